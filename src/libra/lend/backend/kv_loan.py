"""The two ends of a loan of KV memory: the serving engine that cedes blocks, and the rollout engine that gets them.

Invariant: one side unmaps pages before the other side maps them. Serving drops its pages before it reports them as
ceded, and rollout drops its pages before it reports them as returned. The only exception is a burst of serving beyond
the reserve. Both sides then have some pages until rollout's next check, at most a grant later.
"""

from __future__ import annotations

from typing import Any

from libra.lend.backend.block_quota import BlockQuota
from libra.lend.backend.borrower_token import BorrowerToken
from libra.lend.backend.device_page import LendingError
from libra.lend.backend.serving_token import ServingToken
from libra.lend.quota import KVLimits, KVQuota, KVView, ceded

_CEDED_AT_ONCE = 16 << 20  # most bytes ceded between two serving steps, since unmapping takes 0.1 ms a MiB


class CededKV:
    """Serving's end. Raises LendingError if the engine's memory cannot be lent."""

    def __init__(self, scheduler: Any) -> None:
        """`scheduler` is vLLM's own, of the serving engine."""
        self._scheduler = scheduler
        self._blocks = BlockQuota(scheduler)
        self.ceding = False  # whether blocks are ceded
        self._block_tokens = _block_tokens(scheduler)
        # One longest prompt, and one more block for every sequence, which grows by a block in `block_size` steps.
        self._reserve = _context_blocks(scheduler, scheduler.max_model_len)
        self._reserve += _context_blocks(scheduler, 1) * scheduler.max_num_running_reqs

    def settle(self, token: ServingToken) -> None:
        """Before a step, cede the requested blocks that serving can spare, and take back blocks that rollout does not
        use or that serving's requests need."""
        blocks, asked = self._blocks, token.kv_asked
        if asked == blocks.held == 0:
            return
        now, then = blocks.held, self._ceded(asked, token.kv_held)
        if then > now:
            blocks.take(min(then - now, max(1, _CEDED_AT_ONCE // blocks.block_bytes)))
        elif then < now:
            # Publish first, then read rollout's request again: rollout requests blocks before it uses them, so one side
            # always sees the other's change.
            token.publish_kv(self._view(then))
            blocks.give(now - max(then, self._ceded(token.kv_asked, token.kv_held)))
        self.ceding = blocks.held > 0
        token.publish_kv(self.view())

    def view(self) -> KVView:
        return self._view(self._blocks.held)

    def _view(self, held: int) -> KVView:
        blocks, size = self._blocks, self._blocks.block_bytes
        need = min(blocks.own - blocks.free + self._wanted(), blocks.size)
        return KVView(blocks.size * size, self._reserve * size, need * size, held * size)

    def _ceded(self, asked: int, held: int) -> int:
        blocks, size = self._blocks, self._blocks.block_bytes
        return ceded(
            blocks.held,
            asked=-(-asked // size),
            held=-(-held // size),
            free=blocks.free,
            wanted=self._wanted(),
            reserve=self._reserve,
        )

    def _wanted(self) -> int:
        """Upper bound on the blocks that requests may still take for their present tokens. A shared prefix counts for
        each of its requests."""
        scheduler, wanted = self._scheduler, self._scheduler.kv_cache_manager.watermark_blocks
        ahead, longest = scheduler.num_lookahead_tokens, scheduler.max_model_len
        for request in scheduler.requests.values():
            tokens = min(request.num_tokens_with_spec + request.num_output_placeholders + ahead, longest)
            computed = request.num_computed_tokens
            for block in self._block_tokens:
                wanted += -(-tokens // block) + -computed // block
        return int(max(0, wanted))


class BorrowedKV:
    """Rollout's end. Its engine has the blocks of its quota, at first none. Between two steps, and every few
    milliseconds without steps, the owner calls:

        for name in borrowed.in_the_way(now):   # turns to stop, last admitted first; they lose no token
            engine.abort_request([name], internal=True)
        borrowed.settle()
    """

    def __init__(self, scheduler: Any, token: BorrowerToken, *, context: int, quiet: float, beside: int = 0) -> None:
        """`scheduler` is vLLM's, of the rollout engine. `context` is its longest turn, in tokens; `quiet` and `beside`
        are fields of `KVLimits`. Raises LendingError, and ValueError like `KVLimits`."""
        self._token, self._blocks = token, BlockQuota(scheduler)
        kv, size = token.look().kv, self._blocks.block_bytes
        if kv.capacity == 0:
            raise LendingError("the serving engine cannot cede KV memory; see its log for the reason")
        longest, addresses = _context_blocks(scheduler, context) * size, self._blocks.size * size
        self._quota = KVQuota(KVLimits(kv.capacity, kv.reserve, longest, addresses, quiet, beside))
        self._target = 0
        self._blocks.take(self._blocks.size)

    @property
    def own(self) -> int:
        """Blocks that the engine may use now."""
        return self._blocks.own

    @property
    def held(self) -> int:
        """Bytes of KV memory that the engine has now."""
        return self._blocks.own * self._blocks.block_bytes

    def trained(self) -> None:
        """A training step has passed."""
        self._quota.trained()

    def in_the_way(self, now: float) -> list[str]:
        """Read serving's notice; returns the turns that have to end before `settle`, by the scheduler's names. Raises
        LendingError if the serving engine was restarted with other memory."""
        kv, blocks = self._token.look().kv, self._blocks
        if kv.capacity not in (0, self._quota.limits.capacity):
            raise LendingError("the serving engine has other KV memory than before; start the rollout engine again")
        self._target = self._quota.observe(kv, now) // blocks.block_bytes
        return blocks.in_the_way(blocks.own - self._target)

    def settle(self) -> None:
        """Bring the engine's blocks to the quota of the last `in_the_way`, except blocks that requests still use, and
        report the result."""
        blocks = self._blocks
        blocks.take(blocks.own - self._target)
        blocks.give(self._target - blocks.own)
        self._token.say_kv(self._quota.asked, max(0, self.held - self._quota.limits.beside))


def _context_blocks(scheduler: Any, tokens: int) -> int:
    """Blocks of a context of `tokens` tokens, in all KV groups of the engine."""
    return sum(-(-tokens // block) for block in _block_tokens(scheduler))


def _block_tokens(scheduler: Any) -> tuple[int, ...]:
    """Tokens of a block, group by group."""
    return tuple(group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups)
