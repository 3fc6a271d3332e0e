"""Tables of a page in Markdown that benchmarks write, and the page around them that people do.

Invariant: whatever stands outside of the markers stays as it is, to the byte; a table without a place, and a place
without a table, are errors.

A place is `<!-- table: BENCHMARK/TABLE -->` on a line, what was there before, and `<!-- end -->` on a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

PLACE = re.compile(r"^(<!-- table: ([a-z0-9-]+/[a-z0-9-]+) -->\r?\n)(.*?)^(<!-- end -->)$", re.DOTALL | re.MULTILINE)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with these tables, by BENCHMARK/TABLE, in their places. What is in the places of benchmarks that have no
    table here stays. Raises ValueError where a benchmark's tables and its places differ."""
    made = {name.partition("/")[0] for name in tables}
    places = sorted(place[2] for place in PLACE.finditer(page) if place[2].partition("/")[0] in made)
    if places != sorted(tables):
        raise ValueError(
            f"the page has places for {', '.join(places) or 'nothing'}, and the tables are {', '.join(sorted(tables))};"
            " give each a line <!-- table: NAME --> and a line <!-- end -->, once"
        )
    return PLACE.sub(lambda it: f"{it[1]}\n{tables[it[2]].strip()}\n\n{it[4]}" if it[2] in tables else it[0], page)


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table: text in the first column, then numbers. Raises ValueError for a line that is longer or shorter."""
    for line in lines:
        if len(line) != len(headings):
            raise ValueError(f"a line has {len(line)} cells, and the table {len(headings)} columns: {line}")
    ruler = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in (headings, ruler, *lines))


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")
