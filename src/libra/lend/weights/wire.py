"""Wire format of weights: messages in frames, each with its length and checksum.

Invariant: a frame arrives whole and undamaged, or its connection ends; nothing is unpickled. Each chunk carries the
checksums of its base and of its result, so the receiver need not trust the relays in between.
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

NOTHING = -1  # the version of a missing chunk
_HEAD = struct.Struct("!III")  # bytes of the body, CRC-32 of the body, CRC-32 of both: detects a wrong length at once
_PIECE = 1 << 18
_Runs = list[tuple[Annotated[int, msgspec.Meta(ge=NOTHING, le=2**53)], Annotated[int, msgspec.Meta(ge=1, le=2**31)]]]


class Chunk(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One chunk of version `version`: a delta from version `base`, or, if `base` is `NOTHING`, all its bytes."""

    number: int
    version: int
    base: int
    base_sum: int  # CRC-32 of the chunk in version `base`
    sum: int  # CRC-32 of the chunk in version `version`
    payload: bytes

    @property
    def whole(self) -> bool:
        return self.base == NOTHING


class Complete(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A version is complete in the chunks from `start` to before `stop`. `checksum` is the CRC-32 of all weights; None
    if the sender has only some chunks."""

    version: int
    start: int
    stop: int
    checksum: int | None


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A sign of life: the sender has sent everything up to the end of this version."""

    version: int


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A node's request for the chunks `wanted`, later than the versions `have`. Both are runs of (value, number of
    chunks)."""

    token: str
    grid: Grid
    lineage: str  # of the versions; "": the node has no weights
    have: _Runs
    wanted: _Runs


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sender's lineage, and its chunks `own` as runs of (0 or 1, number of chunks). Versions of another lineage are
    other weights, even with the same number."""

    lineage: str
    own: _Runs


class NotServed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sender has other weights than the node requests."""

    why: str


Sent = Chunk | Complete | Beat | Hello | Welcome | NotServed
Kept = Chunk | Complete

_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Sent)
S = TypeVar("S")


class DamagedError(ConnectionError):
    """A frame is damaged, or its content is not what the receiver can use."""


def pack(message: Sent) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    return _head(len(body), zlib.crc32(body)) + body


async def receive(reader: asyncio.StreamReader, silence: float, most: int = WEIGHTS.frame_bytes) -> tuple[Sent, bytes]:
    """Receive a message; returns it with its frame, of at most `most` bytes. Waits for a slow sender. Raises
    `TimeoutError` after `silence` seconds without a byte, `DamagedError`, and another `OSError` if the sender is gone.
    """
    head = await _read(reader, _HEAD.size, silence)
    count, checksum, _ = _HEAD.unpack(head)
    if head != _head(count, checksum):
        raise DamagedError("the header of a frame arrived damaged")
    if count > most:
        raise DamagedError(f"a frame has {count} bytes; at most {most} are accepted")
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
    """The inverse of `runs`. Raises `DamagedError` if the runs do not add up to `length`."""
    if any(count <= 0 for _, count in counted) or sum(count for _, count in counted) != length:
        raise DamagedError(f"{sum(count for _, count in counted)} chunks are listed, there are {length}")
    values = np.array([value for value, _ in counted], np.int64)
    return np.repeat(values, [count for _, count in counted])
