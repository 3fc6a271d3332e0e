"""One engine whose prompts may be pulled from elsewhere: the simulated one and vLLM's scheduler on the same clock.

Invariant: a step takes one tick; at a tick pulls and steps end, requests are cancelled, requests arrive, the next step
is scheduled. What has nothing to do waits for the next of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from tests.oracles.fidelity.clocked import ClockedEngine, alarms_of, serve, simulated_steps
from tests.oracles.fidelity.variants import drawn_case
from tests.oracles.fidelity.vllm_schedule import Step, VllmEngine, name_of


@dataclass(frozen=True, slots=True)
class Transfer:
    ticks: int  # from the start of the pull to its end
    fails: bool


def random_pulls(
    seed: int, *, drafts: bool = False, ahead: bool = False
) -> tuple[EngineConfig, tuple[Request, ...], dict[int, Transfer]]:
    """The random case of a seed, in which some prompts, or all, were computed elsewhere. With `ahead` it schedules
    asynchronously."""
    config, requests = drawn_case(seed, ahead=ahead, drafts=drafts)
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
    """vLLM's steps; those of its asynchronous scheduler are without the requests that finish with each."""
    fails = frozenset(name_of(number) for number, transfer in transfers.items() if transfer.fails)
    engine = VllmEngine(config, kv_role="kv_both")
    one = ClockedEngine(engine, 1, 0, fails=fails, tells_ends=not config.async_scheduling)
    return serve(one, requests, {number: transfer.ticks for number, transfer in transfers.items()})


def simulated_pulls(
    config: EngineConfig, requests: Sequence[Request], transfers: Mapping[int, Transfer]
) -> tuple[Step, ...]:
    """The simulated engine's steps, jumping where it can. Writes the requests."""
    iterations: list[Iteration] = []
    ahead = config.async_scheduling
    engine = SimEngine(config, AffineCost(1), trace=iterations.append, defers=ahead)
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
            (engine.submit if arrives else engine.cancel)(request, now)
        if not engine.busy:
            engine.plan(now)
            finished.setdefault(now, []).extend(sorted(request.number for request in engine.ended))
            ends |= {request: now + transfers[request.number].ticks for request, _ in engine.pulls}
    assert engine.pool.held == 0
    return simulated_steps(iterations, finished={} if ahead else finished)
