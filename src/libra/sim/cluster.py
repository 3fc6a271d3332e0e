"""Engines, the policy that routes to them, and time.

Invariant: events are handled in one total order: by tick, then by kind, then by the number of the engine, the request
or the order. After the last event of a tick, engines that were touched decide what is next, by their numbers. So the
outcome does not depend on how often an engine was looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

from libra.route.policy import Policy
from libra.sim.deployment import WeightUpdate, check_engines, check_groups, check_roles
from libra.sim.engine.config import DECODE, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.group import Rank, RankGroup
from libra.sim.engine.group_cost import GroupSpec
from libra.sim.engine.request import Request
from libra.sim.engine.state import Iteration, Pause
from libra.sim.engine.tiers import SharedTiers
from libra.sim.events import ARRIVAL, EventQueue
from libra.sim.handover import Handover, Handovers, KVMoves
from libra.sim.kv_network import KVNetwork
from libra.sim.placement import Placer
from libra.sim.prefill_decode import Prefill, PrefillDecode
from libra.sim.workload.caller import Caller, rest_of
from libra.sim.workload.requests import Workload

EngineMaker = Callable[..., SimEngine]  # as `SimEngine(config, cost, index, exact=, trace=)`
_RESTS = (1 << 60) + 1  # and more: numbers of requests that are what is left of others


class SimCluster:
    """One simulation: made, run once, and looked at.

    `limits` are the largest final contexts of the buckets, shortest first; without them all engines are one bucket.
    `trace` is told every iteration, also those that nobody had to visit; `watch` is shown each engine after it decided
    what is next, at that tick. `exact` visits every iteration: the same outcome of every request, slower.

    What happens may also add and close engines: see `at`. A request that no engine can hold is refused, or with
    `patient` waits until engines change. With `kv_moves` a trajectory's KV follows it to another engine where that is
    quicker than to compute it again. Engines may have roles: `kv_transfer` says how KV goes from prefill to decode, and
    `decode_route` where. Without `keep`, `requests` stays empty.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        workload: Workload,
        route: Policy | None = None,
        *,
        limits: tuple[int, ...] | None = None,
        turn_tokens: int = 1,
        updates: Sequence[WeightUpdate] = (),
        time_limit: int | None = None,
        exact: bool = False,
        trace: Callable[[Iteration], None] | None = None,
        watch: Callable[[SimEngine, int], None] | None = None,
        patient: bool = False,
        keep: bool = True,
        kv_moves: KVMoves | None = None,
        kv_transfer: KVNetwork | None = None,
        decode_route: Policy | None = None,
        interrupted: Callable[[Request, int], Request] | None = None,
    ) -> None:
        """`interrupted` says how a request goes on that was stopped, given the tick; otherwise what is left of it is a
        request of its own, numbered after all others."""
        check_engines(specs, limits)
        check_roles(specs, kv_transfer is not None, [update.refresh for update in updates])
        check_groups(specs, [update.engines for update in updates])
        entries = sum(spec.role.takes == "prompt" for spec in specs)
        if route is None and (entries > 1 or patient):
            raise ValueError(f"there are {entries} engines and no policy: say where requests go")
        if decode_route is None and len(specs) - entries > 1:
            raise ValueError(f"there are {len(specs) - entries} engines that decode, and no decode_route: say where to")
        if limits is None:
            limits = (max(spec.config.max_model_len for spec in specs),)
        self.engines: list[SimEngine] = []  # all that there ever were
        self.groups: list[RankGroup] = []
        self.specs: list[EngineSpec] = []
        self.requests: list[Request] = []  # all that came, in the order in which they did
        self.now = 0
        self.partial = False  # the time limit came before the end
        self.moved_tokens = 0
        self.workload = workload
        self.placer = Placer(route, limits, turn_tokens)
        self._routed = route is not None
        self._exact, self._trace, self._watch, self._limit = exact, trace, watch, time_limit
        self._patient, self._keep = patient, keep
        self._handovers = None if kv_moves is None else Handovers(kv_moves, self.engines, self.specs)
        self.pairs: PrefillDecode | None = None
        if kv_transfer is not None:
            self.pairs = PrefillDecode(
                kv_transfer,
                Placer(decode_route, limits, turn_tokens),
                self.specs,
                at=self.at,
                changed=self._changed,
                ended=self._ended,
                unplaced=self._unplaced_or_refused,
                idle=self._look_at,
                keep=keep,
            )
        numbers = count(_RESTS)
        self._rest = interrupted or (lambda request, now: rest_of(request, next(numbers), now))
        self._shared_tiers = SharedTiers()
        self._unplaced: list[Request] = []
        self._again: set[Request] = set()  # that arrived before, and will once more
        self._add(specs)
        self._events = EventQueue(updates)
        self._deciding: set[int] = set()  # engines that have to at this tick

    # What whoever makes the workload may do to the cluster while it runs

    @property
    def kv_tokens(self) -> int:
        """Tokens that the caches of the engines in service hold."""
        configs = (self.specs[instance.engine.index].config for instance in self.placer.fleet.instances)
        return sum(config.kv_blocks * config.block_size for config in configs)

    def generated(self, request: Request) -> int:
        """Tokens that a request has generated by now."""
        if request.engine is None or request.status not in ("running", "waiting"):
            return request.generated
        return self.engines[request.engine].generated_by(request, self.now)

    def at(self, tick: int, action: Callable[[int], None]) -> None:
        """Do something at a tick that is not over: after what ends at that instant, before what arrives."""
        if tick < self.now:
            raise ValueError(f"tick {tick} is over, it is {self.now}")
        self._events.act(tick, action)

    def submit(self, request: Request) -> None:
        """A request that arrives now or later, besides those that the workload makes."""
        self._events.arrive(request)

    def update(self, update: WeightUpdate) -> None:
        """One more weight update, now."""
        if self._handovers is not None:
            self._handovers.refreshes += update.refresh
        engines = self.placer.engines() + ([] if self.pairs is None else self.pairs.decoders.engines())
        for engine in engines:
            if update.engines is None or engine.index in update.engines:
                self._changed(engine, engine.pause(Pause(update.pause, update.refresh), self.now))

    def reallocate(self, limits: tuple[int, ...], buckets: Mapping[str, int]) -> None:
        """From now on the engines, by name, serve these buckets."""
        self.placer.reallocate(limits, buckets)
        if self.pairs is not None:
            self.pairs.decoders.reallocate(limits, buckets)
        self._look_again()

    def add(self, spec: EngineSpec, make: EngineMaker = SimEngine) -> SimEngine:
        """An engine is ready. Returns it. Raises ValueError for a rank: groups are there from the beginning."""
        if spec.group is not None:
            raise ValueError(f"{spec.name} is a rank of {spec.group.name}: a group is there from the beginning")
        self._add([spec], make)
        self._look_again()
        return self.engines[-1]

    def close(self, name: str) -> None:
        """An engine stops at the end of the iteration that is under way; what it had goes on elsewhere. With a rank of
        a group the whole group does."""
        of_pair = self.pairs is not None and name not in self.placer
        placer = self.pairs.decoders if of_pair and self.pairs is not None else self.placer
        first = placer.remove(name)
        group = first.clock
        engines: Sequence[SimEngine] = group.ranks if isinstance(group, RankGroup) else (first,)
        for engine in engines:
            if engine is not first:
                placer.remove(self.specs[engine.index].name)
            self._changed(engine, engine.close(self.now))
            if not engine.busy:
                self._empty(engine)

    def _add(self, specs: Sequence[EngineSpec], make: EngineMaker = SimEngine) -> None:
        known = len(self.engines)
        engines = [
            (make if spec.group is None else Rank)(
                spec.config, spec.cost, known + place, exact=self._exact, trace=self._trace
            )
            for place, spec in enumerate(specs)
        ]
        for spec, engine in zip(specs, engines, strict=True):
            if engine.tiers is not None:
                self._shared_tiers.join(engine.tiers, spec.node or spec.name)
            engine.defers = spec.role is DECODE and spec.config.async_scheduling
        self._group(specs, engines)
        for placer, takes in (
            (self.placer, "prompt"),
            (None if self.pairs is None else self.pairs.decoders, "context"),
        ):
            if placer is not None:
                mine = [it for it in zip(specs, engines, strict=True) if it[0].role.takes == takes]
                placer.add(mine, lambda: self.now)
        self.engines += engines
        self.specs += specs

    def _group(self, specs: Sequence[EngineSpec], engines: Sequence[SimEngine]) -> None:
        """Give the ranks of each group their clock."""
        ranks: dict[str, tuple[GroupSpec, list[Rank]]] = {}
        for spec, engine in zip(specs, engines, strict=True):
            if isinstance(engine, Rank) and spec.group is not None:
                ranks.setdefault(spec.group.name, (spec.group, []))[1].append(engine)
        self.groups += [
            RankGroup(group, of_it, exact=self._exact, trace=self._trace) for group, of_it in ranks.values()
        ]

    def _look_again(self) -> None:
        for request in self._unplaced:
            self._arrive_again(request)
        self._unplaced.clear()

    def _arrive_again(self, request: Request) -> None:
        request.arrival = self.now
        self._again.add(request)
        self.submit(request)

    # The clock

    def run(self) -> None:
        """Until everything has finished, or the time limit. Raises RuntimeError where requests wait for an engine that
        never comes."""
        collecting = gc.isenabled()
        gc.disable()  # nothing that is let go refers to itself, and looking for it would take a third of the time
        try:
            self._run()
        finally:
            if collecting:
                gc.enable()
        if self._unplaced and not self.partial:
            first = self._unplaced[0]
            raise RuntimeError(
                f"{len(self._unplaced)} requests wait for an engine for ever, first of all {first.number}:"
                f" {self.placer.refusal(first)}"
            )

    def _run(self) -> None:
        events, engines, deciding, watch = self._events, self.engines, self._deciding, self._watch
        events.expect(self.workload.start())
        for event in events.until(self._limit):
            if event is not None:
                self.now, kind, _, what = event
                if isinstance(what, SimEngine):
                    self._commit(what, self.now)
                elif isinstance(what, RankGroup):
                    for rank in what.land():
                        self._commit(rank, self.now)
                    what.landed()
                elif isinstance(what, Request):
                    if kind is ARRIVAL:
                        self._arrive(what)
                    else:
                        self._cancel(what)
                elif isinstance(what, WeightUpdate):
                    self.update(what)
                else:
                    what(self.now)
                continue
            # Nothing more comes at this tick: engines that were touched say what is next.
            now = self.now
            for index in sorted(deciding) if len(deciding) > 1 else deciding:
                engine = engines[index]
                if engine.plan(now) is not None:
                    events.end(engine)
                if engine.interrupted and engine.borrowed:
                    # Others may have decided at this tick, or may be at a boundary that nobody had to visit.
                    stopped, engine.interrupted = engine.interrupted, []
                    events.act(now + 1, partial(self._continue, engine, stopped))
                elif engine.interrupted:
                    self._go_on(engine)
                if engine.pulls or engine.failed:
                    self._of_pulls(engine, now)
                if watch is not None:
                    watch(engine, now)
            deciding.clear()
            for group in self.groups:
                if group.due and group.depart(now):
                    events.end(group)
        if self._limit is not None and events.goes_on():
            self._stop(self._limit)

    def _commit(self, engine: SimEngine, now: int) -> None:
        self._deciding.add(engine.index)
        for request in engine.commit():
            if isinstance(request.owner, Prefill):
                assert self.pairs is not None
                self.pairs.prefilled(request.owner, now)
                continue
            # Whoever cancelled it while its last iteration was under way has gone on already.
            if request.cancel_at is None or request.cancel_at >= now:
                self._ended(request)
        if engine.asked:
            self._placer_of(engine).ask_again(engine, now)
        if engine.closing:
            self._empty(engine)
            self._deciding.discard(engine.index)
        if engine.interrupted:
            self._go_on(engine)

    # Requests

    def _arrive(self, request: Request) -> None:
        again = request in self._again
        if again:
            self._again.remove(request)
        elif self._keep:
            self.requests.append(request)
        cancel_at = request.cancel_at
        if cancel_at is not None and cancel_at <= self.now:
            request.status, request.finish = "cancelled", self.now
            self._ended(request)
            return
        engine = None if self.pairs is None else self.pairs.stays(request, self.now)
        if engine is None:
            engine = self.placer.place(request, again=again) if self._routed or self.pairs else self.engines[0]
        if engine is None:
            self._unplaced_or_refused(request)
            return
        if self.specs[engine.index].role.hands_over:
            self._prefill(request, engine)
            return
        handover = None if self._handovers is None else self._handovers.begin(request, engine, self.now)
        if handover is None:
            self._submit(request, engine)
        else:  # first its KV
            self.at(handover.end, lambda _: self._received(handover))

    def _unplaced_or_refused(self, request: Request) -> None:
        if self._patient:
            self._unplaced.append(request)
            return
        request.status, request.finish = "refused", self.now
        request.reason = self.placer.refusal(request)
        self._ended(request)

    def _prefill(self, request: Request, engine: SimEngine) -> None:
        """Its prompt is computed on one engine, for another one to go on."""
        assert self.pairs is not None
        part = self.pairs.begin(request, engine)
        self._changed(engine, engine.submit(part, self.now))
        if part.status == "refused":
            self.pairs.stopped(part)
            request.status, request.reason, request.finish = "refused", part.reason, self.now
            self._ended(request)
        elif request.cancel_at is not None:
            self._events.cancel(request.cancel_at, request)

    def _of_pulls(self, engine: SimEngine, now: int) -> None:
        """Pulls of KV that begin, or failed, with an engine's plan."""
        assert self.pairs is not None
        for request in engine.failed:
            self._ended(request)
        self.pairs.pull(engine, now)

    def _look_at(self, engine: SimEngine) -> None:
        if self._watch is not None:
            self._watch(engine, self.now)

    def _placer_of(self, engine: SimEngine) -> Placer:
        pairs = self.pairs
        return pairs.decoders if pairs is not None and self.specs[engine.index].role.takes == "context" else self.placer

    def _received(self, handover: Handover) -> None:
        """On the way the engine may have been closed, or the request given up."""
        request, engine = handover.request, handover.engine
        cancelled = request.cancel_at is not None and request.cancel_at <= self.now
        if cancelled or not self.placer.serves(self.specs[engine.index].name, engine):
            self._arrive_again(request)
            return
        assert self._handovers is not None
        before = engine.end
        self.moved_tokens += self._handovers.complete(handover, self.now)
        self._changed(engine, engine.end < before)
        self._submit(request, engine)

    def _submit(self, request: Request, engine: SimEngine) -> None:
        if self._handovers is not None and isinstance(request.owner, Caller):
            request.owner.engine = engine.index
        self._changed(engine, engine.submit(request, self.now))
        if request.status == "refused":
            self._ended(request)
        elif request.cancel_at is not None:
            self._events.cancel(request.cancel_at, request)

    def _cancel(self, request: Request) -> None:
        if request.status in ("waiting", "running"):
            assert request.engine is not None
            engine, given_up = self.engines[request.engine], request
            if self.pairs is not None:
                part = self.pairs.part_of(request)
                if part is None:
                    self.pairs.cancelled(request, self.now)
                else:
                    engine, given_up = part
                    self.pairs.stopped(given_up)
                    request.status, request.finish = "cancelled", self.now
            self._changed(engine, engine.cancel(given_up, self.now))
            self._ended(request)

    def _empty(self, engine: SimEngine) -> None:
        """A closing engine at a boundary: it lets go of everything, unless other batches are under way in it."""
        if engine.plan(self.now) is not None:
            self._events.end(engine)
        self._go_on(engine)
        if engine.closed and self.pairs is not None:
            self.pairs.closed(engine, self.now)

    def _go_on(self, engine: SimEngine) -> None:
        """What was stopped on an engine arrives anew, now."""
        stopped, engine.interrupted = engine.interrupted, []
        self._continue(engine, stopped, self.now)

    def _continue(self, engine: SimEngine, stopped: Sequence[Request], now: int) -> None:
        for request in stopped:
            if isinstance(request.owner, Prefill):
                assert self.pairs is not None
                self._arrive_again(self.pairs.stopped(request))
                continue
            following = self._rest(request, now)
            self._placer_of(engine).goes_on(request, following)
            self.submit(following)

    def _changed(self, engine: SimEngine, sooner: bool) -> None:
        if sooner:
            self._events.end(engine.group if isinstance(engine, Rank) else engine)
        if not engine.busy or engine.open:
            self._deciding.add(engine.index)

    def _ended(self, request: Request) -> None:
        """Finished, given up or refused: see what follows."""
        if self._routed:
            self.placer.ended(request)
        if self.pairs is not None:
            self.pairs.decoders.ended(request)
        following = self.workload.finished(request, self.now)
        if following is not None:
            owner, after = request.owner, following.owner
            if isinstance(owner, Caller) and isinstance(after, Caller) and after.trajectory is owner.trajectory:
                after.engine = owner.engine
            self.submit(following)

    def _stop(self, now: int) -> None:
        """The time limit: what has not ended is reported as such."""
        self.now = now
        self.partial = True
        for engine in self.engines:
            engine.stop(now)
            if self._watch is not None and not engine.paused:
                self._watch(engine, now)
            for request in engine.unfinished:
                if request.status == "cancelled":
                    continue
                request.status, request.reason = "unfinished", "the time limit came first"
        for request in [] if self.pairs is None else self.pairs.under_way():
            if request.status == "waiting":
                request.status, request.reason = "unfinished", "the time limit came first"
        if not self._keep:
            return
        self.requests += [it for it in self._events.arrivals() if it not in self._again]
        for request in self.requests:
            if request.status == "waiting":
                request.status, request.reason = "unfinished", "the time limit came before its arrival"
