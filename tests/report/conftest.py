from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from made_run import DECISIONS, EVALUATIONS, EVENTS, FIRST, MEASURED, MadeRun, make_steps, make_summary, write_run

from libra.records.schema import PeriodRecord, Record


@pytest.fixture
def made_run(tmp_path: Path) -> MadeRun:
    return write_run(tmp_path / "run-7")


@pytest.fixture
def example_records() -> Mapping[str, Record]:
    """One record of each kind."""
    steps = make_steps(2)
    return {
        "step": steps[0],
        "period": PeriodRecord(0, 1, 2, FIRST, 2.5, 2.6, "rollout", False),
        "decision": MEASURED,
        "undecided": DECISIONS[0],
        "event": EVENTS[0],
        "evaluation": EVALUATIONS[0],
        "summary": make_summary(steps),
    }
