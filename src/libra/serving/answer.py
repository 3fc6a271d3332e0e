"""The answer of a search, and how certain the answer is.

Invariant: every candidate of the menu is in an answer once: as a point of the Pareto set, or rejected with a reason. A
claim says whether a bound proves the claim or only simulation supports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf, isfinite
from typing import Any, Literal

from libra.report.words import per_second, percent, plural
from libra.serving.candidate import ServingCandidate
from libra.serving.holding import Check, Held
from libra.serving.ladder import HIGHEST, rate_of
from libra.serving.question import BRIEF, LASTING, SizingQuestion
from libra.serving.trial import Trial
from libra.serving.verdict import tenths

_BUSY = 0.8  # a bottleneck mentions a network from this share of used bandwidth on

By = Literal["bound", "simulation", "dominated"]


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate at the highest rate that it serves."""

    candidate: ServingCandidate
    cost: float  # GPUs, or price per hour
    bound: float  # requests/s
    trial: Trial
    bottleneck: str
    tenths: tuple[int, int]  # TTFT and TPOT in tenths of their limits, rounded up; 0: no limit
    checks: tuple[Check, ...]  # at the point's rate, on the record and on its draws

    @property
    def tightest(self) -> tuple[float, str, str]:
        """(largest share of a limit that a check reached, objective, name of the check)."""
        return max((share, name, check.name) for check in self.checks for name, share in check.shares.items())

    @property
    def value(self) -> float:
        """Requests/s per GPU, or per unit of the price per hour."""
        return self.trial.rate / self.cost

    def dominates(self, other: Point) -> bool:
        """Whether this point dominates the other: its goodput is no lower, and its TTFT and TPOT, in tenths of their
        limits, are no higher. If all three are equal, the point with lower latencies in seconds dominates."""
        if (self.value, self.tenths) == (other.value, other.tenths):
            return self.criteria < other.criteria
        no_slower = all(one <= another for one, another in zip(self.tenths, other.tenths, strict=True))
        return self.value >= other.value and no_slower

    @property
    def criteria(self) -> tuple[float, float, float]:
        """Negated value, TTFT and TPOT; lower is better."""
        return -self.value, self.trial.ttft, self.trial.tpot


@dataclass(frozen=True, slots=True)
class Rejection:
    candidate: ServingCandidate
    cost: float
    by: By
    reason: str
    bound: float  # requests/s
    rate: float | None  # requests/s that a dominated candidate serves; None: another reason


@dataclass(frozen=True, slots=True)
class NearMiss:
    """The best candidate that a bound allows but that fails in simulation."""

    candidate: ServingCandidate
    objective: str
    limit: float
    seconds: float
    check: str  # the record, or a draw


