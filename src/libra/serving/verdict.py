"""Latencies of requests against their objectives, and a simulation that ends once its verdict is certain.

Invariant: a simulation is stopped only if it will miss an objective in any case, or if its latencies will be no lower
than those of a rival in any case.
"""

from __future__ import annotations

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
        return (request.first_token - request.arrival) / TICKS
    if metric == "latency":
        return (request.finish - request.arrival) / TICKS
    return (request.finish - request.first_token) / (request.generated - 1) / TICKS


@dataclass(frozen=True, slots=True)
class Rival:
    """A point as seen by a candidate: the rate at which the candidate would be worth as much, and its latencies."""

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
    """A workload that stops the simulation once it is certain that an objective is missed, or that it is no faster than
    one of `rivals`."""

    def __init__(
        self,
        workload: Requests,
        question: SizingQuestion,
        records: Sequence[RecordedRequest],
        rivals: Sequence[Rival] = (),
    ) -> None:
        self._workload, self._rivals = workload, rivals
        several = sum(it.output_tokens > 1 for it in records)
        counts = {it: several if it.metric == "tpot" else len(records) for it in question.objectives}
        # The rest of the allowance: requests that may still miss it, or for a mean the seconds left for all together.
        self._left = {it: it.allowed(count) for it, count in counts.items()}
        self._seconds = {it: it.limit * count for it, count in counts.items()}
        shown = (statistic(question, metric) for metric in SHOWN)
        self._least = [_LeastTenth(it, counts[it]) if it in counts else None for it in shown] if rivals else []

    def start(self) -> Iterator[Request]:
        return self._workload.start()

    def describe(self) -> dict[str, object]:
        return self._workload.describe()

    def finished(self, request: Request, now: int) -> None:
        for objective, left in self._left.items():
            seconds = took(request, objective.metric)
            if seconds is None:
                continue
            if left is None:
                self._seconds[objective] -= seconds
                if self._seconds[objective] < 0:
                    raise MissedError(objective)
            elif seconds > objective.limit:
                if not left:
                    raise MissedError(objective)
                self._left[objective] = left - 1
        if any([it.rises(request) for it in self._least if it is not None]):
            least = [0 if it is None else it.tenth for it in self._least]
            for rival in self._rivals:
                if all(one <= other for one, other in zip(rival.tenths, least, strict=True)):
                    raise SlowerError(rival)


class _LeastTenth:
    """Tenths of its limit that a statistic has at least, by the requests that have finished so far."""

    def __init__(self, objective: Objective, requests: int) -> None:
        self._objective, self._requests = objective, requests
        self._allowed = objective.allowed(requests)
        self._above = [0] * 11  # finished requests, by their tenths
        self._beyond = 0  # those above `tenth`
        self._seconds = 0.0
        self.tenth = 0

    def rises(self, request: Request) -> bool:
        """Take a finished request into account; return whether `tenth` has become more."""
        seconds, before = took(request, self._objective.metric), self.tenth
        if seconds is None:
            return False
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
