"""The memory pages under the blocks of a KV cache. Dropping a block unmaps its pages, and restoring it maps them again.

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

_DONTNEED = 4  # MADV_DONTNEED: frees pages at once; the next access maps zeros
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class KVPages(Protocol):
    """Pages under the KV blocks of one engine."""

    block_bytes: int

    def drop(self, blocks: Sequence[int]) -> int:
        """Free the pages of these blocks, whose contents are lost. Returns the freed bytes."""
        ...

    def restore(self, blocks: Sequence[int]) -> int:
        """Map pages for dropped blocks again, from the last block on. Returns the number of blocks for which the device
        had memory."""
        ...


def kv_pages(scheduler: Any) -> KVPages:
    """The KV pages of vLLM's `scheduler`, whose model runs in this process. Raises LendingError if the engine's memory
    cannot be lent."""
    layout = KVLayout.of(scheduler)
    if layout.device.type == "cpu":
        return HostPages(layout)
    if layout.device.type == "cuda":
        return GpuPages(layout, CuMemPages(layout, scheduler.vllm_config.model_config))
    raise LendingError(
        f"KV memory on {layout.device} cannot be lent, only memory of the host or of an NVIDIA GPU; lend the device"
        " without KV memory"
    )


class HostPages:
    """Pages in memory of the host. Pages that a dropped block shares with other blocks stay mapped, so long runs of
    blocks free the most memory."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout, self.block_bytes = layout, layout.block_bytes

    def drop(self, blocks: Sequence[int]) -> int:
        begin, end = self._layout.runs(np.asarray(blocks, dtype=np.int64))
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        sizes = end // mmap.PAGESIZE * mmap.PAGESIZE - begin
        for address, size in zip(begin.tolist(), sizes.tolist(), strict=True):
            if size > 0 and _libc.madvise(address, size, _DONTNEED):
                error = ctypes.get_errno()
                raise LendingError(f"KV memory cannot be freed: madvise: {os.strerror(error)}")
        return int(sizes[sizes > 0].sum())

    def restore(self, blocks: Sequence[int]) -> int:
        return len(blocks)  # the kernel maps pages when they are written
