"""The value of each serving pool to a plan: the problem solved again without the pool.

Invariant: every pool without a loan has a reason: no certified time, no gain, or too many recalls. A plan without
lenders always exists, since the cluster's own engines can serve every context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from libra.plan.allocation import Allocation
from libra.plan.decision import expected
from libra.plan.explain.explanation import LenderView
from libra.plan.loan import LEAST_GAIN, loan_cases, loans_of, without
from libra.plan.model.solve import solve
from libra.plan.options.menu import Menu
from libra.plan.options.price import own_training, price
from libra.plan.problem import Pool


def lender_views(menu: Menu, allocation: Allocation) -> Iterator[LenderView]:
    """A view for each serving pool of the menu; `allocation` fits the menu's problem."""
    for pool in menu.problem.pools:
        if pool.serves:
            yield _view(menu, allocation, pool)


def _view(menu: Menu, allocation: Allocation, pool: Pool) -> LenderView:
    problem = menu.problem
    shapes = {option.shape for option in problem.engines if option.pool == pool.name}
    loans = [loan for loan in loans_of(menu.lent, allocation) if loan.pool == pool.name]
    engines = sum(loan.engines for loan in loans)
    alone = solve(without(problem, shapes)).allocation
    kept = solve(replace(problem, training=(own_training(problem, alone),)), tie_break=False)
    return LenderView(
        pool=pool.name,
        engines=engines,
        use=tuple(loan.use for loan in loans),
        share=sum(loan.engines * loan.share for loan in loans) / engines if engines else 0.0,
        away=max((loan.away for loan in loans), default=0.0),
        step=price(problem, allocation).step,
        average=expected(loan_cases(menu), allocation).step,
        recalled=price(problem, allocation.without(shapes)).step,
        without=price(problem, alone).step,
        kept=kept.predicted.step,
        why_not="" if engines else _why_not(menu, allocation, pool, bool(shapes)),
    )


def _why_not(menu: Menu, allocation: Allocation, pool: Pool, lends: bool) -> str:
    """The reason why a plan borrows nothing from a pool."""
    if not lends:
        return "; ".join(f"{it.name}: {it.reason}" for it in menu.rejected if it.name.startswith(f"{pool.name}/"))
    cases, mine = loan_cases(menu), price(menu.problem, allocation)
    best = solve(menu.problem).allocation
    if not any(loan.pool == pool.name for loan in loans_of(menu.lent, best)):
        return f"no step would be shorter: it is {mine.bottleneck}-bound"
    gain = 1 - price(menu.problem, best).step / mine.step
    if gain < LEAST_GAIN:
        return (
            f"a step is {mine.bottleneck}-bound and would be only {100 * gain:.2g} % shorter, which is not worth a loan"
        )
    return (
        f"a step would take {price(menu.problem, best).step:,.2f} s while engines are lent, but"
        f" {expected(cases, best).step:,.2f} s on average, as traffic may take them all away; without them it takes"
        f" {expected(cases, allocation).step:,.2f} s"
    )
