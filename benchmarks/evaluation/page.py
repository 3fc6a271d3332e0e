"""The page's tables: found by their markers, and written anew.

Invariant: whatever stands outside of the markers stays as it is, to the byte; a table without a place, and a place
without a table, are errors.

A place is `<!-- table: EXPERIMENT/TABLE -->` on a line, what was there before, and `<!-- end -->` on a line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_MARKER = re.compile(r"<!--\s*(?:table\b|end\b)[^>\n]*>")
_TABLE = re.compile(r"<!-- table: ([a-z0-9-]+/[a-z0-9-]+) -->")
_END = "<!-- end -->"


def with_tables(page: str, tables: Mapping[str, str], known: Collection[str]) -> str:
    """The page with these tables, by EXPERIMENT/TABLE, in their places. `known` are the names of all experiments: what
    is in the places of those that have no table here stays.

    Raises ValueError for a marker that is misspelt, not alone on its line, of an unknown experiment, or there twice;
    for a place that does not end; and where an experiment's tables and its places differ.
    """
    made = {name.partition("/")[0] for name in tables}
    places: set[str] = set()
    written: list[str] = []
    inside: str | None = None
    for number, line in enumerate(page.splitlines(keepends=True), start=1):
        marker = _marker(line, f"line {number}")
        if marker is None:
            if inside is None or inside not in tables:
                written.append(line)
        elif marker == _END:
            if inside is None:
                raise ValueError(f"line {number}: {_END} ends nothing; take it away, or add the table's marker")
            written.append(line)
            inside = None
        else:
            if inside is not None:
                raise ValueError(f"line {number}: table {marker} begins inside of {inside}; add {_END} before it")
            if marker in places:
                raise ValueError(f"line {number}: table {marker} has a place already; take one of them away")
            experiment = marker.partition("/")[0]
            if experiment not in known:
                raise ValueError(
                    f"line {number}: there is no experiment {experiment}; known are {', '.join(sorted(known))}"
                )
            if experiment in made and marker not in tables:
                raise ValueError(f"line {number}: {experiment} makes no table {marker}; take the marker away")
            inside = marker
            places.add(marker)
            written.append(line)
            if marker in tables:
                written.append(f"\n{tables[marker].strip()}\n\n")
    if inside is not None:
        raise ValueError(f"table {inside} does not end; add a line {_END}")
    missing = sorted(set(tables) - places)
    if missing:
        raise ValueError(f"the page has no place for {', '.join(missing)}; add <!-- table: {missing[0]} --> and {_END}")
    return "".join(written)


def _marker(line: str, where: str) -> str | None:
    """The table's name, or the end's text; None where the line has neither."""
    if _MARKER.search(line) is None:
        return None
    alone = line.strip()
    table = _TABLE.fullmatch(alone)
    if table is None and alone != _END:
        raise ValueError(f"{where}: {alone!r} is no marker; write <!-- table: EXPERIMENT/TABLE --> or {_END} on a line")
    return _END if table is None else table[1]
