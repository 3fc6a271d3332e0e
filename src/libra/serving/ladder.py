"""The ladder of rates, and the highest rungs that candidates serve in simulation.

Invariant: all candidates are compared on the same rungs. The result of a candidate depends neither on other candidates
nor on the process that simulates it, nor on the value of a valid bound. A candidate that serves a lasting rate also
serves the record once at this rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf, log2

from libra.serving.candidate import ServingCandidate
from libra.serving.question import BRIEF, LASTING, SizingQuestion
from libra.serving.trial import Trial, trial
from libra.serving.verdict import Rival
from libra.sim.workload import requests as workload
from libra.sim.workload.requests import RecordedRequest

STEPS = 16  # rungs of an octave
LOWEST, HIGHEST = -8 * STEPS, 17 * STEPS  # rungs: 1/256 to 131,072 requests/s
FIRST = 2 * STEPS  # first rung to try without a bound
_ARRIVALS = 20_000  # most requests for which a run must last so that its rate counts as lasting
_ENOUGH = 4_000  # the same in a search, which has many candidates; see `sustained_arrivals`


def rate_of(rung: int) -> float:
    """Requests/s of a rung. Rung 0 is 1 request/s, and 16 rungs double the rate."""
    return float(2 ** (rung / STEPS))


def rung_of(rate: float) -> int:
    return round(STEPS * log2(rate))


def rung_above(rate: float) -> int:
    """The lowest rung with a rate of `rate` or more, up to rounding."""
    return ceil(STEPS * log2(rate) - 1e-6)


def highest_rate(question: SizingQuestion, candidate: ServingCandidate, bound: float = inf) -> Trial | None:
    """The trial at the highest rung at which a candidate serves the record once; None if it does so at no rung. Rungs
    above `bound` count as missed."""
    rung = FIRST if bound == inf else rung_of(min(max(bound, rate_of(LOWEST)), rate_of(HIGHEST)))
    return around(partial(trial, question, candidate), rung, bound)[0]


def lasting_rate(question: SizingQuestion, candidate: ServingCandidate, bound: float = inf) -> Trial | None:
    """As `highest_rate`, for lasting rates. The search goes down from the highest rate at which the candidate serves
    the record once. Long runs at failing rates end early."""
    once = highest_rate(question, candidate, bound)
    if once is None or _lasting_arrivals(question, once.rate) <= len(question.requests):
        return once
    return around(partial(_growing, question, candidate), rung_of(once.rate), once.rate)[0]


def sustained_arrivals(question: SizingQuestion, rate: float) -> int:
    """Least number of requests of a run that shows that a rate is sustained: the arrivals in `LASTING` times the
    longest allowed wait, but at most `_ENOUGH`. The number is always at least the arrivals in `BRIEF` times the
    shortest wait, and at most `_ARRIVALS`."""
    brief = ceil(rate * BRIEF * question.shortest_wait)
    return min(max(min(_lasting_arrivals(question, rate), _ENOUGH), brief), _ARRIVALS)


def _lasting_arrivals(question: SizingQuestion, rate: float) -> int:
    return min(ceil(rate * LASTING * question.longest_wait), _ARRIVALS)


def around(
    asked: Callable[[float], Trial], rung: int, bound: float = inf, resolution: int = 1, lowest: int = LOWEST
) -> tuple[Trial | None, str]:
    """(trial at the highest rung that passes, to `resolution` rungs; last missed objective). From `rung` the search
    goes down until a rung passes, or up until a rung fails, in steps that double. Then it bisects. Rungs above `bound`
    count as failed, and rungs below `lowest` are not tried."""
    low, high, step = lowest - 1, HIGHEST + 1, resolution
    rung, passed, missed = max(rung, lowest), None, ""
    while high - low > resolution:
        if rate_of(rung) > bound:
            high = rung
        else:
            one = asked(rate_of(rung))
            if one.passed:
                low, passed = rung, one
            else:
                high, missed = rung, one.missed
        if low < lowest:
            rung, step = max(high - step, lowest), 2 * step
        elif high > HIGHEST:
            rung, step = min(low + step, HIGHEST), 2 * step
        else:
            rung = (low + high) // 2
    return passed, missed


def _growing(question: SizingQuestion, candidate: ServingCandidate, rate: float) -> Trial:
    """The last of several runs, each with twice the requests of the run before. So a rate that is far too high fails
    after a few requests instead of thousands."""
    most, least = _lasting_arrivals(question, rate), len(question.requests)
    while True:
        least = min(2 * least, max(most, len(question.requests)))
        one = trial(question, candidate, rate, requests=repeated(question.requests, least))
        if not one.passed or least >= most:
            return one


def repeated(requests: Sequence[RecordedRequest], least: int) -> tuple[RecordedRequest, ...]:
    """The record repeated at its own rate until it has `least` requests or more."""
    if least <= len(requests):
        return tuple(requests)
    return workload.repeated(requests, -(-least // len(requests)))


@dataclass(frozen=True, slots=True)
class Asking:
    """A candidate to simulate, with an upper bound on its rate, and the least rate of interest."""

    candidate: ServingCandidate
    bound: float = inf  # requests/s
    least: float = 0.0  # requests/s
    start: float | None = None  # requests/s that the candidate probably serves
    first: str | None = None  # the draw that is probably the hardest to serve
    sure: bool = False  # whether it probably serves the other draws, too; if not, short runs check this
    rivals: tuple[Rival, ...] = ()  # the candidate must be faster than each of these to be of interest
