"""Vectors in shared memory: one process writes them, any other of this machine may read.

Invariant: only the owner can write; a reader's map is read-only. The memory is an anonymous file: it has no name on
disk and vanishes with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[Any]

_CELL = 8  # bytes


class LayoutError(RuntimeError):
    """A replica publishes something else than the reader expects."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A header of `cells` 64-bit integers, then `count` vectors of `length` numbers of `dtype`, on their own pages."""

    cells: int
    count: int
    length: int
    dtype: str

    @property
    def size(self) -> int:
        """Bytes in all."""
        return _pages(self.cells * _CELL) + self.count * _pages(self.length * np.dtype(self.dtype).itemsize)


class SharedVectors:
    """One map of the memory. `header` and `vectors` are views of it."""

    def __init__(self, memory: mmap.mmap, layout: Layout) -> None:
        self.header: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64, layout.cells)
        first = _pages(layout.cells * _CELL)
        stride = _pages(layout.length * np.dtype(layout.dtype).itemsize)
        self.vectors: list[Vector] = [
            np.frombuffer(memory, layout.dtype, layout.length, first + index * stride) for index in range(layout.count)
        ]

    def checksum(self, vector: int) -> int:
        """CRC-32 of one vector."""
        return zlib.crc32(self.vectors[vector].view(np.uint8).data)


class OwnVectors(SharedVectors):
    """The owner's map. Others attach to `descriptor` of this process for as long as this object lives."""

    def __init__(self, name: str, layout: Layout) -> None:
        self.descriptor = os.memfd_create(name, 0)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, layout.size)
        super().__init__(mmap.mmap(self.descriptor, layout.size), layout)


def attach(pid: int, descriptor: int, layout: Layout) -> SharedVectors:
    """Another process's vectors, read-only. Raises `LayoutError` when they are not laid out so, `OSError` when the
    process is gone."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
    try:
        found = os.fstat(opened).st_size
        if found != layout.size:
            raise LayoutError(
                f"process {pid} shares {found} bytes where {layout.size} are expected: all replicas must train the same"
                " model in the same precision"
            )
        return SharedVectors(mmap.mmap(opened, layout.size, access=mmap.ACCESS_READ), layout)
    finally:
        os.close(opened)


def _pages(size: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
