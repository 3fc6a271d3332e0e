"""Pages of a GPU's memory under the blocks of a KV cache, mapped one by one by vLLM's own allocator.

Invariant: a page is mapped if and only if it has bytes of a block that is not dropped, or bytes outside all blocks. The
addresses never change, so CUDA graphs and block tables stay valid.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from libra.lend.backend.device_page import LendingError
from libra.lend.backend.kv_layout import KVLayout

if TYPE_CHECKING:
    import numpy.typing as npt

_PAGE = 2 << 20  # bytes: the smallest piece that CUDA maps


class PageMapper(Protocol):
    """Maps the pages of KV memory. At first all pages are mapped."""

    size: int  # bytes of a page
    addresses: npt.NDArray[np.int64]  # of all pages, ascending

    def settle(self) -> None:
        """Wait until no launched work can touch a page that is about to be unmapped."""
        ...

    def unmap(self, page: int) -> None: ...

    def map(self, page: int) -> None:
        """Map a page of zeros. Raises MemoryError if the device has no memory left."""
        ...


class GpuPages:
    """`KVPages` of an accelerator. A page shared by two blocks is unmapped when the second block is dropped."""

    def __init__(self, layout: KVLayout, mapper: PageMapper) -> None:
        self._layout, self._mapper, self.block_bytes = layout, mapper, layout.block_bytes
        pages, size = mapper.addresses, mapper.size
        self._users = np.zeros(len(pages), dtype=np.int64)  # by page: blocks with bytes in it, counted per tensor
        every = np.arange(layout.blocks, dtype=np.int64)
        self._use(every, 1)
        begin, end = layout.extents(every)
        foreign = (self._users == 0) | (pages < begin.min()) | (pages + size > end.max())
        self._users[foreign] += 1
        self._mapped = np.ones(len(pages), dtype=bool)

    def drop(self, blocks: Sequence[int]) -> int:
        touched = self._use(np.asarray(blocks, dtype=np.int64), -1)
        gone = touched[(self._users[touched] == 0) & self._mapped[touched]]
        if len(gone):
            self._mapper.settle()
        for page in gone.tolist():
            self._mapper.unmap(page)
            self._mapped[page] = False
        return len(gone) * self._mapper.size

    def restore(self, blocks: Sequence[int]) -> int:
        for count, block in enumerate(reversed(blocks)):
            touched = self._use(np.array([block], dtype=np.int64), 1)
            came: list[int] = []
            try:
                for page in touched[~self._mapped[touched]].tolist():
                    self._mapper.map(page)
                    came.append(page)
            except MemoryError:
                self._mapper.settle()
                for page in came:
                    self._mapper.unmap(page)
                self._use(np.array([block], dtype=np.int64), -1)
                return count
            self._mapped[came] = True
        return len(blocks)

    def _use(self, blocks: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """Add `count` users to each page with bytes of these blocks; returns these pages."""
        begin, end = self._layout.extents(blocks)
        first = np.searchsorted(self._mapper.addresses, begin, side="right") - 1
        last = np.searchsorted(self._mapper.addresses, end - 1, side="right") - 1
        lengths = last - first + 1
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        pages = np.repeat(first, lengths) + within
        np.add.at(self._users, pages, count)
        return np.unique(pages)


class CuMemPages:
    """A `PageMapper` over vLLM's `CuMemAllocator`, whose C extension maps and unmaps given addresses.

    vLLM maps the whole cache as one piece, which can only be unmapped as a whole. So the constructor maps the cache
    again, page by page, before the first request. Raises LendingError if vLLM allocated the cache in another way.
    """

    size = _PAGE

    def __init__(self, layout: KVLayout, model_config: Any) -> None:
        """`model_config` is vLLM's."""
        from vllm.device_allocator import cumem

        if not getattr(model_config, "enable_cumem_allocator", False):
            raise LendingError(
                "KV memory of a GPU can be lent only with vLLM's cumem allocator; start the engine with"
                " --enable-cumem-allocator"
            )
        if model_config.enable_sleep_mode:
            raise LendingError(
                "an engine that can sleep would unmap lent KV memory; start it without --enable-sleep-mode"
            )
        self._cumem = cumem
        found = cumem.CuMemAllocator.get_instance().pointer_to_data.values()
        handles = sorted((it.handle for it in found if it.tag == "kv_cache"), key=lambda handle: handle[2])
        if any(not isinstance(pointer, int) for *_, pointer in handles):
            raise LendingError(
                "KV memory of this kind of GPU is mapped in lists of chunks, which cannot be lent; lend the device"
                " without KV memory"
            )
        self._device = handles[0][0] if handles else -1
        regions = [np.arange(begin, begin + size, _PAGE, dtype=np.int64) for _, size, begin, _ in handles]
        self.addresses = np.concatenate(regions) if regions else np.zeros(0, dtype=np.int64)
        begin, end = layout.extents(np.arange(layout.blocks, dtype=np.int64))
        if not self._covers(begin, end) or any((size | at) % _PAGE for _, size, at, _ in handles):
            raise LendingError(
                "vLLM did not allocate this KV cache with its cumem allocator (a KV connector may have); lend the"
                " device without KV memory"
            )
        self._bytes = torch.empty(0, dtype=torch.uint8, device=layout.device).set_(layout.storage)
        # CUDA's handle of each page; the extension reads and writes it at an address from `_handle`.
        self._handles = (ctypes.c_uint64 * len(self.addresses))()
        self.settle()
        for handle in handles:
            cumem.unmap_and_release(handle)
        for page in range(len(self.addresses)):
            self.map(page)

    def settle(self) -> None:
        torch.accelerator.synchronize()

    def unmap(self, page: int) -> None:
        self._cumem.unmap_and_release(self._handle(page))

    def map(self, page: int) -> None:
        try:
            self._cumem.create_and_map(self._handle(page))
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise MemoryError(str(error)) from None
            raise
        # The memory has content of another engine, in which a NaN would spread.
        begin = int(self.addresses[page]) - self._bytes.data_ptr()
        self._bytes[max(0, begin) : max(0, begin + _PAGE)].zero_()

    def _handle(self, page: int) -> tuple[int, int, int, int]:
        return self._device, _PAGE, int(self.addresses[page]), ctypes.addressof(self._handles) + 8 * page

    def _covers(self, begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> bool:
        """Whether a page lies under each byte of the extents."""
        if not len(self.addresses) or begin.min() < self.addresses[0]:
            return False
        first, last = (np.searchsorted(self.addresses, at, side="right") - 1 for at in (begin, end - 1))
        beyond = end > self.addresses[last] + _PAGE
        return not beyond.any() and bool(np.all((last - first) * _PAGE == self.addresses[last] - self.addresses[first]))
