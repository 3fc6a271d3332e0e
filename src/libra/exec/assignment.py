"""From an allocation (so many of each) to workers (this one, that).

Invariant: every worker gets a role it may take, and no more workers change than the allocation demands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from libra.exec.pool import Role, Worker
from libra.plan.problem import Allocation, Bucket


@dataclass(frozen=True, slots=True)
class Change:
    """One worker takes another role. `shape` is the engine it is to become; None for a trainer."""

    worker: str
    role: Role
    shape: str | None


def assign(workers: Sequence[Worker], wanted: Allocation) -> tuple[Change, ...]:
    """The changes that turn healthy `workers` into `wanted`, in the order in which they are made: trainers leave before
    their devices are needed, longer engines start before shorter ones, joining the training comes last."""
    shapes = [bucket.shape for bucket in wanted.buckets]
    kept = _kept_engines(workers, wanted)
    may_train = sorted(
        (worker for worker in workers if Role.TRAIN in worker.allowed),
        # Who can only train trains; then who trains already; then whose engine is not needed anyway.
        key=lambda w: (Role.ROLLOUT in w.allowed, w.role is not Role.TRAIN, w.id in kept, w.slot),
    )
    training = may_train[: wanted.replicas]
    if len(training) < wanted.replicas:
        raise ValueError(f"{wanted.replicas} replicas are wanted, but only {len(training)} workers may train")
    generating = [worker for worker in workers if worker not in training]
    missing = Counter({bucket.shape: bucket.engines for bucket in wanted.buckets})
    if len(generating) != missing.total() or any(Role.ROLLOUT not in worker.allowed for worker in generating):
        raise ValueError(f"{missing.total()} engines are wanted, but {len(generating)} workers are left for them")
    moving = []
    for worker in generating:
        if worker.role is Role.ROLLOUT and worker.shape is not None and missing[worker.shape] > 0:
            missing[worker.shape] -= 1
        else:
            moving.append(worker)
    longest_first = [shape for shape in reversed(shapes) for _ in range(missing[shape])]
    moving.sort(key=lambda w: (w.role is not Role.TRAIN, w.role is not Role.IDLE, w.slot))
    starts = [Change(worker.id, Role.ROLLOUT, shape) for worker, shape in zip(moving, longest_first, strict=True)]
    joins = [Change(worker.id, Role.TRAIN, None) for worker in training if worker.role is not Role.TRAIN]
    return (*starts, *joins)


def _kept_engines(workers: Sequence[Worker], wanted: Allocation) -> set[str]:
    """The engines that `wanted` needs as they are; of several, those first that cannot train instead."""
    missing = Counter({bucket.shape: bucket.engines for bucket in wanted.buckets})
    kept = set()
    for worker in sorted(workers, key=lambda w: (Role.TRAIN in w.allowed, -w.slot)):
        if worker.role is Role.ROLLOUT and worker.shape is not None and missing[worker.shape] > 0:
            missing[worker.shape] -= 1
            kept.add(worker.id)
    return kept


def current_allocation(workers: Sequence[Worker], planned: Allocation, longest_context: int) -> Allocation | None:
    """What the healthy workers really do, in the buckets of `planned`; None when nothing trains or nothing generates.

    A bucket without an engine is gone: its range belongs to the next longer one, the last range to whoever is left.
    """
    replicas = sum(worker.role is Role.TRAIN for worker in workers)
    engines = Counter(worker.shape for worker in workers if worker.role is Role.ROLLOUT)
    buckets: list[Bucket] = []
    for bucket in planned.buckets:
        if engines[bucket.shape]:
            above = buckets[-1].up_to if buckets else 0
            buckets.append(Bucket(bucket.shape, engines[bucket.shape], above, bucket.up_to))
    if not replicas or not buckets:
        return None
    last = buckets[-1]
    buckets[-1] = Bucket(last.shape, last.engines, last.above, longest_context)
    return Allocation(replicas, tuple(buckets))


def describe(allocation: Allocation) -> str:
    """For people: `train 2 | short 1 <= 40 | long 1 <= 160`."""
    engines = (f"{bucket.shape} {bucket.engines} <= {bucket.up_to}" for bucket in allocation.buckets)
    return " | ".join([f"train {allocation.replicas}", *engines])
