"""Parts of a model that a family's reader returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from libra.hardware.families.fields import Fields
from libra.hardware.layers import LayerKind


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of a model in order, and its parameters outside of layers and embeddings."""

    layers: list[LayerKind]
    other: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """A reader of layers, and the values of the family's class for missing fields."""

    read: Callable[[Fields], Stack]
    architectures: tuple[str, ...] = ()  # those that predict tokens
    defaults: Mapping[str, Any] = field(default_factory=dict)
    known: bool = True
