"""Rules that ignore buckets: round robin, least loaded, the less loaded of two, and shortest remaining first.

Invariant: every rule sends a turn only to an instance with room for its context and one more turn.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from libra.route.live import Live, StickyPolicy
from libra.route.policy import Fleet, Instance, Placement, ToolReturn, TurnRequest
from libra.route.tool_state import ToolState, payload_class, remainders
from libra.trajectory import Trajectory

# Samples: a plain mean up to this number, then an exponential mean in which each new sample weighs 1 / MEMORY.
MEMORY = 256
MAX_ROWS = 4_096


@dataclass(slots=True)
class _Home(Live):
    position: int = 0  # last known index of the instance in the fleet, tried first to avoid a search

    def position_in(self, instances: Sequence[Instance]) -> int | None:
        if self.position < len(instances) and instances[self.position].id == self.instance:
            return self.position
        return next((position for position, it in enumerate(instances) if it.id == self.instance), None)


class Baseline(StickyPolicy[_Home]):
    """Base of the rules in this module: eligibility and prefix affinity. With `sticky`, a later turn goes to the
    instance of the previous turn if this instance is present, has the prefix and is eligible. `_choose` places all
    other turns.
    """

    BUCKETS = False

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        return self._serve(self._live.setdefault(request.trajectory_id, _Home()), request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        return self._serve(self._placed(request), request, fleet)

    def _row(self, live: _Home) -> tuple[str | None, bool]:
        return live.instance, live.prefix_there

    def _of_row(self, instance: str | None, prefix_there: bool) -> _Home:
        return _Home(instance, prefix_there)

    def _serve(self, home: _Home, request: TurnRequest, fleet: Fleet) -> Placement | None:
        needed = request.context_tokens + fleet.turn_tokens
        instances = fleet.instances
        position = home.position_in(instances) if self._sticky and home.prefix_there else None
        reason = "holds the prefix"
        if position is None or instances[position].capacity_tokens < needed:
            position, reason = self._choose(instances, needed), self.REASON
        if position is None:
            return None
        home.position = position
        return self._goes(home, instances[position], reason)

    @abstractmethod
    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        """Position of an instance with room for `needed` tokens; None if there is none."""


class RoundRobin(Baseline):
    """The next instance in turn that has room for the turn. O(1) if all instances have room."""

    NAME = "round-robin"
    REASON = "next in turn"

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._next = 0  # position in the fleet, which may have shrunk since

    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        count = len(instances)
        for turn in range(self._next, self._next + count):
            position = turn % count
            if needed <= instances[position].capacity_tokens:
                self._next = (position + 1) % count
                return position
        return None

    def _rule(self) -> int:
        return self._next

    def _resume_rule(self, rule: int) -> None:
        self._next = rule


class LeastLoaded(Baseline):
    """The least loaded instance with room for the turn, ties by id. O(instances)."""

    NAME = "least-loaded"
    REASON = "least loaded"

    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        eligible = _eligible(instances, needed)
        return min(eligible, key=lambda position: _load(instances[position]), default=None)


class TwoChoices(Baseline):
    """The less loaded of two random instances with room for the turn, ties by id.

    With n turns on n instances, the fullest instance has ln ln n / ln 2 + O(1) turns, exponentially fewer than with one
    draw (Mitzenmacher 2001, "The power of two choices in randomized load balancing"). O(1) if all instances have room.
    If a drawn instance has no room, both are drawn again from the eligible instances, so every eligible pair is equally
    likely.
    """

    NAME = "two-choices"
    REASON = "less loaded of two drawn"

    def __init__(self, *, sticky: bool = True, seed: int = 0) -> None:
        super().__init__(sticky=sticky)
        self._random = Random(seed)

    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        drawn = self._draw(range(len(instances)))
        for position in drawn:
            if instances[position].capacity_tokens < needed:
                drawn = self._draw(_eligible(instances, needed))
                break
        if len(drawn) < 2:
            return drawn[0] if drawn else None
        first, second = drawn
        return first if _load(instances[first]) < _load(instances[second]) else second

    def _draw(self, positions: Sequence[int]) -> Sequence[int]:
        """Two different random positions; all positions if there are at most two."""
        count = len(positions)
        if count <= 2:
            return positions
        # Of the generator's methods, only `random` returns the same numbers in every version of Python.
        first, second = int(self._random.random() * count), int(self._random.random() * (count - 1))
        return positions[first], positions[second + (second >= first)]

    def _rule(self) -> list[Any]:
        version, numbers, gauss = self._random.getstate()
        return [version, list(numbers), gauss]

    def _resume_rule(self, rule: list[Any]) -> None:
        version, numbers, gauss = rule
        self._random.setstate((version, tuple(numbers), gauss))


Row = tuple[str | None, ToolState | None]  # task (None: every task) and last tool state (None: no return yet)


class RemainingTable:
    """Mean remaining tokens, generated and returned together, by task and last tool state.

    Without samples of a task in a state, the mean is over all tasks in this state. Without samples in this state, the
    mean is over all samples. The least recently updated rows are evicted.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        if max_rows < 2:
            raise ValueError(f"max_rows is {max_rows}; a sample needs 2 rows, so give 2 or more")
        self._max_rows = max_rows
        self._everything = (0, 0.0)  # number of samples, up to MEMORY, and their mean
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
        """Mean remaining tokens; None before any sample."""
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


class ShortestRemaining(LeastLoaded):
    """The `shortest-remaining-first` policy: the least loaded instance, with expected remaining tokens as priority.

    The policy minimises the mean completion time if the expectation is right, at the cost of the longest trajectories.
    Before any trajectory has finished, all turns have the same priority.
    """

    NAME = "shortest-remaining-first"

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._table = RemainingTable()
        self._states: dict[str, ToolState] = {}  # last tool state of live trajectories that have one

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        return self._ordered(request, super().place(request, fleet))

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        placement = super().tool_returned(request, returned, fleet)
        self._states[request.trajectory_id] = ToolState(
            returned.tool, payload_class(returned.returned_tokens), returned.status
        )
        return self._ordered(request, placement)

    def finished(self, trajectory: Trajectory) -> None:
        for _, state, remaining in remainders(trajectory):
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

    def _resume_rule(self, rule: dict[str, Any]) -> None:
        self._table.resume(rule["table"])
        self._states = {id: ToolState(*state) for id, state in rule["states"]}


def _eligible(instances: Sequence[Instance], needed: int) -> list[int]:
    return [position for position, instance in enumerate(instances) if needed <= instance.capacity_tokens]


def _load(instance: Instance) -> tuple[int, str]:
    return instance.load_tokens, instance.id
