"""The quota of KV blocks that an engine may use. The engine has addresses for all blocks, but memory only for its own.

Invariant: no request has a taken block. vLLM's pool counts a taken block as used and never allocates it, the prefix
cache does not contain it, and it has no memory pages. Only public methods of `BlockPool` are called, between two steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from libra.lend.backend.kv_pages import kv_pages


class BlockQuota:
    """Quota of one vLLM engine. At first, all blocks belong to the engine. Raises LendingError if its memory cannot be
    lent.

    quota = BlockQuota(scheduler)               # `engine.engine_core.engine_core.scheduler`, of an LLMEngine
    for name in quota.in_the_way(1000):         # requests, last admitted first
        engine.abort_request([name], internal=True)
    quota.take(1000)                            # return the pages of 1000 blocks to the kernel
    quota.give(1000)                            # allocate the pages again
    """

    def __init__(self, scheduler: Any) -> None:
        """`scheduler` is vLLM's, of a model that runs in this process."""
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._pages = kv_pages(scheduler)
        self._held: list[Any] = []  # taken `KVCacheBlock`s, in the order of taking
        self.size: int = self._pool.num_gpu_blocks - 1  # one is vLLM's placeholder
        self.block_bytes = self._pages.block_bytes

    @property
    def held(self) -> int:
        """Number of taken blocks."""
        return len(self._held)

    @property
    def own(self) -> int:
        """Number of blocks that the engine may use."""
        return self.size - len(self._held)

    @property
    def free(self) -> int:
        """Number of the engine's own blocks without a request; some may be in the prefix cache."""
        return int(self._pool.get_num_free_blocks())

    def in_the_way(self, count: int) -> list[str]:
        """Requests, by the scheduler's names, that have to end before `count` blocks can be taken, last admitted first.
        If ending all requests does not suffice, all are listed. The other blocks are in use for a while, for example
        for KV that is being saved for another engine.
        """
        missing, gone = count - self.free, []
        manager, used = self._scheduler.kv_cache_manager, Counter[int]()
        for request in reversed(self._admitted()):
            if missing <= 0:
                break
            gone.append(request.request_id)
            for group in manager.get_block_ids(request.request_id):
                for number in group:
                    used[number] += 1
                    block = self._pool.blocks[number]
                    missing -= not block.is_null and used[number] == block.ref_cnt  # requests may share a block
        return gone

    def take(self, count: int) -> int:
        """Take up to `count` free blocks, blocks in the prefix cache last. Returns the number of taken blocks."""
        empty: list[Any] = []
        cached: list[Any] = []
        for block in reversed(self._pool.blocks):  # from the end, so that the taken pages lie side by side
            if len(empty) >= count:
                break
            if block.ref_cnt == 0 and not block.is_null:
                (empty if block.block_hash is None else cached).append(block)
        chosen = (empty + cached)[: max(count, 0)]
        numbers = sorted(block.block_id for block in chosen)
        if numbers:
            self._pool.evict_blocks(set(numbers))
            self._pool.touch(chosen)
            self._held += chosen
            self._pages.drop(numbers)
        return len(numbers)

    def give(self, count: int) -> int:
        """Return up to `count` taken blocks to the engine; fewer if the device lacks memory. Returns the number of
        returned blocks."""
        count = min(max(count, 0), len(self._held))
        if count:
            count = self._pages.restore([block.block_id for block in self._held[-count:]])
        if count:
            self._held, back = self._held[:-count], self._held[-count:]
            self._pool.free_blocks(back)
        return count

    def _admitted(self) -> list[Any]:
        """Requests with blocks, in the order of admission."""
        scheduler = self._scheduler
        running = {request.request_id for request in scheduler.running}
        others = [it for name, it in scheduler.requests.items() if name not in running]
        return scheduler.running + [it for it in others if any(scheduler.kv_cache_manager.get_block_ids(it.request_id))]
