"""The rooms that add to the core: `lend` and `serving`.

Invariant: no module of the core names a module of a room. `OFFERS` in a room's `offers.py` lists the room's additions
by place. Without the room, the place is empty and the core still works.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

ROOMS = ("lend", "serving")


def offered(place: str) -> Iterator[Any]:
    """Yield the additions of the existing rooms at a place."""
    for room in ROOMS:
        if find_spec(f"libra.{room}") is None:
            continue
        offers: dict[str, str] = import_module(f"libra.{room}.offers").OFFERS
        if place in offers:
            module, _, name = offers[place].partition(":")
            yield attrgetter(name)(import_module(module))


class OfRoom:
    """Annotation of a field whose type comes from a room. Without the room, only None and an empty list are valid."""

    def __init__(self, place: str) -> None:
        self._place = place

    @property
    def kind(self) -> Any:
        """The field's type; None without the room."""
        return next(offered(self._place), None)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kind = self.kind
        if kind is not None:
            return handler.generate_schema(kind)

        def refuse(_: object) -> object:
            raise ValueError(f"{self._place} is not installed; leave it out")

        return core_schema.no_info_plain_validator_function(refuse)
