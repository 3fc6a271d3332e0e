"""Every allocation that a request allows, by brute force, and random requests small enough for it.

Invariant: an allocation is listed once, and only if all its engines belong to a bucket that serves a class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from hypothesis import strategies as st

from libra.cost.device import DeviceProfile, EngineCost, SwitchCost, TrainCost
from libra.lengths import TrajectoryClass
from libra.plan.moves import diff
from libra.plan.price import fits, price
from libra.plan.problem import Allocation, Bucket, EngineShape, Fleet, PlanRequest, Workload


def allocations(request: PlanRequest) -> list[Allocation]:
    return [candidate for candidate in _candidates(request) if fits(request, candidate) is None]


def best_step(request: PlanRequest) -> float:
    return min(price(request, allocation).step for allocation in allocations(request))


def move_count(request: PlanRequest, allocation: Allocation) -> int:
    return 0 if request.current is None else len(diff(request.current, allocation))


def _candidates(request: PlanRequest) -> Iterator[Allocation]:
    peaks = [cls.peak_context for cls in request.workload.classes]
    cuts = [shorter for shorter, longer in pairwise(peaks) if shorter < longer]
    for replicas in range(request.fleet.devices + 1):
        engines = request.fleet.devices - replicas
        for used in range(1, len(request.shapes) + 1):
            for shapes in combinations(request.shapes, used):
                for ends in combinations(cuts, used - 1):
                    for split in combinations(range(1, engines), used - 1):
                        yield _allocation(request, replicas, shapes, (0, *split, engines), (0, *ends))


def _allocation(
    request: PlanRequest,
    replicas: int,
    shapes: tuple[EngineShape, ...],
    split: tuple[int, ...],
    starts: tuple[int, ...],
) -> Allocation:
    ends = (*starts[1:], request.workload.longest_context)
    counts = [after - before for before, after in pairwise(split)]
    if 0 in counts:
        return Allocation(replicas, ())
    buckets = zip(shapes, counts, starts, ends, strict=True)
    return Allocation(replicas, tuple(Bucket(shape.name, n, above, end) for shape, n, above, end in buckets))


_SECONDS = st.floats(0, 0.05, allow_subnormal=False)


@st.composite
def requests(draw: st.DrawFn, *, with_current: bool = False) -> PlanRequest:
    """A feasible request with at most 4 classes, 3 shapes and 6 devices; round numbers, so that ties happen."""
    core = draw(st.integers(1, 2))
    hybrid = draw(st.integers(0, 3))
    rollout = draw(st.integers(0 if hybrid else 1, 6 - core - hybrid))
    peaks = sorted(draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    longest = draw(st.integers(peaks[-1], 24))
    weights = [draw(st.integers(1, 8)) for _ in peaks]
    classes = tuple(
        TrajectoryClass(
            share=weight / sum(weights),
            peak_context=peak * 100,
            mean_context=peak * 90.0,
            generated=float(draw(st.integers(0, peak * 50))),
            generated_std=0.0,
            context_sum=float(draw(st.integers(0, peak * peak * 2000))),
            prefill=float(draw(st.integers(0, peak * 50))),
            turns=float(draw(st.integers(1, 5))),
            tool_seconds=draw(st.sampled_from([0.0, 1.5, 20.0])),
            tool_seconds_std=0.0,
            before_first_return=draw(st.sampled_from([0.0, 0.3, 1.0])),
        )
        for peak, weight in zip(peaks, weights, strict=True)
    )
    lengths = sorted([*draw(st.lists(st.integers(1, 24), max_size=2)), draw(st.integers(longest, 30))])
    shapes = tuple(
        EngineShape(
            name=f"shape-{index}",
            max_model_len=length * 100,
            max_num_seqs=draw(st.sampled_from([1, 4, 16, 64])),
            kv_tokens=draw(st.integers(length, 60)) * 100,
        )
        for index, length in enumerate(lengths)
    )
    profile = DeviceProfile(
        hardware="any",
        model="any",
        engine=EngineCost(
            step=draw(_SECONDS),
            per_sequence=draw(_SECONDS) / 10,
            per_context_token=draw(_SECONDS) / 1000,
            per_prefill_token=draw(_SECONDS) / 100,
            per_turn=draw(_SECONDS),
        ),
        train=TrainCost(draw(_SECONDS) * 10, draw(st.sampled_from([1e-6, 1e-4, 1e-2])), draw(_SECONDS) * 10),
        switch=SwitchCost(engine_start=8.0, trainer_join=3.0, weight_load=draw(_SECONDS) * 10),
        heldout_error=0.0,
    )
    workload = Workload(
        trajectories=draw(st.integers(1, 64)),
        group_size=1,
        max_staleness=draw(st.integers(0, 3)),
        max_turn_tokens=64,
        longest_context=longest * 100,
        train_tokens=float(draw(st.integers(0, 2000))),
        router_hit=draw(st.sampled_from([0.0, 0.8, 1.0])),
        classes=classes,
    )
    request = PlanRequest(Fleet(core, hybrid, rollout), shapes, profile, workload)
    if not with_current:
        return request
    current = draw(st.sampled_from(allocations(request)))
    return replace(request, current=draw(st.sampled_from([current, *_strayed(current)])))


def _strayed(allocation: Allocation) -> list[Allocation]:
    """What may run while the request has moved on: other ranges, a device not yet used, a shape no longer offered."""
    first, *others = allocation.buckets
    last = allocation.buckets[-1]
    strayed = [
        replace(allocation, replicas=allocation.replicas - 1),
        replace(allocation, buckets=(*allocation.buckets[:-1], replace(last, up_to=last.up_to + 100))),
        replace(allocation, buckets=(replace(first, shape="retired"), *others)),
    ]
    if others:
        shorter = replace(first, up_to=first.up_to - 1), replace(others[0], above=first.up_to - 1)
        strayed.append(replace(allocation, buckets=(*shorter, *others[1:])))
    return strayed
