"""The two ends of a loan of KV memory: the serving engine that cedes blocks, and the rollout engine that has them.

Invariant: pages go before they come. Serving drops its own before it says that it ceded them, and rollout drops its own
before it says that it has them no more. Only what a burst takes beyond the reserve is had by both, until rollout looks
next: at the end of its step, which is a grant at most.
"""

from __future__ import annotations

from typing import Any

from libra.backends.lend.block_quota import BlockQuota
from libra.backends.lend.device_token import BorrowerToken, LendingError
from libra.lend.quota import KVLimits, KVQuota, KVView, ceded

_CEDED_AT_ONCE = 16 << 20  # bytes between two steps of serving: giving pages back takes it a tenth of a ms a MiB


class CededKV:
    """Serving's end. Raises LendingError where the engine's memory cannot change hands."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler` is vLLM's own, of the serving engine."""
        self._scheduler = scheduler
        self._blocks = BlockQuota(scheduler)
        self._block_tokens = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
        # One longest prompt; and a block more for every sequence, its growth in as many steps as a block has tokens.
        self._reserve = self._of(scheduler.max_model_len) + len(self._block_tokens) * scheduler.max_num_running_reqs

    def settle(self, asked: int, held: int) -> None:
        """Before a step: cede what rollout asks for and serving can spare, and have back what it does not hold, or
        what requests need. Bytes."""
        blocks, size = self._blocks, self._blocks.block_bytes
        if asked == blocks.held == 0:
            return
        now = blocks.held
        then = ceded(
            now,
            asked=-(-asked // size),
            held=-(-held // size),
            free=blocks.free,
            wanted=self._wanted(),
            reserve=self._reserve,
        )
        if then > now:
            blocks.take(min(then - now, max(1, _CEDED_AT_ONCE // size)))
        else:
            blocks.give(now - then)

    def view(self) -> KVView:
        blocks, size = self._blocks, self._blocks.block_bytes
        need = min(blocks.own - blocks.free + self._wanted(), blocks.size)
        return KVView(blocks.size * size, self._reserve * size, need * size, blocks.held * size)

    def _wanted(self) -> int:
        """Blocks that requests may take for the tokens that they have, in one step or more: a bound, as it counts
        what a prefix shares for each of them."""
        scheduler, wanted = self._scheduler, self._scheduler.kv_cache_manager.watermark_blocks
        for request in scheduler.requests.values():
            tokens = request.num_tokens_with_spec + request.num_output_placeholders + scheduler.num_lookahead_tokens
            wanted += self._of(min(tokens, scheduler.max_model_len)) - self._of(request.num_computed_tokens)
        return int(max(0, wanted))

    def _of(self, tokens: int) -> int:
        """Blocks of a context of this many tokens, in all KV groups."""
        return sum(-(-tokens // block) for block in self._block_tokens)


class BorrowedKV:
    """Rollout's end: its engine has blocks as the quota says, and none in the beginning.

    Between any two steps, and while there is nothing to do at least every few milliseconds:

        for name in borrowed.in_the_way(now):   # turns to put out, the last admitted first; they lose no token
            engine.abort_request([name], internal=True)
        borrowed.settle()
    """

    def __init__(self, scheduler: Any, token: BorrowerToken, *, context: int, quiet: float, beside: int = 0) -> None:
        """`scheduler` is vLLM's, of the rollout engine. `context` are the tokens of its longest turn, `quiet` seconds
        as in `KVLimits`, `beside` the bytes that the device has beside the serving engine's memory and the weights of
        this one. Raises LendingError, or ValueError where a loan could not hold one turn."""
        self._token, self._blocks = token, BlockQuota(scheduler)
        capacity, size = token.look().kv.capacity, self._blocks.block_bytes
        tokens = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
        longest = sum(-(-context // block) for block in tokens)
        if beside < 0:
            raise LendingError(
                f"the rollout engine's weights are {-beside:,} bytes more than the memory beside the serving engine:"
                " lower the serving engine's KV memory, or roll out with a smaller model"
            )
        if capacity == 0 and beside == 0:
            raise LendingError("the serving engine cannot cede KV memory; its log says why")
        if longest > self._blocks.size:
            raise LendingError(
                f"a rollout context of {context:,} tokens is {longest:,} blocks of KV and the engine has addresses for"
                f" {self._blocks.size:,}: raise its KV memory or shorten its max_model_len"
            )
        self._beside, self._capacity = beside, capacity
        self._quota = KVQuota(KVLimits(capacity + beside, token.look().kv.reserve, longest * size, quiet))
        self._target = self._asked = 0
        self._blocks.take(self._blocks.size)

    @property
    def own(self) -> int:
        """Blocks that the engine may use now."""
        return self._blocks.own

    def trained(self) -> None:
        """A training step has passed."""
        self._quota.trained()

    def in_the_way(self, now: float) -> list[str]:
        """Look at what serving says; turns that have to go before `settle`, as the scheduler names them.

        Raises LendingError where the serving engine was started again with other memory.
        """
        kv, blocks = self._token.look().kv, self._blocks
        if kv.capacity not in (0, self._capacity):
            raise LendingError("the serving engine has other KV memory than before; start the rollout engine again")
        lent = self._quota.observe(kv.need, now)
        self._asked = max(0, min(lent, blocks.size * blocks.block_bytes) - self._beside)
        self._target = min(lent, kv.ceded + self._beside) // blocks.block_bytes
        return blocks.in_the_way(blocks.own - self._target)

    def settle(self) -> None:
        """Have the blocks that the quota gave at the last look, and say so."""
        blocks = self._blocks
        if blocks.own > self._target:
            blocks.take(blocks.own - self._target)
        else:
            blocks.give(self._target - blocks.own)
        self._token.say_kv(self._asked, max(0, blocks.own * blocks.block_bytes - self._beside))
