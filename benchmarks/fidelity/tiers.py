"""One engine with a host tier: the simulated one, and vLLM's scheduler with the scheduler half of its
`OffloadingConnector`, on the same clock.

Invariant: both sides have the same costs of a step and of a block that is moved, and every decision is vLLM's. At a
tick transfers and steps end, requests are cancelled, requests arrive, the next step is scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.fidelity.clocked import ClockedEngine, TierWorker
from benchmarks.fidelity.pulls import alarms_of
from benchmarks.fidelity.tiered import Tiered, tiered_cluster
from benchmarks.fidelity.vllm_schedule import Step, VllmEngine
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request


def vllm_tier(case: Tiered, requests: Sequence[Request]) -> tuple[Step, ...]:
    """vLLM's steps. Of those that schedule nothing only the ones that preempt are told."""
    worker = TierWorker(case.store, case.load)
    side = ClockedEngine(VllmEngine(case.config), case.step, case.per_token, worker)
    alarms = alarms_of(requests)
    while alarms or side.ticks:
        now = min([*[tick for tick, *_ in alarms[:1]], *side.ticks])
        side.end_step(now)
        side.hear(now)
        while alarms and alarms[0][0] <= now:
            _, arrives, number, request = alarms.pop(0)
            if arrives:
                side.engine.add(request)
            else:
                side.given_up.append(number)
        side.cancel()
        side.begin(now)
    return tuple(side.steps)


def simulated_tier(case: Tiered, requests: Sequence[Request]) -> tuple[Step, ...]:
    """The same steps in the simulator. Writes the requests."""
    iterations: list[Iteration] = []
    tiered_cluster(case, requests, trace=iterations.append).run()
    return tuple(Step(it.start, it.scheduled, it.preempted, it.cached, (), it.free_blocks) for it in iterations)
