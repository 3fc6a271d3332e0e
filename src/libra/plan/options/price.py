"""The price of one allocation: seconds per optimiser step with bounded staleness, and what bounds it.

Invariant: this module is the only judge of an allocation. The solvers build their rounded models from the same
problem and report the price computed here, so prediction, comparison and explanation never disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from libra.plan.problem import Allocation, Bottleneck, Bucket, EngineOption, Prediction, Problem, TrainingOption

_ROOM = 1e-9  # relative: what just fits must not need an engine more for rounding


@dataclass(frozen=True, slots=True)
class BucketPrice:
    """One bucket under the best option (seats) of its shape."""

    option: EngineOption
    load: float  # seconds each of its engines needs for one step: work, new weights, refresh; see `Prediction.rollout`
    residence: float  # seconds of its longest trajectory
    alone: float  # those of residence that it would take with no other beside it, where batches overlap; else all


def ranges(allocation: Allocation) -> tuple[tuple[str, int], ...]:
    """What the router needs to know of an allocation: which shape serves contexts up to which length."""
    return tuple((bucket.shape, bucket.up_to) for bucket in allocation.buckets)


def training_option(problem: Problem, allocation: Allocation) -> TrainingOption | None:
    """The option that the allocation trains with, or None if it is not on the menu."""
    wanted = (allocation.layout, allocation.replicas)
    return next((option for option in problem.training if (option.layout, option.replicas) == wanted), None)


def devices_used(problem: Problem, allocation: Allocation) -> dict[str, tuple[int, int]]:
    """Devices of each pool that train and that generate. The allocation's shapes and layout are on the menu."""
    used = {pool.name: [0, 0] for pool in problem.pools}
    training = training_option(problem, allocation)
    if training is not None:
        used[training.pool][0] += training.devices
    for bucket in allocation.buckets:
        option = next(option for option in problem.engines if option.shape == bucket.shape)
        used[option.pool][1] += bucket.engines * option.devices
    return {name: (train, generate) for name, (train, generate) in used.items()}


def infeasibility(problem: Problem, allocation: Allocation) -> str | None:
    """Why the allocation cannot serve the problem, or None if it can.

    A bucket without a class is no reason: under a new distribution its engines idle, and the price says what that
    costs. (The solver itself never starts an engine for nobody.)
    """
    if training_option(problem, allocation) is None:
        choices = ", ".join(str(option.replicas) for option in problem.training if option.layout == allocation.layout)
        wanted = f"{allocation.replicas} replicas as {allocation.layout!r}"
        return f"no option trains {wanted}; there are: {choices or 'none'}"
    if not allocation.buckets:
        return "no engine generates"
    if problem.most_buckets is not None and len(allocation.buckets) > problem.most_buckets:
        return f"there are {len(allocation.buckets)} buckets; at most {problem.most_buckets} are allowed"
    seen: set[str] = set()
    for bucket in allocation.buckets:
        where = f"bucket up to {bucket.up_to} tokens: "
        options = [option for option in problem.engines if option.shape == bucket.shape]
        if not options:
            return f"{where}no engine shape is named {bucket.shape!r}"
        if bucket.shape in seen and problem.one_bucket_per_shape:
            return f"{where}shape {bucket.shape!r} serves another bucket already"
        seen.add(bucket.shape)
        holds = max(option.holds for option in options)
        if bucket.up_to > holds:
            return f"{where}shape {bucket.shape!r} holds {holds}"
    reached = allocation.buckets[-1].up_to
    if reached < problem.longest_context:
        return f"the last bucket ends at {reached} tokens; the longest context is {problem.longest_context}"
    for pool in problem.pools:
        training, generating = devices_used(problem, allocation)[pool.name]
        used = max(training, generating) if problem.colocated else training + generating
        if used > pool.devices or (problem.use_all_devices and used < pool.devices):
            return f"the allocation uses {used} devices of pool {pool.name}; it has {pool.devices}"
    return None


def price(problem: Problem, allocation: Allocation) -> Prediction:
    """Predicted seconds of one optimiser step. Raises ValueError with the reason if the allocation does not fit."""
    reason = infeasibility(problem, allocation)
    if reason is not None:
        raise ValueError(f"an allocation that does not fit has no price: {reason}")
    training = training_option(problem, allocation)
    assert training is not None  # it fits
    prices = bucket_prices(problem, allocation)
    rollout = max(bucket.load for bucket in prices)
    latency = max(bucket_latency(problem, training, bucket) for bucket in prices)
    step = max(rollout, training.seconds, latency)
    parts = _parts(problem, training, prices)
    return Prediction(step, rollout, training.seconds, latency, max(parts, key=lambda name: parts[name]))


def step_parts(problem: Problem, allocation: Allocation) -> dict[Bottleneck, float]:
    """The seconds that the step of an allocation that fits consists of; the largest part is its bottleneck.

    A step that waits for its longest trajectory is a sum: generation (synchronous), or the longest trajectory by itself
    and what others slow it by; training after it; publication, with the changes of side of colocated devices. Each is
    divided by 1 + staleness, as so many batches are under way. Another step is as long as training, or as generation.
    """
    training = training_option(problem, allocation)
    assert training is not None
    return _parts(problem, training, bucket_prices(problem, allocation))


