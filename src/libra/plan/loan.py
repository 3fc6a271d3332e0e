"""Engines that a plan borrows: they generate on devices that serve users meanwhile.

Invariant: a plan counts on a lent engine only as far as its certificate goes, and its step is weighed over all that
traffic may take away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from libra.plan.allocation import Allocation
from libra.plan.decision import Case, expected
from libra.plan.options.menu import LentEngine, Menu
from libra.plan.options.price import solution
from libra.plan.problem import Problem
from libra.plan.solution import Solution

# Of a step. Prices are not told apart by less (docs/fidelity.md has them off by a few percent), and devices of others
# are not free: weights have to go there, and whatever runs there may be recalled.
LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True)
class Loan:
    """The lent engines of one shape. In the plan's placement they are the groups on `pool` with `shape` as name."""

    pool: str  # the serving pool
    shape: str
    use: float  # share of the SLO's tpot that serving is slowed down to
    engines: int  # of rollout, each beside one that serves
    share: float  # of the devices' time that is counted on, while anything is lent
    away: float  # probability that nothing is lent in the coming period


def loans_of(lent: Sequence[LentEngine], allocation: Allocation) -> tuple[Loan, ...]:
    """What an allocation borrows."""
    engines = allocation.engines_by_shape
    return tuple(
        Loan(it.lender.pool, it.shape, it.certificate.use, engines[it.shape], it.share, it.away)
        for it in lent
        if engines[it.shape]
    )


def loan_cases(menu: Menu, weight: float = 1.0) -> tuple[Case, ...]:
    """The menu's problem for all that may be recalled, the likeliest case first. `weight` is shared by them."""
    return tuple(Case(menu.problem, weight * it.probability, it.away) for it in menu.availability)


def without(problem: Problem, shapes: Collection[str]) -> Problem:
    """The problem in which nobody lends engines of the shapes."""
    return replace(problem, engines=tuple(option for option in problem.engines if option.shape not in shapes))


def solve_loans(menu: Menu, solved: Callable[[Problem], Solution]) -> Solution:
    """Split and loan together: of the best allocations with all lenders, without those that may be recalled together,
    and with none, the one with the shortest step on average over all that may be recalled; with none unless that is
    shorter by `LEAST_GAIN`. It is priced as if nothing were recalled; bound and status are those of `solved` for the
    menu's problem."""
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
