"""A gateway's recent decisions, tokens per engine, and lengths of ended trajectories.

Invariant: memory is bounded, since only the latest entries of each kind are kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from libra.config.listeners import TRAJECTORIES
from libra.route.policy import Placement
from libra.serve.gateway.upstreams import Upstream
from libra.serve.gateway.usage import Usage
from libra.serve.gateway.watcher import End, RoutedTurn, Watcher
from libra.trajectory import Trajectory

DECISIONS, ENDED = 40, 512  # entries that are kept


@dataclass(frozen=True, slots=True)
class RecentDecision:
    """A turn that the policy sent to an engine at wall-clock time `at`."""

    at: float
    trajectory: str
    context_tokens: int
    placement: Placement


class Recent(Watcher):
    """Keeps the events that it watches; `clock` returns wall-clock seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.decisions: deque[RecentDecision] = deque(maxlen=DECISIONS)
        self.ended_trajectories: deque[tuple[float, Trajectory]] = deque(maxlen=ENDED)  # (time of the end, trajectory)
        self.generated: dict[str, int] = {}  # generated tokens by engine
        self.decided = 0  # decisions since the start
        self.closings = 0  # trajectories that ended since the start
        self._clock = clock
        self._engines: OrderedDict[str, str] = OrderedDict()  # engine of the latest turn, by trajectory in progress
        self._open: dict[RoutedTurn, str] = {}  # engine of each turn in progress; empty before its placement

    @property
    def turns(self) -> int:
        """Number of turns that have arrived and are not over."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Number of turns that have arrived and are not placed yet."""
        return sum(not engine for engine in self._open.values())

    def engine_of(self, trajectory: str) -> str:
        """The engine of the trajectory's latest turn; empty before its first placement."""
        return self._engines.get(trajectory, "")

    def begun(self, turn: RoutedTurn) -> None:
        self._open[turn] = ""

    def placed(self, turn: RoutedTurn, engine: Upstream, placement: Placement) -> None:
        id, needed = turn.needed.trajectory_id, turn.needed
        self.decided += 1
        self.decisions.append(RecentDecision(self._clock(), id, needed.context_tokens, placement))
        self._open[turn] = self._engines[id] = engine.id
        if len(self._engines) > TRAJECTORIES:
            self._engines.popitem(last=False)

    def ended(self, turn: RoutedTurn, usage: Usage | None, trouble: str) -> None:
        engine = self._open.pop(turn, "")
        if usage is not None:
            self.generated[engine] = self.generated.get(engine, 0) + usage[1]

    def closed(self, id: str, end: End, trajectory: Trajectory | None) -> None:
        self._engines.pop(id, None)
        if trajectory is not None:
            self.closings += 1
            self.ended_trajectories.append((self._clock(), trajectory))
