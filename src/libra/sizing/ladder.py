"""The ladder of rates, and how high on it candidates serve in simulation.

Invariant: candidates are compared by rungs that all have in common; what is found of one does not depend on the others,
nor on the process that simulates it, nor on its bound, as long as the bound holds. A rate that lasts is one that a
candidate serves with the record once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from math import ceil, inf, log2
from multiprocessing import get_context

from libra.sim.workload import requests as workload
from libra.sim.workload.requests import RecordedRequest
from libra.sizing.candidate import ServingCandidate
from libra.sizing.question import BRIEF, LASTING, SizingQuestion
from libra.sizing.trial import Trial, trial

STEPS = 16  # rates of an octave that are told apart
LOWEST, HIGHEST = -8 * STEPS, 17 * STEPS  # rungs: 1/256 to 131,072 requests/s
_ARRIVALS = 20_000  # requests that are enough for a rate to count as lasting
_ENOUGH = 4_000  # of a search, which has many candidates, unless they are over within `BRIEF`


def rate_of(rung: int) -> float:
    """Requests/s of a rung, which counts sixteenths of an octave above 1."""
    return float(2 ** (rung / STEPS))


def _rung_of(rate: float) -> int:
    return round(STEPS * log2(rate))


def highest_rate(
    question: SizingQuestion, candidate: ServingCandidate, bound: float = inf
) -> tuple[Trial | None, str, int]:
    """At the highest rung that it serves (or at the rate that is asked for): what came of it, or None and the objective
    that it misses; and the number of simulations. Rungs above `bound` are missed."""
    if question.rate is not None:
        one = trial(question, candidate, question.rate)
        return (one, "", 1) if one.passed else (None, one.missed, 1)
    return _highest(lambda rate: trial(question, candidate, rate), bound)


def lasting_rate(
    question: SizingQuestion, candidate: ServingCandidate, bound: float = inf
) -> tuple[Trial | None, str, int]:
    """As `highest_rate`, of rates that last."""
    return _lasting(question, candidate, bound, _lasting_arrivals)


def sustained_rate(
    question: SizingQuestion, candidate: ServingCandidate, bound: float = inf
) -> tuple[Trial | None, str, int]:
    """As `lasting_rate`, with as many requests as a search can afford for each of its candidates."""
    return _lasting(question, candidate, bound, sustained_arrivals)


def lasting_trial(question: SizingQuestion, candidate: ServingCandidate, rate: float) -> Trial:
    """The requests come again and again: a record that is over soon is served although the backlog grows."""
    return trial(question, candidate, rate, requests=repeated(question.requests, _lasting_arrivals(question, rate)))


def sustained_arrivals(question: SizingQuestion, rate: float) -> int:
    """Requests of a run that sustains a rate, unless the record has more: they come for `LASTING` times the longest
    wait that is allowed, or are `_ENOUGH` and come for `BRIEF` times the shortest one; `_ARRIVALS` at most."""
    brief = ceil(rate * BRIEF * question.shortest_wait)
    return min(max(min(_lasting_arrivals(question, rate), _ENOUGH), brief), _ARRIVALS)


def _lasting_arrivals(question: SizingQuestion, rate: float) -> int:
    return min(ceil(rate * LASTING * question.longest_wait), _ARRIVALS)


def _lasting(
    question: SizingQuestion,
    candidate: ServingCandidate,
    bound: float,
    arrivals: Callable[[SizingQuestion, float], int],
) -> tuple[Trial | None, str, int]:
    """From the highest rate at which the record is served once, in steps that double until a rate lasts, then by
    bisection. Long runs at rates that are missed end early."""
    once, missed, runs = highest_rate(question, candidate, bound)
    if once is None:
        return None, missed, runs
    rung = _rung_of(once.rate)
    if arrivals(question, once.rate) <= len(question.requests):
        return once, missed, runs
    low, high, step, passed = LOWEST - 1, rung + 1, 1, None
    while high - low > 1:
        one, made = _growing(question, candidate, rate_of(rung), arrivals)
        runs += made
        if one.passed:
            low, passed = rung, one
        else:
            high, missed = rung, one.missed
        if passed is None:
            rung, step = max(rung - step, LOWEST), 2 * step
        else:
            rung = (low + high) // 2
    return passed, missed, runs


def _highest(asked: Callable[[float], Trial], bound: float) -> tuple[Trial | None, str, int]:
    """By bisection."""
    low, high, runs = LOWEST - 1, HIGHEST + 1, 0
    passed, missed = None, ""
    while high - low > 1:
        middle = (low + high) // 2
        if rate_of(middle) > bound:
            high = middle
            continue
        one = asked(rate_of(middle))
        runs += 1
        if one.passed:
            low, passed = middle, one
        else:
            high, missed = middle, one.missed
    return passed, missed, runs


def _growing(
    question: SizingQuestion, candidate: ServingCandidate, rate: float, arrivals: Callable[[SizingQuestion, float], int]
) -> tuple[Trial, int]:
    """The last of runs with twice as many requests each, and their number: a rate that is far too high is missed with
    few requests, where thousands at once would take long."""
    most, least, runs = arrivals(question, rate), len(question.requests), 0
    while True:
        least, runs = min(2 * least, max(most, len(question.requests))), runs + 1
        one = trial(question, candidate, rate, requests=repeated(question.requests, least))
        if not one.passed or least >= most:
            return one, runs


def repeated(requests: Sequence[RecordedRequest], least: int) -> tuple[RecordedRequest, ...]:
    """The record again and again, at its own rate, until it has `least` requests or more."""
    return workload.repeated(requests, max(1, -(-least // len(requests))))


_Find = Callable[[SizingQuestion, ServingCandidate, float], tuple[Trial | None, str, int]]
_Simulated = Iterable[tuple[ServingCandidate, Trial | None, str, int]]


@contextmanager
def simulator(
    question: SizingQuestion, jobs: int, find: _Find = highest_rate
) -> Iterator[Callable[[Sequence[tuple[ServingCandidate, float]]], _Simulated]]:
    if jobs <= 1:
        yield lambda wave: [_simulate(question, find, it) for it in wave]
        return
    with ProcessPoolExecutor(jobs, get_context("fork"), _remember, (question, find)) as pool:
        yield lambda wave: pool.map(_simulate_remembered, wave)


def _simulate(
    question: SizingQuestion, find: _Find, one: tuple[ServingCandidate, float]
) -> tuple[ServingCandidate, Trial | None, str, int]:
    candidate, bound = one
    return candidate, *find(question, candidate, bound)


_asked: list[tuple[SizingQuestion, _Find]] = []  # in a process of the pool


def _remember(question: SizingQuestion, find: _Find) -> None:
    _asked[:] = [(question, find)]


def _simulate_remembered(one: tuple[ServingCandidate, float]) -> tuple[ServingCandidate, Trial | None, str, int]:
    return _simulate(*_asked[0], one)
