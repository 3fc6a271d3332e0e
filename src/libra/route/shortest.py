"""Shortest remaining first: serves first what is expected to be over soonest.

Invariant: where a turn goes is decided as by least loaded; only its priority depends on what was learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from libra.route.baselines import LeastLoaded
from libra.route.causal_tree import ToolState, payload_class
from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest
from libra.trajectory import Trajectory

MEMORY = 256  # samples: a mean over so many, and from then on exponentially forgotten at that rate
MAX_ROWS = 4_096

Row = tuple[str | None, ToolState | None]  # task (None: every task) and last tool state (None: no return yet)


class RemainingTable:
    """Mean remaining tokens by task and last tool state, generated and returned together.

    A task or state that was never seen is answered for by all tasks with that state, or else by all there is. The rows
    least recently updated are let go of.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        if max_rows < 2:
            raise ValueError(f"max_rows is {max_rows}; a sample takes 2, give 2 or more")
        self._max_rows = max_rows
        self._everything = (0, 0.0)  # samples, up to MEMORY, and their mean
        self._rows: dict[Row, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, task: str, state: ToolState | None, remaining: int) -> None:
        self._everything = _moved(self._everything, remaining)
        for row in ((None, state), (task, state)):
            before = self._rows.pop(row, (0, 0.0))
            if len(self._rows) == self._max_rows:
                del self._rows[next(iter(self._rows))]
            self._rows[row] = _moved(before, remaining)

    def mean(self, task: str, state: ToolState | None) -> float | None:
        """None before any sample."""
        for row in ((task, state), (None, state)):
            if row in self._rows:
                return self._rows[row][1]
        return self._everything[1] if self._everything[0] else None

    def snapshot(self) -> list[list[Any]]:
        rows = [[task, state and list(state), *mean] for (task, state), mean in self._rows.items()]
        return [list(self._everything), *rows]

    def resume(self, snapshot: list[list[Any]]) -> None:
        (count, mean), *rows = snapshot
        self._everything = count, mean
        self._rows = {(task, state and ToolState(*state)): (n, mean) for task, state, n, mean in rows}


def _moved(before: tuple[int, float], sample: int) -> tuple[int, float]:
    count = min(before[0] + 1, MEMORY)
    return count, before[1] + (sample - before[1]) / count


def remainders(trajectory: Trajectory) -> Iterator[tuple[ToolState | None, int]]:
    """The tokens generated and returned from the start on, and from each tool return on, with its state."""
    remaining = sum(turn.generated_tokens + turn.returned_tokens for turn in trajectory.turns)
    yield None, remaining
    for turn in trajectory.turns:
        remaining -= turn.generated_tokens + turn.returned_tokens
        if turn.tool is not None and turn.status is not None:
            yield ToolState(turn.tool, payload_class(turn.returned_tokens), turn.status), remaining


class ShortestRemaining(LeastLoaded):
    """The `shortest-remaining-first` policy: the least loaded instance, and expected remaining tokens as priority.

    It minimises the mean completion time where the expectation is right, and lets the longest wait. Buckets are
    ignored. Before any trajectory has finished, all turns have the same priority.
    """

    NAME = "shortest-remaining-first"

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._table = RemainingTable()
        self._states: dict[str, ToolState] = {}  # last tool state of live trajectories that had one

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        return self._ordered(request, super().place(request, fleet))

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        placement = super().tool_returned(request, returned, fleet)
        self._states[request.trajectory_id] = ToolState(
            returned.tool, payload_class(returned.returned_tokens), returned.status
        )
        return self._ordered(request, placement)

    def finished(self, trajectory: Trajectory) -> None:
        if not trajectory.finished:
            raise ValueError(
                f"trajectory {trajectory.id!r} is unfinished, so its remainders are unknown: forget it instead"
            )
        for state, remaining in remainders(trajectory):
            self._table.add(trajectory.task, state, remaining)
        super().finished(trajectory)

    def forget(self, trajectory_id: str) -> None:
        self._states.pop(trajectory_id, None)
        super().forget(trajectory_id)

    def _ordered(self, request: TurnRequest, placement: Placement | None) -> Placement | None:
        if placement is None:
            return None
        remaining = self._table.mean(request.task, self._states.get(request.trajectory_id))
        return placement if remaining is None else replace(placement, priority=round(remaining))

    def _rule(self) -> dict[str, Any]:
        return {
            "table": self._table.snapshot(),
            "states": [[id, list(state)] for id, state in self._states.items()],
        }

    def _resume(self, rule: dict[str, Any]) -> None:
        self._table.resume(rule["table"])
        self._states = {id: ToolState(*state) for id, state in rule["states"]}
