"""Values that are sent to other processes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Value:
    """A value that is pickled by its constructor: the fields of a compiled frozen class cannot be set afterwards."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))
