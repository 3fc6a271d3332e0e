"""Wire format of weights: messages in frames of length and checksum.

Invariant: a frame arrives whole and undamaged, or its connection ends; nothing is unpickled. Each chunk carries the
checksums of its base and of its result, so the receiver need not trust the path.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from libra.backends.weights.grid import Grid, Mask, Versions
from libra.config.listeners import WEIGHTS

NOTHING = -1  # the version of a chunk of which there is nothing
_HEAD = struct.Struct("!III")  # bytes that follow, their CRC-32, and that of these two: a wrong length is waited for
_PIECE = 1 << 18
_Runs = list[tuple[Annotated[int, msgspec.Meta(ge=NOTHING, le=2**53)], Annotated[int, msgspec.Meta(ge=1, le=2**31)]]]


class Chunk(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One chunk of version `version`: a delta from version `base`, or all its bytes if that is `NOTHING`."""

    number: int
    version: int
    base: int
    base_sum: int  # CRC-32 of the bytes before
    sum: int  # and after
    payload: bytes

    @property
    def whole(self) -> bool:
        return self.base == NOTHING


class Complete(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A version is complete in the chunks from `start` on, before `stop`. `checksum` is the CRC-32 of all weights; None
    if this sender has only some."""

    version: int
    start: int
    stop: int
    checksum: int | None


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing is new: everything has been sent, up to the end of this version."""

    version: int


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A node's request: `wanted` chunks, later than the versions that it has, both as (value, number of chunks)."""

    token: str
    grid: Grid
    lineage: str  # of which the versions are; "": it has none
    have: _Runs
    wanted: _Runs


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Lineage of the versions, and the chunks available here, as (0 or 1, number of chunks). Versions of another
    lineage are unusable, though their numbers look alike."""

    lineage: str
    own: _Runs


class NotServed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    why: str


Sent = Chunk | Complete | Beat | Hello | Welcome | NotServed
Kept = Chunk | Complete

_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Sent)
S = TypeVar("S")


class DamagedError(ConnectionError):
    """A frame arrived damaged, or has unknown content."""


def pack(message: Sent) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    return _head(len(body), zlib.crc32(body)) + body


async def receive(reader: asyncio.StreamReader, silence: float, most: int = WEIGHTS.frame_bytes) -> tuple[Sent, bytes]:
    """A message and its frame, of `most` bytes at most. Raises `TimeoutError` after `silence` seconds without a byte,
    `DamagedError`, and other `OSError` when the other end is gone. A slow sender is waited for."""
    head = await _read(reader, _HEAD.size, silence)
    count, checksum, _ = _HEAD.unpack(head)
    if head != _head(count, checksum):
        raise DamagedError("the header of a frame arrived damaged")
    if count > most:
        raise DamagedError(f"a frame of {count} bytes; the largest has {most}")
    body = await _read(reader, count, silence)
    if zlib.crc32(body) != checksum:
        raise DamagedError("a frame arrived damaged")
    try:
        return _decoder.decode(body), head + body
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"a frame is not a message: {error}") from None


def _head(count: int, checksum: int) -> bytes:
    return _HEAD.pack(count, checksum, zlib.crc32(struct.pack("!II", count, checksum)))


async def _read(reader: asyncio.StreamReader, count: int, silence: float) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        async with asyncio.timeout(silence):
            part = await reader.read(min(_PIECE, count - len(parts)))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        parts += part
    return bytes(parts)


def runs(values: Versions | Mask) -> list[tuple[int, int]]:
    """Runs of equal neighbours: (value, count)."""
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    counts = np.diff(np.r_[starts, len(values)])
    return [(int(value), int(count)) for value, count in zip(values[starts], counts, strict=True)]


def unrolled(counted: list[tuple[int, int]], length: int) -> Versions:
    """The inverse of `runs`. Raises `DamagedError` when they are not of this length."""
    if any(count <= 0 for _, count in counted) or sum(count for _, count in counted) != length:
        raise DamagedError(f"{sum(count for _, count in counted)} chunks are listed, there are {length}")
    values = np.array([value for value, _ in counted], np.int64)
    return np.repeat(values, [count for _, count in counted])
