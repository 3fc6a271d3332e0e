"""Copies weights from one node's memory to another's, either all of them or the changes since the previous version.

Invariant: the way that took less time at its last use is chosen, and the other way is tried again from time to time.
Both result in the same bytes. So a fast network carries all weights, and a slow network carries deltas, without
configuration.
"""

from __future__ import annotations

import struct
from typing import Literal

import numpy as np

from libra.backends.transport.shared_memory import Vector, WeightUpdateError
from libra.backends.weights import delta
from libra.backends.weights.grid import Grid

Way = Literal["everything", "delta"]

_AGAIN = 16  # copies after which the slower way is tried again, since learning rates and networks change
_LENGTH = struct.Struct("<I")


def difference(base: Vector, new: Vector) -> Vector:
    """Delta between the bytes of two versions. Each chunk has a length, then its delta, or all its bytes if these are
    fewer. Bytes are treated as 16-bit numbers, which is exact, and hardly larger for fp32."""
    grid, parts = Grid(len(base), "bfloat16"), list[bytes]()
    for number in range(len(grid)):
        fresh = grid.numbers(new, number)
        packed = delta.encode(grid.numbers(base, number), fresh)
        if len(packed) >= fresh.nbytes:
            packed = fresh.tobytes()
        parts += (_LENGTH.pack(len(packed)), packed)
    return np.frombuffer(b"".join(parts), np.uint8)


def add_difference(difference: Vector, base: Vector, into: Vector) -> None:
    """Write the new version into `into`. Raises `WeightUpdateError` if the delta does not fit; `into` is then
    undefined."""
    grid, rest = Grid(len(base), "bfloat16"), difference.data.cast("B")
    try:
        for number in range(len(grid)):
            (length,) = _LENGTH.unpack_from(rest)
            packed, rest = rest[_LENGTH.size : _LENGTH.size + length], rest[_LENGTH.size + length :]
            target = grid.numbers(into, number)
            if length == target.nbytes:
                target[:] = np.frombuffer(packed, target.dtype)
            else:
                delta.apply(packed, grid.numbers(base, number), target)
    except (struct.error, ValueError, delta.DeltaError) as error:
        raise WeightUpdateError(f"a weight delta does not fit the weights: {error}") from None
    if len(rest):
        raise WeightUpdateError(f"a weight delta has {len(rest)} bytes too many")


class CopyChoice:
    """Chooses between the two ways of copying, by their measured times."""

    def __init__(self) -> None:
        self._seconds: dict[Way, float] = {}
        self._copies = 0  # since both times were known, or since the slower way was used

    def next(self) -> Way:
        """The way of copying to a node that has the previous version. Nodes without a version get everything."""
        if len(self._seconds) < 2:
            return "delta" if "everything" in self._seconds else "everything"
        slower, faster = sorted(self._seconds, key=lambda way: self._seconds[way], reverse=True)
        return slower if self._copies >= _AGAIN else faster

    def took(self, way: Way, seconds: float) -> None:
        known = len(self._seconds) == 2
        slower = known and self._seconds[way] == max(self._seconds.values())
        self._seconds[way] = seconds
        self._copies = 0 if slower or not known else self._copies + 1
