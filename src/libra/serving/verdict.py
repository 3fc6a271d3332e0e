"""Latencies of requests against their objectives, and a simulation that ends once its verdict is certain.

Invariant: a simulation is stopped only if it will miss an objective in any case, or if its latencies will be no lower
than those of a rival in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf

from libra.serving.objective import Metric, Objective
from libra.serving.question import SizingQuestion
from libra.sim.clock import TICKS
from libra.sim.engine.request import Request
from libra.sim.workload.requests import RecordedRequest, Requests

SHOWN: tuple[Metric, Metric] = ("ttft", "tpot")


def statistic(question: SizingQuestion, metric: Metric) -> Objective:
    """The statistic by which TTFT or TPOT is reported: that of its first objective, else the 99th percentile."""
    return next((it for it in question.objectives if it.metric == metric), Objective(metric, "p99", 1.0))


def tenths(question: SizingQuestion, ttft: float, tpot: float) -> tuple[int, int]:
    """TTFT and TPOT in tenths of their limits, rounded up and 10 at most; 0 where nothing limits them."""
    its = [statistic(question, metric) for metric in SHOWN]
    one, other = (
        _tenth(seconds, it) if it in question.objectives else 0 for seconds, it in zip((ttft, tpot), its, strict=True)
    )
    return one, other


def _tenth(seconds: float, objective: Objective) -> int:
    return ceil(min(10 * seconds / objective.limit, 10))


def took(request: Request, metric: Metric) -> float | None:
    """Seconds of a request; infinite if it did not finish, None if the metric does not apply to it."""
    if metric == "tpot" and request.output_tokens < 2:
        return None
    if request.status != "finished" or request.first_token is None or request.finish is None:
        return inf
    if metric == "ttft":
        return took_first(request)
    if metric == "latency":
        return (request.finish - request.arrival) / TICKS
    return (request.finish - request.first_token) / (request.generated - 1) / TICKS


def took_first(request: Request) -> float:
    """Seconds to the first token, which a request has."""
    assert request.first_token is not None
    return (request.first_token - request.arrival) / TICKS


@dataclass(frozen=True, slots=True)
class Rival:
    """A point that a candidate must beat: the rate at which the candidate has the point's value, and the point's
    latencies."""

    name: str
    rate: float  # requests/s
    tenths: tuple[int, int]  # TTFT and TPOT, of their limits


class MissedError(Exception):
    """More requests have missed an objective than are allowed to."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective


class SlowerError(Exception):
    """TTFT and TPOT will be no lower than those of a rival."""

    def __init__(self, rival: Rival) -> None:
        self.rival = rival


class Watched:
    """A workload that stops the simulation once it is certain that an objective is missed, or that the candidate is no
    faster than one of `rivals`.

    A request that has waited longer than a limit of the TTFT counts as a miss before it ends.
    """

    def __init__(
        self,
        workload: Requests,
        question: SizingQuestion,
        records: Sequence[RecordedRequest],
        rivals: Sequence[Rival] = (),
    ) -> None:
        self._workload, self._rivals = workload, rivals
        several = sum(it.output_tokens > 1 for it in records)
        objectives = question.objectives
        counts = {it: several if it.metric == "tpot" else len(records) for it in objectives}
        # The rest of the allowance: requests that may still miss an objective, or for a mean the seconds left in total.
        self._left = {it: it.allowed(count) for it, count in counts.items()}
        self._seconds = {it: it.limit * count for it, count in counts.items()}
        self._first = [it for it in objectives if it.metric == "ttft"]
        self._last = [it for it in objectives if it.metric != "ttft"]
        limits = [0 if self._left[it] is None else it.limit for it in self._first]
        self._patience = inf if 0 in limits else max(limits, default=0.0) * TICKS
        self._waiting: deque[Request] = deque()  # requests whose TTFT was not looked at, in the order of their arrival
        shown = [statistic(question, metric) for metric in SHOWN] if rivals else []
        self._least = {it: _LeastTenth(it, counts[it]) for it in shown if it in counts}
        self._shown = shown

    def start(self) -> Iterator[Request]:
        for request in self._workload.start():
            self._waiting.append(request)
            yield request

    def describe(self) -> dict[str, object]:
        return self._workload.describe()

    def finished(self, request: Request, now: int) -> None:
        rises = False
        for objective in self._last:
            rises |= self._take(objective, took(request, objective.metric))
        waiting = self._waiting
        while waiting and (waiting[0].finish is not None or waiting[0].arrival + self._patience < now):
            first = waiting.popleft()
            for objective in self._first:
                rises |= self._take(objective, inf if first.first_token is None else took_first(first))
        if rises:
            least = [self._least[it].tenth if it in self._least else 0 for it in self._shown]
            for rival in self._rivals:
                if all(one <= other for one, other in zip(rival.tenths, least, strict=True)):
                    raise SlowerError(rival)

    def _take(self, objective: Objective, seconds: float | None) -> bool:
        """Take the seconds of one request into account; return whether the objective's statistic has more tenths than
        before."""
        if seconds is None:
            return False
        left = self._left[objective]
        if left is None:
            self._seconds[objective] -= seconds
            if self._seconds[objective] < 0:
                raise MissedError(objective)
        elif seconds > objective.limit:
            if not left:
                raise MissedError(objective)
            self._left[objective] = left - 1
        least = self._least.get(objective)
        return least is not None and least.rises(seconds)


class _LeastTenth:
    """Lower bound on a statistic in tenths of its limit, from the requests that are known so far."""

    def __init__(self, objective: Objective, requests: int) -> None:
        self._objective, self._requests = objective, requests
        self._allowed = objective.allowed(requests)
        self._above = [0] * 11  # known requests, by their tenths
        self._beyond = 0  # those above `tenth`
        self._seconds = 0.0
        self.tenth = 0

    def rises(self, seconds: float) -> bool:
        """Take the seconds of a request into account; return whether `tenth` has become more."""
        before = self.tenth
        if self._allowed is None:
            self._seconds += seconds
            self.tenth = max(before, _tenth(self._seconds / self._requests, self._objective))
            return self.tenth > before
        its = _tenth(seconds, self._objective)
        self._above[its] += 1
        self._beyond += its > before
        while self._beyond > self._allowed:
            self.tenth += 1
            self._beyond -= self._above[self.tenth]
        return self.tenth > before
