"""One worker takes another duty, and whether the pool can do without it meanwhile.

Invariant: a move has one worker, so it frees a device and uses that device; it never needs another one. While it is
under way a core replica trains and, as long as several engines run, one of the others holds the longest contexts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from libra.exec.workers import Duty, Role, Worker


@dataclass(frozen=True, slots=True)
class Move:
    """`before` and `after` are what the worker does without the move, and with it."""

    worker: str
    before: Duty
    after: Duty

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}"


def obstacle(workers: Sequence[Worker], move: Move, longest: Collection[str]) -> str | None:
    """Why the move may not be made now; None if it may. `longest` are the shapes that hold the longest contexts.

    A pool that is short of something already may do what does not make it shorter: that is how it recovers.
    """
    others = [worker for worker in workers if worker.id != move.worker]
    cores = [worker.id for worker in workers if worker.role is Role.TRAIN and worker.allowed == {Role.TRAIN}]
    if cores == [move.worker]:
        return f"{move.worker} is the last core replica"
    if move.before.shape not in longest or any(_holds(worker, longest) for worker in others):
        return None
    if move.after.shape not in longest:
        return f"{move.worker} is the last engine for the longest contexts"
    if any(worker.role is Role.ROLLOUT for worker in others):
        return f"no other engine holds the longest contexts while {move.worker} starts again"
    return None


def _holds(worker: Worker, longest: Collection[str]) -> bool:
    return worker.role is Role.ROLLOUT and worker.shape in longest
