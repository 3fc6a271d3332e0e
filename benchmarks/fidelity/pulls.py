"""One engine whose prompts may be pulled from elsewhere: the simulated one and vLLM's scheduler on the same clock.

Invariant: a step takes one tick; at a tick pulls and steps end, requests are cancelled, requests arrive, the next step
is scheduled. What has nothing to do waits for the next of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from vllm.v1.outputs import KVConnectorOutput

from benchmarks.fidelity.clocked import ClockedEngine
from benchmarks.fidelity.drafts import with_drafts
from benchmarks.fidelity.random_workloads import async_case, random_case
from benchmarks.fidelity.vllm_schedule import Step, VllmEngine, name_of
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request


@dataclass(frozen=True, slots=True)
class Transfer:
    ticks: int  # from the start of the pull to its end
    fails: bool


def random_pulls(
    seed: int, *, drafts: bool = False, ahead: bool = False
) -> tuple[EngineConfig, tuple[Request, ...], dict[int, Transfer]]:
    """The random case of a seed, in which some prompts, or all, were computed elsewhere. With `ahead` it schedules
    asynchronously."""
    config, requests = async_case(seed) if ahead else random_case(seed)
    if drafts:
        config = with_drafts(config, seed)
    random = Random(seed)
    config = replace(config, kv_load_failure_policy=random.choice(("fail", "recompute")))
    share = random.choice((0.3, 0.7, 1.0))
    transfers = {}
    for request in requests:
        if random.random() < share:
            request.pull = True
            ticks = random.choice((1, 2, random.randint(1, 12), random.randint(1, 40)))
            transfers[request.number] = Transfer(ticks, random.random() < 0.07)
    return config, requests, transfers


def vllm_pulls(
    config: EngineConfig, requests: Sequence[Request], transfers: Mapping[int, Transfer]
) -> tuple[Step, ...]:
    """vLLM's steps. Of those that schedule nothing only the ones that preempt are told."""
    engine = VllmEngine(config, kv_role="kv_both")
    steps: list[Step] = []
    ends: dict[int, int] = {}  # of pulls under way, by request
    alarms = alarms_of(requests)
    step_end = None
    now = 0
    while alarms or ends or step_end is not None:
        now = min([*[tick for tick, *_ in alarms[:1]], *ends.values(), *([] if step_end is None else [step_end])])
        ended = sorted(number for number, tick in ends.items() if tick <= now)
        if step_end == now or (step_end is None and ended):
            heard = KVConnectorOutput(
                finished_recving={name_of(number) for number in ended},
                failed_recving={name_of(number) for number in ended if transfers[number].fails},
            )
            for number in ended:
                del ends[number]
            if step_end is None:
                engine.hear(heard)
            else:
                steps.append(engine.end_oldest(step_end - 1, heard))
                step_end = None
        elif ended and step_end is not None:
            for number in ended:
                ends[number] = step_end  # it is seen then
        while alarms and alarms[0][0] <= now:
            _, arrives, _, request = alarms.pop(0)
            if arrives:
                engine.add(request)
            else:
                engine.cancel(request.number)
        while step_end is None and engine.unfinished:
            engine.schedule()
            for number in engine.started_pulls():
                ends[number] = now + transfers[number].ticks
            if engine.scheduled_something:
                step_end = now + 1
                break
            step = engine.end_oldest(now)
            if not step.preempted:
                break
            steps.append(step)
    return tuple(steps)


def vllm_pulls_ahead(
    config: EngineConfig, requests: Sequence[Request], transfers: Mapping[int, Transfer]
) -> tuple[Step, ...]:
    """The same steps of vLLM's asynchronous scheduler, without the requests that finish with each."""
    fails = frozenset(name_of(number) for number, transfer in transfers.items() if transfer.fails)
    one = ClockedEngine(VllmEngine(config, kv_role="kv_both"), step=1, per_token=0, fails=fails)
    ends: dict[int, int] = {}  # of pulls under way, by request
    alarms = alarms_of(requests)
    while alarms or ends or one.ticks:
        now = min([*[tick for tick, *_ in alarms[:1]], *ends.values(), *one.ticks])
        for number in [number for number, tick in ends.items() if tick <= now]:
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
        for number in one.engine.started_pulls():
            ends[number] = now + transfers[number].ticks
    return tuple(one.steps)


def simulated_pulls(
    config: EngineConfig, requests: Sequence[Request], transfers: Mapping[int, Transfer], *, exact: bool = False
) -> tuple[Step, ...]:
    """The simulated engine's steps, jumping where it can. Writes the requests."""
    iterations: list[Iteration] = []
    ahead = config.async_scheduling
    engine = SimEngine(config, AffineCost(1), exact=exact, trace=iterations.append, defers=ahead)
    finished: dict[int, list[int]] = {}
    ends: dict[Request, int] = {}
    alarms = alarms_of(requests)
    while alarms or ends or engine.busy:
        now = min([*[tick for tick, *_ in alarms[:1]], *ends.values(), *([engine.end] if engine.busy else [])])
        if engine.busy and engine.end == now:
            finished.setdefault(now, []).extend(request.number for request in engine.commit())
        for request in [request for request, tick in ends.items() if tick == now]:
            del ends[request]
            engine.pull_ended(request, now, "the link was lost" if transfers[request.number].fails else None)
        while alarms and alarms[0][0] <= now:
            _, arrives, _, request = alarms.pop(0)
            if arrives:
                engine.submit(request, now)
            else:
                engine.cancel(request, now)
        if not engine.busy:
            engine.plan(now)
            failed = sorted(request.number for request in engine.ended)
            finished.setdefault(now, []).extend(failed)
            for request, _ in engine.pulls:
                ends[request] = now + transfers[request.number].ticks
    assert engine.pool.held == 0
    return tuple(
        Step(
            time=it.start,
            scheduled=it.scheduled,
            preempted=it.preempted,
            cached=it.cached,
            finished=tuple(finished.get(it.end, ())) if it.scheduled and not ahead else (),
            free_blocks=it.free_blocks,
        )
        for it in iterations
    )


def alarms_of(requests: Sequence[Request]) -> list[tuple[int, bool, int, Request]]:
    """(tick, whether it arrives or is cancelled, number, request), in order."""
    seen = [request for request in requests if request.cancel_at is None or request.cancel_at > request.arrival]
    alarms = [(request.arrival, True, request.number, request) for request in seen]
    alarms += [(it.cancel_at, False, it.number, it) for it in seen if it.cancel_at is not None]
    return sorted(alarms, key=lambda it: it[:3])
