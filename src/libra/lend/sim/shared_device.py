"""A serving engine and the borrower of its device, one step at a time.

Invariant: the sharing rule decides between two steps who owns the next step, from the state that serving reports. A
step or a grant in progress is never cut. Serving runs whenever nothing is granted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from libra.lend.gate import Grant, SharingRule
from libra.lend.recall import WatchedRule
from libra.lend.sim.step_budget import StepBudgets
from libra.lend.sim.tenant import ServingTenant
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Request


class Borrower(Protocol):
    """Interface of a borrower, which spends grants."""

    def spend(self, now: int, grant: int) -> int:
        """Make a step that begins at tick `now`. Returns its ticks, at most `grant`; 0: nothing to do."""
        ...


class SpendsAll:
    """The worst case: a borrower that uses every grant to its end."""

    def spend(self, now: int, grant: int) -> int:
        return grant


class RolloutBorrower:
    """A rollout engine that always has `turns` turns in flight. A step computes the tokens that fit into the grant:
    decoding first, then the next chunk of a prompt."""

    def __init__(self, spec: EngineSpec, turns: int, next_turn: Callable[[int, int], Request]) -> None:
        """`next_turn(number, now)` makes the request that replaces a finished request."""
        self.engine = SimEngine(spec.config, spec.cost, exact=True)
        self.generated = 0
        self._turns, self._next_turn, self._made = turns, next_turn, 0
        self._budgets = StepBudgets(spec.config)

    def spend(self, now: int, grant: int) -> int:
        engine = self.engine
        while len(engine.running) + len(engine.waiting) < self._turns:
            engine.submit(self._next_turn(self._made, now), now)
            self._made += 1
        config = self._budgets.fitting(engine, grant)
        if config is None:
            return 0
        engine.config, decoding = config, engine.flight.generation.count
        end = engine.plan(now)
        if end is None:
            return 0
        computing = len(engine.running)
        engine.commit()
        some = config.max_num_batched_tokens
        self.generated += some if some < decoding else computing - len(engine.partials)
        return end - now


@dataclass(frozen=True, slots=True)
class DeviceOutcome:
    """Outcome of the serving requests, and use of the device's time. Times are ticks."""

    requests: tuple[Request, ...]  # in the order of their arrival
    end: int
    serving: int  # ticks that serving computed
    lent: int  # ticks that rollout computed
    longest_step: int  # of serving
    grants: int
    most_live: int
    most_queued: int
    most_context: int
    margin: int | None  # least ticks from a token after the first to its due time; None: no such token
    uncovered: frozenset[int]  # requests that were present while the load was outside its envelope

    @property
    def lent_share(self) -> float:
        return self.lent / self.end if self.end else 0.0


class SharedDevice:
    """One replay of one device; not reusable. `pace` is tau, in ticks."""

    def __init__(self, spec: EngineSpec, rule: SharingRule, borrower: Borrower, *, pace: int, prompt: int) -> None:
        self._spec, self._rule, self._borrower = spec, rule, borrower
        self._pace, self._prompt = pace, prompt

    def run(self, requests: Iterable[Request]) -> DeviceOutcome:
        """Replay requests until all have finished."""
        in_order = sorted(requests, key=lambda it: (it.arrival, it.number))
        tenant = ServingTenant(self._spec, in_order, pace=self._pace, prompt=self._prompt)
        now = lent = grants = longest = since = 0
        most_live = most_queued = most_context = 0
        while tenant.next_arrival is not None or tenant.busy:
            tenant.arrive(now)
            view = tenant.view(since)
            most_live, most_queued = max(most_live, view.live), max(most_queued, view.queued)
            most_context = max(most_context, view.context)
            answer = self._rule.decide(view, now, tenant.cost)
            if isinstance(self._rule, WatchedRule) and self._rule.breach is not None:
                tenant.uncover()
            if isinstance(answer, Grant):
                spent = self._borrower.spend(now, int(answer.length))
                if spent:
                    lent, grants, since, now = lent + spent, grants + 1, 0, now + spent
                    continue
            end = tenant.step(now)
            if end is None:  # neither serving nor rollout has anything to do
                now = now if tenant.next_arrival is None else max(now, tenant.next_arrival)
                continue
            longest, since, now = max(longest, end - now), since + 1, end
        return DeviceOutcome(
            tuple(tenant.came),
            now,
            tenant.computed,
            lent,
            longest,
            grants,
            most_live,
            most_queued,
            most_context,
            None if tenant.margin == math.inf else int(tenant.margin),
            frozenset(tenant.uncovered),
        )
