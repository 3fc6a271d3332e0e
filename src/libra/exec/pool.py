"""Workers and their roles: the role of each, its legal changes, and the allocation that all form together.

Invariant: a role changes only along a legal transition; a transitional role has a deadline. A slot whose process is
gone is `failed`, and idle again at once: another process may start there, until the slot has lost too many. The pool
holds no process and does no I/O: it is the executor's state, which the journal records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from libra.config.run import ClusterConfig
from libra.plan.allocation import Allocation, Bucket
from libra.plan.problem import InfeasiblePlanError
from libra.plan.transition import TRAIN, Device, Duty, Role


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time limit of a transitional role: `seconds`, plus the time limit of `steps` training steps."""

    seconds: float
    steps: int

    def after(self, step_seconds: float) -> float:
        """The limit in seconds, if a step may take `step_seconds`."""
        return self.seconds + self.steps * step_seconds


# Step boundaries at which a replica that joins is given the chance to enter.
JOIN_BOUNDARIES = 20

# A worker that overstays a passing role is failed. A start has 600 s (on a GPU) and draining 30 s, each with 300 s on
# top: what happens in them has limits of its own, and this is the last one. A replica is introduced at the end of one
# step and let in at one of the `JOIN_BOUNDARIES` after it; it leaves at the end of the second.
DEADLINES = {Role.JOINING: Deadline(600.0 + 300.0, 1 + JOIN_BOUNDARIES), Role.DRAINING: Deadline(30.0 + 300.0, 2)}

# A process may die of something that passes, so its slot is used again. After `MOST_LOSSES` losses within an hour it
# stays empty for the rest of the session: another start would not remove their cause. Three starts that hang for their
# full time fit into the hour.
MOST_LOSSES = ClusterConfig().losses_per_hour  # unless the configuration says otherwise
LOSS_WINDOW = 3600.0  # seconds

_LEGAL = {
    Role.IDLE: {Role.JOINING},
    Role.JOINING: {Role.ROLLOUT, Role.TRAIN},
    Role.ROLLOUT: {Role.DRAINING},
    Role.TRAIN: {Role.DRAINING},
    Role.DRAINING: {Role.IDLE},
    Role.FAILED: {Role.IDLE},
}


class IllegalTransitionError(RuntimeError):
    """A role change that is not legal."""


def with_loss(losses: tuple[float, ...], now: float) -> tuple[float, ...]:
    """Times of the recent losses, with one more at `now`."""
    return (*(moment for moment in losses if now - moment <= LOSS_WINDOW), now)


@dataclass(frozen=True, slots=True)
class Worker:
    """One device slot. `allowed` are the working roles it may take; its `most_losses`th loss retires it."""

    id: str
    slot: int
    allowed: frozenset[Role]
    role: Role = Role.IDLE
    shape: str | None = None  # of its engine, in ROLLOUT (and JOINING or DRAINING one)
    since: float = 0.0  # seconds on the caller's clock
    losses: tuple[float, ...] = ()  # when it lost its process, within the last `LOSS_WINDOW`
    node_lost: bool = False  # and may come back
    most_losses: int = MOST_LOSSES
    lent: str | None = None  # shape of its engine, where the device serves users, too

    @property
    def duty(self) -> Duty:
        """The worker's role, with the shape of an engine in service. A transitional role does no work yet, or no
        more."""
        return Duty(self.role, self.shape if self.role is Role.ROLLOUT else None)

    @property
    def device(self) -> Device:
        """The device of the worker, as a planner's input."""
        return Device(self.id, self.slot, self.allowed, self.duty, self.lent)

    @property
    def retired(self) -> bool:
        """Whether the slot has lost too many processes."""
        return len(self.losses) >= self.most_losses

    def become(self, role: Role, now: float, shape: str | None = None) -> Worker:
        if role is not Role.FAILED and role not in _LEGAL[self.role]:
            raise IllegalTransitionError(
                f"worker {self.id}: {self.role} -> {role}; legal are {', '.join(sorted(_LEGAL[self.role]))}"
            )
        if role in (Role.ROLLOUT, Role.TRAIN) and role not in self.allowed:
            raise IllegalTransitionError(f"worker {self.id} may not {role}; it may {', '.join(sorted(self.allowed))}")
        if self.role is Role.FAILED and role is not Role.FAILED and self.retired:
            raise IllegalTransitionError(
                f"worker {self.id} lost {len(self.losses)} processes within {LOSS_WINDOW:.0f} s: it stays {self.role}"
            )
        return replace(self, role=role, since=now, shape=shape)

    def lose(self, now: float) -> Worker:
        """The worker without its process, which counts as a loss."""
        return replace(self.become(Role.FAILED, now), losses=with_loss(self.losses, now))


