"""The price of one allocation: seconds per optimiser step with bounded staleness, and what bounds it.

Invariant: this module is the only judge of an allocation. The solver builds its rounded model from the same pieces
and reports the price computed here, so prediction, comparison and explanation never disagree.

Generation and training overlap, hence a step takes as long as the slowest of three:
the busiest bucket's work, one training step, and the time from the start of the longest trajectory to the end of the
step that trains on it, divided by the `1 + max_staleness` steps that staleness lets it take.
"""

from __future__ import annotations

from itertools import accumulate

from libra.cost.rollout import concurrency, residence, work_by_memory, work_by_seats
from libra.cost.train import step_seconds
from libra.lengths import TrajectoryClass
from libra.plan.moves import ranges
from libra.plan.problem import (
    SHARE_TOLERANCE,
    Allocation,
    Bottleneck,
    Bucket,
    EngineShape,
    PlanRequest,
    Prediction,
    Workload,
)


def capacity(shape: EngineShape) -> int:
    """The longest context in tokens that one engine of the shape can serve."""
    return min(shape.max_model_len, shape.kv_tokens)


def seats(request: PlanRequest, shape: EngineShape, engines: int) -> int:
    """Sequences that decode together on an engine of the shape, when `engines` engines share the open trajectories."""
    workload = request.workload
    return concurrency(shape.max_num_seqs, (1 + workload.max_staleness) * workload.trajectories, engines)


def own_share(cls: TrajectoryClass, router_hit: float) -> float:
    """Fraction of a class's work that reaches its own bucket; the rest stays in the first one, where all trajectories
    start before their first tool return tells how long they may become."""
    return (1 - cls.before_first_return) * router_hit


def possible_hits(request: PlanRequest, tried: bool) -> tuple[float, ...]:
    """How well the router may hit. For buckets that were `tried`, as well as it was seen to; nothing is known of
    others (how well it hits depends on where they lie), so they must have time for a perfect router, too."""
    seen = request.workload.router_hit
    return (seen,) if tried or seen == 1 else (seen, 1.0)


def training_seconds(request: PlanRequest, replicas: int) -> float:
    workload = request.workload
    return step_seconds(request.profile.train, workload.trajectories * workload.train_tokens, replicas)


def present(workload: Workload) -> tuple[bool, ...]:
    """Which classes are met in a typical step: one trajectory or more is expected to be at least that long."""
    at_least = tuple(accumulate(cls.share for cls in reversed(workload.classes)))[::-1]
    return tuple(workload.trajectories * (share + SHARE_TOLERANCE) >= 1 for share in at_least)


def fits(request: PlanRequest, allocation: Allocation) -> str | None:
    """Why the allocation cannot serve the request, or None if it can.

    A bucket without a class is no reason: under a new distribution its engines idle, and the price says what that
    costs. (The solver itself never starts an engine for nobody.)
    """
    fleet, longest = request.fleet, request.workload.longest_context
    if fleet.core < 1:
        return "the fleet has no core device; at least one device must always train"
    if not fleet.core <= allocation.replicas <= fleet.core + fleet.hybrid:
        return (
            f"{allocation.replicas} devices train; the fleet allows {fleet.core} (core) to "
            f"{fleet.core + fleet.hybrid} (core and hybrid)"
        )
    if not allocation.buckets:
        return "no engine generates"
    used = allocation.replicas + allocation.engines
    if used != fleet.devices:
        return f"the allocation uses {used} devices; the fleet has {fleet.devices}"
    order = {shape.name: index for index, shape in enumerate(request.shapes)}
    previous = -1
    for bucket in allocation.buckets:
        if bucket.shape not in order:
            return f"bucket up to {bucket.up_to} tokens: no engine shape is named {bucket.shape!r}"
        if order[bucket.shape] <= previous:
            return f"bucket up to {bucket.up_to} tokens: shape {bucket.shape!r} comes before or with the previous one"
        previous = order[bucket.shape]
        holds = capacity(request.shapes[previous])
        if bucket.up_to > holds:
            return f"bucket up to {bucket.up_to} tokens: shape {bucket.shape!r} holds {holds}"
    reached = allocation.buckets[-1].up_to
    if reached < longest:
        return f"the last bucket ends at {reached} tokens; the longest context is {longest}"
    return None


def price(request: PlanRequest, allocation: Allocation) -> Prediction:
    """Predicted seconds of one optimiser step. Raises ValueError with the reason if the allocation does not fit."""
    reason = fits(request, allocation)
    if reason is not None:
        raise ValueError(f"an allocation that does not fit has no price: {reason}")
    own = tuple(_bucket_of(allocation, cls) for cls in request.workload.classes)
    tried = request.current is not None and ranges(request.current) == ranges(allocation)
    rollout = max(
        _rollout_seconds(request, allocation, own, bucket, hit)
        for bucket in allocation.buckets
        for hit in possible_hits(request, tried)
    )
    training = training_seconds(request, allocation.replicas)
    longest = _longest_residence(request, allocation, own)
    latency = (longest + training) / (1 + request.workload.max_staleness)
    step = max(rollout, training, latency)
    bottleneck: Bottleneck = "rollout" if step == rollout else "training" if step == training else "latency"
    return Prediction(step, rollout, training, latency, bottleneck)


def _bucket_of(allocation: Allocation, cls: TrajectoryClass) -> Bucket:
    return next(bucket for bucket in allocation.buckets if bucket.above < cls.peak_context <= bucket.up_to)


def _rollout_seconds(
    request: PlanRequest, allocation: Allocation, own: tuple[Bucket, ...], bucket: Bucket, router_hit: float
) -> float:
    workload, cost = request.workload, request.profile.engine
    shape = _shape(request, bucket)
    together = seats(request, shape, allocation.engines)
    by_seats = by_memory = 0.0
    for cls, home in zip(workload.classes, own, strict=True):
        reaches_own = own_share(cls, router_hit)
        fraction = (1 - reaches_own if bucket == own[0] else 0.0) + (reaches_own if bucket == home else 0.0)
        expected = workload.trajectories * cls.share * fraction
        by_seats += expected * work_by_seats(cost, cls, together)
        by_memory += expected * work_by_memory(cost, cls, shape.kv_tokens)
    return request.profile.switch.weight_load + max(by_seats, by_memory) / bucket.engines


def _longest_residence(request: PlanRequest, allocation: Allocation, own: tuple[Bucket, ...]) -> float:
    workload, cost = request.workload, request.profile.engine
    return max(
        residence(cost, cls, seats(request, _shape(request, home), allocation.engines))
        for cls, home, met in zip(workload.classes, own, present(workload), strict=True)
        if met
    )


def _shape(request: PlanRequest, bucket: Bucket) -> EngineShape:
    return next(shape for shape in request.shapes if shape.name == bucket.shape)
