"""Workers and their roles: what each one is, and what it may become.

Invariant: a role changes only along a legal transition; a passing role has a deadline. A slot whose process is gone is
`failed`, and idle again at once: another process may be started there, until the slot has lost too many. The pool holds
no process and does no I/O: it is the truth that the mover keeps and the journal records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libra.backends.grpo.joining import BOUNDARIES
from libra.config.run import ClusterConfig
from libra.exec.losses import LOSS_WINDOW, with_loss
from libra.records.roles import Role as Role


@dataclass(frozen=True, slots=True)
class Deadline:
    """Of a passing role: so many seconds, and as long as so many training steps may take."""

    seconds: float
    steps: int

    def after(self, step_seconds: float) -> float:
        """Seconds, where a step may take `step_seconds`."""
        return self.seconds + self.steps * step_seconds


# A worker that overstays a passing role is failed. A start has 120 s and draining 30 s, and either 300 s on top: what
# happens in them has limits of its own, and this is the last one. A replica is introduced at the end of one step and
# let in at one of the `BOUNDARIES` after it; it leaves at the end of the second.
DEADLINES = {Role.JOINING: Deadline(120.0 + 300.0, 1 + BOUNDARIES), Role.DRAINING: Deadline(30.0 + 300.0, 2)}

# A process may die of something that passes, so its slot is used again. With so many losses within an hour it stays
# empty for the rest of the sitting.
MOST_LOSSES = ClusterConfig().losses_per_hour  # unless the configuration says otherwise

_LEGAL = {
    Role.IDLE: {Role.JOINING},
    Role.JOINING: {Role.ROLLOUT, Role.TRAIN},
    Role.ROLLOUT: {Role.DRAINING},
    Role.TRAIN: {Role.DRAINING},
    Role.DRAINING: {Role.IDLE},
    Role.FAILED: {Role.IDLE},
}


class IllegalTransitionError(RuntimeError):
    """A role change that the state machine does not know."""


@dataclass(frozen=True, slots=True)
class Duty:
    """What a worker does while nothing about it changes. `shape` is that of its engine, in ROLLOUT."""

    role: Role
    shape: str | None = None

    def __post_init__(self) -> None:
        if (self.role is Role.ROLLOUT) != (self.shape is not None):
            raise ValueError(f"a duty of {self.role} with shape {self.shape}: an engine has a shape, nobody else has")

    def __str__(self) -> str:
        return f"{self.role}:{self.shape}" if self.shape is not None else str(self.role)


IDLE, TRAIN = Duty(Role.IDLE), Duty(Role.TRAIN)


@dataclass(frozen=True, slots=True)
class Worker:
    """One device slot. `allowed` are the working roles it may take; with its `most_losses`th loss it is retired."""

    id: str
    slot: int
    allowed: frozenset[Role]
    role: Role = Role.IDLE
    shape: str | None = None  # of its engine, in ROLLOUT (and JOINING or DRAINING one)
    since: float = 0.0  # seconds on the caller's clock
    losses: tuple[float, ...] = ()  # when it lost its process, within the last `LOSS_WINDOW`
    away: bool = False  # there is no device: its node is lost, and may come back
    most_losses: int = MOST_LOSSES

    @property
    def duty(self) -> Duty:
        """What it does; in a passing role that is nothing yet, or no more."""
        return Duty(self.role, self.shape if self.role is Role.ROLLOUT else None)

    @property
    def retired(self) -> bool:
        """Its slot has lost too many processes."""
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
        """Its process is gone, and that counts."""
        return replace(self.become(Role.FAILED, now), losses=with_loss(self.losses, now))


class Pool:
    """All workers of a run, by id."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = {worker.id: worker for worker in workers}

    def __getitem__(self, worker: str) -> Worker:
        return self._workers[worker]

    def all(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    def healthy(self) -> tuple[Worker, ...]:
        """Workers that do something, or could."""
        return tuple(worker for worker in self._workers.values() if worker.role is not Role.FAILED and not worker.away)

    def become(self, worker: str, role: Role, now: float, shape: str | None = None) -> Worker:
        self._workers[worker] = self._workers[worker].become(role, now, shape)
        return self._workers[worker]

    def lose(self, worker: str, now: float) -> Worker:
        self._workers[worker] = self._workers[worker].lose(now)
        return self._workers[worker]

    def set_away(self, worker: str, away: bool) -> Worker:
        self._workers[worker] = replace(self._workers[worker], away=away)
        return self._workers[worker]

    def overdue(self, now: float, step_seconds: float) -> tuple[Worker, ...]:
        """Workers that overstay a passing role, where a training step may take `step_seconds`."""
        return tuple(
            worker
            for worker in self._workers.values()
            if worker.role in DEADLINES and now - worker.since > DEADLINES[worker.role].after(step_seconds)
        )


def make_pool(core: int, hybrid: int, rollout: int, most_losses: int = MOST_LOSSES) -> Pool:
    """Core trainers first, then hybrids, then engines; slot numbers in that order."""
    kinds = (
        [("core", frozenset({Role.TRAIN}))] * core
        + [("hybrid", frozenset({Role.TRAIN, Role.ROLLOUT}))] * hybrid
        + [("rollout", frozenset({Role.ROLLOUT}))] * rollout
    )
    counts: dict[str, int] = {}
    workers = []
    for slot, (kind, allowed) in enumerate(kinds):
        counts[kind] = counts.get(kind, -1) + 1
        workers.append(Worker(f"{kind}-{counts[kind]}", slot, allowed, most_losses=most_losses))
    return Pool(workers)
