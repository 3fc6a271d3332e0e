"""Workers and their roles: what each one is, and what it may become.

Invariant: a role changes only along a legal transition, each with a deadline; `failed` is final. The pool holds no
process and does no I/O: it is the truth that the executor keeps and the journal records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Role(StrEnum):
    IDLE = "idle"
    JOINING = "joining"  # a process is starting, or entering the gradient exchange
    ROLLOUT = "rollout"
    TRAIN = "train"
    DRAINING = "draining"  # finishes what runs, takes nothing new
    FAILED = "failed"


# Seconds a worker may stay in a passing role; it is failed when it overstays.
DEADLINES = {Role.JOINING: 120.0, Role.DRAINING: 30.0}

_LEGAL = {
    Role.IDLE: {Role.JOINING},
    Role.JOINING: {Role.ROLLOUT, Role.TRAIN, Role.IDLE},
    Role.ROLLOUT: {Role.DRAINING},
    Role.TRAIN: {Role.DRAINING},
    Role.DRAINING: {Role.IDLE},
    Role.FAILED: set(),
}


class IllegalTransitionError(RuntimeError):
    """A role change that the state machine does not know."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One device slot. `allowed` are the working roles it may take."""

    id: str
    slot: int
    allowed: frozenset[Role]
    role: Role = Role.IDLE
    shape: str | None = None  # of its engine, in ROLLOUT (and JOINING or DRAINING one)
    since: float = 0.0  # seconds on the caller's clock

    def become(self, role: Role, now: float, shape: str | None = None) -> Worker:
        if role is not Role.FAILED and role not in _LEGAL[self.role]:
            raise IllegalTransitionError(
                f"worker {self.id}: {self.role} -> {role}; legal are {', '.join(sorted(_LEGAL[self.role])) or 'none'}"
            )
        if role in (Role.ROLLOUT, Role.TRAIN) and role not in self.allowed:
            raise IllegalTransitionError(f"worker {self.id} may not {role}; it may {', '.join(sorted(self.allowed))}")
        return replace(self, role=role, since=now, shape=shape)


class Pool:
    """All workers of a run, by id."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = {worker.id: worker for worker in workers}

    def __getitem__(self, worker: str) -> Worker:
        return self._workers[worker]

    def all(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    def become(self, worker: str, role: Role, now: float, shape: str | None = None) -> Worker:
        self._workers[worker] = self._workers[worker].become(role, now, shape)
        return self._workers[worker]

    def overdue(self, now: float) -> tuple[Worker, ...]:
        """Workers that overstay a passing role."""
        return tuple(
            worker
            for worker in self._workers.values()
            if worker.role in DEADLINES and now - worker.since > DEADLINES[worker.role]
        )


def make_pool(core: int, hybrid: int, rollout: int) -> Pool:
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
        workers.append(Worker(f"{kind}-{counts[kind]}", slot, allowed))
    return Pool(workers)
