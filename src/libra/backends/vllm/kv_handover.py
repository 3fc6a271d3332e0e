"""KV transfers for contexts that change engines, if a transfer is cheaper than a new prefill.

Invariant: if a transfer fails, the context is computed again and the turn continues. No turn waits longer than
`SAVE_SECONDS` for KV. Every change of engines is reported, with the chosen way and the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libra.backends.protocols import Engine
from libra.backends.transport.engine_messages import Fetched, KVBufferPlace, KVTransfer, Save, Saved
from libra.backends.transport.shared_memory import OwnFrames
from libra.cost.device import DeviceProfile
from libra.cost.engine_memory import BLOCK_TOKENS
from libra.cost.transfer import handover_pays


class KVLeases:
    """The frames, and the transfers that lease them."""

    def __init__(self, frames: int) -> None:
        self._free = list(range(frames))
        self._written_by: list[tuple[int, KVTransfer]] = []  # given up, but a process may still write into them
        self._transfers = 0

    @property
    def free(self) -> int:
        """Number of frames without a transfer."""
        self._reclaim()
        return len(self._free)

    def lease(self, blocks: int) -> KVTransfer | None:
        """A transfer with `blocks` frames, the most recently used first; None if fewer are free."""
        if blocks > self.free:
            return None
        self._transfers += 1
        return KVTransfer(self._transfers, [self._free.pop() for _ in range(blocks)])

    def release(self, transfer: KVTransfer) -> None:
        """Free the frames of a transfer."""
        self._free += reversed(transfer.frames)

    def release_after(self, process: int, transfer: KVTransfer) -> None:
        """Free the frames of a transfer once the process that may write into them has ended."""
        self._written_by.append((process, transfer))

    def _reclaim(self) -> None:
        writing = []
        for process, transfer in self._written_by:
            if Path(f"/proc/{process}").exists():
                writing.append((process, transfer))
            else:
                self.release(transfer)
        self._written_by = writing


_NODE = "local"  # launchers' name for the controller's node, whose workers share memory with the controller
SAVE_SECONDS = 2.0  # longest wait of a turn for an engine to save its context


@dataclass(slots=True)
class ContextMove:
    """The move of a context to another engine. `seconds` is the time from the order for its KV to its arrival. Only
    this turn waits for it."""

    context: int  # tokens of the context that the previous engine had
    handed_tokens: int = 0  # tokens whose KV came from the previous engine; the others are computed again
    seconds: float = 0.0
    why: str = "handed over"  # or the reason why it was not


@dataclass(slots=True)
class ContextMoves:
    """Sums over contexts that changed engines."""

    handed_over: int = 0
    handed_tokens: int = 0
    handed_seconds: float = 0.0
    computed: int = 0
    computed_tokens: int = 0

    def add(self, change: ContextMove) -> None:
        if change.handed_tokens > 0:
            self.handed_over += 1
            self.handed_seconds += change.seconds
        else:
            self.computed += 1
        self.handed_tokens += change.handed_tokens
        self.computed_tokens += change.context - change.handed_tokens


class KVHandover:
    """Transfers KV. `kv_bytes` are the bytes of a token; `tokens` is the most that may be in transfers at a time."""

    def __init__(self, kv_bytes: int, tokens: int) -> None:
        frames = -(-tokens // BLOCK_TOKENS)
        self.memory = OwnFrames(frames, kv_bytes * BLOCK_TOKENS)
        self.leases = KVLeases(frames)
        self._profile: DeviceProfile | None = None

    def place(self, engine: Engine) -> KVBufferPlace | None:
        """The shared memory for the engine's transfers. None for an engine on another node, and for one on a lent
        device, which would use its grants to save KV."""
        return self.memory.place if engine.link.node == _NODE and not engine.lent else None

    def price_by(self, profile: DeviceProfile) -> None:
        """Decide by these costs from now on. Before the first call, every context is computed again."""
        self._profile = profile

    def may_pay(self, tokens: int) -> bool:
        """Whether a transfer can pay for some context of at most `tokens` tokens. If it pays for one length, it pays
        for longer ones. True while costs are unknown."""
        return self._profile is None or handover_pays(self._profile, tokens)

    async def bring(
        self, tokens: Sequence[int], salt: str | None, source: Engine, target: Engine
    ) -> tuple[KVTransfer | None, ContextMove]:
        """Have `source` save its KV of a context, for a request that is sent to `target` as soon as this returns. The
        returned move is complete once that request has its first token."""
        blocks = len(tokens) // BLOCK_TOKENS
        change = ContextMove(len(tokens))
        transfer = self._lease(blocks, source, target, change)
        if transfer is None:
            return None, change
        began = time.monotonic()
        saving = source.save(Save(list(tokens[: blocks * BLOCK_TOKENS]), salt, transfer))
        try:
            await asyncio.wait([saving], timeout=SAVE_SECONDS)
        except asyncio.CancelledError:  # the KV may be saved already, or later
            saving.add_done_callback(lambda saved: self._written(saved, transfer, source))
            raise
        if not saving.done():
            saving.add_done_callback(lambda saved: self._written(saved, transfer, source))
            change.why = f"it was not saved within {SAVE_SECONDS:.0f} s"
            return None, change
        saved = saving.result()
        if saved is None or saved.blocks == 0:
            self._written(saving, transfer, source)
            change.why = "the engine was lost" if saved is None else "the engine no longer had it"
            return None, change
        change.why = "no block of it was used"

        def done(fetched: asyncio.Future[Fetched | None]) -> None:
            self.leases.release(transfer)
            answer = fetched.result()
            if answer is not None and answer.tokens > 0:
                change.handed_tokens, change.seconds = answer.tokens, time.monotonic() - began
                change.why = "handed over"

        target.fetched(transfer.number).add_done_callback(done)
        return KVTransfer(transfer.number, transfer.frames[: saved.blocks]), change

    def _lease(self, blocks: int, source: Engine, target: Engine, change: ContextMove) -> KVTransfer | None:
        """Lease frames for a context; None if it is not transferred, with the reason in `change`."""
        if source.lost:
            change.why = "the engine was gone"
        elif self.place(source) is None or self.place(target) is None:
            change.why = "an engine is on another node, or on a lent device"
        elif self._profile is None or self._profile.handover is None:
            change.why = "its cost is not measured"
        elif not handover_pays(self._profile, blocks * BLOCK_TOKENS):
            change.why = "computing it again is cheaper"
        elif (transfer := self.leases.lease(blocks)) is None:
            change.why = "too many contexts are being handed over"
        else:
            return transfer
        return None

    def _written(self, saved: asyncio.Future[Saved | None], transfer: KVTransfer, source: Engine) -> None:
        """Free the frames of a transfer that no engine will read: at once if its writer answered, otherwise when the
        writer's process has ended."""
        if saved.result() is None:
            self.leases.release_after(source.link.pid, transfer)
        else:
            self.leases.release(transfer)
