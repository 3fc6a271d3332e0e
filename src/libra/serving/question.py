"""The question of a search: model, cluster, requests and objectives.

Invariant: a question is consistent, so it has an answer, which may be that nothing on the menu can serve.
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

MOST_PRICE = 1e12  # of a GPU, in the user's unit
LASTING = 32  # multiple of the longest allowed wait: a rate that is served for this time counts as lasting
BRIEF = 8  # multiple of the shortest allowed wait: requests that arrive within this time do not determine a rate


@dataclass(frozen=True, slots=True)
class Drafter:
    """A model that proposes drafts, with its times on the cluster's classes."""

    model: ModelSpec
    profiles: tuple[EngineProfile, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The user's arguments from which a question was made, for files that repeat them."""

    model: str  # a file, its directory, or a name
    profile: str  # auto, tables, roofline, or a file
    host: str  # none, default, or a file
    requests: str | None = None  # the file; None: requests in memory


@dataclass(frozen=True, slots=True)
class SizingQuestion:
    """The question which deployments of `model` on GPUs of `cluster` serve `requests` within `objectives`.

    With `rate` (requests/s) the search finds out whether each deployment serves this rate. Without `rate` it finds the
    highest rate of each deployment, with all gaps of the record scaled by one factor. `gpus` and `budget` limit one
    deployment. `prices` are hourly prices of a GPU by class of nodes, and `budget` is in the same unit. Deployments are
    compared by cost if there are prices, otherwise by GPUs. `profiles` are in the order of the cluster's classes, and
    `drafters` are keyed by their names in the menu. Writing a point as an engines file needs `origin`.
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
    longest: int = field(init=False)  # tokens of the longest context, for which engines must have memory

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
                f"{len(self.profiles)} profiles for {len(self.cluster.nodes)} classes of nodes: give a profile for each"
                " class"
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
                    f"{name}, a draft model, is made for {drafter.model.max_context:,} tokens, but a request has"
                    f" {self.longest:,}: leave out the request or the drafts"
                )

    @property
    def natural_rate(self) -> float:
        """Requests/s of the record at its own times."""
        return (len(self.requests) - 1) / seconds(self.requests[-1].arrival - self.requests[0].arrival)

    @property
    def longest_wait(self) -> float:
        """The longest limit, in seconds, among objectives for TTFT or latency."""
        return max(it.limit for it in self.objectives if it.metric != "tpot")

    @property
    def shortest_wait(self) -> float:
        """The shortest limit, in seconds, among objectives for TTFT or latency. A growing backlog first misses this
        limit."""
        return min(it.limit for it in self.objectives if it.metric != "tpot")

    @property
    def unit(self) -> str:
        return "cost" if self.prices else "GPU"

    def cost(self, candidate: ServingCandidate) -> float:
        """The price per hour, or the number of GPUs if there are no prices."""
        if not self.prices:
            return float(candidate.devices)
        return sum(count * self.prices[name] for name, count in candidate.by_class().items())

    def refusal(self, candidate: ServingCandidate) -> str | None:
        """The reason why the candidate exceeds the GPUs or the budget; None if it fits both."""
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
                f"request {number}: prefix_tokens is {it.prefix_tokens}, more than prompt_tokens, {it.prompt_tokens}:"
                " lower it"
            )
    if len(requests) < 2 or requests[-1].arrival == requests[0].arrival:
        raise ValueError("requests all arrive at one time: give requests at two times or more, which determine a rate")
    if any(later.arrival < sooner.arrival for sooner, later in pairwise(requests)):
        raise ValueError("requests are not in the order of their arrival: sort them")
    for number, it in enumerate(requests):
        if it.cancel_at is not None:
            raise ValueError(f"request {number} has cancel_at: whether it was served in time is unknown; leave it out")
        if it.prompt_tokens + it.output_tokens > model.max_context:
            raise ValueError(
                f"request {number} has {it.prompt_tokens + it.output_tokens:,} tokens, but {model.name} is made for"
                f" {model.max_context:,}: leave the request out"
            )
