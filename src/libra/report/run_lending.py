"""What lending did in a run."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from libra.records.loan_history import RunClock, run_loans
from libra.records.run_log import RunLog
from libra.records.schema import StepRecord
from libra.report.lending_figures import LendingSection, lending_section, versions_behind
from libra.report.vega import Axis


def run_lending(log: RunLog, directory: Path) -> LendingSection | None:
    """None where the run borrowed nothing, or made no step."""
    clock = RunClock(log.events)
    if not (clock.known and log.steps):
        return None
    borrowed = [step for step in log.steps if step.loans]
    wanted = [(step.time - step.step_seconds / 2, 100 * _wanted(step)) for step in borrowed]
    behind = [(step.step, [step.version - it.version for it in step.loans.values()]) for step in borrowed]
    axis = Axis("optimiser step", (log.steps[0].step - 0.5, log.steps[-1].step + 0.5))
    markers = ((0.0, "training begins", "before that: evaluation"), (log.steps[-1].time, "ends", "the last step ended"))
    return lending_section(
        run_loans(directory, clock.seconds, log.events),
        "the RL loop began",
        markers,
        wanted,
        (versions_behind(behind, axis),) if behind else (),
    )


def _wanted(step: StepRecord) -> float:
    """Share of a step in which lent engines had turns to make."""
    return fmean(it.wanted for it in step.loans.values()) / step.step_seconds
