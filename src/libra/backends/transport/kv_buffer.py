"""KV blocks on their way from one engine to another, in shared memory.

Invariant: a frame is taken for the block that was put into it, whole, or for nothing: it says which transfer and which
block it holds, under which weights that was computed, and the checksum of its bytes. The memory is one anonymous file
of fixed size, made by the controller: it has no name on disk and vanishes with the last process that holds it.
"""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libra.backends.transport.engine_messages import KVBufferPlace

BLOCK_NAME = 32  # bytes: vLLM names a block by the SHA-256 of all tokens up to its end, and of its salt

_HEADER = np.dtype(
    [
        ("transfer", "<i8"),
        ("version", "<i8"),
        ("length", "<u4"),
        ("checksum", "<u4"),
        ("block", "u1", (BLOCK_NAME,)),
        ("unused", "u1", (8,)),  # to a cache line
    ]
)


@dataclass(frozen=True, slots=True)
class Filled:
    """What a frame is to hold."""

    transfer: int
    version: int  # of the weights that the engine held when it gave the block away
    block: bytes


class KVBuffer:
    """One map of the memory. `payload` has a row of bytes for each frame."""

    def __init__(self, memory: mmap.mmap, place: KVBufferPlace) -> None:
        self._headers = np.frombuffer(memory, _HEADER, place.frames)
        self.payload: npt.NDArray[np.uint8] = np.frombuffer(
            memory, np.uint8, place.frames * place.frame_bytes, _headers_size(place.frames)
        ).reshape(place.frames, place.frame_bytes)

    def seal(self, frame: int, filled: Filled) -> None:
        """Say what the payload of a frame is, now that it lies there."""
        header = self._headers[frame : frame + 1]
        header["transfer"], header["version"] = filled.transfer, filled.version
        header["length"] = self.payload.shape[1]
        header["block"] = np.frombuffer(filled.block, np.uint8)
        header["checksum"] = self._checksum(frame)

    def holds(self, frame: int, wanted: Filled) -> bool:
        """Whether a frame holds this block undamaged, computed under weights of this version or older ones."""
        header = self._headers[frame]
        return bool(
            header["transfer"] == wanted.transfer
            and header["version"] <= wanted.version
            and header["length"] == self.payload.shape[1]
            and header["block"].tobytes() == wanted.block
            and header["checksum"] == self._checksum(frame)
        )

    def _checksum(self, frame: int) -> int:
        return zlib.crc32(self.payload[frame].data)


class OwnFrames(KVBuffer):
    """The controller's map. Workers attach to `place` for as long as this object lives."""

    def __init__(self, frames: int, frame_bytes: int) -> None:
        descriptor = os.memfd_create("libra-kv", 0)
        weakref.finalize(self, os.close, descriptor)
        self.place = KVBufferPlace(os.getpid(), descriptor, frames, frame_bytes)
        os.ftruncate(descriptor, _size(self.place))
        super().__init__(mmap.mmap(descriptor, _size(self.place)), self.place)


def attach(place: KVBufferPlace) -> KVBuffer:
    """The controller's frames, in a worker. Raises `OSError` when the controller is gone, `ValueError` when what it
    holds there is something else."""
    opened = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR)
    try:
        found = os.fstat(opened).st_size
        if found != _size(place):
            raise ValueError(f"the controller's KV frames are {found} bytes where {_size(place)} are expected")
        return KVBuffer(mmap.mmap(opened, found), place)
    finally:
        os.close(opened)


def _headers_size(frames: int) -> int:
    """Bytes before the first payload, in whole pages."""
    return -(-frames * _HEADER.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(place: KVBufferPlace) -> int:
    return _headers_size(place.frames) + place.frames * place.frame_bytes
