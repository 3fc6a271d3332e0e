"""Deltas: the exact changes of a range of weights from one version to the next, in few bytes.

Invariant: applied to the old numbers, a delta results in exactly the new numbers, for all bit patterns (including NaN,
-0 and infinity). Applied to other numbers it results in wrong numbers, so the receiver compares checksums. Bytes that
are not a delta raise `DeltaError`, and never write to a wrong place in memory.

A step of reinforcement learning is small compared with the last bit of a bf16 number. At a learning rate of 1e-6 one
number in a hundred changes, and mostly to its neighbour. So a delta has the places of the changed numbers, as gaps of
one byte (255 is a gap to which the next byte adds). It also has the distance that each number moved, in representable
values, as a mostly small integer (zigzag, with a plane for each byte). zlib compresses both with Huffman codes and
runs. They contain no repeated strings, and a search for such strings takes five times as long.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]  # the bits of bf16 or fp32 numbers

_HEAD = struct.Struct("<II")  # number of changed numbers, bytes of gaps
_ESCAPE = 255


class DeltaError(RuntimeError):
    """The received bytes are not a delta of these numbers."""


def encode(base: Numbers, new: Numbers) -> bytes:
    """The delta from `base` to `new`, [numbers] each; empty if they are equal."""
    changed = np.flatnonzero(base != new)
    count = len(changed)
    if count == 0:
        return b""
    gaps = _gaps(changed)
    moved = _zigzag(_ordered(new[changed]) - _ordered(base[changed]))
    raw = np.empty(len(gaps) + moved.nbytes, np.uint8)
    raw[: len(gaps)] = gaps
    raw[len(gaps) :].reshape(base.itemsize, count)[:] = moved.view(np.uint8).reshape(count, base.itemsize).T
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL + 1, zlib.Z_RLE)
    return _HEAD.pack(count, len(gaps)) + coder.compress(raw.data) + coder.flush()


def apply(delta: bytes | memoryview, base: Numbers, into: Numbers) -> None:
    """Write the new numbers into `into`, which may be `base`. Raises `DeltaError`; `into` is then undefined."""
    if into is not base:
        np.copyto(into, base)
    data = memoryview(delta)
    if not data.nbytes:
        return
    places, moved = _decoded(data, base)
    into[places] = _ordered(_ordered(base[places]) + moved).view(base.dtype)


def _decoded(data: memoryview, base: Numbers) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.signedinteger]]:
    """Places in increasing order, and the distance that each number moves."""
    if data.nbytes < _HEAD.size:
        raise DeltaError(f"{data.nbytes} bytes are not a delta")
    count, length = _HEAD.unpack_from(data)
    if not 0 < count <= len(base) or not count <= length <= count + len(base) // _ESCAPE:
        raise DeltaError(
            f"the delta does not fit weights of {len(base)} numbers: its header says {count} changed numbers, and"
            f" {length} bytes for their positions"
        )
    size = length + count * base.itemsize
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        raw = decoder.decompress(data[_HEAD.size :], size)
    except zlib.error as error:
        raise DeltaError(f"a delta does not unpack: {error}") from None
    if len(raw) != size or decoder.decompress(decoder.unconsumed_tail, 1) or not decoder.eof:
        raise DeltaError(f"a delta unpacks to other than {size} bytes")
    gaps = np.frombuffer(raw, np.uint8, length)
    places = _places(gaps, count)
    if len(places) != count or gaps[-1] == _ESCAPE or places[-1] >= len(base):
        raise DeltaError(f"a delta of {count} numbers has places that do not fit {len(base)} numbers")
    planes = np.frombuffer(raw, np.uint8, offset=length).reshape(base.itemsize, count)
    moved = np.empty((count, base.itemsize), np.uint8)
    moved[:] = planes.T
    return places, _unzigzag(moved.view(base.dtype)[:, 0])


def _gaps(changed: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
    """Unchanged numbers before each changed one, as one or more bytes each."""
    gaps = np.empty(len(changed), np.int32)
    gaps[0] = changed[0]
    np.subtract(changed[1:], changed[:-1], out=gaps[1:], casting="same_kind")
    gaps[1:] -= 1
    if gaps.max() < _ESCAPE:
        return gaps.astype(np.uint8)
    escapes = gaps // _ESCAPE
    ends = np.cumsum(escapes + 1)
    stream = np.full(int(ends[-1]), _ESCAPE, np.uint8)
    stream[ends - 1] = gaps - _ESCAPE * escapes
    return stream


def _places(gaps: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int32]:
    """The inverse of `_gaps`. The last byte of a gap also counts the changed number."""
    if len(gaps) == count:  # every gap has one byte
        steps = np.cumsum(gaps, dtype=np.int32)
        steps += np.arange(count, dtype=np.int32)
        return steps
    ends = gaps != _ESCAPE
    steps = np.cumsum(gaps + ends, dtype=np.int32)
    places = steps[ends]
    places -= 1
    return places


def _ordered(bits: npt.NDArray[np.unsignedinteger | np.signedinteger]) -> npt.NDArray[np.signedinteger]:
    """Bit patterns of floats as integers in the order of the numbers, with -0 just before 0. The function is its
    inverse."""
    signed = bits.view(f"i{bits.itemsize}")
    flip = signed >> (8 * bits.itemsize - 1)
    flip &= np.iinfo(signed.dtype).max
    flip ^= signed
    return flip


def _zigzag(moved: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.unsignedinteger]:
    """Map -1, 1, -2, 2 ... to 1, 2, 3, 4 ..."""
    sign = moved >> (8 * moved.itemsize - 1)
    sign ^= moved << 1
    return sign.view(f"u{moved.itemsize}")


def _unzigzag(folded: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.signedinteger]:
    moved = (folded >> 1).view(f"i{folded.itemsize}")
    moved ^= -(folded & 1).view(f"i{folded.itemsize}")
    return moved
