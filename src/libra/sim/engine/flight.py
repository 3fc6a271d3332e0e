"""Batches in flight: one at a time, one in each pipeline stage, or one that is computed while the next is scheduled.

Invariant: a request is in one batch at a time; a batch passes all stages, in the order in which batches were
scheduled, and a stage works on one batch at a time. Waiting requests, KV blocks and `max_num_seqs` are the engine's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from libra.sim.engine.generation import Generation
from libra.sim.engine.request import Path, Request

# (request, path, tokens, known): a request that left, while an iteration under way may still write to its blocks. The
# blocks hold `tokens` tokens, of which `known` are final.
Deferred = tuple[Request, Path, int, int]


@dataclass(slots=True, eq=False)
class Flight:
    """Requests that are always scheduled together."""

    index: int
    generation: Generation
    finishing: list[Request] = field(default_factory=list)  # the iteration under way completes their prompts
    chunk: Request | None = None  # a chunk of its prompt, but not the last chunk, is under way
    deferred: list[Deferred] = field(default_factory=list)  # released when the batch has landed
    waits: bool = False  # it waits for blocks to which another batch under way may still write
    under_way: bool = False
    start: int = 0  # tick at which the iteration under way began
    end: int = 0


@dataclass(slots=True, eq=False)
class UnderWay:
    """The iteration under way, with asynchronous scheduling: it is computed while the next one is scheduled. Its
    results are known at its end."""

    ticks: int
    absent: Collection[Request] = ()  # generating requests that are not in it
    late: Collection[Request] = ()  # requests not in the previous iteration, whose input tokens are thus known
    chunk: Request | None = None  # request that computes a chunk of its prompt, but not the last chunk
    deferred: list[Deferred] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)  # requests whose prompts it completes
    ending: dict[Request, int] = field(default_factory=dict)  # slots of the blocks of requests that end with it
    stopping: list[Request] = field(default_factory=list)  # requests that end with it, as is known only at its end
    asks: list[tuple[Request, int, int]] = field(default_factory=list)  # (request, `ask_at` reached, tokens generated)
    stale: list[tuple[int, Request, int]] = field(default_factory=list)  # (admission, request, tokens) preempted since
    dummy: bool = False  # the engine is a rank that has nothing to compute in this iteration

    @property
    def eventful(self) -> bool:
        """Whether the end of this iteration changes anything other than numbers of tokens."""
        return self.dummy or bool(
            self.started or self.ending or self.stopping or self.asks or self.stale or self.deferred
        )

    def forget(self, request: Request) -> None:
        """Ignore the iteration's results for a request that leaves."""
        self.ending.pop(request, None)
        for requests in (self.started, self.stopping):
            if request in requests:
                requests.remove(request)


class Flights:
    """The batches of an engine: one for each pipeline stage.

    A stage takes its share of an iteration's time: layers are assumed to be divided evenly, and transfers between
    stages to take no time.
    """

    __slots__ = ("_stages", "all", "under_way")

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.all = [Flight(index, generation) for index, generation in enumerate(generations)]
        self.under_way: list[Flight] = []  # oldest first
        self._stages = [0] * len(self.all)  # tick at which each stage has finished all its batches

    @property
    def free(self) -> list[Flight]:
        """Batches not in flight. Batches that wait for blocks come first; otherwise others might always take the
        blocks."""
        return sorted((it for it in self.all if not it.under_way), key=lambda it: not it.waits)

    def end_of(self, now: int, ticks: int) -> int:
        """Tick at which an iteration of `ticks` ticks leaves the last stage, if it enters the first one now."""
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
        """End the oldest batch in flight."""
        flight = self.under_way.pop(0)
        flight.under_way = False
        return flight