@dataclass(frozen=True, slots=True)
class SizingAnswer:
    question: SizingQuestion
    points: tuple[Point, ...]  # the Pareto set, best value first
    rejected: tuple[Rejection, ...]  # in the menu's order
    runs: int  # simulations
    possible: int  # candidates that a bound leaves better than the best point
    near_miss: NearMiss | None

    @property
    def candidates(self) -> int:
        return len(self.points) + len(self.rejected)

    @property
    def out_by_bound(self) -> int:
        return sum(it.by == "bound" for it in self.rejected)

    @property
    def proven(self) -> bool:
        return self.told and not self.possible

    @property
    def told(self) -> bool:
        """Whether the answer has points whose rate is given, or determined by enough requests."""
        return bool(self.points) and (self.question.rate is not None or not self._brief())

    def claim(self) -> str:
        """Comparison of the best point with the other candidates, and how certain the comparison is."""
        if self.points and not self.told:
            return "the requests are too few to determine a rate"
        given = self.question.rate is not None
        better = "cheaper" if given and self.question.prices else "with fewer GPUs" if given else "better"
        if not self.points:
            if all(it.by == "bound" for it in self.rejected):
                return "nothing on the menu can (bound)"
            tried = sum(it.by == "simulation" for it in self.rejected)
            return f"no deployment meets the limits in simulation ({tried} tried)"
        if self.proven:
            return f"nothing {better} on the menu can (bound)"
        rivals = "no cheaper deployment" if better == "cheaper" else "no deployment with fewer GPUs"
        text = f"{rivals} meets the limits" if given else "no deployment is better"
        text += f" in simulation ({self.possible} tried)"
        near = self.near_miss
        if near is not None:
            beyond = near.seconds - near.limit
            its = f"misses {near.objective} by {beyond:.3g} s" if beyond > 0 else "is as good"
            text += f"; the {'nearest' if given else 'next best'} {its} on {near.check}"
        return text

    def caution(self) -> str | None:
        """A warning if the requests are too few; None if they suffice. With few requests, a deployment may serve all in
        time although its queue grows, or a percentile is the latency of the slowest request.
        """
        if not self.points:
            return None
        reasons, enough = self._brief(), []
        if reasons:
            fastest = self._fastest
            enough.append(ceil(LASTING * fastest.rate * self.question.shortest_wait))
        count = len(self.question.requests)
        few = [it for it in self.question.objectives if it.allowed(count) == 0]
        if self.question.rate is not None and few:
            names = " and ".join(it.name for it in few)
            reasons += [f"{names} of {plural(count, 'request')} {'is' if len(few) == 1 else 'are'} that of the slowest"]
            enough.append(max(it.fewest for it in few))
        return f"{'; '.join(reasons)}; give {max(enough):,} requests or more" if reasons else None

    @property
    def _fastest(self) -> Trial:
        return max((it.trial for it in self.points), key=lambda it: it.rate)

    def _brief(self) -> list[str]:
        """The reason why the run is too short to determine a rate; empty if the run is long enough."""
        count, rate, wait = self._fastest.requests, self._fastest.rate, self.question.shortest_wait
        if count >= BRIEF * rate * wait and (self.question.rate is not None or rate < rate_of(HIGHEST)):
            return []
        come = f"the {plural(count, 'request')} {'comes' if count == 1 else 'come'} within {count / rate:.3g} s"
        return [
            f"at {per_second(rate)} {come}, and may wait {wait:g} s: a deployment that cannot keep up may still serve"
            f" {'this request' if count == 1 else 'all of them'} in time"
        ]

    def document(self) -> dict[str, Any]:
        """The answer as JSON values."""
        question = self.question
        return {
            "question": {
                "model": question.model.name,
                "requests": len(question.requests),
                "objectives": {it.name: it.limit for it in question.objectives},
                "rate": question.rate,
                "gpus": question.gpus,
                "budget": question.budget,
                "cost_per_hour": dict(question.prices),
                "engine_times": {
                    nodes.name: f"{profile.source}; host: {profile.host.source}"
                    for nodes, profile in zip(question.cluster.nodes, question.profiles, strict=True)
                },
            },
            "claim": self.claim(),
            "caution": self.caution(),
            "proven": self.proven,
            "candidates": self.candidates,
            "out_by_bound": self.out_by_bound,
            "simulations": self.runs,
            "near_miss": None if self.near_miss is None else _plain(asdict(self.near_miss)),
            "pareto": [
                {
                    "candidate": asdict(it.candidate),
                    "gpus": it.candidate.devices,
                    "cost": it.cost,
                    "rate": it.trial.rate,
                    f"rate_per_{question.unit.lower()}": it.value,
                    "rate_bound": _finite(it.bound),
                    "latency": it.trial.latency,
                    "margin": 1 - it.tightest[0],
                    "checks": [asdict(check) for check in it.checks],
                    "ttft": it.trial.ttft,
                    "tpot": it.trial.tpot,
                    "pools": [asdict(pool) for pool in it.trial.pools],
                    "network": it.trial.network,
                    "bottleneck": it.bottleneck,
                }
                for it in self.points
            ]
            if self.told
            else [
                {"candidate": asdict(it.candidate), "gpus": it.candidate.devices, "cost": it.cost} for it in self.points
            ],
            "rejected": [_plain(asdict(it)) for it in self.rejected],
        }


def pareto(points: Sequence[Point]) -> tuple[list[Point], dict[ServingCandidate, Point]]:
    """(points that no other point dominates, best value first; a dominating point for each dominated candidate)."""
    ordered = sorted(points, key=lambda it: (-it.value, it.tenths, it.criteria))  # no point dominates an earlier point
    kept: list[Point] = []
    beaten: dict[ServingCandidate, Point] = {}
    for point in ordered:
        better = next((it for it in kept if it.dominates(point)), None)
        if better is None:
            kept.append(point)
        else:
            beaten[point.candidate] = better
    return kept, beaten


def point_of(question: SizingQuestion, candidate: ServingCandidate, bound: float, held: Held) -> Point | None:
    """The point of a candidate; None if the candidate serves at no rate."""
    one = held.trial
    if one is None:
        return None
    why = bottleneck(question, candidate, one)
    return Point(
        candidate, question.cost(candidate), bound, one, why, tenths(question, one.ttft, one.tpot), held.checks
    )


def rival(least: tuple[int, int], kept: Sequence[Point]) -> Point | None:
    """The point with the highest value among the points that are no slower than `least`, tenths of the limits."""
    return max(
        (it for it in kept if all(one <= another for one, another in zip(it.tenths, least, strict=True))),
        key=lambda it: it.value,
        default=None,
    )


def bottleneck(question: SizingQuestion, candidate: ServingCandidate, trial: Trial) -> str:
    """The objective nearest to its limit, and the use of the pool that determines this objective."""
    near = max(question.objectives, key=lambda it: trial.latency[it.name] / it.limit)
    other = "decode" if near.metric == "ttft" else "prefill"
    its = [both for both in zip(candidate.pools, trial.pools, strict=True) if both[0].role != other]
    pool, use = max(its, key=lambda both: both[1].busy)
    text = f"{near.name} at {percent(trial.latency[near.name] / near.limit, 0)} of its limit"
    text += f"; {pool.role} engines {percent(use.busy, 0)} busy, KV {percent(use.kv, 0)} full"
    if use.preemptions:
        text += f", {use.preemptions:,} preemptions"
    return text if trial.network < _BUSY else f"{text}; network {percent(trial.network, 0)} busy"


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value in (inf, -inf) else value for key, value in values.items()}
