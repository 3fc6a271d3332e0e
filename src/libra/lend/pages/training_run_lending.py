"""Lent devices on the page and the trace of a simulated run."""

from __future__ import annotations

from libra.lend.pages.lending_section import lending_chapter, lending_section
from libra.lend.records.loan_history import LoanHistory
from libra.lend.records.loan_trace import draw_loans
from libra.lend.sim.lending import lender_outcomes
from libra.records.trace import TraceFile
from libra.report.page import Tile
from libra.report.training_run_page import RunChapter
from libra.report.words import count, percent, plural
from libra.sim.training_run.outcome import SimulatedRun


def run_chapter(outcome: SimulatedRun) -> RunChapter:
    """The chapter of a run; empty where nothing is lent."""
    ended = outcome.steps[-1].ended
    section = lending_section(_histories(outcome), "the run began", ((ended, "ends", "the last step was made"),))
    return RunChapter(_sentences(outcome), _tiles(outcome), lending_chapter(section))


def draw_lenders(trace: TraceFile, group: int, outcome: SimulatedRun) -> None:
    """Draw the histories of a run's lenders in a group of their own."""
    draw_loans(trace, group, _histories(outcome))


def _histories(outcome: SimulatedRun) -> list[LoanHistory]:
    return [it.history for it in lender_outcomes(outcome) if it.history is not None]


def _sentences(outcome: SimulatedRun) -> tuple[str, ...]:
    lenders = lender_outcomes(outcome)
    if not lenders:
        return ()
    requests, missed = sum(it.requests for it in lenders), sum(len(it.missed.any) for it in lenders)
    return (f"{count(missed)} of {plural(requests, 'request')} of users missed their SLO.",)


def _tiles(outcome: SimulatedRun) -> tuple[Tile, ...]:
    lenders = lender_outcomes(outcome)
    if not lenders:
        return ()
    lent = sum(it.lent for it in lenders) / len(lenders) / outcome.seconds
    away = sum(it.away for it in lenders) / len(lenders) / outcome.seconds
    missed, blamed, inside = (
        sum(map(len, found))
        for found in zip(
            *((it.missed.any, it.attributable, it.attributable - it.uncovered) for it in lenders), strict=True
        )
    )
    cost = f"{count(missed)} missed their SLO, {count(blamed)} because of lending, {count(inside)} inside the envelope"
    return (
        Tile("Lent", percent(lent, 0), f"of the time of {plural(len(lenders), 'serving device')}"),
        Tile("Recalled", percent(away), f"of their time, {plural(sum(it.recalls for it in lenders), 'recall')}"),
        Tile("Users' requests", count(sum(it.requests for it in lenders)), cost, alarming=bool(inside)),
    )
