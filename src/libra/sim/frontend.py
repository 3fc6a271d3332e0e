"""The front end of a cluster, which sends each request to an engine and tracks the request until it has ended.

Invariant: a request is on at most one engine at a time. Every request finishes or has a reason why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Protocol

from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Request
from libra.sim.handover import Handover, Handovers, KVMoves
from libra.sim.placement import Placer
from libra.sim.workload.caller import Caller, rest_of

_RESTS = (1 << 60) + 1  # first number of requests that continue stopped requests


class Host(Protocol):
    """The engines and the clock behind a front end."""

    now: int
    engines: list[SimEngine]
    specs: list[EngineSpec]

    def at(self, tick: int, action: Callable[[int], None]) -> None:
        """Call `action` at `tick`, which must not be over."""

    def submit(self, request: Request) -> None:
        """Let a request arrive, now or later."""

    def cancel_at(self, tick: int, request: Request) -> None:
        """Cancel a request at `tick`."""

    def changed(self, engine: SimEngine, sooner: bool) -> None:
        """Record that an engine may have to plan again. `sooner`: its present plan ends earlier than before."""

    def look_at(self, engine: SimEngine) -> None:
        """Record that an engine with nothing to plan has released blocks."""

    def ended(self, request: Request) -> None:
        """Record that a request has finished, or was cancelled or refused."""


class Frontend:
    """Front end for colocated engines.

    A request that fits no engine is refused, or with `patient` waits until engines change. With `kv_moves` a
    trajectory's KV follows it to another engine. `interrupted` makes the request that continues a stopped request; by
    default this is a new request with a number after all others.
    """

    def __init__(
        self,
        host: Host,
        placer: Placer,
        *,
        patient: bool,
        kv_moves: KVMoves | None,
        interrupted: Callable[[Request, int], Request] | None,
    ) -> None:
        self.host, self.placer, self.patient = host, placer, patient
        self.placers: Sequence[Placer] = (placer,)  # one for each kind of work of engines
        self.unplaced: list[Request] = []
        self.again: set[Request] = set()  # requests that have arrived before and will arrive once more
        self.moved_tokens = 0
        self._handovers = None if kv_moves is None else Handovers(kv_moves, host.engines, host.specs)
        numbers = count(_RESTS)
        self._rest = interrupted or (lambda request, now: rest_of(request, next(numbers), now))

    def placer_of(self, spec: EngineSpec) -> Placer:
        return self.placer

    def add(self, specs: Sequence[EngineSpec], engines: Sequence[SimEngine]) -> None:
        """Put engines into service."""
        for placer in self.placers:
            mine = [it for it in zip(specs, engines, strict=True) if self.placer_of(it[0]) is placer]
            placer.add(mine, lambda: self.host.now)

    def look_again(self) -> None:
        """Let requests without an engine arrive again after a change of engines."""
        for request in self.unplaced:
            self.arrive_again(request)
        self.unplaced.clear()

    def refreshed(self) -> None:
        """Record that weights were updated and contexts will be recomputed."""
        if self._handovers is not None:
            self._handovers.refreshes += 1

    # Requests

    def arrive(self, request: Request) -> None:
        again, now = request in self.again, self.host.now
        self.again.discard(request)
        if request.cancel_at is not None:
            if request.cancel_at <= now:
                self._end_cancelled(request)
                return
            if not again:
                self.host.cancel_at(request.cancel_at, request)
        engine = self.place(request, again)
        if engine is None:
            self.not_placed(request)
        else:
            self.send(request, engine)

    def place(self, request: Request, again: bool) -> SimEngine | None:
        """The engine for a request; None if the request fits no engine."""
        return self.placer.place(request, again=again) if self.placer.routed else self.host.engines[0]

    def not_placed(self, request: Request) -> None:
        if self.patient:
            request.engine = None
            self.unplaced.append(request)
            return
        request.status, request.finish = "refused", self.host.now
        request.reason = self.placer.refusal(request)
        self.host.ended(request)

    def send(self, request: Request, engine: SimEngine) -> None:
        """Submit a request to its engine: at once, or after the KV that moves to this engine has arrived."""
        handover = None if self._handovers is None else self._handovers.begin(request, engine, self.host.now)
        if handover is None:
            self._submit(request, engine)
        else:
            self.host.at(handover.end, lambda _: self._received(handover))

    def finished(self, request: Request, now: int) -> bool:
        """Record that an engine has finished a request. Returns whether the workload's request has ended with it."""
        # If the request was cancelled during its last iteration, its caller has already continued.
        return request.cancel_at is None or request.cancel_at >= now

    def planned(self, engine: SimEngine, now: int) -> None:
        """Handle a plan's blocks for KV and its ended requests. Plans of colocated engines have neither."""

    def cancel(self, request: Request) -> None:
        if request.status not in ("waiting", "running"):
            return
        if request.engine is not None:
            self.give_up(request, self.host.engines[request.engine], request)
        elif request in self.unplaced:  # otherwise its KV is in transfer, and the arrival of the KV ends the request
            self.unplaced.remove(request)
            self._end_cancelled(request)

    def give_up(self, request: Request, engine: SimEngine, submitted: Request) -> None:
        """Cancel a request. Its part `submitted` is on `engine`."""
        self.host.changed(engine, engine.cancel(submitted, self.host.now))
        self.host.ended(request)

    def go_on(self, engine: SimEngine, stopped: Iterable[Request], now: int) -> None:
        """Let requests that were stopped on `engine` continue on other engines."""
        for request in stopped:
            self.resume(engine, request, now)

    def resume(self, engine: SimEngine, request: Request, now: int) -> None:
        """Submit the rest of a request that was stopped on `engine` as a new request."""
        following = self._rest(request, now)
        self.placer.goes_on(request, following)
        self.host.submit(following)

    def arrive_again(self, request: Request) -> None:
        request.arrival, request.engine = self.host.now, None
        self.again.add(request)
        self.host.submit(request)

    def closed(self, engine: SimEngine, now: int) -> None:
        """Record that an engine has stopped and will not start again."""

    def under_way(self) -> Sequence[Request]:
        """Requests that are on no engine as a whole, but have a part on one."""
        return ()

    def _submit(self, request: Request, engine: SimEngine) -> None:
        host = self.host
        if self._handovers is not None and isinstance(request.owner, Caller):
            request.owner.engine = engine.index
        host.changed(engine, engine.submit(request, host.now))
        if request.status == "refused":
            host.ended(request)

    def _end_cancelled(self, request: Request) -> None:
        """End a cancelled request that is on no engine."""
        request.status, request.finish = "cancelled", self.host.now
        self.host.ended(request)

    def _received(self, handover: Handover) -> None:
        """Submit a request whose KV has arrived. If its engine was closed during the transfer, or the request was
        cancelled, it arrives again."""
        request, engine, now = handover.request, handover.engine, self.host.now
        cancelled = request.cancel_at is not None and request.cancel_at <= now
        if cancelled or not self.placer.serves(self.host.specs[engine.index].name, engine):
            self.arrive_again(request)
            return
        assert self._handovers is not None
        before = engine.end
        self.moved_tokens += self._handovers.complete(handover, now)
        self.host.changed(engine, engine.end < before)
        self._submit(request, engine)
