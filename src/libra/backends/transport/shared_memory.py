"""Memory that processes of one machine share, for weights on their way to the engines and KV between engines.

Invariant: the memory is an anonymous file. It has no name on disk, and vanishes with the last process that has it open.
Readers accept only whole and checked data.
"""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from libra.backends.transport.engine_messages import KVBufferPlace
from libra.backends.transport.messages import DTYPE_BYTES, Dtype, Tensor

if TYPE_CHECKING:
    import torch

Vector = npt.NDArray[Any]

CACHE_LINE = 64  # bytes


class LayoutError(RuntimeError):
    """The shared memory of another process has an unexpected layout."""


def make_memory(owner: object, name: str, size: int) -> tuple[int, mmap.mmap]:
    """Make shared memory. Returns a descriptor, to which others attach while the owner lives, and the owner's
    mapping."""
    descriptor = os.memfd_create(name, 0)
    weakref.finalize(owner, os.close, descriptor)
    os.ftruncate(descriptor, size)
    return descriptor, mmap.mmap(descriptor, size)


def attach(pid: int, descriptor: int, size: int, *, writable: bool = False) -> mmap.mmap:
    """Map another process's memory. Raises `LayoutError` if it has another size, `OSError` if the process has ended."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR if writable else os.O_RDONLY)
    try:
        found = os.fstat(opened).st_size
        if found != size:
            raise LayoutError(f"process {pid} shares {found} bytes where {size} are expected")
        return mmap.mmap(opened, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(opened)


def round_up(size: int, step: int) -> int:
    return -(-size // step) * step


# --- weights ---------------------------------------------------------------------------------------------------------

# Two buffers alternate: version v lies in buffer v % 2, so the trainer may write v + 1 while engines still read v. The
# controller ensures that v + 2 is written only after every engine has acknowledged v.
BUFFERS = 2


class WeightUpdateError(RuntimeError):
    """Weights arrived damaged. The receiver keeps its old version."""


_SEALED = 0x11B5EA1ED  # marks a seal; weights of an earlier layout do not leave this number there
_SEAL = np.dtype([("sealed", "<i8"), ("checksum", "<i8")])


_CHUNK = 1 << 21  # words that are hashed together: 16 MiB, with as much memory for the products
_MULTIPLIER = 6364136223846793005  # of Knuth's generator (MMIX), whose period modulo 2^64 covers all numbers


def device_hash(tensor: torch.Tensor) -> int:
    """A 64-bit hash of a tensor, computed on its device; equal for equal bits."""
    import torch

    flat = tensor.contiguous().view(-1)
    types = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = flat.view(types[8 if flat.nbytes % 8 == 0 else flat.element_size()])
    # Each word is multiplied, modulo 2^64, by a factor for its place. `torch.hash_tensor` is an XOR, which misses
    # exchanged words, and an even number of words with the same change.
    factors = _factors(tensor.device)
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in words.split(_CHUNK):
        found = found * _MULTIPLIER + (chunk * factors[: len(chunk)]).sum()
    return int(found) & (2**64 - 1)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, equal on every device."""
    import torch

    mixed = torch.arange(1, _CHUNK + 1, device=device) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIER
    return (mixed ^ (mixed >> 32)) | 1


def make_layout(shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: Dtype) -> tuple[tuple[Tensor, ...], int]:
    """Places of the weights, all of type `dtype`, and the bytes of one buffer."""
    layout, offset = [], 0
    for name, shape in shapes:
        layout.append(Tensor(name, shape, offset, dtype))
        offset += round_up(prod(shape) * DTYPE_BYTES[dtype], CACHE_LINE)
    return tuple(layout), offset


def create_buffer() -> int:
    """Make empty memory for weights; returns its descriptor, which the workers inherit."""
    return os.memfd_create("libra-weights", 0)


