"""Views of an allocation, computed without a solver: the parts of its step, the work of each bucket and pool, and
reasons for idle devices.

Invariant: a reason for idle devices holds for every engine of the pool. The reason names the obstacle to serving any
class within the plan's step, or says that more engines would not shorten the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from libra.plan.allocation import Allocation
from libra.plan.explain.explanation import Bound, BucketView, PlanView, PoolView
from libra.plan.loan import LEAST_GAIN
from libra.plan.model.ranges import NEVER, RangeTable
from libra.plan.options.menu import Rejected
from libra.plan.options.price import (
    bucket_latency,
    bucket_prices,
    devices_used,
    fixed_seconds,
    own_training,
    price,
    step_parts,
)
from libra.plan.problem import EngineOption, Problem


def plan_view(problem: Problem, allocation: Allocation, step: float) -> PlanView:
    """The allocation compared with a plan whose step is `step` seconds."""
    predicted, training = price(problem, allocation), own_training(problem, allocation)
    return PlanView(
        layout=allocation.layout,
        replicas=allocation.replicas,
        training_pool=training.pool,
        training_devices=training.devices,
        engines=tuple(allocation.engines_by_shape.items()),
        buckets=len(allocation.buckets),
        predicted=predicted,
        loss=predicted.step / step - 1 if step > 0 else 0.0,
    )


def bound_of(problem: Problem, allocation: Allocation) -> Bound:
    predicted = price(problem, allocation)
    parts = sorted(step_parts(problem, allocation).items(), key=lambda part: -part[1])
    asked = {"rollout": predicted.rollout, "training": predicted.training, "latency": predicted.latency}
    rest = max(seconds for name, seconds in asked.items() if name != predicted.bottleneck)
    slack = 1 - rest / predicted.step if predicted.step > 0 else 0.0
    return Bound(predicted.bottleneck, tuple(parts), 1 + problem.staleness, slack)


def bucket_views(problem: Problem, allocation: Allocation) -> tuple[BucketView, ...]:
    step, training = price(problem, allocation).step, own_training(problem, allocation)
    views = []
    for bucket, priced in zip(allocation.buckets, bucket_prices(problem, allocation), strict=True):
        latency = bucket_latency(problem, training, priced)
        views.append(
            BucketView(
                shape=bucket.shape,
                pool=" and ".join(sorted(priced.option.uses)),
                engines=bucket.engines,
                devices=bucket.engines * sum(priced.option.uses.values()),
                max_num_seqs=priced.option.max_num_seqs,
                above=bucket.above,
                up_to=bucket.up_to,
                load=priced.load,
                residence=priced.residence,
                latency=latency,
                share=max(priced.load, latency) / step if step > 0 else 0.0,
            )
        )
    return tuple(views)


def pool_views(problem: Problem, allocation: Allocation, rejected: Sequence[Rejected] = ()) -> tuple[PoolView, ...]:
    """The use of each pool's devices. `rejected` are shapes that are not options, named `POOL/...`."""
    used = devices_used(problem, allocation)
    views = []
    for pool in problem.pools:
        training, generating = used[pool.name]
        idle = pool.devices - (min(training, generating) if problem.colocated else training + generating)
        why = _why_idle(problem, allocation, pool.name, rejected) if idle else ""
        if idle and problem.colocated:
            why = _in_turns(pool.devices, training, generating, allocation.layout, why)
        if pool.serves and not generating and any(pool.name in option.uses for option in problem.engines):
            why = f"a loan would save less than {100 * LEAST_GAIN:.0f} % of a step on average"
        views.append(PoolView(pool.name, pool.devices, training, generating, idle, why, pool.serves))
    return tuple(views)


def _in_turns(devices: int, training: int, generating: int, layout: str, why: str) -> str:
    """Text about devices that are idle in one phase of a colocated step. `why` is the reason why idle devices do not
    generate.
    """
    phases = []
    if generating < devices:
        phases.append(f"{devices - generating:,} through the rollout: {why}")
    if training < devices:
        phases.append(f"{devices - training:,} through training: {layout} takes {training:,}")
    return "; ".join(phases)


def _why_idle(problem: Problem, allocation: Allocation, pool: str, rejected: Sequence[Rejected]) -> str:
    engines = tuple(option for option in problem.engines if pool in option.uses)
    if not engines:
        there = (each.reason for each in reversed(rejected) if each.name.startswith(f"{pool}/"))
        return f"no engine there: {next(there, 'none fits')}"
    if _serves(problem, allocation, engines):
        return "not needed: they would not shorten the step"
    longest = problem.longest_context - problem.pool(pool).serves
    if _serves(problem, allocation, tuple(replace(option, holds=longest) for option in engines)):
        holds = max(option.holds for option in engines)
        return f"engines there hold {holds:,} tokens at most, too few for a class that they could serve in time"
    step = price(problem, allocation).step
    left = (1 + problem.staleness) * step - fixed_seconds(problem, own_training(problem, allocation))
    least = min(max(option.residence[0], option.stays.alone(0)) for option in engines)
    if least > left:
        return (
            f"too slow there: the longest trajectory of a bucket takes {least:,.2f} s even by itself, and a step of"
            f" {step:,.2f} s leaves it {left:,.2f} s"
        )
    stall, alone = min((option.stall, option.stays.alone(0)) for option in engines)
    return (
        f"too slow there: of a step of {step:,.2f} s, loading new weights takes {stall:,.2f} s and the longest"
        f" trajectory {alone:,.2f} s by itself; the remaining time is too short for the shortest class"
    )


def _serves(problem: Problem, allocation: Allocation, engines: tuple[EngineOption, ...]) -> bool:
    """Whether `engines` on all devices of their pools could serve a class within the allocation's step."""
    changed = replace(problem, engines=engines)
    training, step = own_training(problem, allocation), price(problem, allocation).step
    need = RangeTable(changed, tried=False).engines(training, step)
    room = np.array(
        [
            min(problem.pool(pool).devices // devices for pool, devices in changed.uses(shape).items())
            for shape in changed.shapes
        ]
    )
    return bool(((need < NEVER) & (need <= room[:, None, None])).any())
