"""A node's copy of the weights, in two halves: engines load one half while the next version is built in the other half.

Invariant: the half that engines load is one published version. Every chunk of this half was checked against the
sender's checksum after it was written. A delta is applied only to its own base. A chunk that fails the check becomes
invalid, and the node has to request the whole chunk; the half that engines load is not affected.
"""

from __future__ import annotations

import zlib

import numpy as np

from libra.backends.transport.shared_memory import Vector, WeightUpdateError
from libra.backends.weights import delta
from libra.backends.weights.grid import Grid, Mask, Sums, Versions
from libra.lend.weights.wire import NOTHING, Chunk, Complete


class Mirror:
    """`halves` are the bytes of both halves, `wanted` the chunks that this node keeps."""

    def __init__(self, grid: Grid, halves: tuple[Vector, Vector], wanted: Mask) -> None:
        if not wanted.any():
            raise ValueError("wanted is empty: name the chunks that the node needs")
        self.grid, self.wanted = grid, wanted
        self._halves = halves
        self._sums: tuple[Sums, Sums] = (np.zeros(len(grid), np.uint32), np.zeros(len(grid), np.uint32))
        self.half = 0  # index of the half that engines load
        self.forget()

    def forget(self) -> None:
        """Forget all contents."""
        self.held = NOTHING  # the version that engines load
        self.checksum: int | None = None  # of all weights of that version; None: unknown
        self._staged = self._nothing()
        self._confirmed = self._nothing()
        self._distrusted = np.zeros(len(self.grid), np.bool_)
        self._checksums: dict[int, int] = {}  # by version

    @property
    def versions(self) -> Versions:
        """Versions of the chunks in the half that engines load, which other nodes can get here."""
        return np.where(self.wanted & ~self._distrusted, self.held, NOTHING)

    @property
    def have(self) -> Versions:
        """The newest version of each chunk to which a delta may be applied."""
        return np.maximum(self._staged, self.versions)

    def content(self) -> Vector:
        """The bytes that engines load."""
        return self._halves[self.half]

    def chunk(self, number: int) -> Chunk:
        """A whole chunk of the version that engines load."""
        content = self.content()[self.grid.span(number)]
        return Chunk(number, self.held, NOTHING, 0, int(self._sums[self.half][number]), content.tobytes())

    def take(self, chunk: Chunk) -> bool:
        """Put a chunk into the next version. False: the chunk is a duplicate, is not wanted, or its base is missing.
        Raises `WeightUpdateError` if the result does not match the sender's checksum."""
        number = chunk.number
        if not 0 <= number < len(self.grid):
            raise WeightUpdateError(f"chunk {number} is none of {len(self.grid)} chunks; the sender has another grid")
        usable = NOTHING if self._distrusted[number] else self.held
        if not self.wanted[number] or chunk.version <= max(usable, self._staged[number]):
            return False
        new = 1 - self.half
        into = self.grid.numbers(self._halves[new], number)
        if chunk.whole:
            self._fill(chunk, into.view(np.uint8))
        elif self._staged[number] == chunk.base:
            self._apply(chunk, into, int(self._sums[new][number]), into)
        elif usable == chunk.base:
            base = self.grid.numbers(self._halves[self.half], number)
            self._apply(chunk, base, int(self._sums[self.half][number]), into)
        else:
            return False
        if zlib.crc32(into.view(np.uint8).data) != chunk.sum:
            raise self._failed(chunk, "its checksum differs")
        self._sums[new][number] = chunk.sum
        self._staged[number], self._distrusted[number] = chunk.version, False
        return True

    def confirm(self, complete: Complete) -> None:
        """Record that a sender has published a version in these chunks."""
        span = slice(complete.start, complete.stop)
        self._confirmed[span] = np.maximum(self._confirmed[span], complete.version)
        if complete.checksum is not None:
            self._checksums[complete.version] = complete.checksum

    def is_late(self, chunk: Chunk) -> bool:
        """Whether the chunk's version was confirmed before the chunk arrived."""
        return bool(self._confirmed[chunk.number] >= chunk.version)

    def settle(self) -> bool:
        """Swap the halves if the next version is whole and published. Returns whether the halves were swapped."""
        staged = self._staged[self.wanted]
        version = int(staged[0])
        if version <= self.held or np.any(staged != version) or np.any(self._confirmed[self.wanted] < version):
            return False
        self.half, self.held, self.checksum = 1 - self.half, version, self._checksums.get(version)
        self._staged = self._nothing()
        self._checksums = {later: value for later, value in self._checksums.items() if later > version}
        return True

    def _fill(self, chunk: Chunk, into: Vector) -> None:
        if len(chunk.payload) != len(into):
            raise self._failed(chunk, f"it has {len(chunk.payload)} bytes of {len(into)}")
        self._staged[chunk.number] = NOTHING
        np.copyto(into, np.frombuffer(chunk.payload, np.uint8))

    def _apply(self, chunk: Chunk, base: delta.Numbers, base_sum: int, into: delta.Numbers) -> None:
        if base_sum != chunk.base_sum:
            raise self._failed(chunk, f"it was made from another version {chunk.base}")
        self._staged[chunk.number] = NOTHING  # until `take` has checked the result
        try:
            delta.apply(chunk.payload, base, into)
        except delta.DeltaError as error:
            raise self._failed(chunk, str(error)) from None

    def _failed(self, chunk: Chunk, why: str) -> WeightUpdateError:
        self._staged[chunk.number], self._distrusted[chunk.number] = NOTHING, True
        return WeightUpdateError(f"chunk {chunk.number} of weights v{chunk.version}: {why}")

    def _nothing(self) -> Versions:
        return np.full(len(self.grid), NOTHING, np.int64)
