"""Workers, their roles, the legal role changes, and the allocation that all workers form together.

Invariant: a role changes only along a legal transition, and a transitional role has a deadline. A slot that loses its
process becomes `failed`, then idle at once. Another process may start there, until the slot has lost too many. The pool
is the executor's state, which the journal records. It has no processes and does no I/O.
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
    """Time limit of a transitional role: `seconds`, plus the time of `steps` training steps."""

    seconds: float
    steps: int

    def after(self, step_seconds: float) -> float:
        """The limit in seconds, if a step may take `step_seconds`."""
        return self.seconds + self.steps * step_seconds


# Step boundaries at which a joining replica may enter.
JOIN_BOUNDARIES = 20

# A worker that exceeds the limit of a transitional role is failed. The limits are 600 s for a start (on a GPU) and 30 s
# for draining, plus 300 s each, since the operations inside have their own, shorter limits. A replica is announced at
# the end of one step, and enters at one of the next `JOIN_BOUNDARIES` step boundaries. It leaves at the end of the
# second step.
DEADLINES = {Role.JOINING: Deadline(600.0 + 300.0, 1 + JOIN_BOUNDARIES), Role.DRAINING: Deadline(30.0 + 300.0, 2)}

# A process may die of a passing cause, so its slot is used again. After `MOST_LOSSES` losses within an hour, the slot
# stays empty for the rest of the session, since another start would not remove the cause. Three starts that hang until
# their deadline fit into the hour.
MOST_LOSSES = ClusterConfig().losses_per_hour  # default of the configuration
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
    """Times of the recent losses, with a new loss at `now`."""
    return (*(moment for moment in losses if now - moment <= LOSS_WINDOW), now)


@dataclass(frozen=True, slots=True)
class Worker:
    """One device slot. `allowed` are the roles that it may take; loss number `most_losses` retires it."""

    id: str
    slot: int
    allowed: frozenset[Role]
    role: Role = Role.IDLE
    shape: str | None = None  # shape of its engine in ROLLOUT, and while an engine joins or drains
    since: float = 0.0  # seconds on the caller's clock
    losses: tuple[float, ...] = ()  # times of lost processes within the last `LOSS_WINDOW`
    node_lost: bool = False  # whether its node is lost, which may return
    most_losses: int = MOST_LOSSES
    lent: str | None = None  # shape of its engine, if its device also serves users

    @property
    def duty(self) -> Duty:
        """The worker's role, and the shape of its engine while in service. A worker in a transitional role does no
        work.
        """
        return Duty(self.role, self.shape if self.role is Role.ROLLOUT else None)

    @property
    def device(self) -> Device:
        """The worker's device, as input of the planner."""
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
        """Count the loss of the worker's process; returns the worker after it."""
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
        """Workers that have a duty, or could get one."""
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
        """Shapes of the engines on devices that serve users, whether present or not."""
        return frozenset(worker.lent for worker in self._workers.values() if worker.lent is not None)

    def devices(self) -> tuple[Device, ...]:
        """Devices of the healthy workers, as input of the planner."""
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
    """Make the pool: core trainers, hybrids, engines, and engines on lent devices last; slot numbers in that order."""
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
    """Allocation of workers with these duties, in buckets with these `limits`; None if no worker trains or none
    generates.

    Between two allocations, engines of both run, and the first limit of a shape counts. A bucket without an engine is
    removed, and the next longer bucket takes its range. If there is no longer bucket, the longest remaining bucket
    does. Of two buckets with the same limit, the first stays.
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
    """`allocation` fitted to the present workers. Missing workers are taken from the longest bucket, which keeps one
    engine, and then from the shortest buckets. Surplus workers join the longest bucket. Each present lent device has an
    engine with one of the `lent_shapes`. Raises `InfeasiblePlanError` if no worker is left to generate, or to train.
    """
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
