"""Latencies of requests against their objectives, and the workload that stops a simulation once its verdict is certain.

Invariant: a simulation stops only if it is certain to miss an objective, or certain to have latencies no lower than a
rival's.
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
    """The first objective for `metric`, whose statistic is reported; without such an objective, the 99th percentile."""
    return next((it for it in question.objectives if it.metric == metric), Objective(metric, "p99", 1.0))


def tenths(question: SizingQuestion, ttft: float, tpot: float) -> tuple[int, int]:
    """TTFT and TPOT in tenths of their limits, rounded up and at most 10; 0 for a metric without an objective."""
    its = [statistic(question, metric) for metric in SHOWN]
    one, other = (
        _tenth(seconds, it) if it in question.objectives else 0 for seconds, it in zip((ttft, tpot), its, strict=True)
    )
    return one, other


def _tenth(seconds: float, objective: Objective) -> int:
    return ceil(min(10 * seconds / objective.limit, 10))


def took(request: Request, metric: Metric) -> float | None:
    """Seconds of a request by `metric`; infinite if the request did not finish, None if the metric does not apply."""
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
    """Seconds to the first token of a request that has one."""
    assert request.first_token is not None
    return (request.first_token - request.arrival) / TICKS


@dataclass(frozen=True, slots=True)
class Rival:
    """A point that a candidate must beat."""

    name: str
    rate: float  # requests/s at which the candidate has the point's value
    tenths: tuple[int, int]  # the point's TTFT and TPOT, in tenths of their limits


class MissedError(Exception):
    """More requests have missed an objective than it allows."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective


class SlowerError(Exception):
    """TTFT and TPOT are certain to be no lower than a rival's."""

    def __init__(self, rival: Rival) -> None:
        self.rival = rival


class Watched:
    """A workload that stops the simulation once the candidate is certain to miss an objective, or to be no faster than
    one of `rivals`.

    A request that has waited longer than the TTFT limits counts as a miss before it ends.
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
        # Allowances left: the number of requests that may still miss an objective; for a mean, the seconds in total.
        self._left = {it: it.allowed(count) for it, count in counts.items()}
        self._seconds = {it: it.limit * count for it, count in counts.items()}
        self._first = [it for it in objectives if it.metric == "ttft"]
        self._last = [it for it in objectives if it.metric != "ttft"]
        limits = [0 if self._left[it] is None else it.limit for it in self._first]
        self._patience = inf if 0 in limits else max(limits, default=0.0) * TICKS
        self._waiting: deque[Request] = deque()  # requests whose TTFT is not counted yet, in the order of arrival
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
        """Count the seconds of one request. Returns whether the lower bound on the objective's statistic, in tenths of
        its limit, has risen."""
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
    """Lower bound on a statistic, in tenths of its limit, from the requests that have been counted."""

    def __init__(self, objective: Objective, requests: int) -> None:
        self._objective, self._requests = objective, requests
        self._allowed = objective.allowed(requests)
        self._above = [0] * 11  # number of counted requests, by their tenths
        self._beyond = 0  # number of counted requests above `tenth`
        self._seconds = 0.0
        self.tenth = 0

    def rises(self, seconds: float) -> bool:
        """Count the seconds of a request. Returns whether `tenth` has risen."""
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
