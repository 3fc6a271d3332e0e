"""The chapter of a run on lending: from records of its own servers, and from its use of the devices of agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from markupsafe import Markup

from libra.lend.pages.lending_figures import versions_behind
from libra.lend.pages.lending_section import LendingSection, lending_chapter, lending_section
from libra.lend.records.loan_history import RunClock, run_loans
from libra.records.run_log import RunLog
from libra.records.schema import StepRecord
from libra.report.charts import Figure, Series, line_figure
from libra.report.vega import Axis
from libra.report.words import plural


def run_lending(log: RunLog, directory: Path) -> Markup:
    """The chapter; empty if the run has no lent devices."""
    words = log.summary.lending.words if log.summary is not None and log.summary.lending is not None else ""
    return lending_chapter(_section(log, directory), words)


def _section(log: RunLog, directory: Path) -> LendingSection | None:
    """The section; None if the run borrowed nothing, or made no step."""
    borrowed = [step for step in log.steps if step.loans]
    if not borrowed:
        return None
    clock = RunClock(log.events)
    histories = run_loans(directory, clock.seconds, log.events) if clock.known else []
    markers = ((0.0, "training begins", "before that: evaluation"), (log.steps[-1].time, "ends", "the last step ended"))
    x = Axis("optimiser step", (log.steps[0].step - 0.5, log.steps[-1].step + 0.5))
    figures = (_had(borrowed, x), versions_behind(_behind(borrowed), x))
    seen = "Serving steps are recorded only while rollout has something to compute."
    section = lending_section(histories, "the RL loop began", markers, figures, seen)
    if section is not None:
        return section
    engines = {name for step in borrowed for name in step.loans}
    return LendingSection(figures, f"{plural(len(engines), 'engine')}; their agents keep the records of the devices.")


def _had(steps: Sequence[StepRecord], x: Axis) -> Figure:
    def share(name: str) -> list[tuple[float, float]]:
        """Mean in % of each step, cut at 100: wanted seconds are reported with a small delay."""
        means = ((it.step, fmean(getattr(loan, name) for loan in it.loans.values()) / it.step_seconds) for it in steps)
        return [(step, min(100.0, 100 * mean)) for step, mean in means]

    series = [
        Series("lent", "var(--blue)", share("lent")),
        Series("wanted: turns to generate", "#8a949e", share("wanted")),
    ]
    return line_figure("Rollout's share of the devices", "Means over the lent engines.", series, x, Axis("% of a step"))


def _behind(steps: Sequence[StepRecord]) -> list[tuple[int, list[int]]]:
    return [(step.step, [step.version - it.version for it in step.loans.values()]) for step in steps]
