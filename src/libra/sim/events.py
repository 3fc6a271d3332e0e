"""What happens in a simulated cluster, in one total order: by tick, then by kind, then by number.

Invariant: no two events have the same kind and number at one tick, but ends of plans, which are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from heapq import heappush

from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Request
from libra.sim.weight_update import WeightUpdate


class Kind(IntEnum):
    """In the order in which events of one tick are handled."""

    END = 0  # of what an engine planned, unless that was cut since
    CANCELLATION = 1
    UPDATE = 2  # of weights
    ACTION = 3
    ARRIVAL = 4


END, CANCELLATION, UPDATE, ACTION, ARRIVAL = Kind

Action = Callable[[int], None]  # told the tick
Event = tuple[int, Kind, int, Request | WeightUpdate | Action | None]  # tick, kind, number, what


class EventQueue:
    """A heap of events over the engines of a cluster, by index. `heap` is for the loop that takes them out."""

    __slots__ = ("_actions", "_engines", "heap")

    def __init__(self, engines: Sequence[SimEngine], updates: Sequence[WeightUpdate]) -> None:
        self.heap: list[Event] = []
        self._engines = engines
        self._actions = 0
        for number, update in enumerate(updates):
            heappush(self.heap, (update.at, UPDATE, number, update))

    def end(self, engine: SimEngine) -> None:
        """The engine has planned, or its plan was cut."""
        heappush(self.heap, (engine.end, END, engine.index, None))

    def act(self, tick: int, action: Action) -> None:
        self._actions += 1
        heappush(self.heap, (tick, ACTION, self._actions, action))

    def arrive(self, request: Request) -> None:
        heappush(self.heap, (request.arrival, ARRIVAL, request.number, request))

    def cancel(self, tick: int, request: Request) -> None:
        heappush(self.heap, (tick, CANCELLATION, request.number, request))

    def arrivals(self) -> list[Request]:
        """Those to come, in their order."""
        return [what for _, kind, _, what in sorted(self.heap) if kind is ARRIVAL and isinstance(what, Request)]

    def goes_on(self) -> bool:
        """Whether anything is left that happens by itself: a cancellation or an update is none."""
        return any(self._happens(event) for event in self.heap)

    def _happens(self, event: Event) -> bool:
        tick, kind, number, _ = event
        if kind is END:
            return self._engines[number].busy and self._engines[number].end == tick
        return kind is ACTION or kind is ARRIVAL
