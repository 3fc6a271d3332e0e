"""The rate at which a candidate meets its objectives, both on the record and on draws of the record.

Invariant: a rate that holds was simulated on the record and on each of its draws, and missed no objective. The rate
depends only on the question and the candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isclose

from libra.report.words import per_second
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
    rung_above,
    rung_of,
)
from libra.serving.question import SizingQuestion
from libra.serving.runs import RECORD, Runs
from libra.serving.trial import Trial
from libra.serving.verdict import Rival, SlowerError

_COARSE = 4  # resolution of a guess, in rungs
_SPARE = 0.1  # unused share of each limit with which a short run shows that a rate is surely served


@dataclass(frozen=True, slots=True)
class Check:
    """Latencies on the record or on one draw, as shares of their limits."""

    name: str
    shares: Mapping[str, float]  # by objective


@dataclass(frozen=True, slots=True)
class Held:
    """The highest rate that holds for a candidate, or the reason why no rate of interest holds."""

    trial: Trial | None  # on the record, at the rate; None: no rate holds
    checks: tuple[Check, ...] = ()  # at the rate
    missed: str = ""  # missed objective, if no rate holds
    runs: int = 0
    too_little: bool = False  # whether the candidate serves less than `Asking.least`
    rate: float = 0.0  # requests/s at which all draws are served; 0: none
    hardest: str = RECORD  # the record or draw that was the last to lower the rate
    slower: Rival | None = None  # rival that is no slower at the rate


def held_bounds(bounds: Bounds, candidates: Iterable[ServingCandidate]) -> dict[ServingCandidate, RateBound]:
    """The bounds of each candidate. The rate is the least bound over the record and its draws; latencies are bounds on
    the record alone."""
    question = bounds.question
    drawn = [(it, Bounds(replace(question, requests=it.requests), bounds)) for it in draws(question.requests)]
    found = {}
    for candidate in candidates:
        least = bounds.of(candidate)
        for draw, its in drawn:
            bound = its.of(candidate)
            if bound.rate / draw.density < least.rate:
                least = replace(least, rate=bound.rate / draw.density, reason=f"{bound.reason}, on {draw.name}")
        found[candidate] = least
    return found


def held_rate(question: SizingQuestion, asking: Asking) -> Held:
    """Find the highest rung at which the candidate serves the record and all its draws, or check the rate that the
    question gives. Rungs below `asking.least` are not tried."""
    runs = Runs(question, asking.candidate)
    if question.rate is not None:
        return _at_rate(question, runs, question.rate)
    try:
        return _highest(question, runs, asking)
    except _SlowError as slow:
        return Held(None, (), "", runs.made, rate=slow.rate, hardest=slow.hardest, slower=slow.rival)


def _at_rate(question: SizingQuestion, runs: Runs, rate: float) -> Held:
    tried: dict[str, Trial] = {}
    for name in runs.names:
        tried[name] = runs.lasting(name, rate)
        if not tried[name].passed:
            return Held(None, (), _on(name, tried[name].missed), runs.made)
    return _held(question, runs, tried)


class _SlowError(Exception):
    """The candidate serves the draws at `rate`, but at this rate `rival` is no slower and has at least its value."""

    def __init__(self, rival: Rival, rate: float, hardest: str) -> None:
        self.rival, self.rate, self.hardest = rival, rate, hardest


def _highest(question: SizingQuestion, runs: Runs, asking: Asking) -> Held:
    """Search from the expected rate on the hardest draw, then downwards on the other draws and on the record."""
    lowest = rung_above(asking.least) if asking.least else LOWEST
    order, rung = _beginning(runs, asking)
    rung = max(rung, lowest)
    order = _look(runs, asking, order, rate_of(rung))
    tried, bound, hardest = dict[str, Trial](), asking.bound, order[0]
    while late := _late(order, tried, bound):
        # Draws are harder than the record, so a candidate that serves them is expected to serve the record. The run on
        # the record may then stop as soon as the candidate is slower than a rival.
        rivals = tuple(_rivals(asking, bound)) if late == RECORD and tried else ()
        try:
            passed, missed = around(partial(runs.lasting, late, rivals=rivals), rung, bound, lowest=lowest)
        except SlowerError as slower:
            raise _SlowError(slower.rival, bound, hardest) from None
        if passed is None:
            missed = f"{missed} at {per_second(rate_of(lowest))}" if asking.least else missed
            return Held(None, (), _on(late, missed), runs.made, too_little=asking.least > 0)
        if passed.rate < bound:
            hardest = late
        tried[late], bound, rung = passed, passed.rate, rung_of(passed.rate)
    return _held(question, runs, tried, hardest)


def _beginning(runs: Runs, asking: Asking) -> tuple[list[str], int]:
    """(draws, probably hardest first, then the record; the rung at which the search begins)."""
    first, rate = asking.first, asking.bound if asking.start is None else asking.start
    rung = FIRST if rate == inf else rung_of(rate) - (STEPS if asking.start is None else 0)  # misses end early
    for name in () if asking.sure else (it for it in runs.drawn if it != first or asking.start is None):
        served = around(partial(runs.brief, name), rung, rate, _COARSE)[0]
        if served is None or served.rate < rate:
            first, rate = name, rate_of(LOWEST) if served is None else served.rate
        rung = rung_of(rate)
    return sorted(runs.names, key=lambda it: (it == RECORD, it != first)), rung


def _look(runs: Runs, asking: Asking, order: list[str], rate: float) -> list[str]:
    """Run each draw once at the expected rate; run the record, too, if a rival has a higher value than the candidate
    can have. Returns `order` with the first draw that missed moved to the front.
    """
    if rate > asking.bound:
        return order
    rivals = tuple(it for it in asking.rivals if it.rate > asking.bound)
    for name in order if rivals and len(order) > 1 else order[:-1]:
        try:
            one = runs.lasting(name, rate, rivals=rivals if name == RECORD else ())
        except SlowerError as slower:
            raise _SlowError(slower.rival, rate, order[0]) from None
        if not one.passed and name != RECORD:
            return [name, *(it for it in order if it != name)]
    return order


def _rivals(asking: Asking, rate: float) -> Iterator[Rival]:
    """Yield rivals with a higher value than the candidate at `rate`. A rival with the same value must be strictly
    faster, so its tenths are raised by one."""
    for rival in asking.rivals:
        ttft, tpot = rival.tenths
        if isclose(rival.rate, rate):
            yield replace(rival, tenths=(ttft + 1, tpot))
            yield replace(rival, tenths=(ttft, tpot + 1))
        elif rival.rate > rate:
            yield rival


def _late(order: Sequence[str], tried: Mapping[str, Trial], rate: float) -> str | None:
    """The next draw, or the record, to simulate at `rate`; None if all were simulated at this rate."""
    new = (it for it in order if it not in tried)
    return next(new, None) or next((it for it in order if tried[it].rate != rate), None)


def _held(question: SizingQuestion, runs: Runs, tried: Mapping[str, Trial], hardest: str = RECORD) -> Held:
    checks = (Check(name, _shares(question, tried[name])) for name in runs.names)
    return Held(tried[RECORD], tuple(checks), "", runs.made, rate=tried[RECORD].rate, hardest=hardest)


def _on(name: str, missed: str) -> str:
    return missed if name == RECORD else f"{missed} on {name}"


def surely_serves(question: SizingQuestion, candidate: ServingCandidate, rate: float) -> tuple[bool, int]:
    """(whether short runs on all draws leave `_SPARE` of each limit unused at `rate`, number of runs)."""
    runs = Runs(question, candidate)
    for name in runs.drawn:
        one = runs.brief(name, rate)
        if not one.passed or max(_shares(question, one).values()) > 1 - _SPARE:
            return False, runs.made
    return True, runs.made


def checked(question: SizingQuestion, candidate: ServingCandidate, rate: float) -> dict[str, Trial]:
    """Trials of the record and its draws at `rate`. A trial continues after a miss."""
    runs = Runs(question, candidate)
    return {name: runs.lasting(name, rate, to_the_end=True) for name in runs.names}


def _shares(question: SizingQuestion, one: Trial) -> dict[str, float]:
    return {it.name: one.latency[it.name] / it.limit for it in question.objectives}
