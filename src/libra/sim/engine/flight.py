"""Batches under way: one at a time, one in each pipeline stage, or one that is computed while the next is decided.

Invariant: a request is in one batch at a time; a batch passes all stages, in the order in which batches were
scheduled, and a stage works on one batch at a time. Waiting requests, KV blocks and `max_num_seqs` are the engine's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from libra.sim.engine.generation import Generation
from libra.sim.engine.request import Path, Request

# A request that left, whose blocks an iteration under way may still write: of so many tokens, so many of them known
Deferred = tuple[Request, Path, int, int]


@dataclass(slots=True, eq=False)
class Flight:
    """Requests that are always scheduled together."""

    index: int
    generation: Generation
    finishing: list[Request] = field(default_factory=list)  # their prompts are computed with the iteration under way
    chunk: Request | None = None  # a part of whose prompt, and not the last, is under way
    deferred: list[Deferred] = field(default_factory=list)  # let go when it has landed
    waits: bool = False  # for blocks that another one under way may still write
    under_way: bool = False
    start: int = 0  # ticks, of the iteration under way
    end: int = 0


@dataclass(slots=True, eq=False)
class UnderWay:
    """The iteration that is computed while the next one is decided: with asynchronous scheduling. What comes of it is
    known at its end."""

    ticks: int
    absent: Collection[Request] = ()  # that generate, but are not in it
    late: Collection[Request] = ()  # that were not in the one before: what they compute in this one is known already
    chunk: Request | None = None  # whose prompt it computes a part of, and not the last
    deferred: list[Deferred] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)  # whose prompts are computed with it
    ending: dict[Request, int] = field(default_factory=dict)  # of which it surely is the last: slots of their blocks
    stopping: list[Request] = field(default_factory=list)  # the same, but that is seen only when it has ended
    asks: list[tuple[Request, int, int]] = field(default_factory=list)  # that reach `ask_at`, it, and what they reach
    stale: list[tuple[int, Request, int]] = field(default_factory=list)  # preempted since: admission, request, tokens
    dummy: bool = False  # the engine is a rank that has nothing to compute in it

    @property
    def eventful(self) -> bool:
        """Whether anything but tokens comes with its end."""
        return self.dummy or bool(
            self.started or self.ending or self.stopping or self.asks or self.stale or self.deferred
        )

    def forget(self, request: Request) -> None:
        """A request leaves: its tokens will be dropped."""
        self.ending.pop(request, None)
        for requests in (self.started, self.stopping):
            if request in requests:
                requests.remove(request)


class Flights:
    """The batches of an engine: as many as it has pipeline stages.

    A stage takes its share of an iteration's time: layers are taken to be divided evenly, and what is sent from stage
    to stage to take no time.
    """

    __slots__ = ("_stages", "all", "under_way")

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.all = [Flight(index, generation) for index, generation in enumerate(generations)]
        self.under_way: list[Flight] = []  # oldest first
        self._stages = [0] * len(self.all)  # tick at which each stage has worked off what was sent to it

    @property
    def free(self) -> list[Flight]:
        """Those that wait for blocks come first, or the others would take them again and again."""
        return sorted((it for it in self.all if not it.under_way), key=lambda it: not it.waits)

    def end_of(self, now: int, ticks: int) -> int:
        """When an iteration that takes so long leaves the last stage, if it is sent to the first one now."""
        share, rest = divmod(ticks, len(self._stages))
        at = now
        for stage, free in enumerate(self._stages):
            at = max(at, free) + share + (rest if stage == 0 else 0)
            self._stages[stage] = at
        return at

    def depart(self, flight: Flight, start: int, end: int) -> None:
        flight.under_way, flight.start, flight.end = True, start, end
        self.under_way.append(flight)

    def land(self) -> Flight:
        """End the oldest batch under way."""
        flight = self.under_way.pop(0)
        flight.under_way = False
        return flight
