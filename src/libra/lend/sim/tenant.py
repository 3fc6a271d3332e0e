"""A serving engine under its traffic, one step at a time; the caller starts each step.

Invariant: the state between two steps depends only on the engine's requests and steps. A borrower of the device never
changes due times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from libra.lend.gate import ServingView
from libra.lend.sim.kv_loan import KVLoan
from libra.sim.clock import seconds
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import UNLIMITED, Chunk, DecodeBatch, IterationCost
from libra.sim.engine.jump import coming_blocks, cut_stretch, end_of
from libra.sim.engine.request import Request

_CONTEXT_PAGE = 4096  # tokens


class EngineServingCost:
    """Bounds on the steps of a simulated serving engine.

    `budget` is `max_num_batched_tokens`, `prompt` the tokens of the longest possible prompt.
    """

    def __init__(self, cost: IterationCost, budget: int, prompt: int) -> None:
        self._cost, self._budget, self._prompt = cost, budget, prompt
        self._longest: dict[tuple[int, int], int] = {}

    def longest_step(self, view: ServingView) -> int:
        """Ticks of the longest step: all live requests decode a token each, and the rest of the budget is the last
        chunk of the longest prompt, the chunk with the longest attention. Contexts are rounded up to pages, so that
        only a few different steps need a price."""
        pages = -(-(view.context + view.live + self._prompt) // _CONTEXT_PAGE)
        longest = self._longest.get((view.live, pages))
        if longest is None:
            chunk = max(1, min(self._budget - view.live, self._prompt))
            longest = self._cost.mixed(DecodeBatch(view.live), pages * _CONTEXT_PAGE, [(chunk, self._prompt - chunk)])
            self._longest[view.live, pages] = longest
        return longest

    def catch_up(self, view: ServingView) -> int:
        if not view.queued:
            base, slope, _ = self._cost.line(DecodeBatch(max(1, view.live)), view.context + view.live)
            return base + slope * (view.context + view.live)
        decoding = view.live - view.waiting
        chunks: list[Chunk] = []
        left, before = view.queued, 0
        while left:
            chunk = min(max(1, self._budget - decoding), left)
            chunks.append((chunk, before))
            left, before = left - chunk, before + chunk
        return sum(self._cost.mixed(DecodeBatch(decoding), view.context + decoding, [chunk]) for chunk in chunks)


class ServingTenant:
    """A serving engine and its traffic. `requests` yields requests in the order of arrival, and is read lazily. `pace`
    is tau, in ticks; `prompt` is the longest prompt, in tokens."""

    def __init__(self, spec: EngineSpec, requests: Iterable[Request], *, pace: int, prompt: int) -> None:
        self.engine = SimEngine(spec.config, spec.cost, exact=True)
        self.cost = EngineServingCost(spec.cost, spec.config.max_num_batched_tokens, prompt)
        self.came: list[Request] = []
        self.computed = 0  # ticks
        self.made = 0  # steps
        self.margin = math.inf  # least ticks from a token after the first to its due time
        self.kv: KVLoan | None = None  # loan of KV memory; None: no memory is lent
        self.closest = math.inf  # like `margin`, for the latest call of `step` or `steps_until`
        self.served = 0  # requests that ran in that call
        self.uncovered: set[int] = set()  # requests that were present while the load was outside its envelope
        self._coming = iter(requests)
        self._next = next(self._coming, None)
        self._pace = pace
        self._waiting: dict[Request, None] = {}  # requests without a first token, in the order of arrival
        self._due: list[tuple[int, int, Request]] = []  # (due tick less `pace` x steps made, number, request)
        self._decoding: set[Request] = set()
        self._preempted = 0

    @property
    def next_arrival(self) -> int | None:
        """Tick of the next request; None: all have arrived."""
        return None if self._next is None else self._next.arrival

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._waiting or self._decoding)

    def arrive(self, now: int) -> bool:
        """Submit the requests that have arrived by `now`. Returns whether a request has arrived."""
        before = self._next
        while self._next is not None and self._next.arrival <= now:
            request, self._next = self._next, next(self._coming, None)
            self.came.append(request)
            self.engine.submit(request, now)
            if request.status != "refused":
                self._waiting[request] = None
        return self._next is not before

    def step(self, now: int) -> int | None:
        """Make a step that begins at `now`. Returns the tick of its end; None: nothing to do."""
        end = self.engine.plan(now)
        return None if end is None else self._made(now, end)

    def steps_until(self, now: int, until: int) -> int | None:
        """Make steps until the first that ends at or after `until` or the next arrival. Equal to repeated calls of
        `step`."""
        engine = self.engine
        engine.most_steps = UNLIMITED
        end = engine.plan(now)
        engine.most_steps = 1
        if end is None:
            return None
        following = self.next_arrival
        cut_stretch(engine, until if following is None else min(until, following))
        return self._made(now, engine.end)

    def uncover(self) -> None:
        """Record that the load is outside its envelope: no certificate covers the present requests."""
        self.uncovered.update(it.number for it in self._waiting)
        self.uncovered.update(it.number for it in self._decoding)

    def _made(self, now: int, end: int) -> int:
        steps = self.engine.steps or 1
        self.computed += end - now
        due = self._earliest()
        self.closest = self._closest(due, end) if due < math.inf else math.inf
        self.margin = min(self.margin, self.closest)
        if self.kv is not None:
            engine = self.engine
            self.kv.served(engine.pool.free - coming_blocks(engine))
        self.served = len(self.engine.running)
        self._served(self.engine.commit(), steps, end)
        return end

    def _served(self, finished: Sequence[Request], steps: int, now: int) -> None:
        """Record that `steps` steps have ended: each decoding request has `steps` tokens more."""
        self.made += steps
        ended = set(finished)
        for request in [it for it in self._waiting if it.first_token is not None]:
            del self._waiting[request]
            if request not in ended:
                self._decoding.add(request)
                heappush(self._due, (now + self._pace - self._pace * self.made, request.number, request))
        self._decoding -= ended
        if self.engine.preemptions != self._preempted:  # a preempted request got no token: count all tokens again
            self._preempted = self.engine.preemptions
            self._due = [(self._due_of(it, now) - self._pace * self.made, it.number, it) for it in self._decoding]
            heapify(self._due)

    def _closest(self, due: float, end: int) -> float:
        """Smallest margin, in ticks, of the tokens of the steps that have just ended; the first token was due at `due`.
        In each piece the steps grow linearly, so its smallest margin is at one of its ends."""
        steps, pieces = self.engine.steps, self.engine.pieces
        if not steps:
            return due - end
        ends = {*(it[0] for it in pieces[1:]), *(it[0] + 1 for it in pieces), steps}
        return min(due + self._pace * (step - 1) - end_of(pieces, step) for step in ends)

    def _due_of(self, request: Request, now: int) -> int:
        assert request.first_token is not None
        return request.first_token + self.engine.generated_by(request, now) * self._pace

    def _earliest(self) -> float:
        """Earliest due tick of a next token; inf: no request has its first token."""
        while self._due and self._due[0][2] not in self._decoding:
            heappop(self._due)
        return self._due[0][0] + self._pace * self.made if self._due else math.inf

    def view(self, since: int) -> ServingView:
        """The state that serving reports, `since` steps after the last grant."""
        waiting = self._waiting
        return ServingView(
            live=len(waiting) + len(self._decoding),
            waiting=len(waiting),
            due=self._earliest(),
            oldest=next(iter(waiting)).arrival if waiting else math.inf,
            queued=sum(it.prompt_tokens - it.computed for it in waiting) if waiting else 0,
            context=self.engine.flight.generation.context + (sum(it.computed for it in waiting) if waiting else 0),
            steps=since,
            came=len(self.came),
        )


@dataclass(frozen=True, slots=True)
class Misses:
    """Numbers of the requests that missed the SLO of the first token, or of later tokens."""

    ttft: frozenset[int]
    tpot: frozenset[int]

    @property
    def any(self) -> frozenset[int]:
        return self.ttft | self.tpot


def misses(requests: Iterable[Request], ttft: float, tpot: float) -> Misses:
    """The requests that took more than `ttft` seconds to the first token, or more than `tpot` seconds per later token
    on average. A refused request misses both."""
    late, slow = set(), set()
    for request in requests:
        if request.first_token is None or request.finish is None:
            late.add(request.number)
            slow.add(request.number)
            continue
        if seconds(request.first_token - request.arrival) > ttft:
            late.add(request.number)
        if seconds(request.finish - request.first_token) > tpot * max(1, request.output_tokens - 1):
            slow.add(request.number)
    return Misses(frozenset(late), frozenset(slow))


def latencies(requests: Iterable[Request], share: float = 0.99) -> tuple[float, float]:
    """The `share` quantiles, over finished requests, of the seconds to the first token and the seconds per later token;
    0 if no request finished."""
    ended = [
        (it.first_token - it.arrival, it.finish - it.first_token, it.output_tokens)
        for it in requests
        if it.first_token is not None and it.finish is not None
    ]
    if not ended:
        return 0.0, 0.0
    ttft = np.quantile([seconds(first) for first, _, _ in ended], share)
    tpot = np.quantile([seconds(others) / max(1, tokens - 1) for _, others, tokens in ended], share)
    return float(ttft), float(tpot)
