"""A run directory as one value.

Invariant: reading changes no file and hides no fault. A file that the run has not written is empty or None in the
value. A file that breaks its schema is an error. A last line that a kill cut off is skipped, and `cut_off` names its
file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from libra.config.input_file import read_input
from libra.records.schema import (
    DecisionRecord,
    EventRecord,
    PeriodRecord,
    Record,
    RecordFormatError,
    RunSummary,
    StepRecord,
    parse_record,
)

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class RunLog:
    """Everything that a run recorded about itself."""

    name: str
    config: Any  # JSON; None if the run wrote none
    steps: tuple[StepRecord, ...]
    periods: tuple[PeriodRecord, ...]
    decisions: tuple[DecisionRecord, ...]  # the latest record of each decision
    events: tuple[EventRecord, ...]  # in order of time
    summary: RunSummary | None  # None: the run was interrupted, or still runs
    cut_off: tuple[str, ...]  # files whose last line is incomplete

    @property
    def taken(self) -> tuple[DecisionRecord, ...]:
        return tuple(decision for decision in self.decisions if decision.taken)

    @property
    def refused(self) -> tuple[DecisionRecord, ...]:
        return tuple(decision for decision in self.decisions if not decision.taken)

    @property
    def losses(self) -> tuple[EventRecord, ...]:
        return tuple(event for event in self.events if event.kind == "worker_lost")


def read_run(directory: Path) -> RunLog:
    """Read the files of a run. Raises `FileNotFoundError` if there are none, and `RecordFormatError` if a file breaks
    its schema."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory; give the directory that the run wrote to")
    cut_off: list[str] = []
    steps = _read_lines(StepRecord, directory / "metrics.jsonl", cut_off)
    periods = _read_lines(PeriodRecord, directory / "periods.jsonl", cut_off)
    decisions = _read_lines(DecisionRecord, directory / "decisions.jsonl", cut_off)
    events = _read_lines(EventRecord, directory / "events.jsonl", cut_off)
    summary_path, config_path = directory / "summary.json", directory / "config.json"
    summary = parse_record(RunSummary, read_input(summary_path), f"{summary_path}") if summary_path.exists() else None
    config = _read_json(config_path) if config_path.exists() else None
    if not (steps or events or summary or config):
        raise FileNotFoundError(
            f"{directory}: not the directory of a run: it has no config.json, metrics.jsonl or events.jsonl"
        )
    return RunLog(
        name=summary.name if summary else directory.resolve().name,
        config=config,
        steps=_in_order(steps, directory / "metrics.jsonl"),
        periods=periods,
        decisions=latest_words(decisions),
        events=tuple(sorted(events, key=lambda event: event.time)),
        summary=summary,
        cut_off=tuple(cut_off),
    )


def latest_words(decisions: Iterable[DecisionRecord]) -> tuple[DecisionRecord, ...]:
    """The latest record of each decision. A decision is in the log again once its outcome has been measured."""
    latest: dict[tuple[int, int, float], DecisionRecord] = {}
    for decision in decisions:
        latest[decision.period, decision.step, decision.time] = decision
    return tuple(latest.values())


def prediction_error(periods: Iterable[PeriodRecord]) -> float | None:
    """Mean absolute relative error of the predicted step time, over periods without a role change; None if there is no
    such period.
    """
    errors = [abs(period.relative_error) for period in periods if not period.switching]
    return sum(errors) / len(errors) if errors else None


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """Outcome of a taken decision, which is in force until the next taken decision, or until the end of the run."""

    decision: DecisionRecord
    steps: int  # while it was in force
    net_seconds: float | None  # estimated saving over these steps, minus the cost; None: unknown
    error_seconds: float | None  # error of `net_seconds`; None: unknown


def outcomes(log: RunLog) -> tuple[DecisionOutcome, ...]:
    """The outcome of each taken decision, in order."""
    last_step = max([step.step for step in log.steps] + [decision.step for decision in log.taken], default=0)
    ends = [decision.step for decision in log.taken[1:]] + [last_step]
    error = prediction_error(log.periods)
    return tuple(_outcome(decision, end - decision.step, error) for decision, end in zip(log.taken, ends, strict=False))


def _read_lines(kind: type[R], path: Path, cut_off: list[str]) -> tuple[R, ...]:
    if not path.exists():
        return ()
    lines = read_input(path).split(b"\n")
    last = lines.pop()  # empty, unless the writer was stopped between a record and its newline
    records = [parse_record(kind, line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    if last:
        try:
            records.append(parse_record(kind, last, f"{path}:{len(lines) + 1}"))
        except RecordFormatError:
            cut_off.append(path.name)
    return tuple(records)


def _outcome(decision: DecisionRecord, steps: int, error: float | None) -> DecisionOutcome:
    gain, cost, after = decision.realised_gain_per_step, decision.measured_cost, decision.measured_after
    net = None if gain is None or cost is None else gain * steps - cost
    if net is not None and decision.realised_interval is not None:
        return DecisionOutcome(decision, steps, net, decision.realised_interval * steps)
    if net is None or gain is None or after is None or error is None:
        return DecisionOutcome(decision, steps, net, None)
    # Without corrected prices, the model prices the step of the old allocation, so the gain has the model's whole
    # error.
    return DecisionOutcome(decision, steps, net, error * (after + gain) * steps)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_input(path))
    except json.JSONDecodeError as error:
        raise RecordFormatError(
            f"{path}:{error.lineno}: not JSON ({error.msg}); restore the file as the run wrote it"
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise RecordFormatError(f"{path}: not JSON ({error}); restore the file as the run wrote it") from None


def _in_order(steps: tuple[StepRecord, ...], path: Path) -> tuple[StepRecord, ...]:
    for earlier, later in pairwise(steps):
        if later.step <= earlier.step or later.time < earlier.time:
            raise RecordFormatError(
                f"{path}: step {later.step} at {later.time:g} s follows step {earlier.step} at {earlier.time:g} s; "
                "a resumed run must cut the file back to its checkpoint before it appends"
            )
    return steps
