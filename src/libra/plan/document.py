"""Plans and requests as versioned JSON text.

Invariant: what is written reads back equal, equal values give equal bytes, and a text that is not exactly a document
of this format version is refused with the place and the reason, never repaired.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from libra.plan.problem import FORMAT, Plan, PlanRequest

_Value = TypeVar("_Value")


class DocumentError(ValueError):
    """A text is not a document of this format version. The message names the place and what is wrong there."""


def dump_plan(plan: Plan) -> str:
    """A plan with the request that it answers; the keys stand in the order of the fields."""
    fields = _plans().dump_python(plan, mode="json")
    del fields["format"]
    return _text({"format": plan.format, **fields})


def parse_plan(text: str | bytes, where: str = "plan") -> Plan:
    """Read what `dump_plan` wrote; `where` (a file name) opens the error message. Raises `DocumentError`."""
    return _validated(_plans(), _document(text, where), where)


def dump_request(request: PlanRequest) -> str:
    return _text({"format": FORMAT, "request": _requests().dump_python(request, mode="json")})


def parse_request(text: str | bytes, where: str = "request") -> PlanRequest:
    """Read what `dump_request` wrote; `where` (a file name) opens the error message. Raises `DocumentError`."""
    document = _document(text, where)
    if document.keys() != {"format", "request"}:
        keys = ", ".join(sorted(document))
        raise DocumentError(f"{where}: a request document has the keys format and request; this one has {keys}")
    return _validated(_requests(), document["request"], f"{where}: request")


@cache
def _plans() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


@cache
def _requests() -> TypeAdapter[PlanRequest]:
    return TypeAdapter(PlanRequest)


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _document(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DocumentError(f"{where}: not JSON: {error}") from None
    if not isinstance(document, dict) or "format" not in document:
        raise DocumentError(f"{where}: format is missing; a document says which format version it is written in")
    if document["format"] != FORMAT:
        raise DocumentError(
            f"{where}: format is {document['format']!r}; this version of libra reads format {FORMAT}: plan again"
        )
    return document


def _validated(adapter: TypeAdapter[_Value], value: object, where: str) -> _Value:
    try:
        # As JSON, because strict Python input would have to be tuples where JSON has only arrays.
        return adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'document'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise DocumentError(f"{where}: {problems}") from None