class WorkerPool:
    """All workers of a run, by id."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = {worker.id: worker for worker in workers}

    def __getitem__(self, worker: str) -> Worker:
        return self._workers[worker]

    def all(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    def healthy(self) -> tuple[Worker, ...]:
        """Workers that have a duty, or could have one."""
        return tuple(
            worker for worker in self._workers.values() if worker.role is not Role.FAILED and not worker.node_lost
        )

    def become(self, worker: str, role: Role, now: float, shape: str | None = None) -> Worker:
        self._workers[worker] = self._workers[worker].become(role, now, shape)
        return self._workers[worker]

    def lose(self, worker: str, now: float) -> Worker:
        self._workers[worker] = self._workers[worker].lose(now)
        return self._workers[worker]

    def lent_shapes(self) -> frozenset[str]:
        """Shapes of the engines on devices that serve users, present or not."""
        return frozenset(worker.lent for worker in self._workers.values() if worker.lent is not None)

    def devices(self) -> tuple[Device, ...]:
        """Healthy workers, as a planner's input."""
        return tuple(worker.device for worker in self.healthy())

    def set_node_lost(self, worker: str, lost: bool) -> Worker:
        self._workers[worker] = replace(self._workers[worker], node_lost=lost)
        return self._workers[worker]

    def overdue(self, now: float, step_seconds: float) -> tuple[Worker, ...]:
        """Workers that exceed the time limit of a transitional role; a training step may take `step_seconds`."""
        return tuple(
            worker
            for worker in self._workers.values()
            if worker.role in DEADLINES and now - worker.since > DEADLINES[worker.role].after(step_seconds)
        )


def make_pool(
    core: int, hybrid: int, rollout: int, most_losses: int = MOST_LOSSES, *, lent: int = 0, lent_shape: str = ""
) -> WorkerPool:
    """Core trainers first, then hybrids, then engines, those on lent devices last; slot numbers in that order."""
    kinds = [
        ("core", core, {Role.TRAIN}),
        ("hybrid", hybrid, {Role.TRAIN, Role.ROLLOUT}),
        ("rollout", rollout, {Role.ROLLOUT}),
        ("lent", lent, {Role.ROLLOUT}),
    ]
    named = [
        (f"{kind}-{number}", frozenset(allowed), lent_shape if kind == "lent" else None)
        for kind, count, allowed in kinds
        for number in range(count)
    ]
    return WorkerPool(
        [
            Worker(name, slot, allowed, most_losses=most_losses, lent=shape)
            for slot, (name, allowed, shape) in enumerate(named)
        ]
    )


def bucket_limits(plans: Iterable[Allocation]) -> list[tuple[str, int]]:
    """Shape and longest context of every bucket, plan by plan."""
    return [(bucket.shape, bucket.up_to) for plan in plans for bucket in plan.buckets]


def current_allocation(
    duties: Iterable[Duty], limits: Iterable[tuple[str, int]], longest_context: int
) -> Allocation | None:
    """Allocation of workers with these duties, in buckets with these `limits`; None when none trains or none generates.

    The first limit of a shape counts: between two allocations, engines of both run. A bucket without an engine
    disappears: its range joins the next longer one, the last range the longest remaining one. Of two buckets that end
    at the same length the first one stays.
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
    buckets[-1] = replace(buckets[-1], up_to=longest_context)
    return Allocation(doing[TRAIN], tuple(buckets))


def fitted(allocation: Allocation, workers: Sequence[Worker], lent_shapes: Collection[str] = ()) -> Allocation:
    """`allocation` fitted to the present workers. Missing workers come off the longest bucket first, which keeps one
    engine, and then off the shortest ones; surplus workers join the longest one. Engines of `lent_shapes` are those on
    the present lent devices. Raises `InfeasiblePlanError` if no worker is left to generate, or to train."""
    lent = Counter(worker.lent for worker in workers if worker.lent is not None)
    own = len(workers) - lent.total()
    core = sum(worker.allowed == {Role.TRAIN} for worker in workers)
    may_train = sum(Role.TRAIN in worker.allowed for worker in workers)
    replicas = max(core, min(allocation.replicas, may_train, own - 1))
    engines = own - replicas
    if engines < 1:
        raise InfeasiblePlanError("no device is left for a rollout engine")
    if replicas < 1:
        raise InfeasiblePlanError("no device is left for training")
    wanted = sum(bucket.engines for bucket in allocation.buckets if bucket.shape not in lent_shapes)
    buckets: list[Bucket] = []
    for bucket in reversed(allocation.buckets):
        if bucket.shape in lent_shapes:
            count = lent[bucket.shape]
        else:
            count = min(bucket.engines, engines) if buckets else max(1, engines - (wanted - bucket.engines))
            engines -= count
        if count:
            buckets.insert(0, replace(bucket, engines=count))
    ends = (0, *(bucket.up_to for bucket in buckets))
    return Allocation(
        replicas, tuple(replace(bucket, above=above) for above, bucket in zip(ends, buckets, strict=False))
    )
