"""The rate at which a candidate keeps its objectives: on the record, and on draws of it.

Invariant: a rate that holds was simulated on the record and on each of its draws, and missed nothing. It depends only
on the question and the candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf

from libra.serving.bound import Bounds, RateBound
from libra.serving.candidate import ServingCandidate
from libra.serving.draws import draws
from libra.serving.ladder import (
    FIRST,
    LOWEST,
    STEPS,
    Asking,
    around,
    rate_of,
    repeated,
    rung_above,
    rung_of,
    sustained_arrivals,
)
from libra.serving.question import SizingQuestion
from libra.serving.trial import Trial, trial
from libra.sim.workload.requests import RecordedRequest

RECORD = "the record"
_COARSE = 4  # resolution of a guess, in rungs
_BRIEFLY = 16  # duration of the arrivals in a guess, in multiples of the shortest allowed wait
_FEWEST = 50  # least requests of a guess


@dataclass(frozen=True, slots=True)
class Check:
    """Latencies on the record, or on a draw of it, as shares of their limits."""

    name: str
    shares: Mapping[str, float]  # by objective


@dataclass(frozen=True, slots=True)
class Held:
    """The trial on the record at the highest holding rate, and all checks at that rate; or the missed objective."""

    trial: Trial | None
    checks: tuple[Check, ...] = ()
    missed: str = ""
    runs: int = 0
    too_little: bool = False  # whether it serves less than `Asking.least`


def held_bounds(bounds: Bounds, candidates: Iterable[ServingCandidate]) -> dict[ServingCandidate, RateBound]:
    """The least of the bounds on the rate over the record and its draws; latencies are those of the record."""
    question = bounds.question
    drawn = {it.name: Bounds(replace(question, requests=it.requests), bounds) for it in draws(question.requests)}
    found = {}
    for candidate in candidates:
        least = bounds.of(candidate)
        for name, its in drawn.items():
            bound = its.of(candidate)
            if bound.rate < least.rate:
                least = replace(least, rate=bound.rate, reason=f"{bound.reason}, on {name}")
        found[candidate] = least
    return found


def held_rate(question: SizingQuestion, asking: Asking) -> Held:
    """Find the highest rung at which the record and all its draws are served, or check the question's rate. Rungs below
    `asking.least` are not tried."""
    runs = _Runs(question, asking.candidate)
    return _at_rate(question, runs, question.rate) if question.rate is not None else _highest(question, runs, asking)


def _at_rate(question: SizingQuestion, runs: _Runs, rate: float) -> Held:
    tried: dict[str, Trial] = {}
    for name in runs.names:
        tried[name] = runs.lasting(name, rate)
        if not tried[name].passed:
            return Held(None, (), _on(name, tried[name].missed), runs.made)
    return _held(question, runs, tried)


def _highest(question: SizingQuestion, runs: _Runs, asking: Asking) -> Held:
    """Search on the first draw from a guess, or from a near bound; then downwards on the others and on the record."""
    lowest = rung_above(asking.least) if asking.least else LOWEST
    if asking.near:
        rung = rung_of(asking.bound)
    else:
        guess = runs.guess(asking.bound)
        rung = LOWEST if guess is None else rung_of(guess.rate)
    tried, bound = dict[str, Trial](), asking.bound
    while late := next((it for it in runs.names if it not in tried or tried[it].rate != bound), None):
        passed, missed = around(partial(runs.lasting, late), rung, bound, lowest=lowest)
        if passed is None:
            missed = f"{missed} at {rate_of(lowest):.3g} requests/s" if asking.least else missed
            return Held(None, (), _on(late, missed), runs.made, too_little=asking.least > 0)
        tried[late], bound, rung = passed, passed.rate, rung_of(passed.rate)
    return _held(question, runs, tried)


def _held(question: SizingQuestion, runs: _Runs, tried: Mapping[str, Trial]) -> Held:
    checks = (Check(name, _shares(question, tried[name])) for name in runs.names)
    return Held(tried[RECORD], tuple(checks), "", runs.made)


def _on(name: str, missed: str) -> str:
    return missed if name == RECORD else f"{missed} on {name}"


def checked(question: SizingQuestion, candidate: ServingCandidate, rate: float) -> dict[str, Trial]:
    """Trials of the record and its draws at a rate, which continue after a miss."""
    runs = _Runs(question, candidate)
    return {name: runs.lasting(name, rate, to_the_end=True) for name in runs.names}


class _Runs:
    """Simulations of one candidate on the draws of the record, the hardest first, and on the record."""

    def __init__(self, question: SizingQuestion, candidate: ServingCandidate) -> None:
        self.question, self.candidate, self.made = question, candidate, 0
        its = {it.name: it.requests for it in draws(question.requests)} | {RECORD: question.requests}
        self.names = tuple(its)
        self._questions = {name: replace(question, requests=requests) for name, requests in its.items()}
        self._repeated: dict[tuple[str, int], tuple[RecordedRequest, ...]] = {}

    def guess(self, bound: float) -> Trial | None:
        """The trial at about the highest rung at which the first draw is served, by short runs; None without one."""
        first = self.names[0]
        asked = self._questions[first]

        def brief(rate: float) -> Trial:
            record = self._record(first, sustained_arrivals(asked, rate))
            return self._trial(asked, record[: max(_FEWEST, ceil(_BRIEFLY * rate * asked.shortest_wait))], rate)

        rung = FIRST if bound == inf else rung_of(bound) - STEPS  # misses end early
        return around(brief, rung, bound, _COARSE)[0]

    def lasting(self, name: str, rate: float, *, to_the_end: bool = False) -> Trial:
        """A trial long enough for a lasting rate; with the question's rate, of the requests once."""
        asked = self._questions[name]
        least = 1 if asked.rate is not None else sustained_arrivals(asked, rate)
        return self._trial(asked, self._record(name, least), rate, to_the_end=to_the_end)

    def _record(self, name: str, least: int) -> tuple[RecordedRequest, ...]:
        requests = self._questions[name].requests
        times = max(1, -(-least // len(requests)))
        if (name, times) not in self._repeated:
            self._repeated[name, times] = repeated(requests, least)
        return self._repeated[name, times]

    def _trial(
        self, asked: SizingQuestion, requests: tuple[RecordedRequest, ...], rate: float, *, to_the_end: bool = False
    ) -> Trial:
        self.made += 1
        return trial(asked, self.candidate, rate, requests=requests, to_the_end=to_the_end)


def _shares(question: SizingQuestion, one: Trial) -> dict[str, float]:
    return {it.name: one.latency[it.name] / it.limit for it in question.objectives}
