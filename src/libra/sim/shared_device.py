"""A serving engine and whoever borrows its device, one step at a time.

Invariant: whose turn it is is decided between two steps, from what serving says of itself; a step or a grant that has
begun is never cut. Serving goes on whenever nothing is granted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Protocol

from libra.lend.gate import Grant, ServingView, SharingRule
from libra.sim.clock import seconds
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import Chunk, DecodeBatch, IterationCost
from libra.sim.engine.request import Request

_CONTEXT_PAGE = 4096  # tokens


class Borrower(Protocol):
    """What uses a grant."""

    def spend(self, now: int, grant: int) -> int:
        """Ticks that a step takes that begins now, at most `grant`; 0: there is nothing to do."""
        ...


class SpendsAll:
    """The worst borrower: it uses every grant to its end."""

    def spend(self, now: int, grant: int) -> int:
        return grant


class RolloutBorrower:
    """A rollout engine with `turns` always under way, drawn by `next_turn`. A step computes as many tokens as fit into
    the grant: decoding first, then the next chunk of a prompt."""

    def __init__(self, spec: EngineSpec, turns: int, next_turn: Callable[[int, int], Request]) -> None:
        """`next_turn(number, now)` makes the request that follows upon one that has ended."""
        self.engine = SimEngine(spec.config, spec.cost, exact=True)
        self.generated = 0
        self._turns, self._next_turn, self._made = turns, next_turn, 0
        most, least = spec.config.max_num_batched_tokens, spec.config.max_num_seqs
        budgets = sorted({max(least, most >> shift) for shift in range(most.bit_length())}, reverse=True)
        self._configs = [replace(spec.config, max_num_batched_tokens=budget) for budget in budgets]

    def spend(self, now: int, grant: int) -> int:
        engine = self.engine
        while len(engine.running) + len(engine.waiting) < self._turns:
            engine.submit(self._next_turn(self._made, now), now)
            self._made += 1
        config = next((it for it in self._configs if self._bound(it) <= grant), None)
        if config is None:
            return 0
        engine.config = config
        end = engine.plan(now)
        if end is None:
            return 0
        before = len(engine.running)
        engine.commit()
        self.generated += before - (engine.partial is not None)
        return end - now

    def _bound(self, config: EngineConfig) -> int:
        """Of a step with this token budget; what decoding leaves of it is taken to be the end of a longest prompt."""
        generation = self.engine.flight.generation
        decoding, context = generation.count, generation.context
        if self.engine.partial is None and not self.engine.waiting and decoding:
            base, slope, _ = self.engine.cost.line(DecodeBatch(decoding), context)
            return base + slope * context
        chunk = max(1, config.max_num_batched_tokens - decoding)
        before = max(0, config.max_model_len - chunk)
        return self.engine.cost.mixed(DecodeBatch(decoding), context, [(chunk, before)])


class EngineServingCost:
    """What steps of a simulated serving engine take at most.

    `budget` is `max_num_batched_tokens`, `prompt` the tokens of the longest prompt that may come.
    """

    def __init__(self, cost: IterationCost, budget: int, prompt: int) -> None:
        self._cost, self._budget, self._prompt = cost, budget, prompt
        self._longest: dict[tuple[int, int], int] = {}

    def longest_step(self, view: ServingView) -> int:
        """All live requests decode, one token further each, and the rest of the budget is the last chunk of the longest
        prompt: attention makes it the dearest. Contexts are rounded up, so that few steps have to be priced."""
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


@dataclass(frozen=True, slots=True)
class DeviceOutcome:
    """What became of the serving requests, and of the device's time. Ticks."""

    requests: tuple[Request, ...]  # in the order of their arrival
    end: int
    serving: int  # ticks that serving computed
    lent: int  # and rollout
    longest_step: int  # that serving made
    grants: int
    most_live: int
    most_queued: int
    most_context: int

    @property
    def lent_share(self) -> float:
        return self.lent / self.end if self.end else 0.0


