"""Values that are sent to other processes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Value:
    """A value that pickle restores by its constructor, since the fields of a compiled frozen class cannot be set."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))
