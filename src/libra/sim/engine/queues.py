"""Requests that wait: first come, first served, or by priority.

Invariant: the head of the queue is admitted next; nothing overtakes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from libra.sim.engine.request import Request


class FcfsQueue(deque[Request]):
    """First come, first served; a preempted request returns to the head."""

    __slots__ = ()

    requeue = deque.appendleft  # returns a preempted request
    pop_head = deque.popleft

    @property
    def head(self) -> Request:
        return self[0]

    def put_back(self, requests: Sequence[Request]) -> None:
        """Return requests that were taken from the head, in their order."""
        self.extendleft(reversed(requests))

    def push(self, request: Request) -> bool:
        """Add a request; True: it is now the head."""
        self.append(request)
        return len(self) == 1


class PriorityQueue:
    """Requests in the order of `priority`, lowest first; then of arrival, then of number. A preempted request returns
    to its place in this order."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in sorted(self._entries))

    @property
    def head(self) -> Request:
        return self._entries[0][3]

    def push(self, request: Request) -> bool:
        """Add a request; True: it is now the head."""
        heappush(self._entries, (request.priority, request.arrival, request.number, request))
        return self._entries[0][3] is request

    def requeue(self, request: Request) -> None:
        """Return a preempted request."""
        self.push(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.push(request)

    def pop_head(self) -> Request:
        return heappop(self._entries)[3]

    def remove(self, request: Request) -> None:
        self._entries.remove((request.priority, request.arrival, request.number, request))
        heapify(self._entries)
