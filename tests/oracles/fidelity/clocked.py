"""One of vLLM's schedulers on a clock, and the worker of its tier.

Invariant: every decision is vLLM's. What is made up is when steps and transfers end: a step takes `step + per_token *
tokens` ticks, and begins when the one before it has ended and what it is told to flush is stored. Stores of a step
begin with its end, loads with its begin, one after the other in each direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from tests.oracles.fidelity.vllm_schedule import Step, VllmEngine, name_of


@dataclass(slots=True)
class TierWorker:
    """Carries out transfers. A block takes `store_ticks` or `load_ticks` ticks."""

    store_ticks: int
    load_ticks: int
    ends: dict[int, tuple[int, str | None]] = field(default_factory=dict)  # of jobs, and of whose load it is
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (job, blocks): stores that have not begun
    stored: int = 0  # tick at which the last store has ended, and the last load
    loaded: int = 0
    flushed: int = 0  # tick until which steps wait

    def begin(self, what: OffloadingConnectorMetadata, now: int) -> int:
        """A step begins. Returns the tick from which on it may write."""
        for job in what.jobs_to_flush:
            entry = what.store_jobs.pop(job, None)
            if entry is not None:
                self.waiting.append((job, len(entry.src_spec.block_ids)))
        self.store(now)
        begin = max([now, self.flushed, *(self.ends[job][0] for job in what.jobs_to_flush if job in self.ends)])
        self.flushed = begin
        for job, entry in what.load_jobs.items():
            self.loaded = max(self.loaded, begin) + len(entry.dst_spec.block_ids) * self.load_ticks
            self.ends[job] = self.loaded, entry.req_id
        self.waiting = [(job, len(entry.src_spec.block_ids)) for job, entry in what.store_jobs.items()]
        return begin

    def store(self, now: int) -> None:
        for job, blocks in self.waiting:
            self.stored = max(self.stored, now) + blocks * self.store_ticks
            self.ends[job] = self.stored, None
        self.waiting = []

    def ended(self, now: int) -> tuple[list[str], OffloadingWorkerMetadata]:
        """Names of the requests whose KV has been loaded, and all jobs that have ended."""
        done = sorted((end, job, name) for job, (end, name) in self.ends.items() if end <= now)
        self.ends = {job: it for job, it in self.ends.items() if it[0] > now}
        loaded = [name for *_, name in done if name is not None]
        return loaded, OffloadingWorkerMetadata(completed_jobs={job: 1 for _, job, _ in done})


@dataclass(slots=True)
class ClockedEngine:
    """`sends` says whether transfers that end are of KV that it keeps for others, or of KV that it pulls; of those in
    `fails` nothing comes."""

    engine: VllmEngine
    step: int
    per_token: int
    worker: TierWorker | None = None
    sends: bool = False
    fails: frozenset[str] = frozenset()
    tells_ends: bool = False  # steps have the requests that finish with them
    steps: list[Step] = field(default_factory=list)  # of those that schedule nothing only the ones that preempt
    end: int | None = None  # of the step under way
    given_up: list[int] = field(default_factory=list)  # since the step began: seen when it has ended
    done: dict[str, None] = field(default_factory=dict)  # transfers that ended since it was heard last, in order
    _began: int = 0
    _decided: deque[tuple[Any, int]] = field(default_factory=deque)  # steps that have not begun, and their tokens

    @property
    def ticks(self) -> list[int]:
        """Ticks at which the engine has something to do by itself."""
        if self.end is not None:
            return [self.end]
        return [] if self.worker is None else [tick for tick, _ in self.worker.ends.values()]

    def end_step(self, now: int) -> tuple[int, ...]:
        """End the step under way if it ends now. Returns the requests that finished with it."""
        if self.end != now:
            return ()
        if self.worker is not None:
            self.worker.store(now)
        step = self.engine.end_oldest(self._began, self._heard(now))
        self.end = None
        if step.scheduled or step.preempted:
            self.steps.append(step if self.tells_ends else replace(step, finished=()))
        return step.finished

    def cancel(self) -> None:
        if self.end is None:
            for number in sorted(self.given_up):
                self.engine.cancel(number)
            self.given_up = []

    def hear(self, now: int) -> None:
        """Pass ended transfers to the engine while no step is under way."""
        if self.end is None and (self.done or self.worker is not None):
            self.engine.hear(self._heard(now))

    def begin(self, now: int) -> None:
        """Begin the step that is decided already, and decide steps until the engine waits: while one is under way it
        waits for that one's end."""
        engine, fresh = self.engine, False
        if self.end is not None:
            return
        while True:
            if self.end is None and self._decided:
                what, tokens = self._decided.popleft()
                begin = now if self.worker is None else self.worker.begin(what, now)
                if tokens or (fresh and begin > now):
                    self._began, self.end = now, begin + (self.step + self.per_token * tokens) * bool(tokens)
                    if tokens:
                        continue
                    return  # vLLM waits for what a step without tokens comes to before it decides another
                if self.worker is not None:
                    self.worker.store(begin)
                step = engine.end_oldest(now)
                if step.preempted:
                    self.steps.append(replace(step, finished=()))
                elif fresh:
                    return
            elif engine.full or not engine.has_work:
                return
            else:
                fresh = self.end is None  # it is decided at the instant at which it could begin
                engine.schedule()
                self._decided.append((engine.transfers, engine.scheduled_tokens))

    def _heard(self, now: int) -> KVConnectorOutput:
        """vLLM lets go of blocks as it goes through a set, in no order that means anything: here that of the ends."""
        done: Any = list(self.done)
        self.done = {}
        if self.worker is None:
            if self.sends:
                return KVConnectorOutput(finished_sending=done)
            return KVConnectorOutput(finished_recving=done, failed_recving=self.fails.intersection(done))
        loaded, jobs = self.worker.ended(now)
        return KVConnectorOutput(
            finished_sending=done if self.sends else None,
            finished_recving=loaded,
            kv_connector_worker_meta=self.engine.of_tier(jobs),
        )


