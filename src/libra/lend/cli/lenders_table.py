"""The terminal's table of the serving devices of a simulated run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from libra.lend.sim.lending import lender_outcomes
from libra.report.words import percent
from libra.sim.training_run.outcome import SimulatedRun


def show_lenders(outcome: SimulatedRun, console: Console) -> None:
    console.print(
        "Devices that serve: shares of their time lent and recalled, latencies of users' requests, smallest margin of a"
        " token before its due time, and requests that missed the SLO: all, by lending, and inside the envelope.",
        soft_wrap=True,
    )
    console.print(_lenders_table(outcome))


def _lenders_table(outcome: SimulatedRun) -> Table:
    """A table with one row for each serving device."""
    table = Table()
    table.add_column("device", no_wrap=True)
    for name in (
        "lent",
        "away",
        "TTFT P99, ms",
        "TPOT P99, ms",
        "margin, ms",
        "requests",
        "missed",
        "by lending",
        "inside",
    ):
        table.add_column(name, justify="right")
    for it in lender_outcomes(outcome):
        table.add_row(
            it.name,
            percent(it.lent / outcome.seconds, 0),
            percent(it.away / outcome.seconds, 1),
            f"{1e3 * it.ttft:.0f}",
            f"{1e3 * it.tpot:.0f}",
            "" if it.margin is None else f"{1e3 * it.margin:+.1f}",
            f"{it.requests:,}",
            f"{len(it.missed.any)}",
            f"{len(it.attributable)}",
            f"{len(it.attributable - it.uncovered)}",
        )
    return table
