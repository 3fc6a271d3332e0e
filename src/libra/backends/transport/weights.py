"""Policy weights from the trainer to the engines of one machine, through shared memory.

Invariant: an engine loads a version whole and checked, or not at all. The buffers are anonymous memory files that are
inherited by every worker: they have no name on disk and vanish with the last process that holds them.

Two buffers take turns: version v lies in buffer v % 2, so the trainer may write v + 1 while engines still read v. The
controller sees to it that v + 2 is not written before every engine has acknowledged v.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from libra.backends.transport.messages import DTYPE_BYTES, Dtype, Tensor
from libra.backends.transport.shared_vectors import Vector

if TYPE_CHECKING:
    import torch

BUFFERS = 2
_ALIGNMENT = 64  # bytes: a cache line


class WeightUpdateError(RuntimeError):
    """A weight update arrived damaged. The engine keeps the version it had."""


def make_layout(shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: Dtype) -> tuple[tuple[Tensor, ...], int]:
    """Where each weight lies, and the bytes of one buffer; all are of one type."""
    layout, offset = [], 0
    for name, shape in shapes:
        layout.append(Tensor(name, shape, offset, dtype))
        size = prod(shape) * DTYPE_BYTES[dtype]
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return tuple(layout), offset


def create_buffer() -> int:
    """A file descriptor of anonymous shared memory, to be inherited by the workers."""
    return os.memfd_create("libra-weights", 0)


class WeightBuffer:
    """One end of the shared buffers. The file holds `BUFFERS` copies of the layout."""

    def __init__(self, descriptor: int, size: int) -> None:
        if os.fstat(descriptor).st_size < BUFFERS * size:
            os.ftruncate(descriptor, BUFFERS * size)
        self._size = size
        self._map = mmap.mmap(descriptor, BUFFERS * size)

    def write(self, buffer: int, layout: Iterable[Tensor], weights: Mapping[str, torch.Tensor]) -> int:
        """Store the weights in the types of the layout, taking one at a time in its order; returns their checksum
        (CRC-32)."""
        import torch

        target = torch.frombuffer(self._map, dtype=torch.uint8)[buffer * self._size : (buffer + 1) * self._size]
        for tensor in layout:
            flat = weights[tensor.name].detach().reshape(-1)
            place = target[tensor.offset : tensor.offset + flat.numel() * DTYPE_BYTES[tensor.dtype]]
            place.view(getattr(torch, tensor.dtype)).copy_(flat)
        return self.checksum(buffer)

    def content(self, buffer: int) -> Vector:
        """The bytes of a buffer, as a view."""
        return np.frombuffer(self._map, np.uint8, self._size, buffer * self._size)

    def store(self, buffer: int, content: Vector, checksum: int) -> None:
        """Fill a buffer with what another node's holds. Raises `WeightUpdateError` when it is not that."""
        if len(content) != self._size:
            raise WeightUpdateError(f"{len(content)} bytes for buffer {buffer}, expected {self._size}")
        np.copyto(self.content(buffer), content)
        self.verify(buffer, checksum)

    def checksum(self, buffer: int) -> int:
        with memoryview(self._map) as view:
            return zlib.crc32(view[buffer * self._size : (buffer + 1) * self._size])

    def verify(self, buffer: int, checksum: int) -> None:
        """Raises `WeightUpdateError` when the buffer does not hold what the checksum was made of."""
        found = self.checksum(buffer)
        if found != checksum:
            raise WeightUpdateError(f"checksum {found:#010x} of buffer {buffer}, expected {checksum:#010x}")

    def read(self, buffer: int, layout: Iterable[Tensor], checksum: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by name, as views of the shared memory. Raises `WeightUpdateError` before the first one."""
        import torch

        self.verify(buffer, checksum)
        source = torch.frombuffer(self._map, dtype=torch.uint8)[buffer * self._size : (buffer + 1) * self._size]
        for tensor in layout:
            stored = source[tensor.offset : tensor.offset + prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]]
            yield tensor.name, stored.view(getattr(torch, tensor.dtype)).view(tensor.shape)
