"""Events of a simulated cluster, in one total order: by tick, then by kind, then by number.

Invariant: no two events have the same kind and number at one tick, except ends of plans, which are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from heapq import heappop, heappush

from libra.sim.deployment import WeightUpdate
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.group import RankGroup
from libra.sim.engine.request import Request


class Kind(IntEnum):
    """Kinds of events, in the order of their handling within a tick."""

    END = 0  # of an engine's plan, unless the plan was cut meanwhile
    CANCELLATION = 1
    UPDATE = 2  # of weights
    ACTION = 3
    ARRIVAL = 4


END, CANCELLATION, UPDATE, ACTION, ARRIVAL = Kind

Action = Callable[[int], None]  # gets the tick
Event = tuple[int, Kind, int, SimEngine | RankGroup | Request | WeightUpdate | Action]  # tick, kind, number, what


class EventQueue:
    """A heap of events. It has only the next one of the expected requests."""

    __slots__ = ("_actions", "_expected", "_heap", "_next")

    def __init__(self, updates: Sequence[WeightUpdate]) -> None:
        self._heap: list[Event] = [(update.at, UPDATE, number, update) for number, update in enumerate(updates)]
        self._heap.sort(key=lambda event: event[:3])
        self._actions = 0
        self._expected: Iterator[Request] = iter(())
        self._next: Request | None = None  # the expected request whose arrival is already an event

    def end(self, engine: SimEngine | RankGroup) -> None:
        """Add the end of the plan of an engine or a group, after it has planned or its plan was cut."""
        heappush(self._heap, (engine.end, END, engine.index, engine))

    def act(self, tick: int, action: Action) -> None:
        self._actions += 1
        heappush(self._heap, (tick, ACTION, self._actions, action))

    def expect(self, requests: Iterable[Request]) -> None:
        """Add requests that will arrive, in the order of arrival. The iterable is read one request at a time."""
        self._expected = iter(requests)
        self._next = next(self._expected, None)
        if self._next is not None:
            self.arrive(self._next)

    def arrive(self, request: Request) -> None:
        heappush(self._heap, (request.arrival, ARRIVAL, request.number, request))

    def cancel(self, tick: int, request: Request) -> None:
        heappush(self._heap, (tick, CANCELLATION, request.number, request))

    def until(self, limit: int | None) -> Iterator[Event | None]:
        """Remove and yield the events up to the tick `limit`, in order, including events that are added meanwhile.
        Yields None after the last event of each tick. Ends early if `goes_on` is False."""
        heap, now = self._heap, -1  # the present tick; -1 between two ticks
        while heap or now >= 0:
            if now >= 0 and (not heap or heap[0][0] != now):
                now = -1
                yield None
                continue
            event = heap[0]
            tick, kind, _, what = event
            if kind is END and isinstance(what, (SimEngine, RankGroup)):
                if not what.busy or what.end != tick:  # the plan was cut
                    heappop(heap)
                    continue
            elif tick != now and kind < ACTION and not self.goes_on():
                return
            if tick != now:
                if limit is not None and tick > limit:
                    return
                now = tick
            heappop(heap)
            if what is self._next:
                self._next = following = next(self._expected, None)
                if following is not None:
                    self.arrive(following)
            yield event

    def goes_on(self) -> bool:
        """Whether an event remains other than a cancellation, an update, or the end of a cut plan."""
        return any(
            kind >= ACTION or (isinstance(what, (SimEngine, RankGroup)) and what.busy and what.end == tick)
            for tick, kind, _, what in self._heap
        )

    def arrivals(self) -> list[Request]:
        """Requests that have not arrived: first the expected requests, then all others, each in their order."""
        following = [] if self._next is None else [self._next, *self._expected]
        coming = [what for _, kind, _, what in sorted(self._heap) if kind is ARRIVAL and what is not self._next]
        return following + [request for request in coming if isinstance(request, Request)]
