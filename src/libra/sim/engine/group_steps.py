"""Iterations of generating requests that take blocks of KV cache groups, or release some.

Invariant: a request's tables change only in its events. So iterations between two events are alike, and only the events
have to be carried out.
"""

from __future__ import annotations

from collections.abc import Iterable

from libra.sim.engine.flight import UnderWay
from libra.sim.engine.generation import Generation
from libra.sim.engine.group_layout import ConstantLayout, Layout
from libra.sim.engine.request import Request

Event = tuple[int, int, Request]  # (iteration, place among the running requests, request)


class GroupSteps:
    """Finds the events of an engine whose groups have these layouts. `ahead`: with asynchronous scheduling."""

    __slots__ = ("_ahead", "_cycles")

    def __init__(self, layouts: Iterable[Layout], ahead: bool) -> None:
        self._ahead = ahead
        # (period, shift, most blocks freed): a request has an event in each iteration before which its number of tokens
        # differs from `shift` by a multiple of `period`.
        self._cycles: list[tuple[int, int, int]] = []
        for layout in layouts:
            if isinstance(layout, ConstantLayout):
                continue
            self._cycles.append((layout.block_size, 0, -1))
            if layout.period:
                freed = -(-layout.period // layout.block_size)
                self._cycles.append((layout.period, layout.ahead + ahead, freed))

    def events(
        self, running: Iterable[Request], generation: Generation, under_way: UnderWay | None, taken: int, steps: int
    ) -> list[Event]:
        """Events of the next iterations from `taken` to `steps` (exclusive), in their order."""
        events: list[Event] = []
        for place, request in enumerate(running):
            if request.flight < 0:
                continue
            computed = generation.computed(request)
            found = set(range(taken, min(steps, self._sudden(computed, request, under_way))))
            for period, shift, _ in self._cycles:
                found.update(_every(period, shift - computed, taken, steps))
            for step in found:
                events.append((step, place, request))
        events.sort(key=_in_order)
        return events

    def rises(
        self, running: Iterable[Request], generation: Generation, under_way: UnderWay | None, steps: int
    ) -> list[tuple[int, int]] | None:
        """(iteration, additional blocks that may be free with it) in the order of iterations, for the next `steps` ones
        except the first. None: a request may release more than a cycle's blocks."""
        rises: dict[int, int] = {}
        for request in running:
            if request.flight < 0:
                continue
            computed = generation.computed(request)
            if self._sudden(computed, request, under_way) > 1:
                return None
            for period, shift, freed in self._cycles:
                for step in _every(period, shift - computed, 1, steps):
                    rises[step] = rises.get(step, 0) + freed
        return sorted(rises.items())

    def _sudden(self, computed: int, request: Request, under_way: UnderWay | None) -> int:
        """Number of a request's next iterations that may release blocks outside its cycles. This happens if its
        processed tokens grew by more than one at once, after its prompt or after a pause."""
        generated = computed - request.target
        if not self._ahead:
            return int(generated == 0)
        if generated <= 1:
            return 2 - generated
        return int(under_way is None or request in under_way.absent)


def _every(period: int, first: int, taken: int, steps: int) -> range:
    """Iterations from `taken` to `steps` (exclusive) that differ from `first` by multiples of `period`."""
    return range(taken + (first - taken) % period, steps, period)


def _in_order(event: Event) -> tuple[int, int]:
    return event[0], event[1]
