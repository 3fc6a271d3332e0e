"""What asks for the work: requests in the order of time, and what follows when one ends.

Invariant: a workload says the same again whenever it is started, and the number of a request does not depend on what
became of the others. So two simulations of one workload can be compared request by request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from libra.sim.engine.request import Request


class Workload(Protocol):
    """One simulation at a time: `start`, then `finished` for every request that ended, in the order of time."""

    def start(self) -> Iterable[Request]:
        """The requests known from the beginning, by (arrival, number): possibly a million, made as they are taken.
        What an earlier start left behind is forgotten."""
        ...

    def finished(self, request: Request, now: int) -> Request | None:
        """The request that follows one that was finished, cancelled or refused at tick `now`; it arrives at `now` or
        later. None: nothing follows."""
        ...

    def describe(self) -> dict[str, Any]:
        """Name, distributions, parameters and seed, as JSON values."""
        ...


class Requests:
    """An open loop: requests that come whatever became of those before.

    `make` gives them anew at each start, by (arrival, number). Iterating raises ValueError where that order is broken.
    """

    def __init__(self, make: Callable[[], Iterable[Request]], description: Mapping[str, Any]) -> None:
        self._make = make
        self._description = dict(description)

    def start(self) -> Iterator[Request]:
        arrival, number = -1, -1
        for request in self._make():
            if request.arrival < arrival or (request.arrival == arrival and request.number <= number):
                raise ValueError(
                    f"request {request.number} arrives at tick {request.arrival}, but comes after request {number} of"
                    f" tick {arrival}: sort the requests by arrival and number, and give each number once"
                )
            arrival, number = request.arrival, request.number
            yield request

    def finished(self, request: Request, now: int) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return dict(self._description)
