"""Transfers of prompts' KV from the prefill to the decode engine, pulled or pushed.

Invariant: an engine divides its bandwidth evenly among its transfers, in each direction. A transfer is reported as
arrived one latency after its last byte was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from libra.sim.clock import ticks
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Request
from libra.sim.kv_network import KVNetwork
from libra.sim.link import Link, Network, link


@dataclass(slots=True, eq=False)
class HandedOver:
    """History of the KV of one prompt. Times are ticks; -1: never happened."""

    request: int  # number
    source: int  # index of the engine that computes the prompt
    target: int  # index of the engine that decodes
    blocks: int  # blocks that the source keeps
    computed: int = -1  # when the prompt was computed
    reserved: int = -1  # when the target reserved blocks for the KV; for pushed KV, before `computed`
    size: int = 0  # bytes to transfer
    begun: int = -1  # when the transfer began
    sent: int = -1  # when the last byte was sent, or the transfer was aborted
    came: int = -1  # when the KV arrived
    released: int = -1  # when the source released the KV, or gave the prompt up before it was computed


@dataclass(slots=True, eq=False)
class Prefill:
    """The prefill half of a request, and the KV of its prompt."""

    request: Request  # the whole request
    engine: SimEngine
    part: Request = field(init=False)
    decoder: SimEngine | None = None  # the engine that decodes
    known_since: int | None = None  # tick from which on the decoder sends heartbeats
    blocks: int = 0  # decoder's blocks that are reserved for the KV
    record: HandedOver | None = None

    def __post_init__(self) -> None:
        whole = self.request
        self.part = Request(
            whole.number,
            whole.arrival,
            whole.prompt_tokens,
            1,
            chain=whole.chain,
            priority=whole.priority,
            keeps=True,
            owner=self,
        )


class KVTransfers:
    """KV transfers of a cluster whose engines have these `specs`. `at` schedules an action at a tick. `came` is called
    with the prefill and the tick when a prompt's KV arrives."""

    def __init__(
        self,
        settings: KVNetwork,
        specs: Sequence[EngineSpec],
        at: Callable[[int, Callable[[int], None]], None],
        came: Callable[[Prefill, int], None],
    ) -> None:
        self.settings = settings
        self.bytes = 0  # of all transfers that have begun
        self._specs, self._at, self._came = specs, at, came
        self._latency = ticks(settings.latency)
        self._network = Network()
        self._links: dict[tuple[int, bool], Link] = {}  # (engine, whether out of it)
        self._alarm: int | None = None  # tick of the earliest action that looks at the network

    def __len__(self) -> int:
        """Number of transfers in flight."""
        return len(self._network)

    def __contains__(self, prefill: Prefill) -> bool:
        return prefill in self._network

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """(bytes sent, bytes received) by all engines, in transfers that have ended."""
        moved = [(out, it.moved) for (_, out), it in self._links.items()]
        return sum(size for out, size in moved if out), sum(size for out, size in moved if not out)

    def begin(self, prefill: Prefill, target: SimEngine, now: int) -> None:
        size = round(prefill.blocks * target.config.block_size * self._specs[target.index].kv_bytes)
        self.bytes += size
        self._network.begin(prefill, self._link(prefill.engine, True), self._link(target, False), max(1, size), now)
        if prefill.record is not None:
            prefill.record.begun, prefill.record.size = now, max(1, size)

    def drop(self, prefill: Prefill, now: int) -> None:
        """Abort a transfer if it is in flight. Transfers that share its links then end sooner."""
        if prefill in self._network:
            self._network.drop(prefill, now)
            if prefill.record is not None:
                prefill.record.sent = now
            self.look_again(now)

    def look_again(self, now: int) -> None:
        """Schedule a check at the next end of a transfer. Must be called after a transfer has begun or was aborted."""
        tick = self._network.next_end()
        if tick is not None and (self._alarm is None or tick < self._alarm):
            self._alarm = max(tick, now)
            self._at(self._alarm, self._look)

    def _look(self, now: int) -> None:
        if self._alarm == now:
            self._alarm = None
        for key in self._network.ended(now):
            assert isinstance(key, Prefill)
            if key.record is not None:
                key.record.sent = now
            if self._latency:
                self._at(now + self._latency, lambda tick, it=key: self._came(it, tick))  # type: ignore[misc]
            else:
                self._came(key, now)
        self.look_again(now)

    def _link(self, engine: SimEngine, out: bool) -> Link:
        key = (engine.index, out)
        if key not in self._links:
            self._links[key] = link(self.settings.bandwidth * self._specs[engine.index].devices)
        return self._links[key]
