"""The evaluation of lending: a cell of every kind of system on two nodes, and rows made of what cells return."""

from __future__ import annotations

import pytest
from oracles.evaluation_page import require_found

from benchmarks.evaluation import lending_runs
from benchmarks.evaluation.cells import Result, canonical
from benchmarks.evaluation.lending import EXPERIMENT, SYSTEMS, WAITING
from benchmarks.evaluation.lending_runs import LendingSetting, certificate, run

SMALL = LendingSetting("search_r1", 1, 2, 10, 2, 1)


@pytest.fixture(autouse=True)
def _made_up_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lending_runs.VARIABLE, "/nowhere")
    monkeypatch.setattr(lending_runs, "_READ", [])
    monkeypatch.setattr(lending_runs, "_HOUR", 600.0)
    monkeypatch.setattr(lending_runs, "_CERTIFIED", 120.0)
    monkeypatch.setattr(lending_runs, "_certified", certificate)


@pytest.mark.parametrize("system", ["gate", "half-device", "elastic"])
def test_a_cell_says_what_became_of_a_system(system: str) -> None:
    values = run(SMALL.arguments(), system)
    canonical(values, system)
    assert values["seconds"] > 0 and values["throughput"] > 0
    assert values["borrowed"] > 0
    assert (values["lent"] > 0) is (system == "gate")
    assert (values["requests"] > 0) is (system != "half-device")
    assert values.get("covered", 0) <= values["attributable"] <= values["missed"]


def test_rows_and_tables_are_made_of_the_cells() -> None:
    cells = EXPERIMENT.cells(True)
    shape = {
        "seconds": 9.0,
        "throughput": 1.0,
        "waited": 2.0,
        "lent": 0.5,
        "away": 0.1,
        "training": 8,
        "borrowed": 4,
        "requests": 9,
    }
    results = [Result(it, {**shape, "attributable": 0, "covered": 0}, 1.0, found=False) for it in cells]
    found = require_found(EXPERIMENT, results)
    met = {row.metric: row.met for row in found.rows if row.met is not None}
    assert met == {
        "gate over fixed": False,
        "gate: attributable misses inside its envelope": True,
        "rollout time of elastic over the gate's": False,
        "rollout time of published over the gate's": True,
    }
    table, waiting = (it.markdown() for it in found.tables.values())
    assert all(f"| {system} |" in table for system in SYSTEMS)
    assert all(f"| {system} |" in waiting for system in WAITING)
