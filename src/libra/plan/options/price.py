"""The price of one allocation: seconds per optimiser step with bounded staleness, and its bottleneck.

Invariant: only this module prices allocations. The solvers build their models from the same problem and report the
price from this module, so prediction, comparison and explanation never disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.allocation import Allocation, Bucket
from libra.plan.problem import EngineOption, Problem, TrainingOption
from libra.plan.solution import Bottleneck, Prediction, Proof, Solution, SolverStatus, StepPart
from libra.plan.stays import Stays

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BucketPrice:
    """One bucket under the best option (`max_num_seqs`) of its shape."""

    option: EngineOption
    load: float  # seconds that each engine needs for one step: work, new weights, refresh; see `Prediction.rollout`
    residence: float  # seconds of its longest trajectory
    alone: float  # residence without other trajectories on its engine if batches overlap; otherwise `residence`


def training_option(problem: Problem, allocation: Allocation) -> TrainingOption | None:
    """The option that the allocation trains with, or None if it is not on the menu."""
    wanted = (allocation.layout, allocation.replicas)
    return next((option for option in problem.training if (option.layout, option.replicas) == wanted), None)


def own_training(problem: Problem, allocation: Allocation) -> TrainingOption:
    """The training option of an allocation that fits."""
    option = training_option(problem, allocation)
    assert option is not None
    return option


def devices_used(problem: Problem, allocation: Allocation) -> dict[str, tuple[int, int]]:
    """Devices of each pool that train and that generate. The allocation's shapes and layout are on the menu."""
    used = {pool.name: [0, 0] for pool in problem.pools}
    training = training_option(problem, allocation)
    if training is not None:
        used[training.pool][0] += training.devices
    for bucket in allocation.buckets:
        option = next(option for option in problem.engines if option.shape == bucket.shape)
        for pool, devices in option.uses.items():
            used[pool][1] += bucket.engines * devices
    return {name: (train, generate) for name, (train, generate) in used.items()}


def total_devices(problem: Problem, allocation: Allocation) -> int:
    """Sum of the devices that train and the devices that generate; devices that do both count twice."""
    return sum(map(sum, devices_used(problem, allocation).values()))


def infeasibility(problem: Problem, allocation: Allocation) -> str | None:
    """The reason why the allocation cannot serve the problem; None if it can.

    A bucket without a class is allowed: under a new distribution its engines are idle, and the price includes them. The
    solver never starts an engine for such a bucket.
    """
    if training_option(problem, allocation) is None:
        choices = ", ".join(str(option.replicas) for option in problem.training if option.layout == allocation.layout)
        wanted = f"{allocation.replicas} replicas as {allocation.layout!r}"
        return f"no option trains {wanted}; options of this layout: {choices or 'none'}"
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
        idle = problem.use_all_devices and used < pool.devices and not (pool.serves and used == 0)
        if used > pool.devices or idle:
            return f"the allocation uses {used} devices of pool {pool.name}; it has {pool.devices}"
    return None


def price(problem: Problem, allocation: Allocation) -> Prediction:
    """Predicted seconds of one optimiser step. Raises ValueError with the reason if the allocation does not fit."""
    reason = infeasibility(problem, allocation)
    if reason is not None:
        raise ValueError(f"an allocation that does not fit has no price: {reason}")
    training = own_training(problem, allocation)
    prices = bucket_prices(problem, allocation)
    rollout = max(bucket.load for bucket in prices)
    latency = max(bucket_latency(problem, training, bucket) for bucket in prices)
    seconds: dict[Bottleneck, float] = {"rollout": rollout, "training": training.seconds, "latency": latency}
    bottleneck = max(seconds, key=lambda name: seconds[name])
    step = seconds[bottleneck]
    alternate = None
    if bottleneck == "latency" and problem.shared:
        parts = _latency_parts(problem, training, prices)
        if parts["latency"] == max(parts.values()):
            # A batch that the previous one has delayed is complete by then, so its step waits only for training.
            alternate = (training.seconds, (1 + problem.staleness) * step - problem.staleness * training.seconds)
    return Prediction(step, rollout, training.seconds, latency, bottleneck, alternate)


