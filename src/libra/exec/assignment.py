"""From an allocation (so many of each) to workers (this one, that), and back.

Invariant: every worker gets a duty that it may take, no more workers move than have to, and after every move of the
list the run can go on: see `obstacle`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from libra.exec.moves import Move, obstacle
from libra.exec.workers import IDLE, TRAIN, Duty, Role, Worker
from libra.plan.problem import Allocation, Bucket, InfeasiblePlanError


def assign(workers: Sequence[Worker], wanted: Allocation, longest: Collection[str]) -> tuple[Move, ...]:
    """The moves that turn healthy `workers` into `wanted`, in the order in which they are made: idle slots start
    first, since that takes nobody's device and so is made even where a later move cannot be; then trainers leave;
    longer engines start before shorter ones, and joining the training comes last.

    `longest` are the shapes that hold the longest contexts. Raises ValueError where the workers cannot be that, or
    nobody would hold them."""
    if not any(bucket.shape in longest for bucket in wanted.buckets):
        raise ValueError(f"no engine of {describe(wanted)} holds the longest contexts; {', '.join(longest)} would")
    kept = _kept_engines(workers, wanted)
    may_train = sorted(
        (worker for worker in workers if Role.TRAIN in worker.allowed),
        # Who can only train trains; then who trains already; then whose engine is not needed anyway, first of all one
        # for the longest contexts: where another takes its place, that one can start before this one ends.
        key=lambda w: (
            Role.ROLLOUT in w.allowed,
            w.role is not Role.TRAIN,
            w.id in kept,
            w.shape not in longest,
            w.slot,
        ),
    )
    training = may_train[: wanted.replicas]
    if len(training) < wanted.replicas:
        raise ValueError(f"{wanted.replicas} replicas are wanted, but only {len(training)} workers may train")
    generating = [worker for worker in workers if worker not in training]
    missing = _engines(wanted)
    if len(generating) != missing.total() or any(Role.ROLLOUT not in worker.allowed for worker in generating):
        raise ValueError(f"{missing.total()} engines are wanted, but {len(generating)} workers are left for them")
    moving = []
    for worker in generating:
        if worker.role is Role.ROLLOUT and worker.shape is not None and missing[worker.shape] > 0:
            missing[worker.shape] -= 1
        else:
            moving.append(worker)
    longest_first = [bucket.shape for bucket in reversed(wanted.buckets) for _ in range(missing[bucket.shape])]
    moving.sort(key=lambda w: (w.role is not Role.IDLE, w.role is not Role.TRAIN, w.shape in longest, w.slot))
    starts = [
        Move(worker.id, worker.duty, Duty(Role.ROLLOUT, shape))
        for worker, shape in zip(moving, longest_first, strict=True)
    ]
    joins = [Move(worker.id, worker.duty, TRAIN) for worker in training if worker.role is not Role.TRAIN]
    moves = sorted([*starts, *joins], key=lambda move: move.before != IDLE)
    return _without_a_gap(workers, moves, longest)


def _without_a_gap(workers: Sequence[Worker], moves: Sequence[Move], longest: Collection[str]) -> tuple[Move, ...]:
    """Where the only engine for the longest contexts would start again in another shape that holds them, another engine
    takes that shape first: one move more, and no time without such an engine."""
    state = {worker.id: worker for worker in workers}
    found: list[Move] = []
    for index, planned in enumerate(moves):
        move = replace(planned, before=state[planned.worker].duty)
        steps = [move]
        if obstacle([*state.values()], move, longest):
            moves_later = {later.worker for later in moves[index + 1 :]}
            engines = [w for w in state.values() if w.role is Role.ROLLOUT and w.id != move.worker]
            stands_in = min(engines, key=lambda w: (w.id in moves_later, w.slot))
            # The two change places, unless the other one is wanted elsewhere anyway.
            instead = move.after if stands_in.id in moves_later else stands_in.duty
            steps = [Move(stands_in.id, stands_in.duty, move.after), replace(move, after=instead)]
        for step in steps:
            state[step.worker] = replace(state[step.worker], role=step.after.role, shape=step.after.shape)
        found += steps
    return tuple(found)


def _kept_engines(workers: Sequence[Worker], wanted: Allocation) -> set[str]:
    """The engines that `wanted` needs as they are; of several, those first that cannot train instead."""
    missing = _engines(wanted)
    kept = set()
    for worker in sorted(workers, key=lambda w: (Role.TRAIN in w.allowed, -w.slot)):
        if worker.role is Role.ROLLOUT and worker.shape is not None and missing[worker.shape] > 0:
            missing[worker.shape] -= 1
            kept.add(worker.id)
    return kept


def _engines(wanted: Allocation) -> Counter[str]:
    return Counter({bucket.shape: bucket.engines for bucket in wanted.buckets})


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


def describe(allocation: Allocation) -> str:
    """For people: `train 2 | short 1 <= 40 | long 1 <= 160`."""
    engines = (f"{bucket.shape} {bucket.engines} <= {bucket.up_to}" for bucket in allocation.buckets)
    return " | ".join([f"train {allocation.replicas}", *engines])
