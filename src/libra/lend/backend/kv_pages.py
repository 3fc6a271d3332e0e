"""The pages of memory under the blocks of a KV cache: they are unmapped when the blocks change hands, and mapped again
with them.

Invariant: a page is unmapped only if every byte of it belongs to dropped blocks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from libra.lend.backend.device_page import LendingError
from libra.lend.backend.gpu_pages import CuMemPages, GpuPages
from libra.lend.backend.kv_layout import KVLayout

_DONTNEED = 4  # MADV_DONTNEED: pages go at once, and come back as zeros when they are next touched
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class KVPages(Protocol):
    """Pages under the KV blocks of one engine."""

    block_bytes: int

    def drop(self, blocks: Sequence[int]) -> int:
        """Give the pages of these blocks back; returns the bytes given back. Their contents are lost."""
        ...

    def restore(self, blocks: Sequence[int]) -> int:
        """Map pages for dropped blocks again; returns the number of blocks, from the last on, for which there was
        memory."""
        ...


def kv_pages(scheduler: Any) -> KVPages:
    """`scheduler` is vLLM's, of a model that runs in this process. Raises LendingError if its memory cannot change
    hands."""
    layout = KVLayout.of(scheduler)
    if layout.device.type == "cpu":
        return HostPages(layout)
    if layout.device.type == "cuda":
        return GpuPages(layout, CuMemPages(layout, scheduler.vllm_config.model_config))
    raise LendingError(
        f"KV memory on {layout.device} cannot be lent, only memory of the host or of an NVIDIA GPU can; lend the"
        " device without it"
    )


class HostPages:
    """Pages in memory of the host. Parts that a block shares with its neighbours at both ends stay, so blocks are best
    dropped in long runs."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout, self.block_bytes = layout, layout.block_bytes

    def drop(self, blocks: Sequence[int]) -> int:
        begin, end = self._layout.runs(np.asarray(blocks, dtype=np.int64))
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        sizes = end // mmap.PAGESIZE * mmap.PAGESIZE - begin
        for address, size in zip(begin.tolist(), sizes.tolist(), strict=True):
            if size > 0 and _libc.madvise(address, size, _DONTNEED):
                error = ctypes.get_errno()
                raise LendingError(f"KV memory cannot be given back: madvise: {os.strerror(error)}")
        return int(sizes[sizes > 0].sum())

    def restore(self, blocks: Sequence[int]) -> int:
        return len(blocks)  # the kernel maps them as they are written
