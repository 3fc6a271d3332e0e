"""The question of a search: model, cluster, requests and objectives.

Invariant: a question in memory is consistent, so it has an answer, which may be "nothing on the menu can".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from numbers import Integral

from libra.cost.grid import EngineProfile
from libra.hardware.cluster import Cluster
from libra.hardware.model import ModelSpec
from libra.serving.candidate import ServingCandidate
from libra.serving.objective import Objective, check_objectives
from libra.sim.clock import seconds
from libra.sim.workload.requests import RecordedRequest

MOST_PRICE = 1e12  # of a GPU, in whatever unit
LASTING = 32  # times the longest allowed wait: a rate that is served for that time counts as lasting
BRIEF = 8  # times the shortest allowed wait: requests that end within that time do not determine a rate


@dataclass(frozen=True, slots=True)
class Drafter:
    """A model that proposes drafts, with its times on the cluster's classes."""

    model: ModelSpec
    profiles: tuple[EngineProfile, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Sources of the parts of a question, given by the user, for files that name them."""

    model: str  # a file, its directory, or a name
    profile: str  # auto, tables, roofline, or a file
    host: str  # none, default, or a file
    requests: str | None = None  # the file, where there is one


@dataclass(frozen=True, slots=True)
class SizingQuestion:
    """Which deployments of `model` on GPUs of `cluster` serve `requests` within `objectives`?

    Without `rate` (requests/s) the search finds the highest rate of each deployment, with all gaps of the record scaled
    by one factor; with it, whether each serves that rate. `gpus` and `budget` are limits of one deployment; `budget` is
    in the unit of `prices`, an hour's price of a GPU by class of nodes. With prices, deployments are compared by cost,
    else by GPUs. `profiles` are those of the cluster's classes, in their order; `drafters` are keyed by their names in
    the menu. `origin` is needed to write a point as a file of its engines.
    """

    cluster: Cluster
    model: ModelSpec
    profiles: tuple[EngineProfile, ...]
    requests: tuple[RecordedRequest, ...]
    objectives: tuple[Objective, ...]
    rate: float | None = None
    gpus: int | None = None
    budget: float | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    drafters: Mapping[str, Drafter] = field(default_factory=dict)
    origin: Origin | None = None
    longest: int = field(init=False)  # tokens of the longest context, which engines must hold

    def __post_init__(self) -> None:
        check_objectives(self.objectives)
        for name, value in (("rate", self.rate), ("budget", self.budget)):
            if value is not None and not (_is_number(value) and isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; give a finite number above 0")
        if self.gpus is not None and not _is_whole(self.gpus):
            raise ValueError(f"gpus is {self.gpus!r}; give a whole number")
        if self.gpus is not None and not 1 <= self.gpus <= self.cluster.devices:
            raise ValueError(f"gpus is {self.gpus}; give 1 to {self.cluster.devices:,}, the GPUs of the cluster")
        if len(self.profiles) != len(self.cluster.nodes):
            raise ValueError(
                f"{len(self.profiles)} profiles for {len(self.cluster.nodes)} classes of nodes: give each one"
            )
        for name in self.prices:
            self.cluster.node_class(name)
        missing = [nodes.name for nodes in self.cluster.nodes if nodes.name not in self.prices]
        if missing and (self.prices or self.budget is not None):
            raise ValueError(f"{missing[0]} has no price: give the cost of a GPU an hour as cost_per_hour of the menu")
        if any(not 0 < price <= MOST_PRICE for price in self.prices.values()):
            raise ValueError(f"prices are {dict(self.prices)}; give numbers above 0, {MOST_PRICE:g} at most")
        _check_requests(self.requests, self.model)
        longest = max(it.prompt_tokens + it.output_tokens for it in self.requests)
        object.__setattr__(self, "longest", longest)  # a question is frozen
        for name, drafter in self.drafters.items():
            if drafter.model.max_context < self.longest:
                raise ValueError(
                    f"{name}, a draft model, is made for {drafter.model.max_context:,} tokens; a request has"
                    f" {self.longest:,}: leave one of them out"
                )

    @property
    def natural_rate(self) -> float:
        """Requests/s of the record."""
        return (len(self.requests) - 1) / seconds(self.requests[-1].arrival - self.requests[0].arrival)

    @property
    def longest_wait(self) -> float:
        """Longest limit, in seconds, of an objective for the first token or the end of a request."""
        return max(it.limit for it in self.objectives if it.metric != "tpot")

    @property
    def shortest_wait(self) -> float:
        """Shortest such limit, in seconds: a growing backlog misses this objective first."""
        return min(it.limit for it in self.objectives if it.metric != "tpot")

    @property
    def unit(self) -> str:
        return "cost" if self.prices else "GPU"

    def cost(self, candidate: ServingCandidate) -> float:
        """An hour's price, or GPUs if there are no prices."""
        if not self.prices:
            return float(candidate.devices)
        return sum(count * self.prices[name] for name, count in candidate.by_class().items())

    def refusal(self, candidate: ServingCandidate) -> str | None:
        """The reason why the candidate exceeds GPUs or budget; None if it does not."""
        for name, count in candidate.by_class().items():
            if count > self.cluster.node_class(name).devices:
                return f"needs {count:,} GPUs of {name}, of {self.cluster.node_class(name).devices:,}"
        if candidate.devices > (self.gpus or inf):
            return f"needs {candidate.devices:,} GPUs, of {self.gpus:,}"
        if self.cost(candidate) > (self.budget or inf):
            return f"costs {self.cost(candidate):g} an hour, of {self.budget:g}"
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_requests(requests: Sequence[RecordedRequest], model: ModelSpec) -> None:
    for number, it in enumerate(requests):
        if not isinstance(it, RecordedRequest):
            raise ValueError(f"request {number} is {it!r:.40}; give RecordedRequests, as libra.read_requests does")
        for name, least in (("arrival", 0), ("prompt_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0)):
            value = getattr(it, name)
            if not _is_whole(value) or value < least:
                raise ValueError(f"request {number}: {name} is {value!r}; give a whole number of {least} or more")
        if it.prefix_tokens > it.prompt_tokens:
            raise ValueError(
                f"request {number}: prefix_tokens is {it.prefix_tokens}, of a prompt of {it.prompt_tokens}: lower it"
            )
    if len(requests) < 2 or requests[-1].arrival == requests[0].arrival:
        raise ValueError("requests all come at one instant: a rate needs two that come at different times")
    if any(later.arrival < sooner.arrival for sooner, later in pairwise(requests)):
        raise ValueError("requests are not in the order of their arrival: sort them")
    for number, it in enumerate(requests):
        if it.cancel_at is not None:
            raise ValueError(f"request {number} has cancel_at: whether it was served in time is unknown; leave it out")
        if it.prompt_tokens + it.output_tokens > model.max_context:
            raise ValueError(
                f"request {number} has {it.prompt_tokens + it.output_tokens:,} tokens; {model.name} is made for"
                f" {model.max_context:,}: leave it out"
            )
