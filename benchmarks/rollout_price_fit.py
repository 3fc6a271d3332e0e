"""Factors that bring prices near what was simulated.

Invariant: only the price of given allocations is computed here, so the same samples give the same factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from libra.cost.corrections import UNCORRECTED, BatchFactors
from libra.cost.grid import EngineProfile
from libra.hardware.cluster import NodeClass
from libra.plan.allocation import Allocation
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.engines import engine_options
from libra.plan.options.price import bucket_prices, price
from libra.plan.problem import EngineOption, Problem

Floats = NDArray[np.float64]

_ROUNDS = 6
_STEP = 0.02  # of a factor, to see how the price follows
_TRUST = 0.3  # a factor changes by no more in a round
_RANGE = (0.05, 2.0)
_PARTS = ("decode", "prefill", "eviction", "memory", "generation")
_PRIOR = 0.05  # weight of 1 for each factor, in mean squared logarithms: what the samples say little of stays there


@dataclass(frozen=True)
class Sample:
    """One allocation, and how long it was simulated to take: see `priced_seconds`."""

    request: ClusterRequest
    problem: Problem
    allocation: Allocation
    seconds: float

    def price(self, factors: BatchFactors) -> float:
        return priced_seconds(replace(self.problem, engines=self._options(factors)), self.allocation)

    def _options(self, factors: BatchFactors) -> tuple[EngineOption, ...]:
        request = self.request
        found: list[EngineOption] = []
        for nodes, profile in self._profiles:
            options, _ = engine_options(
                request.model, nodes, request.recipe, request.classes, profile, request.recipe.max_length, factors
            )
            found += options
        return tuple(found)

    @cached_property
    def _profiles(self) -> list[tuple[NodeClass, EngineProfile]]:
        """Profiles with only the engine sizes that the allocation has: no others need a price."""
        shapes = {bucket.shape for bucket in self.allocation.buckets}
        found = []
        for nodes, profile in zip(self.request.cluster.nodes, self.request.profiles, strict=True):
            grids = tuple(grid for grid in profile.engines if f"{nodes.name}/tp{grid.tp}" in shapes)
            if grids:
                found.append((nodes, replace(profile, engines=grids)))
        return found


def priced_seconds(problem: Problem, allocation: Allocation) -> float:
    """Predicted seconds of a batch's rollout, weights loaded before; where batches overlap, of a step."""
    if problem.staleness:
        return price(problem, allocation).step
    prices = bucket_prices(problem, allocation)
    return max(max(price.load, price.residence) - price.option.stall for price in prices)


def fit(samples: Sequence[Sample]) -> BatchFactors:
    """Least squares of the logarithms of predicted by simulated seconds, by Gauss and Newton's method."""

    def factors_of(values: Floats) -> BatchFactors:
        return replace(UNCORRECTED, **dict(zip(_PARTS, values.tolist(), strict=True)))

    def errors(values: Floats) -> Floats:
        factors = factors_of(values)
        return np.array([np.log(sample.price(factors) / sample.seconds) for sample in samples])

    before = np.ones(len(_PARTS))
    factors = before
    for _ in range(_ROUNDS):
        now = errors(factors)
        slopes = np.array([(errors(factors + _STEP * unit) - now) / _STEP for unit in np.eye(len(_PARTS))]).T
        # A heavy-tailed batch is no reason to misprice all others.
        weights = 1 / np.sqrt(np.maximum(np.abs(now), 0.05))
        rows = np.vstack([slopes * weights[:, None], _PRIOR * np.sqrt(len(samples)) * np.eye(len(_PARTS))])
        wanted = np.concatenate([-now * weights, _PRIOR * np.sqrt(len(samples)) * (before - factors)])
        change = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        factors = np.clip(factors + np.clip(change, -_TRUST, _TRUST), *_RANGE)
    return factors_of(factors.round(2))