def _parts(problem: Problem, training: TrainingOption, prices: tuple[BucketPrice, ...]) -> dict[Bottleneck, float]:
    """In the order in which they are named where they are equal."""
    batches = 1 + problem.staleness
    fixed = fixed_seconds(problem, training)
    rollout, residence = max(bucket.load for bucket in prices), max(bucket.residence for bucket in prices)
    after: dict[Bottleneck, float] = {
        "training": training.after_rollout / batches,
        "publication": (fixed - training.after_rollout) / batches,
    }
    if problem.synchronous:
        if training.seconds > max(rollout, residence) + fixed:
            return {"training": training.seconds}
        longest: dict[Bottleneck, float] = {"rollout": rollout} if rollout >= residence else {"latency": residence}
        return {"training": after["training"], **longest, "publication": after["publication"]}
    by_itself, waiting = max(rollout, training.seconds), (residence + fixed) / batches
    if by_itself > waiting or (by_itself == waiting and not problem.shared):
        return {"rollout": rollout} if rollout >= training.seconds else {"training": training.seconds}
    if not problem.shared:
        return {"latency": residence / batches, **after}
    last = max(prices, key=lambda bucket: bucket.residence)
    slowed = max(0.0, last.residence - last.alone)
    return {
        "training": after["training"],
        "rollout": slowed / batches,
        "latency": (residence - slowed) / batches,
        "publication": after["publication"],
    }


def bucket_prices(problem: Problem, allocation: Allocation) -> tuple[BucketPrice, ...]:
    """Each bucket of an allocation that fits, with the seats under which it delays the step least."""
    training = training_option(problem, allocation)
    assert training is not None
    tried = problem.current is not None and ranges(problem.current) == ranges(allocation)
    found = []
    for bucket in allocation.buckets:
        members = [j for j, peak in enumerate(problem.peaks) if bucket.above < peak <= bucket.up_to]
        candidates = [
            _bucket_price(problem, training, option, bucket, members, tried)
            for option in problem.engines
            if option.shape == bucket.shape and option.holds >= bucket.up_to and _has_room(option, bucket, members)
        ]
        found.append(min(candidates, key=lambda c: max(c.load, bucket_latency(problem, training, c))))
    return tuple(found)


def _has_room(option: EngineOption, bucket: Bucket, members: list[int]) -> bool:
    """Whether the caches of the bucket's engines hold as much as the option is priced for."""
    filled = math.fsum(option.fills[j] for j in members) if option.fills else 0.0
    return filled <= bucket.engines * (1 + _ROOM)


def fixed_seconds(problem: Problem, training: TrainingOption) -> float:
    """Seconds from a step's last trajectory to the first that starts with the new weights."""
    return training.after_rollout + training.publish + (2 * problem.switch if problem.colocated else 0.0)


def bucket_latency(problem: Problem, training: TrainingOption, bucket: BucketPrice) -> float:
    """(residence + what follows it) / (1 + staleness); where steps are synchronous, of load where that is longer."""
    fixed = fixed_seconds(problem, training) / (1 + problem.staleness)
    longest = bucket.residence / (1 + problem.staleness)
    return fixed + (max(longest, bucket.load) if problem.synchronous else longest)


def _bucket_price(
    problem: Problem, training: TrainingOption, option: EngineOption, bucket: Bucket, members: list[int], tried: bool
) -> BucketPrice:
    load, squared = _asked(problem, option, bucket, members, tried)
    longest = max((option.residence[j] for j in members if problem.expected[j]), default=0.0)
    fixed = fixed_seconds(problem, training)
    if not problem.shared:
        # Synchronous steps last as long as their load and what follows it; others can be as short as their load.
        waits = fixed if problem.synchronous else 0.0
        load += option.alone if problem.synchronous else 0.0
        return BucketPrice(option, _refreshed(load, squared, waits), longest, longest)
    batches = 1 + problem.staleness
    step = _shared_step(load, squared, option.generates, option.waits + fixed, batches)
    step = max(step, (longest + fixed) / batches)
    # What never generates is never slowed. Else a step has no time but for what its longest trajectory takes.
    residence = batches * step - fixed if option.generates else max(longest, option.waits)
    load += squared / step if squared else 0.0
    return BucketPrice(option, load, residence, max(longest, option.alone))


def _asked(
    problem: Problem, option: EngineOption, bucket: Bucket, members: list[int], tried: bool
) -> tuple[float, float]:
    """Seconds of a step that each engine is busy, and the seconds squared of refresh, to be divided by the step's."""
    first = bucket.above == 0
    routers = problem.recall_known if tried else problem.recall_possible

    def total(costs: tuple[float, ...], reach: tuple[float, ...]) -> float:
        own = sum([costs[j] * reach[j] for j in members])
        return sum([cost * (1 - part) for cost, part in zip(costs, reach, strict=True)]) + own if first else own

    work = max(total(row, reach) for row in option.work for reach in routers)
    squared = max(total(option.refresh, reach) for reach in routers) if any(option.refresh) else 0.0
    return work / bucket.engines + option.stall, squared / bucket.engines


def _refreshed(load: float, squared: float, waits: float) -> float:
    """The smallest x with  x >= load + squared / (x + waits)."""
    return load if squared == 0 else (load - waits + math.sqrt((load + waits) ** 2 + 4 * squared)) / 2


def _shared_step(load: float, squared: float, generates: float, follows: float, batches: int) -> float:
    """The smallest step T with  (batches * T - follows) * (T - load - squared / T) >= generates * T, no factor below 0.

    Without `squared` that is the larger root of a quadratic. With it the step is no more than its root longer, and the
    shorter the step, the more is asked of it: so it is found by bisection, to the last bit.
    """

    def at(load: float) -> float:
        work, rest = batches * load, follows + generates
        root = math.sqrt((work - follows) ** 2 + generates * (generates + 2 * (work + follows)))
        return (work + rest + root) / (2 * batches)

    short = at(load)
    if squared == 0:
        return short
    long = short + math.sqrt(squared)
    while short < (middle := (short + long) / 2) < long:
        short, long = (middle, long) if at(load + squared / middle) > middle else (short, middle)
    return long
