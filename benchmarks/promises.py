"""Promises of runs: predicted and measured steps, learned biases, and gains of changes.

Invariant: everything is read from the records of the runs; nothing is computed anew but means.

    python -m benchmarks.promises RUN... [--json FILE]

RUN is a directory such as `runs/calculator`. A settled period is one in which no worker changed its role. Its promise
is the price of a step, corrected by what was learned before it, and made before its steps. The gain of a change is what
the allocation that was left would take by then, less what was measured; ± is two standard errors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from benchmarks.command import command_line
from benchmarks.rows import Row, report
from libra.records.run_log import RunLog, prediction_error, read_run
from libra.report.run_promises import promise_rows
from libra.report.words import cell, duration, signed_duration

ERROR = 0.10  # mean relative error of the promises of settled periods, at most

_PERIODS = ("steps", "allocation", "priced", "promised", "measured", "error", "learned")
_CHANGES = ("after step", "change", "promised a step", "realised a step", "verdict")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("promises", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    options = parser.parse_args(arguments)
    logs = [(f"{path}", read_run(path)) for path in options.runs]
    console = Console(width=180)
    for name, log in logs:
        console.print(_table(f"{name}: periods", _PERIODS, promise_rows(log.periods)))
        console.print(_table(f"{name}: changes", _CHANGES, change_rows(log)))
    rows = [row for name, log in logs for row in rows_of(name, log)]
    report([*rows, *together([log for _, log in logs])], options.json)
    return 0


def rows_of(case: str, log: RunLog) -> list[Row]:
    """The numbers of one run. Raises ValueError where it has no settled period."""
    settled = [period for period in log.periods if not period.switching]
    error = prediction_error(settled)
    if error is None:
        raise ValueError(f"{case}: no period is settled; give a run of more steps than its planner.period")
    uncorrected = [
        abs(period.priced_seconds - period.measured_seconds) / period.measured_seconds
        for period in settled
        if period.priced_seconds is not None
    ]
    rows = [
        Row(case, "settled periods", len(settled), ""),
        Row(case, "mean error of promises", 100 * error, "%"),
        Row(case, "largest error of a promise", 100 * max(abs(period.relative_error) for period in settled), "%"),
    ]
    if uncorrected:
        rows.append(Row(case, "mean error of prices, not corrected", 100 * fmean(uncorrected), "%"))
    judged = [decision for decision in log.taken if decision.realised_gain_per_step is not None]
    return [*rows, Row(case, "changes", len(log.taken), ""), Row(case, "changes with a known outcome", len(judged), "")]


def together(logs: Sequence[RunLog]) -> list[Row]:
    """The two goals, over all runs."""
    error = prediction_error(period for log in logs for period in log.periods)
    lost = sum(decision.surely_lost for log in logs for decision in log.taken)
    rows = [] if error is None else [
        Row("all runs", "mean error of promises", 100 * error, "%", f"at most {100 * ERROR:g} %", error <= ERROR)
    ]  # fmt: skip
    return [*rows, Row("all runs", "changes that lost more than their interval", lost, "", "none", lost == 0)]


def change_rows(log: RunLog) -> list[tuple[str, ...]]:
    """After which step, what changed, the promised and the realised gain of a step, and the verdict."""
    rows: list[tuple[str, ...]] = []
    for it in log.taken:
        gain, interval = it.realised_gain_per_step, it.realised_interval
        promised = signed_duration(it.gain_per_step)
        if it.price_error is not None:
            promised += f" ± {duration(2 * it.price_error)}"
        realised = "not measured" if gain is None else signed_duration(gain)
        if interval is not None:
            realised += f" ± {duration(interval)}"
        verdict = "not known"
        if gain is not None and interval is not None:
            verdict = "lost" if it.surely_lost else "gained" if gain > interval else "within its interval"
        rows.append((f"{it.step}", f"{it.before} → {it.after}", promised, realised, verdict))
    return rows


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(cell, row))
    return table


if __name__ == "__main__":
    sys.exit(main())
