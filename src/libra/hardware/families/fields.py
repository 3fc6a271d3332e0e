"""Fields of a configuration, with a record of which fields were read.

Invariant: an error begins with the field's path. A field that may change a shape is either read or reported as unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libra.config.yaml_file import shown

_MOST = 2**26  # larger than any present size, context or vocabulary
# Field names that describe a shape, and exceptions that do not: positions, initial values, training, and layers that
# predict further tokens, which are not part of a model.
_SHAPE = re.compile(r"dim|size|rank|heads|layers|experts|latent|width|depth|kernel|groups|ratio")
_HARMLESS = re.compile(
    r"nextn|mtp|rotary|rope|init|window_layers|chunk_size_feed|ep_size|expand|vocab_size_|scale|scaling|routing|dropout"
    r"|image|video|audio|vision|aux|use_mamba|duration|time_step|orig|pruned|residual|sinkhorn|norm_topk|hash|per_tok$"
    r"|token_id|output_|pretraining|return_|fp32|beam|ignore|freq$|offset$|batch|group_size|capacity|deepstack|tensor_para|dim_model_base|global_attn_every|qk_head_dim"
)


class Fields:
    """The fields of one object in a configuration. `defaults` are those of the family's class."""

    def __init__(self, data: Mapping[str, Any], path: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self.data, self.path, self._defaults = data, path, dict(defaults or {})
        self._read: set[str] = set()
        self._assumed: dict[str, Any] = {}
        self._parts: list[Fields] = []

    def with_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Set values for absent fields."""
        self._defaults = {**self._defaults, **defaults}

    def value(self, field: str) -> Any:
        """The unchecked value of a field; None if it is absent."""
        self._read.add(field)
        given = self.data.get(field)
        if given is None and field in self._defaults:
            self._assumed[field] = given = self._defaults[field]
        return given

    def assume(self, field: str, value: Any) -> None:
        """Record that this value is assumed for an absent field, for a note."""
        self._assumed[field] = value

    def given(self, field: str) -> bool:
        return self.value(field) is not None

    def error(self, field: str, text: str) -> ValueError:
        """An error that begins with the field's path."""
        return ValueError(f"{self.path}{field}: {text}")

    def first(self, *names: str) -> str:
        """The first of these names whose field is present; if no field is present, the first name."""
        found = [name for name in names if self.given(name)]
        return found[0] if found else names[0]

    def count(self, field: str, minimum: int = 1, otherwise: int | None = None) -> int:
        """A whole number. `otherwise` is the value if the field is absent; None means that the field is required."""
        value = self.value(field)
        if value is None:
            if otherwise is None:
                raise self.error(field, "this field is required; add it")
            return otherwise
        if type(value) is not int or not minimum <= value <= _MOST:
            raise self.error(field, f"expected a whole number of {minimum} or more (got {shown(value)})")
        return value

    def flag(self, field: str, otherwise: bool = False) -> bool:
        """A truth value; `otherwise` if the field is absent."""
        value = self.value(field)
        if value not in (None, True, False) or type(value) is int:
            raise self.error(field, f"expected true or false (got {shown(value)})")
        return otherwise if value is None else bool(value)

    def word(self, field: str, known: Sequence[str], otherwise: str) -> str:
        value = self.value(field)
        if value is None:
            return otherwise
        if value not in known:
            raise self.error(field, f"{shown(value)} is not supported; known are {', '.join(known)}")
        return str(value)

    def names(self, field: str) -> list[str]:
        value = self.value(field) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(field, f"expected a list of names (got {shown(value)})")
        return value

    def numbers(self, field: str) -> list[int] | None:
        """A list of whole numbers; None if the field is absent."""
        value = self.value(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(it) is int and abs(it) <= _MOST for it in value):
            raise self.error(field, f"expected a list of whole numbers (got {shown(value)})")
        return value

    def pattern(self, field: str, length: int) -> list[Any] | None:
        """A list with at least `length` entries, cut to one entry per layer; None if the field is absent."""
        value = self.value(field)
        if value is None:
            return None
        if not isinstance(value, list | str) or len(value) < length:
            raise self.error(field, f"expected an entry for each of {length} layers (got {shown(value)})")
        return list(value)[:length]

    def part(self, field: str, whole: bool = True) -> Fields | None:
        """The object in a field; None if the field is absent. Only a `whole` object reports its unread fields."""
        value = self.value(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(field, f"expected an object (got {shown(value)})")
        found = Fields(value, f"{self.path}{field}.")
        if whole:
            self._parts.append(found)
        return found

    def refuse(self, field: str, why: str) -> None:
        """Raise `ValueError` if the field is present and is not false, 0 or empty."""
        if self.value(field):
            raise self.error(field, f"{shown(self.value(field))} is not supported: {why}")

    def unread(self) -> Iterator[str]:
        """Paths of unread fields that may change a shape."""
        for name, value in self.data.items():
            if name not in self._read and value and _SHAPE.search(name) and not _HARMLESS.search(name):
                yield f"{self.path}{name}"
        for part in self._parts:
            yield from part.unread()

    def assumed(self) -> Iterator[tuple[str, Any]]:
        """Paths and values of shape fields that the checkpoint lacks and the family's class provides."""
        for name, value in self._assumed.items():
            if _SHAPE.search(name):
                yield f"{self.path}{name}", value
        for part in self._parts:
            yield from part.assumed()
