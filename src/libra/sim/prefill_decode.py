"""Prompts are computed on some engines, and tokens generated on others, which pull the KV.

Invariant: a request is on one engine at a time, and every request ends or has a reason. Its KV stays where the prompt
was computed until the engine that goes on with it has read it, or the lease on it ends. As vLLM's NIXL connector in
pull mode: the first engine is asked for one token, the second one computes the last token of the prompt again.
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
from libra.sim.placement import Placer

_HEARTBEATS = 6  # in a lease
_EXTENSION = (2, 3)  # of a lease, that a heartbeat gives from then on


@dataclass(slots=True, eq=False)
class HandedOver:
    """What became of the KV of one prompt. Ticks; -1 where that never happened."""

    request: int  # number
    source: int  # engine that computed the prompt
    target: int  # and that goes on with it
    blocks: int  # that the source keeps
    computed: int  # the prompt
    size: int = 0  # bytes to pull
    begun: int = -1  # the pull, with blocks for it
    sent: int = -1  # its last byte; or it was broken off, and nothing came
    came: int = -1
    released: int = -1  # by the source


@dataclass(slots=True, eq=False)
class Prefill:
    """The first half of a request: what computes its prompt, and the KV of it."""

    request: Request  # the whole
    engine: SimEngine
    part: Request = field(init=False)
    decoder: SimEngine | None = None  # that goes on with it
    known_since: int | None = None  # tick from which on the decoder sends heartbeats
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


class PrefillDecode:
    """The requests of a cluster that are handed over, and their KV on its way."""

    def __init__(
        self,
        settings: KVNetwork,
        decoders: Placer,
        specs: Sequence[EngineSpec],
        *,
        at: Callable[[int, Callable[[int], None]], None],
        changed: Callable[[SimEngine, bool], None],
        ended: Callable[[Request], None],
        unplaced: Callable[[Request], None],
        idle: Callable[[SimEngine], None],
        keep: bool,
    ) -> None:
        """`at` does something at a tick; `changed` is told of engines that may have to decide anew, `ended` of requests
        that did, `unplaced` of those that no engine goes on with, `idle` of engines that let go of blocks and have
        nothing to decide. Without `keep`, `handed_over` stays empty."""
        self.settings, self.decoders = settings, decoders
        self.transferred_bytes = 0
        self.transfers = 0
        self.handed_over: list[HandedOver] = []  # in the order in which their prompts were computed
        self._keep = keep
        self._specs, self._at, self._changed, self._ended, self._unplaced = specs, at, changed, ended, unplaced
        self._idle = idle
        self._latency, self._lease = ticks(settings.latency), ticks(settings.lease)
        self._prefills: dict[Request, Prefill] = {}  # by the whole, from its placement until its KV is let go
        self._network = Network()
        self._links: dict[tuple[int, bool], Link] = {}  # (engine, whether out of it)
        self._broken: set[int] = set()  # engines that nothing can be read from
        self._alarm: int | None = None  # tick of the earliest action that looks at the network

    @property
    def idle(self) -> bool:
        """Whether nothing is handed over, or kept for that."""
        return not self._prefills and not len(self._network)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Sent by all engines, and received: of transfers that ended."""
        moved = [(out, it.moved) for (_, out), it in self._links.items()]
        return sum(size for out, size in moved if out), sum(size for out, size in moved if not out)

    def stays(self, request: Request, now: int) -> SimEngine | None:
        """The engine that generates, if it computes the prompt, too: little of that is missing there."""
        if not self.settings.local_below:
            return None
        engine = self.decoders.place(request, again=True)
        if engine is None:
            return None
        missing = request.prompt_tokens - engine.cached_tokens(request, now)
        return engine if missing < self.settings.local_below else None

    def begin(self, request: Request, engine: SimEngine) -> Request:
        """Its prompt is computed on this engine: what is to be submitted there."""
        prefill = self._prefills[request] = Prefill(request, engine)
        request.engine = engine.index
        return prefill.part

    def part_of(self, request: Request) -> tuple[SimEngine, Request] | None:
        """Where a request is whose prompt is not computed yet."""
        prefill = self._prefills.get(request)
        return (prefill.engine, prefill.part) if prefill is not None and prefill.decoder is None else None

    def prefilled(self, prefill: Prefill, now: int) -> None:
        """The prompt is computed: another engine goes on."""
        request, part = prefill.request, prefill.part
        _copy(part, request)
        if request.status == "cancelled":
            self._let_go(prefill, now)
            return
        engine = self.decoders.place(request, again=True)
        if engine is None:
            self._at(now + self._lease, lambda tick: self._let_go(prefill, tick))
            del self._prefills[request]
            self._unplaced(request)
            return
        prefill.decoder, prefill.known_since = engine, now
        if self._keep:
            source = prefill.engine
            blocks = source.config.blocks(part.prompt_tokens)
            prefill.record = HandedOver(request.number, source.index, engine.index, blocks, now)
            self.handed_over.append(prefill.record)
        request.pull = True
        self._changed(engine, engine.submit(request, now))
        if request.status == "refused":
            self._let_go(prefill, now)
            self._ended(request)

    def pull(self, engine: SimEngine, now: int) -> None:
        """Pulls that begin with an engine's plan."""
        for request, blocks in engine.pulls:
            prefill = self._prefills[request]
            source = prefill.engine
            if source.closing or source.index in self._broken:
                name = self._specs[source.index].name
                self._at(now, lambda tick, it=prefill, name=name: self._lost(it, f"nothing comes from {name}", tick))  # type: ignore[misc]
                continue
            size = round(blocks * engine.config.block_size * self._specs[engine.index].kv_bytes)
            self.transferred_bytes += size
            self._network.begin(prefill, self._link(source, True), self._link(engine, False), max(1, size), now)
            if prefill.record is not None:
                prefill.record.begun, prefill.record.size = now, max(1, size)
        self._set_alarm(now)

    def cancelled(self, request: Request, now: int) -> None:
        """A request was given up whose KV may not be on its way: nobody will read it then."""
        prefill = self._prefills.get(request)
        if prefill is not None and request.pull:
            self._let_go(prefill, now)

    def fail(self, engine: SimEngine, now: int) -> None:
        """Nothing can be read from an engine any more: what is on its way is lost."""
        self._broken.add(engine.index)
        name = self._specs[engine.index].name
        for prefill in [it for it in self._prefills.values() if it.engine is engine and it in self._network]:
            self._lost(prefill, f"nothing comes from {name}", now)

    def closed(self, engine: SimEngine, now: int) -> None:
        """An engine stopped for good: nobody reads what it had, nor what was kept for it."""
        self.fail(engine, now)
        for prefill in [it for it in self._prefills.values() if it.decoder is engine]:
            self._forget(prefill, now)

    def stopped(self, part: Request) -> Request:
        """The whole of a part that its engine gave back."""
        prefill = part.owner
        assert isinstance(prefill, Prefill)
        del self._prefills[prefill.request]
        return prefill.request

    def under_way(self) -> list[Request]:
        """Requests whose prompts are not computed yet."""
        return [it.request for it in self._prefills.values() if it.decoder is None]

    # KV on its way

    def _look(self, now: int) -> None:
        if self._alarm == now:
            self._alarm = None
        for key in self._network.ended(now):
            assert isinstance(key, Prefill)
            if key.record is not None:
                key.record.sent = now
            if self._latency:
                self._at(now + self._latency, lambda tick, it=key: self._arrived(it, tick))  # type: ignore[misc]
            else:
                self._arrived(key, now)
        self._set_alarm(now)

    def _set_alarm(self, now: int) -> None:
        tick = self._network.next_end()
        if tick is not None and (self._alarm is None or tick < self._alarm):
            self._alarm = max(tick, now)
            self._at(self._alarm, self._look)

    def _arrived(self, prefill: Prefill, now: int) -> None:
        decoder = prefill.decoder
        if decoder is None or decoder.closing:
            return  # it was forgotten meanwhile
        self.transfers += 1
        if prefill.record is not None:
            prefill.record.came = now
        self._changed(decoder, decoder.pull_ended(prefill.request, now))
        self._let_go(prefill, now)

    def _lost(self, prefill: Prefill, why: str, now: int) -> None:
        decoder = prefill.decoder
        self._break_off(prefill, now)
        if decoder is not None and not decoder.closing:
            self._changed(decoder, decoder.pull_ended(prefill.request, now, why))
        self._forget(prefill, now)

    def _forget(self, prefill: Prefill, now: int) -> None:
        """Nobody says any more that the KV is needed: it stays until the lease ends."""
        self._break_off(prefill, now)
        self._prefills.pop(prefill.request, None)
        finish = prefill.part.finish
        if finish is None:
            return
        since = finish if prefill.known_since is None else prefill.known_since
        beat = since + (now - since) // (self._lease // _HEARTBEATS) * (self._lease // _HEARTBEATS)
        numerator, denominator = _EXTENSION
        end = max(finish + self._lease, beat + self._lease * numerator // denominator)
        prefill.decoder = None
        self._at(max(now, end), lambda tick: self._let_go(prefill, tick))

    def _break_off(self, prefill: Prefill, now: int) -> None:
        if prefill in self._network:
            self._network.drop(prefill, now)
            if prefill.record is not None:
                prefill.record.sent = now

    def _let_go(self, prefill: Prefill, now: int) -> None:
        self._prefills.pop(prefill.request, None)
        if prefill.record is not None:
            prefill.record.released = now
        engine = prefill.engine
        if not engine.closed:
            sooner = engine.sent(prefill.part, now)
            if engine.busy or engine.waiting:
                self._changed(engine, sooner)
            else:
                self._idle(engine)

    def _link(self, engine: SimEngine, out: bool) -> Link:
        key = (engine.index, out)
        if key not in self._links:
            self._links[key] = link(self.settings.bandwidth * self._specs[engine.index].devices)
        return self._links[key]


def _copy(part: Request, whole: Request) -> None:
    """What became of a request's prompt."""
    if whole.scheduled is None:
        whole.scheduled, whole.prefill_end = part.scheduled, part.prefill_end
        whole.cached_tokens = part.cached_tokens
    whole.preemptions += part.preemptions
