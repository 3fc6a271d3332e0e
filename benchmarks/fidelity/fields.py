"""Fields of a measured file, each of which is of its kind or refused by its name.

Invariant: a refusal opens with the field, from the top of the file; keys that are not read are no error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from libra.config.yaml_file import shown

_MISSING = "is missing"


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of the file; `name` is where it lies. A key that is null counts as one that is not there; `otherwise`
    is what stands for it, None: it has to be there. Raises ValueError."""

    data: Mapping[str, object]
    name: str = ""

    def refusal(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self._place(key)} {problem}; measure again")

    def given(self, key: str) -> bool:
        return self.data.get(key) is not None

    def count(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        value = self._value(key, otherwise)
        if type(value) is not int or value < least:
            raise self.refusal(key, f"is {shown(value)}, not a whole number of {least} or more")
        return value

    def number(self, key: str, otherwise: float | None = None) -> float:
        value = self._value(key, otherwise)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
            raise self.refusal(key, f"is {shown(value)}, not a number of 0 or more")
        return float(value)  # type: ignore[arg-type]

    def positive(self, key: str) -> float:
        value = self.number(key)
        if not value:
            raise self.refusal(key, "is 0, not more than that")
        return value

    def flag(self, key: str, otherwise: bool | None = None) -> bool:
        value = self._value(key, otherwise)
        if type(value) is not bool:
            raise self.refusal(key, f"is {shown(value)}, not true or false")
        return value

    def text(self, key: str, otherwise: str | None = None) -> str:
        value = self._value(key, otherwise)
        if not isinstance(value, str):
            raise self.refusal(key, f"is {shown(value)}, not text")
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """Whole numbers, rising, each once."""
        value = self._value(key, None)
        if not isinstance(value, list) or any(type(one) is not int or one < 1 for one in value):
            raise self.refusal(key, f"is {shown(value)}, not a list of whole numbers of 1 or more")
        return tuple(sorted(set(value)))

    def section(self, key: str) -> Fields:
        value = self._value(key, None)
        if not isinstance(value, dict):
            raise self.refusal(key, f"is {shown(value)}, not an object")
        return Fields(value, self._place(key))

    def sections(self, key: str) -> tuple[Fields, ...]:
        """A list of objects."""
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.refusal(key, f"is {shown(value)}, not a list of objects")
        return tuple(Fields(one, f"{self._place(key)}[{place}]") for place, one in enumerate(value))

    def _value(self, key: str, otherwise: object) -> object:
        value = self.data.get(key)
        value = otherwise if value is None else value
        if value is None:
            raise self.refusal(key, _MISSING)
        return value

    def _place(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key
