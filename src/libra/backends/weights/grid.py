"""Weights in numbered chunks. A chunk is the unit that is sent, checked and requested.

Invariant: chunks are disjoint, in order, and cover the weights. Nodes that exchange weights have the same grid; others
are refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from libra.backends.transport.messages import DTYPE_BYTES, Dtype, Tensor
from libra.backends.transport.shared_memory import Vector
from libra.backends.weights.delta import Numbers

# A chunk fits a core's cache, so that comparing, packing and checking it read memory once. With smaller chunks, calls
# would have too much overhead.
CHUNK_BYTES = 1 << 20

Mask = npt.NDArray[np.bool_]  # [chunks]
Versions = npt.NDArray[np.int64]  # [chunks]
Sums = npt.NDArray[np.uint32]  # [chunks], CRC-32 of each


class Grid(msgspec.Struct, frozen=True):
    """A division of weights into chunks. `size` is the size of the weights in bytes, `dtype` their type, and `layout`
    the CRC-32 of their places. The same bytes in another layout are other weights."""

    size: int
    dtype: Dtype
    chunk_bytes: int = CHUNK_BYTES
    layout: int = 0

    @classmethod
    def of(cls, layout: Sequence[Tensor], size: int) -> Grid:
        """The grid for weights in the layout of `make_layout`. Raises `ValueError` if they are of several types."""
        kinds = sorted({tensor.dtype for tensor in layout})
        if len(kinds) != 1:
            raise ValueError(f"weights of {' and '.join(kinds) or 'no type'}: deltas are of one type")
        return cls(size, kinds[0], layout=zlib.crc32(msgspec.json.encode(layout)))

    def __post_init__(self) -> None:
        width = DTYPE_BYTES[self.dtype]
        if self.size <= 0 or self.chunk_bytes <= 0 or self.size % width or self.chunk_bytes % width:
            raise ValueError(f"{self.size} bytes in chunks of {self.chunk_bytes}: both must be above 0, and whole")

    def __len__(self) -> int:
        return -(-self.size // self.chunk_bytes)

    def span(self, number: int) -> slice:
        """The bytes of a chunk; the last chunk may be shorter."""
        return slice(number * self.chunk_bytes, min((number + 1) * self.chunk_bytes, self.size))

    def numbers(self, content: Vector, number: int) -> Numbers:
        """A chunk of `content`, the bytes of all weights, as a view of bit patterns."""
        chunk = content[self.span(number)]
        return chunk.view(np.uint16) if self.dtype == "bfloat16" else chunk.view(np.uint32)

    def touched(self, ranges: Iterable[tuple[int, int]]) -> Mask:
        """The chunks with a byte in one of these ranges (first, end)."""
        mask = np.zeros(len(self), np.bool_)
        for first, end in ranges:
            if not 0 <= first <= end <= self.size:
                raise ValueError(f"bytes {first} to {end} are outside the weights, which have {self.size} bytes")
            if first < end:
                mask[first // self.chunk_bytes : (end - 1) // self.chunk_bytes + 1] = True
        return mask
