"""Both formulations against brute force on 5,000 random problems: `python -m pytest tests/fuzz/fuzz_plan.py`.

Invariant: pytest collects this file only by its name, since it takes minutes; its problems and checks are those of the
tests.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from oracles.enumerate_problems import problems
from oracles.optimality import require_agreement

from libra.plan.problem import Problem


@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_both_formulations_and_brute_force_agree(problem: Problem) -> None:
    require_agreement(problem)
