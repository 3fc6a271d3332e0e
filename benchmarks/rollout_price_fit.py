"""Factors that bring prices near what was simulated.

Invariant: nothing but the price of given allocations is asked here, so the same samples give the same factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from libra.cluster import NodeClass
from libra.cost.corrections import UNCORRECTED, BatchFactors
from libra.cost.grid import EngineProfile
from libra.plan.cluster_request import ClusterRequest
from libra.plan.engines import engine_options
from libra.plan.price import bucket_prices
from libra.plan.problem import Allocation, EngineOption, Problem

Floats = NDArray[np.float64]

_ROUNDS = 6
_STEP = 0.02  # of a factor, to see how the price follows
_TRUST = 0.3  # a factor changes by no more in a round
_RANGE = (0.05, 2.0)
_PRIOR = 0.05  # weight of 1 for each factor, in mean squared logarithms: what the samples say little of stays there


@dataclass(frozen=True)
class Sample:
    """One allocation, and how long it was simulated to roll out a batch."""

    request: ClusterRequest
    problem: Problem
    allocation: Allocation
    seconds: float

    def price(self, factors: BatchFactors) -> float:
        problem = replace(self.problem, engines=self._options(factors))
        return rollout_seconds(problem, self.allocation)

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
        """Of the sizes that the allocation has: no others need a price."""
        shapes = {bucket.shape for bucket in self.allocation.buckets}
        found = []
        for nodes, profile in zip(self.request.cluster.nodes, self.request.profiles, strict=True):
            grids = tuple(grid for grid in profile.engines if f"{nodes.name}/tp{grid.tp}" in shapes)
            if grids:
                found.append((nodes, replace(profile, engines=grids)))
        return found


def rollout_seconds(problem: Problem, allocation: Allocation) -> float:
    """Predicted seconds of a batch's rollout, weights loaded before."""
    prices = bucket_prices(problem, allocation)
    return max(max(price.load, price.residence) - price.option.stall for price in prices)


def fit(samples: Sequence[Sample]) -> BatchFactors:
    """Least squares of the logarithms of predicted by simulated seconds, by Gauss and Newton's method."""
    factors = np.array(astuple(UNCORRECTED))
    for _ in range(_ROUNDS):
        errors = _errors(samples, factors)
        slopes = np.array(
            [(_errors(samples, factors + _STEP * unit) - errors) / _STEP for unit in np.eye(len(factors))]
        ).T
        # A heavy-tailed batch is no reason to misprice all others.
        weights = 1 / np.sqrt(np.maximum(np.abs(errors), 0.05))
        rows = np.vstack([slopes * weights[:, None], _PRIOR * np.sqrt(len(samples)) * np.eye(len(factors))])
        wanted = np.concatenate([-errors * weights, _PRIOR * np.sqrt(len(samples)) * (1 - factors)])
        change = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        factors = np.clip(factors + np.clip(change, -_TRUST, _TRUST), *_RANGE)
    return BatchFactors(*(round(float(factor), 2) for factor in factors))


def _errors(samples: Sequence[Sample], factors: Floats) -> Floats:
    given = BatchFactors(*factors.tolist())
    return np.array([np.log(sample.price(given) / sample.seconds) for sample in samples])
