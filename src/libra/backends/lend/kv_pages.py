"""Which pages of memory the blocks of an engine's KV cache lie on, and how the kernel gets them back.

Invariant: a page is dropped only if every byte of it belongs to blocks that are dropped. What a block shares with its
neighbours at its two ends stays, so blocks are best dropped in long runs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from libra.backends.lend.device_page import LendingError

if TYPE_CHECKING:
    import numpy.typing as npt

_DONTNEED = 4  # MADV_DONTNEED: pages go at once, and come back as zeros when they are next touched
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class KVPages:
    """Of an engine whose model runs in this process, in memory of the host. Raises LendingError for any other."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler` is vLLM's, of an engine core that has its KV cache."""
        blocks: int = scheduler.kv_cache_config.num_blocks
        layers = scheduler.vllm_config.compilation_config.static_forward_context
        names = [name for group in scheduler.kv_cache_config.kv_cache_groups for name in group.layer_names]
        views = [_blocks_of(name, layers.get(name), blocks) for name in names]
        # One row a tensor: the address of block 0, the bytes from a block to the next, the bytes of a block.
        self._layout = np.array(sorted({*views}), dtype=np.int64).reshape(-1, 3)
        begin, end = self._runs([0])
        self.block_bytes = int((end - begin).sum())  # over all layers; each byte once, though groups may overlay

    def drop(self, blocks: Sequence[int]) -> int:
        """Give the pages of these blocks back; bytes of address space that they cover. What was in them is lost."""
        begin, end = self._runs(blocks)
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        sizes = end // mmap.PAGESIZE * mmap.PAGESIZE - begin
        for address, size in zip(begin.tolist(), sizes.tolist(), strict=True):
            if size > 0 and _libc.madvise(address, size, _DONTNEED):
                error = ctypes.get_errno()
                raise LendingError(f"KV memory cannot be given back: madvise: {os.strerror(error)}")
        return int(sizes[sizes > 0].sum())

    def _runs(self, blocks: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the runs of bytes of these blocks begin and end: ascending, apart from one another."""
        numbers = np.asarray(blocks, dtype=np.int64)
        first, stride, size = self._layout[:, :1], self._layout[:, 1:2], self._layout[:, 2:]
        begin = (first + stride * numbers).ravel()
        order = np.argsort(begin)
        begin, end = begin[order], (first + stride * numbers + size).ravel()[order]
        end = np.maximum.accumulate(end)
        apart = np.flatnonzero(begin[1:] > end[:-1]) + 1
        starts = np.concatenate(([0], apart)).astype(np.int64)
        return begin[starts], end[np.concatenate((apart - 1, [len(end) - 1])).astype(np.int64)]


def _blocks_of(name: str, layer: Any, blocks: int) -> tuple[int, int, int]:
    """A layer's address of block 0, bytes from a block to the next, and bytes of a block."""
    cache = getattr(layer, "kv_cache", None)
    if layer is None or (isinstance(cache, torch.Tensor) and cache.numel() == 0):
        raise LendingError(
            "the model runs in another process than its scheduler, which cannot reach its KV memory;"
            " start the engine with VLLM_ENABLE_V1_MULTIPROCESSING=0 and one worker"
        )
    if not isinstance(cache, torch.Tensor):
        raise LendingError(
            f"{name} ({type(layer).__name__}) keeps {type(cache).__name__}, not blocks of KV;"
            " memory of a model of this kind cannot change hands"
        )
    if cache.device.type != "cpu":
        raise LendingError(
            f"KV memory on {cache.device} cannot change hands, only memory of the host can; lend the device without it"
        )
    if cache.shape[0] % blocks:
        raise LendingError(f"{name}: a KV cache of {tuple(cache.shape)} for {blocks} blocks is not block-outermost")
    block = cache.unflatten(0, (blocks, -1))[0]  # a block may be several of the attention kernel's
    size = block.numel() * block.element_size()
    extent = (1 + sum((n - 1) * s for n, s in zip(block.shape, block.stride(), strict=True))) * block.element_size()
    stride = cache.stride(0) * (cache.shape[0] // blocks) * cache.element_size()
    if extent != size or stride < size:
        raise LendingError(
            f"{name}: the bytes of a KV block are not side by side (shape {tuple(cache.shape)}, strides"
            f" {cache.stride()}); set VLLM_KV_CACHE_LAYOUT to a layout with whole blocks, such as LBHNC"
        )
    return cache.data_ptr(), stride, size
