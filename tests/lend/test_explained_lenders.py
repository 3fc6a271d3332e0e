"""What a pool that serves is worth to a plan, or why nothing is borrowed of it: worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_lender import CERTIFICATE, lender
from tables import by_name

from libra.lend.explained import lender_views
from libra.lend.lent_engine import LentEngine
from libra.plan.explain.explanation import LenderView
from libra.plan.loan import solve_loans
from libra.plan.model.solve import solve
from libra.plan.options.menu import Availability, Menu, Rejected
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption

SHAPE = "chat/tp1@0.8"
EVERY = ((1.0, 1.0),)
OWN = EngineOption("own", "own", 1, 8, 100, 0.0, ((12.0, 4.0),), (0.0, 0.0), (0.0, 0.0))


def menu(work: float, away: float = 0.0) -> Menu:
    """Three devices of one's own: one trains in 8 s and two generate for 16 s, or two train in 4 s, and two lent ones
    take `work` / 2 s for the short trajectories."""
    lent = EngineOption(SHAPE, "chat", 1, 8, 99, 0.0, ((work, work),), (0.0, 0.0), (0.0, 0.0))
    problem = Problem(
        pools=(Pool("own", 3, 1), Pool("chat", 2, 1, serves=True)),
        engines=(OWN, lent),
        training=tuple(TrainingOption("t", "own", n, n, 8.0 / n, 0.0) for n in (1, 2)),
        peaks=(10, 100),
        expected=(True, True),
        longest_context=100,
        recall_known=EVERY,
        recall_possible=EVERY,
        staleness=1,
    )
    rates = (1.0,) * round(10 - 10 * away) + (9.0,) * round(10 * away)
    beside = LentEngine(lender(*rates), CERTIFICATE, 1000, 100, 99)
    cases = (Availability(frozenset(), 1 - away), *([Availability(frozenset({SHAPE}), away)] if away else []))
    return Menu(problem, lent=(beside,), availability=cases)


def view(made: Menu) -> LenderView:
    (found,) = lender_views(made, solve_loans(made, solve).allocation)
    return found


def test_a_loan_that_pays() -> None:
    found = view(menu(10.0, away=0.1))
    assert (found.pool, found.engines, found.use, found.share) == ("chat", 2, (0.8,), pytest.approx(0.9))
    assert (found.step, found.recalled, found.without, found.kept) == (5.0, 16.0, 8.0, 8.0)
    assert found.away == pytest.approx(0.1)
    assert found.average == pytest.approx(0.9 * 5.0 + 0.1 * 16.0)
    assert found.why_not == ""


WHY_NOT: list[tuple[str, Menu, str]] = [
    ("too slow", menu(100.0), "no step would be shorter: it is "),
    ("too little", menu(15.92), "-bound and would be only 0.5 % shorter, which is not worth a loan"),
    ("too often away", menu(10.0, away=0.5), "5.00 s while engines are lent, but 10.50 s on average, as traffic may"),
    ("no option", replace(menu(10.0), problem=replace(menu(10.0).problem, engines=(OWN,)), lent=(),
     rejected=(Rejected(SHAPE, "lends nothing", "too busy"),)), "chat/tp1@0.8: too busy"),
]  # fmt: skip


@by_name("made, message", WHY_NOT)
def test_why_nothing_is_borrowed(made: Menu, message: str) -> None:
    found = view(made)
    assert (found.engines, found.use, found.step, found.average) == (0, (), 8.0, 8.0)
    assert message in found.why_not
