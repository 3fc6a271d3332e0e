"""Expected steps of plans before they are simulated: their prices, and the errors of these."""

from __future__ import annotations

from collections.abc import Sequence

from libra.choose.race import Expected
from libra.plan.solution import Solution

# Assumed standard errors of predicted steps, relative to a step: of plans with as many engine sizes as the first, and
# of others.
_PRICE_ERROR, _SIZES_ERROR = 0.04, 0.12


def expected_steps(plans: Sequence[Solution]) -> list[Expected]:
    """Predicted steps and their errors, larger where the number of engine sizes is not that of the first plan: then the
    router makes the difference."""
    buckets = len(plans[0].allocation.buckets)
    errors = [_PRICE_ERROR if len(it.allocation.buckets) == buckets else _SIZES_ERROR for it in plans]
    return [Expected(it.predicted.step, error) for it, error in zip(plans, errors, strict=True)]
