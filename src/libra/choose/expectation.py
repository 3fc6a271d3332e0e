"""Expected steps of plans before simulation: their prices with errors."""

from __future__ import annotations

from collections.abc import Sequence

from libra.choose.race import Expected
from libra.plan.solution import Solution

# Assumed standard errors of predicted steps, relative to a step: for plans with as many engine sizes as the first plan,
# and for others.
_PRICE_ERROR, _SIZES_ERROR = 0.04, 0.12


def expected_steps(plans: Sequence[Solution]) -> list[Expected]:
    """Predicted steps and their errors. The error is larger for a plan with another number of engine sizes than the
    first plan, since the difference then depends on the router.
    """
    buckets = len(plans[0].allocation.buckets)
    errors = [_PRICE_ERROR if len(it.allocation.buckets) == buckets else _SIZES_ERROR for it in plans]
    return [Expected(it.predicted.step, error) for it, error in zip(plans, errors, strict=True)]
