"""One engine with a host tier: the simulated one, and vLLM's scheduler with the scheduler half of its
`OffloadingConnector`, on the same clock.

Invariant: both sides have the same costs of a step and of a block that is moved, and every decision is vLLM's. What is
made up is the worker: stores of a step begin with its end, loads with its begin, one after the other in each direction;
a step waits for what it is told to flush. At a tick transfers and steps end, requests are cancelled, requests arrive,
the next step is scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from benchmarks.fidelity.pulls import alarms_of
from benchmarks.fidelity.tiered import Tiered, tiered_cluster
from benchmarks.fidelity.vllm_schedule import Step, VllmEngine
from libra.sim.engine.request import Request
from libra.sim.engine.state import Iteration


@dataclass(slots=True)
class _Worker:
    """Carries out transfers."""

    case: Tiered
    ends: dict[int, tuple[int, str | None]] = field(default_factory=dict)  # of jobs, and of whose load it is
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (job, blocks): stores that have not begun
    stored: int = 0  # tick at which the last store has ended, and the last load
    loaded: int = 0

    def begin(self, what: OffloadingConnectorMetadata, now: int) -> int:
        """A step begins. Returns the tick from which on it may write."""
        for job in what.jobs_to_flush:
            entry = what.store_jobs.pop(job, None)
            if entry is not None:
                self.waiting.append((job, len(entry.src_spec.block_ids)))
        self.store(now)
        begin = max([now, *(self.ends[job][0] for job in what.jobs_to_flush if job in self.ends)])
        for job, entry in what.load_jobs.items():
            self.loaded = max(self.loaded, begin) + len(entry.dst_spec.block_ids) * self.case.load
            self.ends[job] = self.loaded, entry.req_id
        self.waiting = [(job, len(entry.src_spec.block_ids)) for job, entry in what.store_jobs.items()]
        return begin

    def store(self, now: int) -> None:
        for job, blocks in self.waiting:
            self.stored = max(self.stored, now) + blocks * self.case.store
            self.ends[job] = self.stored, None
        self.waiting = []

    def ended(self, now: int) -> KVConnectorOutput:
        done = sorted((end, job, name) for job, (end, name) in self.ends.items() if end <= now)
        for _, job, _ in done:
            del self.ends[job]
        return KVConnectorOutput(
            finished_recving=[name for *_, name in done if name is not None],
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs={job: 1 for _, job, _ in done}),
        )


def vllm_tier(case: Tiered, requests: Sequence[Request]) -> tuple[Step, ...]:
    """vLLM's steps. Of those that schedule nothing only the ones that preempt are told."""
    engine, worker = VllmEngine(case.config), _Worker(case)
    steps: list[Step] = []
    alarms = alarms_of(requests)
    given_up: list[int] = []  # while a step is under way
    began, end, now = 0, None, 0
    while alarms or worker.ends or end is not None:
        idle = [] if end is not None else [tick for tick, _ in worker.ends.values()]
        now = min([*[tick for tick, *_ in alarms[:1]], *idle, *([] if end is None else [end])])
        if end == now:
            worker.store(now)
            step = engine.end_oldest(began, worker.ended(now))
            if step.scheduled or step.preempted:
                steps.append(replace(step, finished=()))
            end = None
        elif end is None and worker.ends:
            engine.hear(worker.ended(now))
        while alarms and alarms[0][0] <= now:
            _, arrives, number, request = alarms.pop(0)
            if arrives:
                engine.add(request)
            else:
                given_up.append(number)
        if end is not None:
            continue
        for number in sorted(given_up):
            engine.cancel(number)
        given_up = []
        while engine.has_work:
            engine.schedule()
            begin = worker.begin(engine.transfers, now)
            if engine.scheduled_something or begin > now:
                began = now
                end = begin + (case.step + case.per_token * engine.scheduled_tokens) * engine.scheduled_something
                break
            worker.store(now)
            step = engine.end_oldest(now)
            if not step.preempted:
                break
            steps.append(replace(step, finished=()))
    return tuple(steps)


def simulated_tier(case: Tiered, requests: Sequence[Request]) -> tuple[Step, ...]:
    """The same of the simulator. Writes the requests."""
    iterations: list[Iteration] = []
    tiered_cluster(case, requests, trace=iterations.append).run()
    return tuple(Step(it.start, it.scheduled, it.preempted, it.cached, (), it.free_blocks) for it in iterations)
