"""Service level objectives: limits of latencies, and the number of requests that may exceed them.

Invariant: all requests together meet or miss an objective. Metrics are those of `sim.outcome`: percentiles are
nearest-rank, and TPOT is over requests of two tokens or more. A request that did not finish misses every objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, fsum
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from libra.config.units import PLAUSIBLE, duration
from libra.config.yaml_file import unknown
from libra.sim.clock import LONGEST

Metric = Literal["ttft", "tpot", "latency"]
METRICS: tuple[Metric, ...] = get_args(Metric)
PERCENTS = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
NAMES = tuple(f"{metric}_{statistic}" for metric in METRICS for statistic in ("mean", *PERCENTS))
# If values have a mean m, at most a share 1/k of them exceeds k * m (Markov's inequality).
_MARKOV = (1.5, 3.0, 10.0)


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective that the `statistic` of `metric` is at most `limit` seconds."""

    metric: Metric
    statistic: str  # mean, p50, p90, p95 or p99
    limit: float

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(unknown("objective", self.name, NAMES))
        if not 0 < self.limit < LONGEST:
            raise ValueError(f"{self.name} is {self.limit}; give seconds, more than 0 and less than {LONGEST:.3g}")

    @property
    def name(self) -> str:
        return f"{self.metric}_{self.statistic}"

    def allowed(self, requests: int) -> int | None:
        """Number of requests, among `requests`, that may exceed the limit; None for a mean, which limits no single
        request."""
        percent = PERCENTS.get(self.statistic)
        return None if percent is None else requests + -percent * requests // 100

    @property
    def fewest(self) -> int:
        """The least number of requests of which one may exceed the limit; 1 for a mean."""
        return -(-100 // (100 - PERCENTS.get(self.statistic, 0)))

    def value(self, seconds: Sequence[float] | NDArray[np.float64]) -> float:
        """The statistic of `seconds`; infinite if the statistic depends on an infinite value."""
        percent = PERCENTS.get(self.statistic)
        if percent is None:
            return fsum(seconds) / len(seconds)
        return float(np.sort(np.asarray(seconds))[-(-percent * len(seconds) // 100) - 1])

    def tails(self, requests: int) -> tuple[tuple[float, int], ...]:
        """Necessary conditions of the objective: (limit, number of requests that may exceed it)."""
        allowed = self.allowed(requests)
        if allowed is not None:
            return ((self.limit, allowed),)
        return tuple((factor * self.limit, max(0, ceil(requests / factor) - 1)) for factor in _MARKOV)


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Parse objectives such as `ttft_p99=1s,tpot_p99=50ms`. A number without unit is seconds. Raises ValueError.

    >>> parse_objectives("ttft_p99=1000ms")
    (Objective(metric='ttft', statistic='p99', limit=1.0),)
    """
    objectives = []
    for part in text.split(","):
        name, equals, number = (it.strip() for it in part.partition("="))
        if not equals:
            raise ValueError(f"{part.strip()!r} is not an objective; give objectives like ttft_p99=1s,tpot_p99=50ms")
        if name not in NAMES:
            raise ValueError(unknown("objective", name, NAMES))
        metric, _, statistic = name.partition("_")
        limit = duration(name, number, PLAUSIBLE[metric])
        objectives.append(Objective(next(it for it in METRICS if it == metric), statistic, limit))
    return check_objectives(objectives)


def check_objectives(objectives: Iterable[Objective]) -> tuple[Objective, ...]:
    """Check and return objectives. Raises ValueError if an objective occurs twice, or none limits the wait of a
    request."""
    made = tuple(objectives)
    names = [it.name for it in made]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice; give it once")
    if not any(it.metric in ("ttft", "latency") for it in made):
        raise ValueError(
            "no objective limits the wait of a request, so every rate would pass: add an objective for ttft or latency,"
            " such as ttft_p99=1"
        )
    return made
