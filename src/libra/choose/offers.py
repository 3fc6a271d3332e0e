"""Offered clusters, compared for a job of many optimiser steps: its days, its dollars, and which to take.

Invariant: the cheapest and the fastest were simulated, unless simulation is left out. Every step is assumed to take as
long as the plan's; drifting lengths change that.
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
            raise ValueError(f"steps is {self.steps}; give the optimiser steps of the whole training, 1 or more")
        if not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline:g} s; give more than 0")


@dataclass(frozen=True, slots=True)
class OfferedCluster:
    """A cluster with its plan; `refusal` says why there is none."""

    cluster: Cluster
    plan: Plan | None
    refusal: str = ""

    @property
    def name(self) -> str:
        return f"{self.cluster.devices} {self.cluster.nodes[0].name}"

    def seconds(self, job: Job) -> float:
        """Seconds of the whole job; inf without a plan."""
        return inf if self.plan is None else job.steps * self.plan.step

    def gpu_hours(self, job: Job) -> float:
        return self.cluster.devices * self.seconds(job) / _HOUR

    def dollars(self, job: Job) -> float | None:
        """Dollars of the whole job; None if the cost of a node is not known."""
        hourly = self.cluster.cost_per_hour
        return None if hourly is None else hourly * self.seconds(job) / _HOUR


@dataclass(frozen=True, slots=True)
class Comparison:
    """Offers in the order in which they were named."""

    job: Job
    offers: tuple[OfferedCluster, ...]

    @property
    def priced(self) -> bool:
        """Whether each offer has a cost in dollars; otherwise GPU-hours are compared."""
        return all(it.cluster.cost_per_hour is not None for it in self.offers)

    def cost(self, offer: OfferedCluster) -> float:
        """Dollars, or GPU-hours where an offer has no cost; inf without a plan."""
        dollars = offer.dollars(self.job) if self.priced else None
        return offer.gpu_hours(self.job) if dollars is None else dollars

    @property
    def in_time(self) -> tuple[OfferedCluster, ...]:
        return tuple(it for it in self.offers if it.plan is not None and it.seconds(self.job) <= self.job.deadline)

    @property
    def cheapest(self) -> OfferedCluster | None:
        """The cheapest offer in time; of equally cheap ones the fastest. None if none is in time."""
        return min(self.in_time, key=lambda it: (self.cost(it), it.seconds(self.job)), default=None)

    @property
    def fastest(self) -> OfferedCluster | None:
        """The fastest offer, even if it is late; None if no offer has a plan."""
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
    """Plan for each cluster by prediction, then simulate the cheapest and the fastest until both are simulated offers:
    a simulated step may be longer or shorter than predicted, and then another offer may come first."""
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
