"""Engines that a plan borrows, which generate on devices that also serve users.

Invariant: a plan uses a lent engine only within its certificate, and its step is a mean over all recalls that traffic
may cause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from libra.plan.allocation import Allocation
from libra.plan.decision import Case, expected
from libra.plan.options.menu import BorrowedEngine, Menu
from libra.plan.options.price import solution
from libra.plan.problem import Problem
from libra.plan.solution import Solution

# Least gain of a loan, as a share of a step. Prices are not more exact (docs/fidelity.md: a few percent), and loans
# have costs: engines need weights, and turns may be recalled.
LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True)
class Loan:
    """The lent engines of one shape. In the plan's placement they are the groups on `pool` with `shape` as name."""

    pool: str  # the serving pool
    shape: str
    use: float  # share of the SLO's tpot to which lending may slow down serving
    engines: int  # rollout engines, each on the devices of a serving engine
    share: float  # share of the devices' time that the plan counts on while the pool lends
    away: float  # probability that nothing is lent in the coming period


def loans_of(lent: Sequence[BorrowedEngine], allocation: Allocation) -> tuple[Loan, ...]:
    """The loans of an allocation."""
    engines = allocation.engines_by_shape
    return tuple(
        Loan(it.lender.pool, it.shape, it.use, engines[it.shape], it.share, it.away) for it in lent if engines[it.shape]
    )


def loan_cases(menu: Menu, weight: float = 1.0) -> tuple[Case, ...]:
    """One case of the menu's problem for each possible set of recalls, likeliest first. The cases share `weight` in
    proportion to their probabilities.
    """
    return tuple(Case(menu.problem, weight * it.probability, it.away) for it in menu.availability)


def without(problem: Problem, shapes: Collection[str]) -> Problem:
    """The problem without engines of `shapes`."""
    return replace(problem, engines=tuple(option for option in problem.engines if option.shape not in shapes))


def solve_loans(menu: Menu, solved: Callable[[Problem], Solution]) -> Solution:
    """Choose split and loan together, by the mean step over all possible recalls.

    Compares the best allocations with all lenders, without each set of lenders that may be recalled together, and
    without lenders. The allocation without loans wins unless another shortens the step by `LEAST_GAIN`. The returned
    price is without recalls. Bound and status come from `solved` for the menu's problem.
    """
    problem = menu.problem
    best = solved(problem)
    if problem.lent.isdisjoint(best.allocation.engines_by_shape):
        return best
    away = {it.away for it in menu.availability if it.away}
    fewer = (solved(without(problem, shapes)).allocation for shapes in sorted(away - {problem.lent}, key=sorted))
    cases, alone = loan_cases(menu), solved(without(problem, problem.lent)).allocation
    chosen = min(dict.fromkeys([best.allocation, *fewer]), key=lambda it: expected(cases, it).step)
    if expected(cases, chosen).step > (1 - LEAST_GAIN) * expected(cases, alone).step:
        chosen = alone
    return best if chosen == best.allocation else solution(problem, chosen, best.proof.bound, best.proof.status)
