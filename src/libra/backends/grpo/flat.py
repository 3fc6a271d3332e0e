"""All parameters of a model as one vector.

Invariant: every tensor has a place of its own that starts on a cache line; what lies between two places is zero and
stays zero, so a sum, a copy or a checksum of whole vectors is that of their tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Shapes by name in the order of the vector, and where each starts, in elements. `length` is that of the vector."""

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    length: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], element_bytes: int) -> FlatLayout:
        step = _ALIGNMENT // element_bytes
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-prod(shape) // step) * step
        return cls(dict(shapes), offsets, end)

    def views(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors by name, as views of a vector of at least `length`."""
        return {
            name: vector[self.offsets[name] : self.offsets[name] + prod(shape)].view(shape)
            for name, shape in self.shapes.items()
        }

    def signature(self) -> int:
        """A number that tells layouts apart."""
        return zlib.crc32(repr((list(self.shapes.items()), self.length)).encode())
