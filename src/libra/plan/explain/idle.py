"""Why a plan leaves devices idle.

Invariant: a reason holds for every engine of the pool. It names the family of constraints of `libra.plan.problem` that
keeps all of them from serving any class within the plan's step, or says that they could and that it would not help.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from libra.plan.allocation import Allocation
from libra.plan.model.ranges import NEVER, RangeTable
from libra.plan.options.price import devices_used, fixed_seconds, price, training_option
from libra.plan.problem import EngineOption, Family, Problem


@dataclass(frozen=True, slots=True)
class IdleDevices:
    pool: str
    devices: int
    family: Family | None  # that keeps engines there from serving anything; None: others suffice
    reason: str


def idle_devices(
    problem: Problem, allocation: Allocation, rejected: Iterable[tuple[str, str]] = ()
) -> tuple[IdleDevices, ...]:
    """The pools of an allocation that fits in which devices idle. `rejected` are names of shapes that are no option, as
    `POOL/...`, with the reason."""
    reasons = list(rejected)
    found = []
    for pool in problem.pools:
        training, generating = devices_used(problem, allocation)[pool.name]
        idle = pool.devices - (max(training, generating) if problem.colocated else training + generating)
        if idle:
            found.append(IdleDevices(pool.name, idle, *_why(problem, allocation, pool.name, reasons)))
    return tuple(found)


def _why(
    problem: Problem, allocation: Allocation, pool: str, rejected: list[tuple[str, str]]
) -> tuple[Family | None, str]:
    engines = tuple(option for option in problem.engines if option.pool == pool)
    if not engines:
        reason = next((reason for name, reason in reversed(rejected) if name.startswith(f"{pool}/")), "none fits")
        return "every_class_once", f"no engine there: {reason}"
    if _serves(problem, allocation, engines):
        return None, "others suffice: the step would not be shorter with them"
    if _serves(problem, allocation, tuple(replace(option, holds=problem.longest_context) for option in engines)):
        holds = max(option.holds for option in engines)
        return "longest_context", f"engines there hold {holds:,} tokens at most, fewer than what they would serve"
    training = training_option(problem, allocation)
    assert training is not None  # it fits
    step = price(problem, allocation).step
    left = (1 + problem.staleness) * step - fixed_seconds(problem, training)
    least = min(max(option.residence[0], option.alone(0)) for option in engines)
    if least > left:
        return "latency", (
            f"too slow there: the longest trajectory of a bucket takes {least:,.2f} s even by itself, and a step of"
            f" {step:,.2f} s leaves it {left:,.2f} s"
        )
    stall, alone = min((option.stall, option.alone(0)) for option in engines)
    return "rollout", (
        f"too slow there: of a step of {step:,.2f} s, loading new weights takes {stall:,.2f} s and the longest"
        f" trajectory {alone:,.2f} s by itself; the rest is too little for the shortest class"
    )


def _serves(problem: Problem, allocation: Allocation, engines: tuple[EngineOption, ...]) -> bool:
    """Whether such engines, with all devices of their pool, could serve some class within the allocation's step."""
    training = training_option(problem, allocation)
    assert training is not None  # it fits
    changed = replace(problem, engines=engines)
    need = RangeTable(changed, tried=False).engines(training, price(problem, allocation).step)
    room = np.array(
        [problem.pool(pool).devices // devices for pool, devices, _ in map(changed.footprint, changed.shapes)]
    )
    return bool(((need < NEVER) & (need <= room[:, None, None])).any())
