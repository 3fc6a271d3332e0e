"""What workers amount to as an allocation, and an allocation for fewer workers.

Invariant: pure functions of what workers do; the other way round, from an allocation to workers, is a `Transition`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from libra.exec.pool import Worker
from libra.plan.allocation import Allocation, Bucket
from libra.plan.problem import InfeasiblePlanError
from libra.plan.transition import TRAIN, Duty, Role


def bucket_limits(plans: Iterable[Allocation]) -> list[tuple[str, int]]:
    """Shape and longest context of every bucket, plan by plan."""
    return [(bucket.shape, bucket.up_to) for plan in plans for bucket in plan.buckets]


def current_allocation(
    duties: Iterable[Duty], limits: Iterable[tuple[str, int]], longest_context: int
) -> Allocation | None:
    """What workers with these duties are, in buckets with these `limits`; None when nothing trains, or none generates.

    The first limit of a shape counts: between two allocations, engines of both run. A bucket without an engine is gone:
    its range belongs to the next longer one, the last range to whoever is left. Of two buckets that end at the same
    length the first one stays.
    """
    doing = Counter(duties)
    ends: dict[str, int] = {}
    for shape, up_to in limits:
        if doing[Duty(Role.ROLLOUT, shape)] and up_to not in ends.values():
            ends.setdefault(shape, up_to)
    if not doing[TRAIN] or not ends:
        return None
    buckets: list[Bucket] = []
    for shape, up_to in sorted(ends.items(), key=lambda item: item[1]):
        above = buckets[-1].up_to if buckets else 0
        buckets.append(Bucket(shape, doing[Duty(Role.ROLLOUT, shape)], above, up_to))
    last = buckets[-1]
    buckets[-1] = Bucket(last.shape, last.engines, last.above, longest_context)
    return Allocation(doing[TRAIN], tuple(buckets))


def fitted(allocation: Allocation, workers: Sequence[Worker]) -> Allocation:
    """`allocation` for as many workers as there are: who is too few is first missing in the longest bucket, which keeps
    one engine, and then in the shortest ones; who is too many joins the longest one. Raises `InfeasiblePlanError` where
    nobody is left to generate, or to train."""
    core = sum(worker.allowed == {Role.TRAIN} for worker in workers)
    may_train = sum(Role.TRAIN in worker.allowed for worker in workers)
    replicas = max(core, min(allocation.replicas, may_train, len(workers) - 1))
    engines = len(workers) - replicas
    if engines < 1:
        raise InfeasiblePlanError("no device is left for a rollout engine")
    if replicas < 1:
        raise InfeasiblePlanError("no device is left for training")
    buckets: list[Bucket] = []
    for bucket in reversed(allocation.buckets):
        count = min(bucket.engines, engines) if buckets else max(1, engines - (allocation.engines - bucket.engines))
        engines -= count
        if count:
            buckets.insert(0, replace(bucket, engines=count))
    return Allocation(replicas, (replace(buckets[0], above=0), *buckets[1:]))
