"""Measurements of real engines, as a file.

Invariant: the file holds all that a prediction and its comparison need, and reading it back gives what was written.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.fidelity.step import Step
from benchmarks.fidelity.summary import Outcome
from benchmarks.fidelity.workloads import Workload

_Record = TypeVar("_Record", Step, Outcome)


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat of a workload."""

    outcomes: tuple[Outcome, ...]  # by number
    steps: tuple[Step, ...]  # of one engine after the other


@dataclass(frozen=True, slots=True)
class Measured:
    hardware: str
    software: str
    model: str
    calibration: tuple[tuple[Step, ...], ...]  # rounds over one grid
    runs: tuple[tuple[Workload, tuple[Run, ...]], ...]  # each workload with its repeats

    def write(self, path: Path) -> None:
        """Gzipped JSON; equal values give equal bytes."""
        document = {
            "hardware": self.hardware,
            "software": self.software,
            "model": self.model,
            "calibration": [_table(Step, steps) for steps in self.calibration],
            "runs": [
                {
                    "workload": workload.model_dump(mode="json"),
                    "repeats": [
                        {"outcomes": _table(Outcome, run.outcomes), "steps": _table(Step, run.steps)} for run in repeats
                    ],
                }
                for workload, repeats in self.runs
            ],
        }
        path.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0))


def read_measured(path: Path) -> Measured:
    """Read what `Measured.write` wrote. Raises ValueError where the file holds something else."""
    try:
        document = json.loads(gzip.decompress(path.read_bytes()))
        return Measured(
            hardware=document["hardware"],
            software=document["software"],
            model=document["model"],
            calibration=tuple(_records(Step, table) for table in document["calibration"]),
            runs=tuple(
                (
                    Workload.model_validate(run["workload"]),
                    tuple(
                        Run(_records(Outcome, repeat["outcomes"]), _records(Step, repeat["steps"]))
                        for repeat in run["repeats"]
                    ),
                )
                for run in document["runs"]
            ),
        )
    except (gzip.BadGzipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error!r}; this is no file of measured runs, measure again") from error


def _table(kind: type[_Record], records: Sequence[_Record]) -> dict[str, Any]:
    return {"columns": [field.name for field in fields(kind)], "rows": [astuple(record) for record in records]}


def _records(kind: type[_Record], table: dict[str, Any]) -> tuple[_Record, ...]:
    columns = table["columns"]
    return tuple(
        kind(**{name: _frozen(value) for name, value in zip(columns, row, strict=True)}) for row in table["rows"]
    )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
