"""Plans as versioned JSON text.

Invariant: what is written reads back equal, equal values give equal bytes, and a text that is not exactly a document
of this format version is refused with the place and the reason, never repaired.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from libra.plan.plan import FORMAT, Plan


class DocumentError(ValueError):
    """A text is not a document of this format version. The message names the place and what is wrong there."""


def dump_plan(plan: Plan) -> str:
    """A plan and, last, the request that it answers; the keys stand in the order of the fields."""
    fields = _plans().dump_python(plan, mode="json")
    del fields["format"]
    return _written({"format": plan.format, **fields}, "") + "\n"


def parse_plan(text: str | bytes, where: str = "plan") -> Plan:
    """Read what `dump_plan` wrote; `where` (a file name) opens the error message. Raises `DocumentError`."""
    return _validated(_document(text, where), where)


@cache
def _plans() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def _written(value: Any, indent: str) -> str:
    """JSON with one entry a line, save that a list of numbers or names is one line: it diffs well and stays short."""
    if isinstance(value, dict) and value:
        inner = ",\n".join(f"{indent}  {json.dumps(k)}: {_written(v, indent + '  ')}" for k, v in value.items())
        return f"{{\n{inner}\n{indent}}}"
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        inner = ",\n".join(f"{indent}  {_written(part, indent + '  ')}" for part in value)
        return f"[\n{inner}\n{indent}]"
    return json.dumps(value, allow_nan=False)


def _document(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: not JSON: {error}") from None
    if not isinstance(document, dict) or "format" not in document:
        raise DocumentError(f"{where}: format is missing; a document says which format version it is written in")
    if document["format"] != FORMAT:
        raise DocumentError(
            f"{where}: format is {document['format']!r}; this version of libra reads format {FORMAT}: plan again"
        )
    return document


def _validated(value: object, where: str) -> Plan:
    try:
        # As JSON, because strict Python input would have to be tuples where JSON has only arrays.
        return _plans().validate_json(json.dumps(value))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'document'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise DocumentError(f"{where}: {problems}") from None
