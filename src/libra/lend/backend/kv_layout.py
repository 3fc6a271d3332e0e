"""Addresses of the blocks of an engine's KV cache.

Invariant: the bytes of a block are in one piece in each tensor, so consecutive blocks cover runs of memory. With vLLM's
block-outermost layouts (BLHNC, BLNHC) all layers of a block are one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from libra.lend.backend.device_page import LendingError

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True)
class KVLayout:
    """Layout of the KV cache of an engine whose model runs in this process."""

    blocks: int  # the placeholder included
    rows: npt.NDArray[np.int64]  # per tensor: address of block 0, bytes from a block to the next, bytes of a block
    storage: torch.UntypedStorage  # of the first tensor

    @classmethod
    def of(cls, scheduler: Any) -> KVLayout:
        """Read the layout from vLLM's `scheduler`, after its engine core has allocated the KV cache. Raises
        LendingError if a block is not in one piece, or the cache is in another process."""
        blocks: int = scheduler.kv_cache_config.num_blocks
        layers = scheduler.vllm_config.compilation_config.static_forward_context
        names = [name for group in scheduler.kv_cache_config.kv_cache_groups for name in group.layer_names]
        if not names:
            raise LendingError("this model has no KV that could be lent; lend the device without KV memory")
        caches = {name: _cache(name, layers.get(name)) for name in names}
        rows = sorted({_row(name, cache, blocks) for name, cache in caches.items()})
        return cls(blocks, np.array(rows, dtype=np.int64).reshape(-1, 3), caches[names[0]].untyped_storage())

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers. Memory that groups of layers share counts once."""
        begin, end = self.runs(np.zeros(1, dtype=np.int64))
        return int((end - begin).sum())

    def extents(self, blocks: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Begin and end of the bytes of these blocks, tensor by tensor."""
        first, stride, size = self.rows[:, :1], self.rows[:, 1:2], self.rows[:, 2:]
        begin = first + stride * blocks
        return begin.ravel(), (begin + size).ravel()

    def runs(self, blocks: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Begin and end of the runs of bytes of these blocks, ascending and disjoint."""
        begin, end = self.extents(blocks)
        order = np.argsort(begin)
        begin, end = begin[order], np.maximum.accumulate(end[order])
        apart = np.flatnonzero(begin[1:] > end[:-1]) + 1
        starts = np.concatenate(([0], apart)).astype(np.int64)
        return begin[starts], end[np.concatenate((apart - 1, [len(end) - 1])).astype(np.int64)]


def _cache(name: str, layer: Any) -> torch.Tensor:
    cache = getattr(layer, "kv_cache", None)
    if layer is None or (isinstance(cache, torch.Tensor) and cache.numel() == 0):
        raise LendingError(
            "the model runs in another process than its scheduler, which cannot reach its KV memory;"
            " start the engine with VLLM_ENABLE_V1_MULTIPROCESSING=0 and one worker"
        )
    if not isinstance(cache, torch.Tensor):
        raise LendingError(
            f"{name} ({type(layer).__name__}) keeps {type(cache).__name__}, not blocks of KV;"
            " memory of a model of this kind cannot be lent"
        )
    return cache


def _row(name: str, cache: torch.Tensor, blocks: int) -> tuple[int, int, int]:
    if cache.shape[0] % blocks:
        raise LendingError(
            f"{name}: a KV cache of {tuple(cache.shape)} for {blocks} blocks is not block-outermost; set"
            " VLLM_KV_CACHE_LAYOUT to a layout with whole blocks, such as LBHNC"
        )
    block = cache.unflatten(0, (blocks, -1))[0]  # a block may consist of several blocks of the attention kernel
    size = block.numel() * block.element_size()
    extent = (1 + sum((n - 1) * s for n, s in zip(block.shape, block.stride(), strict=True))) * block.element_size()
    stride = cache.stride(0) * (cache.shape[0] // blocks) * cache.element_size()
    if extent != size or stride < size:
        raise LendingError(
            f"{name}: the bytes of a KV block are not side by side (shape {tuple(cache.shape)}, strides"
            f" {cache.stride()}); set VLLM_KV_CACHE_LAYOUT to a layout with whole blocks, such as LBHNC"
        )
    return cache.data_ptr(), stride, size