class WeightBuffer:
    """A process's access to the shared buffers: `BUFFERS` copies of the layout, followed by a seal for each copy."""

    def __init__(self, descriptor: int, size: int) -> None:
        seals = round_up(BUFFERS * size, CACHE_LINE)
        whole = seals + BUFFERS * _SEAL.itemsize
        if os.fstat(descriptor).st_size < whole:
            os.ftruncate(descriptor, whole)
        self.descriptor, self.size = descriptor, size
        self._map = mmap.mmap(descriptor, whole)
        self._seals = np.frombuffer(self._map, _SEAL, BUFFERS, seals)

    @classmethod
    def attach(cls, pid: int, descriptor: int, size: int) -> WeightBuffer:
        """The buffers of a process on this machine. Raises `OSError` if it has ended."""
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        buffer = cls(opened, size)
        weakref.finalize(buffer, os.close, opened)
        return buffer

    def pin(self) -> None:
        """Have the GPU of this process copy from and to the buffers directly, without an intermediate copy."""
        import torch

        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if status != 0:
            raise RuntimeError(f"weight buffers of {memory.numel()} bytes cannot be pinned: CUDA error {status}")

    def write(
        self, buffer: int, layout: Iterable[Tensor], weights: Mapping[str, torch.Tensor], *, hashed: bool = False
    ) -> int:
        """Store the weights, one tensor at a time, in the types and the order of the layout. Returns their checksum:
        CRC-32, or with `hashed` a hash from the weights' device, which also seals the buffer."""
        seal = self._seals[buffer : buffer + 1]
        seal["sealed"] = 0  # first, since the write may be interrupted
        checksum = 0
        for tensor, place in self._places(buffer, layout):
            weight = weights[tensor.name].detach().to(place.dtype)
            place.copy_(weight)
            if hashed:
                checksum = zlib.crc32(device_hash(weight).to_bytes(8, "little"), checksum)
        if not hashed:
            return self.checksum(buffer)
        seal["checksum"] = checksum
        seal["sealed"] = _SEALED  # last, since it declares the buffer whole
        return checksum

    def read(self, buffer: int, layout: Iterable[Tensor], checksum: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights by name, as views of the shared memory. Raises `WeightUpdateError` before the first
        weight."""
        self.verify(buffer, checksum)
        yield from self.views(buffer, layout)

    def views(self, buffer: int, layout: Iterable[Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights by name, as views of shared memory that is known to be whole."""
        for tensor, place in self._places(buffer, layout):
            yield tensor.name, place

    def content(self, buffer: int) -> Vector:
        """The bytes of a buffer, as a view."""
        return np.frombuffer(self._map, np.uint8, self.size, buffer * self.size)

    def store(self, buffer: int, content: Vector, checksum: int) -> None:
        """Fill a buffer with the bytes of another node's buffer. Raises `WeightUpdateError` if they arrived damaged."""
        if len(content) != self.size:
            raise WeightUpdateError(f"{len(content)} bytes for buffer {buffer}, expected {self.size}")
        self._seals[buffer : buffer + 1]["sealed"] = 0
        np.copyto(self.content(buffer), content)
        self.verify(buffer, checksum)

    def checksum(self, buffer: int) -> int:
        return zlib.crc32(self.content(buffer).data)

    def verify(self, buffer: int, checksum: int) -> None:
        """Raise `WeightUpdateError` if the buffer does not match the checksum. A process of this machine has written a
        sealed buffer completely, so its seal is compared instead of every byte."""
        seal = self._seals[buffer]
        found = int(seal["checksum"]) if seal["sealed"] == _SEALED else self.checksum(buffer)
        if found != checksum:
            raise WeightUpdateError(f"checksum {found:#010x} of buffer {buffer}, expected {checksum:#010x}")

    def _places(self, buffer: int, layout: Iterable[Tensor]) -> Iterator[tuple[Tensor, torch.Tensor]]:
        import torch

        memory = torch.frombuffer(self._map, dtype=torch.uint8)[buffer * self.size : (buffer + 1) * self.size]
        for tensor in layout:
            place = memory[tensor.offset : tensor.offset + prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]]
            yield tensor, place.view(getattr(torch, tensor.dtype)).view(tensor.shape)


# --- KV --------------------------------------------------------------------------------------------------------------

BLOCK_NAME = 32  # bytes; vLLM names a block by the SHA-256 of all tokens up to its end, and of its salt

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
    """Expected content of a frame."""

    transfer: int
    version: int  # of the saving engine's weights
    block: bytes


class KVBuffer:
    """One mapping of the controller's frames for KV blocks, all of one size. `payload` has a row of bytes for each
    frame. A frame's header has its transfer, its block, the version of the weights that computed it, and a checksum of
    its bytes. Readers accept the whole block, or nothing."""

    def __init__(self, memory: mmap.mmap, place: KVBufferPlace) -> None:
        self._headers = np.frombuffer(memory, _HEADER, place.frames)
        self.payload: npt.NDArray[np.uint8] = np.frombuffer(
            memory, np.uint8, place.frames * place.frame_bytes, _headers_size(place.frames)
        ).reshape(place.frames, place.frame_bytes)

    @classmethod
    def attach(cls, place: KVBufferPlace) -> KVBuffer:
        """Map the controller's frames in a worker. Raises the errors of `attach`."""
        return cls(attach(place.pid, place.descriptor, _size(place.frames, place.frame_bytes), writable=True), place)

    def seal(self, frame: int, filled: Filled) -> None:
        """Write the header of a frame whose payload is written."""
        header = self._headers[frame : frame + 1]
        header["transfer"], header["version"] = filled.transfer, filled.version
        header["length"] = self.payload.shape[1]
        header["block"] = np.frombuffer(filled.block, np.uint8)
        header["checksum"] = self._checksum(frame)

    def holds(self, frame: int, wanted: Filled) -> bool:
        """Whether a frame has this block undamaged, computed under weights of this version or an older one."""
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
    """The controller's mapping. Workers can attach to `place` while this object lives."""

    def __init__(self, frames: int, frame_bytes: int) -> None:
        descriptor, memory = make_memory(self, "libra-kv", _size(frames, frame_bytes))
        self.place = KVBufferPlace(os.getpid(), descriptor, frames, frame_bytes)
        super().__init__(memory, self.place)


def _headers_size(frames: int) -> int:
    """Bytes before the first payload, rounded up to whole pages."""
    return round_up(frames * _HEADER.itemsize, mmap.PAGESIZE)


def _size(frames: int, frame_bytes: int) -> int:
    return _headers_size(frames) + frames * frame_bytes
