"""Comparison of offered clusters for a job of many optimiser steps, by days and dollars.

Invariant: the cheapest and the fastest offer are simulated, unless simulation is turned off. All steps are assumed to
take as long as the plan's step, although drifting lengths change this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from libra.hardware.cluster import Cluster
from libra.plan.plan import Plan
from libra.plan.problem import InfeasiblePlanError

_HOUR = 3_600.0


@dataclass(frozen=True, slots=True)
class Job:
    """Training of `steps` optimiser steps within `deadline` seconds."""

    steps: int
    deadline: float = inf

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(
                f"steps is {self.steps}; give the number of optimiser steps of the whole training, 1 or more"
            )
        if not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline:g} s; give more than 0")


@dataclass(frozen=True, slots=True)
class OfferedCluster:
    """A cluster with its plan, or with `refusal`, the reason why it has no plan."""

    cluster: Cluster
    plan: Plan | None
    refusal: str = ""

    @property
    def name(self) -> str:
        return f"{self.cluster.devices} {self.cluster.nodes[0].name}"

    def seconds(self, job: Job) -> float:
        """Seconds of the whole job; infinite without a plan."""
        return inf if self.plan is None else job.steps * self.plan.step

    def gpu_hours(self, job: Job) -> float:
        return self.cluster.devices * self.seconds(job) / _HOUR

    def dollars(self, job: Job) -> float | None:
        """Dollars of the whole job; None if the cost of a node is unknown."""
        hourly = self.cluster.cost_per_hour
        return None if hourly is None else hourly * self.seconds(job) / _HOUR


@dataclass(frozen=True, slots=True)
class Comparison:
    """Offers for one job, in the order in which they were named."""

    job: Job
    offers: tuple[OfferedCluster, ...]

    @property
    def priced(self) -> bool:
        """Whether each offer has a cost in dollars; otherwise GPU-hours are compared."""
        return all(it.cluster.cost_per_hour is not None for it in self.offers)

    def cost(self, offer: OfferedCluster) -> float:
        """Dollars, or GPU-hours if an offer has no cost in dollars; infinite without a plan."""
        dollars = offer.dollars(self.job) if self.priced else None
        return offer.gpu_hours(self.job) if dollars is None else dollars

    @property
    def in_time(self) -> tuple[OfferedCluster, ...]:
        return tuple(it for it in self.offers if it.plan is not None and it.seconds(self.job) <= self.job.deadline)

    @property
    def cheapest(self) -> OfferedCluster | None:
        """The cheapest offer that meets the deadline; among equally cheap offers, the fastest. None if no offer meets
        it.
        """
        return min(self.in_time, key=lambda it: (self.cost(it), it.seconds(self.job)), default=None)

    @property
    def fastest(self) -> OfferedCluster | None:
        """The fastest offer, even if it misses the deadline; None if no offer has a plan."""
        planned = [it for it in self.offers if it.plan is not None]
        return min(planned, key=lambda it: (it.seconds(self.job), self.cost(it)), default=None)

    @property
    def front(self) -> tuple[OfferedCluster, ...]:
        """The Pareto front by seconds and cost, fastest first."""
        best, kept = inf, []
        planned = (it for it in self.offers if it.plan is not None)
        for offer in sorted(planned, key=lambda it: (it.seconds(self.job), self.cost(it))):
            if self.cost(offer) < best:
                best = self.cost(offer)
                kept.append(offer)
        return tuple(kept)


def compare_offers(
    clusters: Sequence[Cluster],
    job: Job,
    planned: Callable[[Cluster], Plan],
    simulated: Callable[[Cluster], Plan] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Plan for each cluster by prediction, then simulate the cheapest and the fastest offer. Repeat until both are
    simulated, since a simulated step may differ from its prediction and change the order.
    """
    offers = []
    for number, cluster in enumerate(clusters, start=1):
        tell(f"planning for {cluster.devices} {cluster.nodes[0].name}: {number} of {len(clusters)}")
        try:
            offers.append(OfferedCluster(cluster, planned(cluster)))
        except InfeasiblePlanError as error:
            offers.append(OfferedCluster(cluster, None, " ".join(str(error).split())))
    found = Comparison(job, tuple(offers))
    while simulated is not None:
        promised = next((it for it in (found.cheapest, found.fastest) if it is not None and _is_predicted(it)), None)
        if promised is None:
            break
        tell(f"simulating {promised.name}")
        surer = replace(promised, plan=simulated(promised.cluster))
        found = replace(found, offers=tuple(surer if it is promised else it for it in found.offers))
    return found


def _is_predicted(offer: OfferedCluster) -> bool:
    return offer.plan is not None and offer.plan.simulated is None
