"""Simulation of a candidate at one rate of requests.

Invariant: requests are the record's, in its order, and only the time between them is scaled, so candidates and rates
are compared on one draw. A trial is stopped early only if it is certain to miss an objective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from libra.cost.grid import Array
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.serving.candidate import ServingCandidate
from libra.serving.engines import engines, network
from libra.serving.objective import Metric, Objective
from libra.serving.question import SizingQuestion
from libra.sim.clock import LONGEST, TICKS, seconds
from libra.sim.cluster import SimCluster
from libra.sim.deployment import DEFAULT_DECODE_ROUTE
from libra.sim.engine.request import Request
from libra.sim.engine.tier_fetches import TierTooSmallError
from libra.sim.workload.requests import RecordedRequest, Requests, Workload, recorded_requests

SHOWN: tuple[Metric, Metric] = ("ttft", "tpot")
ROUTE = DEFAULT_DECODE_ROUTE  # of requests, and of prompts that were computed


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Use of a pool: shares of 1, as means over the pool's engines and the makespan, and the number of preemptions."""

    busy: float
    kv: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial. A stopped trial, or one that would never end, has only `missed`."""

    rate: float  # requests/s
    missed: str  # name of a missed objective, or the reason why all are missed; empty: none
    latency: dict[str, float]  # seconds, by objective; empty if it was stopped
    ttft: float  # seconds, by the statistic of the first objective of the metric, else p99
    tpot: float
    pools: tuple[PoolUse, ...]
    network: float  # share of the bandwidth of the busier side
    requests: int  # simulated: those of the record, or a multiple of them

    @property
    def passed(self) -> bool:
        return not self.missed


class _MissedError(Exception):
    """More requests have missed an objective than it allows."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective


def trial(
    question: SizingQuestion,
    candidate: ServingCandidate,
    rate: float,
    *,
    requests: tuple[RecordedRequest, ...] | None = None,
    routes: tuple[Policy, Policy] | None = None,
    to_the_end: bool = False,
) -> Trial:
    """Simulate a candidate at `rate` requests/s. `requests` replace the question's, at the same rate. `routes` are the
    policies for requests and for computed prompts, by default the least loaded. `to_the_end`: continue after a miss.
    Raises `NoRoomError` if an engine cannot run, and ValueError if the rate is too low to simulate."""
    records = question.requests if requests is None else requests
    scale = rate / question.natural_rate
    if seconds(records[-1].arrival) >= scale * LONGEST:
        raise ValueError(f"rate is {rate:g}: the last of {len(records):,} requests would come after 106 days; raise it")
    workload = recorded_requests(records, rate_scale=scale)
    watched = _Watched(workload, question.objectives, records, to_the_end)
    cluster = _cluster(question, candidate, watched, routes)
    try:
        cluster.run()
    except _MissedError as missed:
        return Trial(rate, missed.objective.name, {}, inf, inf, (), 0.0, len(records))
    except TierTooSmallError as error:
        return Trial(rate, f"every objective: {error}", {}, inf, inf, (), 0.0, len(records))
    taken = _durations(cluster.requests)
    latency = {it.name: it.value(taken[it.metric]) if len(taken[it.metric]) else 0.0 for it in question.objectives}
    beyond = next((it.name for it in question.objectives if latency[it.name] > it.limit), "")
    ttft, tpot = (statistic(question, metric).value(taken[metric]) if len(taken[metric]) else 0.0 for metric in SHOWN)
    uses = tuple(_uses(cluster, candidate))
    return Trial(rate, beyond, latency, ttft, tpot, uses, _network_share(cluster, candidate), len(records))


def latencies(
    question: SizingQuestion, candidate: ServingCandidate, requests: tuple[RecordedRequest, ...]
) -> dict[Metric, Array]:
    """Seconds of requests at their own times, by metric; TPOT of those with two tokens or more."""
    cluster = _cluster(question, candidate, recorded_requests(requests))
    cluster.run()
    return _durations(cluster.requests)


def _cluster(
    question: SizingQuestion,
    candidate: ServingCandidate,
    workload: Workload,
    routes: tuple[Policy, Policy] | None = None,
) -> SimCluster:
    specs, net = engines(question, candidate), network(question, candidate)
    first, then = (policy_named(ROUTE, seed=0), policy_named(ROUTE, seed=0)) if routes is None else routes
    prompts = sum(spec.role.takes == "prompt" for spec in specs)
    return SimCluster(
        specs,
        workload,
        first if prompts > 1 else None,
        kv_transfer=net,
        decode_route=None if net is None else then,
    )


def statistic(question: SizingQuestion, metric: Metric) -> Objective:
    """The statistic by which TTFT or TPOT is reported: that of its first objective, else the 99th percentile."""
    return next((it for it in question.objectives if it.metric == metric), Objective(metric, "p99", 1.0))


class _Watched:
    """A workload that stops the simulation as soon as an objective is certainly missed."""

    def __init__(
        self, workload: Requests, objectives: tuple[Objective, ...], records: tuple[RecordedRequest, ...], lenient: bool
    ) -> None:
        self._workload, self._lenient = workload, lenient
        several = sum(it.output_tokens > 1 for it in records)
        counts = {it: several if it.metric == "tpot" else len(records) for it in objectives}
        # The rest of the allowance: requests that may still miss it, or for a mean the seconds left for all together.
        self._left = {it: it.allowed(count) for it, count in counts.items()}
        self._seconds = {it: it.limit * count for it, count in counts.items()}

    def start(self) -> Iterator[Request]:
        return self._workload.start()

    def describe(self) -> dict[str, object]:
        return self._workload.describe()

    def finished(self, request: Request, now: int) -> None:
        if self._lenient:
            return
        for objective, left in self._left.items():
            took = _took(request, objective.metric)
            if took is None:
                continue
            if left is None:
                self._seconds[objective] -= took
                if self._seconds[objective] < 0:
                    raise _MissedError(objective)
            elif took > objective.limit:
                if not left:
                    raise _MissedError(objective)
                self._left[objective] = left - 1


def _took(request: Request, metric: Metric) -> float | None:
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


def _durations(requests: list[Request]) -> dict[Metric, Array]:
    metrics: tuple[Metric, ...] = ("ttft", "tpot", "latency")
    taken = {metric: [_took(request, metric) for request in requests] for metric in metrics}
    return {metric: np.array([it for it in values if it is not None]) for metric, values in taken.items()}


def _uses(cluster: SimCluster, candidate: ServingCandidate) -> Iterator[PoolUse]:
    place = 0
    ticks = max(1, cluster.now)
    for pool in candidate.pools:
        members = cluster.engines[place : place + pool.ranks]
        place += pool.ranks
        busy = sum(it.busy_ticks for it in members) / (ticks * len(members))
        held = sum(it.held_ticks / (2 * it.config.kv_blocks) for it in members) / (ticks * len(members))
        yield PoolUse(busy, held, sum(it.preemptions for it in members))


def _network_share(cluster: SimCluster, candidate: ServingCandidate) -> float:
    if cluster.pairs is None:
        return 0.0
    sides = [sum(it.kv_devices for it in candidate.pools if it.role == role) for role in ("prefill", "decode")]
    narrowest = min(sides) * cluster.pairs.settings.bandwidth
    return cluster.pairs.transferred_bytes / (narrowest * max(1e-12, seconds(cluster.now)))