def solution(
    problem: Problem, allocation: Allocation, bound: float = 0.0, status: SolverStatus = "feasible"
) -> Solution:
    """The solution with an allocation that fits and its price; `bound` is the proven lower bound in seconds."""
    predicted = price(problem, allocation)
    bound = min(bound, predicted.step)
    gap = 1 - bound / predicted.step if predicted.step > 0 else 0.0
    return Solution(allocation, predicted, Proof(status, bound, gap))


def step_parts(problem: Problem, allocation: Allocation) -> dict[StepPart, float]:
    """The parts of the step, in seconds, of an allocation that fits; equal parts keep their order.

    Latency is a sum of three parts. The first is generation (synchronous), or the longest trajectory alone and its
    delay by others. Training and publication follow, with the role changes of colocated devices. Each part is divided
    by 1 + staleness, the number of batches in flight. With another bottleneck, a step is as long as training or
    generation.
    """
    predicted = price(problem, allocation)
    if predicted.bottleneck != "latency":
        return {predicted.bottleneck: predicted.step}
    return _latency_parts(problem, own_training(problem, allocation), bucket_prices(problem, allocation))


def _latency_parts(
    problem: Problem, training: TrainingOption, prices: tuple[BucketPrice, ...]
) -> dict[StepPart, float]:
    batches = 1 + problem.staleness
    fixed = fixed_seconds(problem, training)
    rollout, residence = max(bucket.load for bucket in prices), max(bucket.residence for bucket in prices)
    after: dict[StepPart, float] = {
        "training": training.after_rollout / batches,
        "publication": (fixed - training.after_rollout) / batches,
    }
    if problem.synchronous:
        longest: dict[StepPart, float] = {"rollout": rollout} if rollout >= residence else {"latency": residence}
        return {"training": after["training"], **longest, "publication": after["publication"]}
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
    """The price of each bucket of an allocation that fits, under the option of its shape that delays the step least."""
    training = own_training(problem, allocation)
    tried = problem.current is not None and problem.current.ranges == allocation.ranges
    recall = problem.recall_known if tried else problem.recall_possible
    routers = np.array(recall)
    peaks = np.array(problem.peaks)
    begin = problem.begins(allocation.buckets[0].shape)
    found = []
    for bucket in allocation.buckets:
        own = (peaks > bucket.above) & (peaks <= bucket.up_to)
        served = routers * own + (1 - routers if bucket.above == 0 else 0.0)  # [router, class] shares of work
        options = [option for option in problem.options(bucket.shape) if option.holds >= bucket.up_to]
        candidates = [
            _bucket_price(
                problem, training, it, bucket.engines, served, _longest(problem, bucket, it.stays, begin, recall)
            )
            for it in options
        ]
        found.append(min(candidates, key=lambda c: (max(c.load, bucket_latency(problem, training, c)), c.load)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Longest:
    """The longest trajectories of a bucket, alone and together with others."""

    residence: float  # seconds by itself, of the longest trajectory of a typical step
    lines: tuple[tuple[float, float], ...]  # (generates, waits)

    @property
    def alone(self) -> float:
        return max([self.residence, *(generates + waits for generates, waits in self.lines)])


def _longest(
    problem: Problem, bucket: Bucket, stays: Stays, begin: Stays, recall: Sequence[Sequence[float]]
) -> _Longest:
    """The longest trajectories of the bucket's classes. In the first bucket, also the longest trajectories of longer
    classes, which only begin there.
    """
    own = [j for j, peak in enumerate(problem.peaks) if bucket.above < peak <= bucket.up_to]
    longer = [j for j, peak in enumerate(problem.peaks) if peak > bucket.up_to]
    parts = [(stays, own, own[-1:])]
    if bucket.above > 0:
        parts = [(stays.begun_on(begin, recall), own, own[-1:])]
    elif longer:
        parts.append((problem.elsewhere.begun_on(stays, recall), longer, longer))
    return _Longest(
        max((its.residence[j] for its, classes, _ in parts for j in classes if problem.expected[j]), default=0.0),
        tuple(line for its, _, lasts in parts for last in lasts for line in its.lines(last)),
    )


def fixed_seconds(problem: Problem, training: TrainingOption) -> float:
    """Seconds between a step's last trajectory and the first trajectory with the new weights."""
    return training.after_rollout + training.publish + (2 * problem.switch if problem.colocated else 0.0)


def bucket_latency(problem: Problem, training: TrainingOption, bucket: BucketPrice) -> float:
    """(residence + fixed seconds) / (1 + staleness); for synchronous steps at least the load."""
    fixed = fixed_seconds(problem, training) / (1 + problem.staleness)
    longest = bucket.residence / (1 + problem.staleness)
    return fixed + (max(longest, bucket.load) if problem.synchronous else longest)


def _bucket_price(
    problem: Problem, training: TrainingOption, option: EngineOption, engines: int, served: Floats, longest: _Longest
) -> BucketPrice:
    fixed = fixed_seconds(problem, training)
    loads = _loads(option, engines, served)
    step = max(load.shortest_step(option, longest.lines, fixed, problem.staleness) for load in loads)
    late = (longest.residence + fixed) / (1 + problem.staleness)
    if problem.synchronous:
        return BucketPrice(option, step - fixed, longest.alone, longest.alone)
    step = max(step, late)
    # If other trajectories slow the longest one, its residence fills the shortest step.
    slowed = any(generates for generates, _ in longest.lines)
    residence = (1 + problem.staleness) * step - fixed if slowed else longest.alone
    return BucketPrice(option, max(load.at(step) for load in loads) + option.stall, residence, longest.alone)


@dataclass(frozen=True, slots=True)
class _Load:
    """Seconds that an engine works in a step of T seconds: `seconds + squared / T`, without loading new weights."""

    seconds: float
    squared: float = 0.0  # refresh

    def at(self, step: float) -> float:
        return self.seconds + (self.squared / step if self.squared else 0.0)

    def shortest_step(
        self, option: EngineOption, lines: Sequence[tuple[float, float]], fixed: float, staleness: int
    ) -> float:
        """The shortest step in which the engine does this work and no trajectory is late; see `libra.plan.problem`.

        The term divided by the step increases as the step gets shorter, so bisection finds the step exactly.
        """

        def at(seconds: float) -> float:
            if staleness == 0:
                rollout = max([_root(seconds, generates, waits, 1) for generates, waits in lines], default=seconds)
                return rollout + option.stall + fixed
            load = seconds + option.stall
            ends = [_root(load, generates, waits + fixed, 1 + staleness) for generates, waits in lines]
            return max([load, *ends])

        short = at(self.seconds)
        if not self.squared:
            return short
        long = short + math.sqrt(self.squared)
        while at(self.seconds + self.squared / long) > long:
            long *= 2
        while short < (middle := (short + long) / 2) < long:
            late = at(self.seconds + self.squared / middle) > middle
            short, long = (middle, long) if late else (short, middle)
        return long


def _loads(option: EngineOption, engines: int, served: Floats) -> list[_Load]:
    """The load of one engine of a bucket under each router; `served` is [router, class]."""
    work = (served @ np.array(option.work).T).max(axis=1)
    squared = served @ np.array(option.refresh)
    if option.refill:
        filled, again = served @ np.array(option.kv_occupancy), served @ np.array(option.refill)
        work = work + again * np.clip(filled / engines - 1, 0.0, 1.0)
    return [_Load(*pair) for pair in zip((work / engines).tolist(), (squared / engines).tolist(), strict=True)]


def _root(load: float, generates: float, follows: float, batches: int) -> float:
    """The smallest T with (batches * T - follows) * (T - load) >= generates * T, both factors 0 or more."""
    # The discriminant, as a sum of terms that are not negative.
    root = (batches * load - follows) ** 2 + generates * (generates + 2 * (batches * load + follows))
    return (batches * load + follows + generates + math.sqrt(root)) / (2 * batches)
