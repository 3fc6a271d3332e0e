"""One object of a log, with fields by name and kind.

Invariant: a field of the wrong kind is refused in one line with the file, the line, the field and a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from libra.config.input_file import MOST
from libra.trajectory.record import LONGEST, TrajectoryFormatError

_MOST_NUMBER = 1e15  # far above all seconds, scores and indices, and exact as a float


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A JSON object, or a row of a table by column name. A null field counts as absent."""

    fields: Mapping[str, Any]
    where: str  # file and line, or file and place in a document
    number: int  # number of the entry in its file, from 1
    inside: str = ""  # path of this object within its entry, such as "messages[2]."; empty for the entry itself

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def refusal(self, name: str, problem: str) -> TrajectoryFormatError:
        line = f"{self.where}: {self.inside}{name}: {problem}; correct it, or remove the record"
        return TrajectoryFormatError(" ".join(line.split()))

    def tokens(self, name: str) -> int:
        """A whole number of tokens, 0 or more."""
        value = self._present(name)
        whole = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST
        if not whole or value != int(value):
            raise self.refusal(name, f"{_shown(value)} is not a number of tokens")
        return int(value)

    def number_of(self, name: str) -> float:
        """A finite number."""
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_NUMBER:
            raise self.refusal(name, f"{_shown(value)} is not a finite number")
        return float(value)

    def seconds(self, name: str, unit: float = 1.0) -> float:
        """A duration in seconds. The field counts in units of `unit` seconds."""
        found = self.number_of(name) * unit
        if not 0 <= found <= LONGEST:
            raise self.refusal(name, f"{found:g} s is not from 0 to {LONGEST:g}")
        return found

    def instant(self, name: str) -> float:
        """A time in seconds, from a number or an ISO 8601 text (UTC if it has no zone)."""
        value = self._present(name)
        if not isinstance(value, str):
            return self.number_of(name)
        try:
            moment = datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise self.refusal(name, f"{_shown(value)} is not an ISO 8601 time") from None

    def text(self, name: str) -> str:
        """A text. A whole number is converted, since names in a column may look like numbers."""
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise self.refusal(name, f"{_shown(value)} is not a text")
        return str(value)

    def text_or(self, name: str, default: str) -> str:
        return self.text(name) if name in self else default

    def boolean(self, name: str) -> bool:
        value = self._present(name)
        if not isinstance(value, bool):
            raise self.refusal(name, f"{_shown(value)} is not true or false")
        return value

    def values(self, name: str) -> list[Any]:
        value = self._present(name)
        if not isinstance(value, list):
            raise self.refusal(name, f"{_shown(value)} is not a list")
        return value

    def entry(self, name: str) -> LogEntry:
        """The object in this field."""
        return self.within(name, self._present(name))

    def entries(self, name: str) -> list[LogEntry]:
        """The objects in a list; empty if the field is absent."""
        if name not in self:
            return []
        return [self.within(f"{name}[{index}]", value) for index, value in enumerate(self.values(name))]

    def within(self, name: str, value: Any) -> LogEntry:
        """`value`, which is in the field `name`, as an entry."""
        if not isinstance(value, dict):
            raise self.refusal(name, f"{_shown(value)} is not an object")
        return LogEntry(value, self.where, self.number, f"{self.inside}{name}.")

    def _present(self, name: str) -> Any:
        value = self.fields.get(name)
        if value is None:
            raise self.refusal(name, "this field is required")
        if isinstance(value, float) and math.isnan(value):
            raise self.refusal(name, "NaN is not a value")
        return value


def _shown(value: object) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, dict | list) else repr(value)[:40]