class SharedDevice:
    """One replay. `pace` is tau, in ticks. Make one for each replay."""

    def __init__(self, spec: EngineSpec, rule: SharingRule, borrower: Borrower, *, pace: int, prompt: int) -> None:
        self.engine = SimEngine(spec.config, spec.cost, exact=True)
        self._cost = EngineServingCost(spec.cost, spec.config.max_num_batched_tokens, prompt)
        self._rule, self._borrower, self._pace = rule, borrower, pace
        self._waiting: dict[Request, None] = {}  # without a first token, in the order of arrival
        self._due: list[tuple[int, int, Request]] = []  # of those with one: due less what each serving step adds
        self._decoding: set[Request] = set()
        self._steps = 0  # of serving
        self._came = 0
        self._preempted = 0

    def run(self, requests: Iterable[Request]) -> DeviceOutcome:
        """Until all have finished."""
        to_come = sorted(requests, key=lambda it: (it.arrival, it.number))
        came: list[Request] = []
        engine, now, following = self.engine, 0, 0
        serving = lent = grants = longest = since = 0
        most_live = most_queued = most_context = 0
        while following < len(to_come) or self._waiting or self._decoding:
            while following < len(to_come) and to_come[following].arrival <= now:
                request = to_come[following]
                following += 1
                engine.submit(request, now)
                came.append(request)
                self._came += 1
                if request.status != "refused":
                    self._waiting[request] = None
            view = self._view(since)
            most_live, most_queued = max(most_live, view.live), max(most_queued, view.queued)
            most_context = max(most_context, view.context)
            answer = self._rule.decide(view, now, self._cost)
            if isinstance(answer, Grant):
                spent = self._borrower.spend(now, int(answer.length))
                if spent:
                    lent, grants, since, now = lent + spent, grants + 1, 0, now + spent
                    continue
            end = engine.plan(now)
            if end is None:  # neither has anything to do
                now = max(now, to_come[following].arrival) if following < len(to_come) else now
                continue
            longest = max(longest, end - now)
            serving, since, now = serving + end - now, since + 1, end
            self._served(engine.commit(), now)
        return DeviceOutcome(tuple(came), now, serving, lent, longest, grants, most_live, most_queued, most_context)

    def _served(self, finished: Sequence[Request], now: int) -> None:
        """A serving step has ended: everybody who decodes has a token more."""
        self._steps += 1
        ended = set(finished)
        for request in [it for it in self._waiting if it.first_token is not None]:
            del self._waiting[request]
            if request not in ended:
                self._decoding.add(request)
                heappush(self._due, (now + self._pace - self._pace * self._steps, request.number, request))
        self._decoding -= ended
        if self.engine.preemptions != self._preempted:  # some have no token of this step: count them all again
            self._preempted = self.engine.preemptions
            self._due = [(self._due_of(it, now) - self._pace * self._steps, it.number, it) for it in self._decoding]
            heapify(self._due)

    def _due_of(self, request: Request, now: int) -> int:
        assert request.first_token is not None
        return request.first_token + self.engine.generated_by(request, now) * self._pace

    def _view(self, since: int) -> ServingView:
        while self._due and self._due[0][2] not in self._decoding:
            heappop(self._due)
        due = self._due[0][0] + self._pace * self._steps if self._due else math.inf
        engine, waiting = self.engine, self._waiting
        context = engine.flight.generation.context
        queued = sum(it.prompt_tokens - it.computed for it in waiting)
        return ServingView(
            live=len(waiting) + len(self._decoding),
            waiting=len(waiting),
            due=due,
            oldest=next(iter(waiting)).arrival if waiting else math.inf,
            queued=queued,
            context=context + sum(it.computed for it in waiting),
            steps=since,
            came=self._came,
        )


@dataclass(frozen=True, slots=True)
class Misses:
    """Requests whose SLO was missed, by their numbers."""

    ttft: frozenset[int]
    tpot: frozenset[int]

    @property
    def any(self) -> frozenset[int]:
        return self.ttft | self.tpot


def misses(requests: Iterable[Request], ttft: float, tpot: float) -> Misses:
    """Which of the requests came later than so many seconds to the first token, or a token after it on average. One
    that was refused missed both."""
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
