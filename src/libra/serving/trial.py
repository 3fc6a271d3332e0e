"""Simulation of a candidate at one rate of requests.

Invariant: a trial has the record's requests, in the record's order; only the time between them is scaled. So all
candidates and rates are compared on the same requests. A trial stops early only if its verdict is certain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from libra.cost.grid import Array
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.serving.candidate import ServingCandidate
from libra.serving.engines import engines, network
from libra.serving.objective import Metric
from libra.serving.question import SizingQuestion
from libra.serving.verdict import SHOWN, MissedError, Rival, SlowerError, Watched, statistic, took
from libra.sim.clock import LONGEST, seconds
from libra.sim.cluster import SimCluster
from libra.sim.deployment import DEFAULT_DECODE_ROUTE
from libra.sim.engine.request import Request
from libra.sim.engine.tier_fetches import TierTooSmallError
from libra.sim.workload.requests import RecordedRequest, Workload, recorded_requests

ROUTE = DEFAULT_DECODE_ROUTE  # policy for requests, and for computed prompts


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Use of a pool. Shares are means over the pool's engines and the makespan."""

    busy: float  # share of the time
    kv: float  # share of the KV blocks
    preemptions: int


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial. A trial that was stopped, or that would never end, has no latencies."""

    rate: float  # requests/s
    missed: str  # name of a missed objective, or the reason why all are missed; empty: none
    latency: dict[str, float]  # seconds, by objective; empty for a stopped trial
    ttft: float  # seconds, as the statistic of `verdict.statistic`
    tpot: float
    pools: tuple[PoolUse, ...]
    network: float  # share of the bandwidth of the busier side
    requests: int  # simulated requests: the record's number, or a multiple of it
    slower: Rival | None = None  # rival with no higher latencies, for which the trial was stopped

    @property
    def passed(self) -> bool:
        return not self.missed and self.slower is None


def trial(
    question: SizingQuestion,
    candidate: ServingCandidate,
    rate: float,
    *,
    requests: tuple[RecordedRequest, ...] | None = None,
    routes: tuple[Policy, Policy] | None = None,
    to_the_end: bool = False,
    rivals: Sequence[Rival] = (),
) -> Trial:
    """Simulate a candidate at `rate` requests/s.

    `requests` replace the question's requests, at the same rate. `routes` are the policies for requests and for
    computed prompts; the default sends to the least loaded engine. `to_the_end` continues after a miss. With `rivals`,
    the trial stops once its latencies are sure to be no lower than those of a rival. Raises `NoRoomError` if an engine
    cannot run, and ValueError if the rate is too low to simulate.
    """
    records = question.requests if requests is None else requests
    scale = rate / question.natural_rate
    if seconds(records[-1].arrival) >= scale * LONGEST:
        raise ValueError(
            f"rate is {rate:g}: the last of {len(records):,} requests would arrive after 106 days; raise the rate"
        )
    workload = recorded_requests(records, rate_scale=scale)
    watched = workload if to_the_end else Watched(workload, question, records, rivals)
    cluster = _cluster(question, candidate, watched, routes)
    try:
        cluster.run()
    except MissedError as missed:
        return Trial(rate, missed.objective.name, {}, inf, inf, (), 0.0, len(records))
    except SlowerError as slower:
        return Trial(rate, "", {}, inf, inf, (), 0.0, len(records), slower.rival)
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
    """Seconds of each request by metric, with arrivals at the record's own times. TPOT has only requests with two
    tokens or more."""
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


def _durations(requests: list[Request]) -> dict[Metric, Array]:
    metrics: tuple[Metric, ...] = ("ttft", "tpot", "latency")
    taken = {metric: [took(request, metric) for request in requests] for metric in metrics}
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
