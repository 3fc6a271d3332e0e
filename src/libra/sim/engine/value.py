"""Values that other processes are sent."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Value:
    """A copy is made as the original was: the fields of a frozen class that is compiled cannot be set afterwards."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))