def vllm_schedule(config: EngineConfig, requests: Sequence[Request]) -> tuple[Step, ...]:
    """The steps by which vLLM would serve `requests`, which are read and not written, where each takes one tick. A step
    that only preempts takes none: with the priority policy, a request that finds no block and is itself the lowest is
    preempted, and no other is looked at in that step."""
    return serve(ClockedEngine(VllmEngine(config), 1, 0, tells_ends=True), requests)


def serve(one: ClockedEngine, requests: Sequence[Request], pulls: Mapping[int, int] | None = None) -> tuple[Step, ...]:
    """The steps by which an engine serves requests; `pulls` are ticks that it takes to pull the prompts that are. At a
    tick pulls and steps end, requests are cancelled, requests arrive, the next step is scheduled."""
    ends: dict[int, int] = {}  # of pulls under way, by request
    alarms = alarms_of(requests)
    while alarms or ends or one.ticks:
        now = min([*[tick for tick, *_ in alarms[:1]], *ends.values(), *one.ticks])
        for number in sorted(number for number, tick in ends.items() if tick <= now):
            del ends[number]
            one.done[name_of(number)] = None
        one.end_step(now)
        one.cancel()
        while alarms and alarms[0][0] <= now:
            _, arrives, number, request = alarms.pop(0)
            if arrives:
                one.engine.add(request)
            else:
                one.given_up.append(number)
                one.cancel()
        one.hear(now)
        one.begin(now)
        if pulls is not None:
            ends |= {number: now + pulls[number] for number in one.engine.started_pulls()}
    return tuple(one.steps)


def alarms_of(requests: Sequence[Request]) -> list[tuple[int, bool, int, Request]]:
    """(tick, whether it arrives or is cancelled, number, request), in order."""
    seen = [request for request in requests if request.cancel_at is None or request.cancel_at > request.arrival]
    alarms = [(request.arrival, True, request.number, request) for request in seen]
    alarms += [(it.cancel_at, False, it.number, it) for it in seen if it.cancel_at is not None]
    return sorted(alarms, key=lambda it: it[:3])


def simulated_steps(
    iterations: Iterable[Iteration], engine: int = 0, finished: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> tuple[Step, ...]:
    """Iterations of one simulated engine as steps; `finished` are requests by the tick at which they finish. A step
    that schedules nothing ends when it begins, as does the one before it: no request finishes there."""
    steps = []
    for it in iterations:
        if it.engine == engine:
            ends = tuple(finished.get(it.end, ())) if it.scheduled else ()
            steps.append(Step(it.start, it.scheduled, it.preempted, it.cached, ends, it.free_blocks))
    return tuple(steps)
