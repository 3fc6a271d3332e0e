"""Each room can be taken away, and all of them: the core plans, runs, routes and simulates without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.roomless import ROOT, Roomless

from libra.config.rooms import ROOMS

CORE = {  # what a room could reach: configurations, plans, routes, whole runs in simulation, and their commands
    "plans": (
        "tests/config",
        "tests/plan/test_plan.py",
        "tests/plan/test_replanner.py",
        "tests/plan/test_carried_plan.py",
        "tests/plan/explain",
        "tests/plan/options",
        "tests/cli/test_cli.py",
        "tests/cli/test_cli_plan.py",
    ),
    "runs": (
        "tests/loop/test_process_controller.py",
        "tests/loop/test_run.py::test_a_run_from_its_beginning_to_its_end",  # the others are of lost workers
        "tests/loop/test_run.py::test_a_killed_controller_and_its_resumed_run",
        "tests/sim/training_run",
        "tests/sim/test_simulate_plan.py",
        "tests/cli/test_cli_run.py",
    ),
    "routes": ("tests/route", "tests/serve/gateway"),
}
# They take most of the time, and nothing in them asks what rooms there are.
LONG = (
    "tests/config/test_reader_fuzz.py",
    "tests/plan/options/test_price.py",
    "tests/plan/options/test_rollout_price.py",
)
SAMPLE = (
    "tests/plan/test_plan.py",
    "tests/plan/explain/test_views.py",
    "tests/route/test_cmlfq_evidence.py",
    "tests/loop/test_process_controller.py",
    "tests/sim/training_run/test_simulated_changes.py",
    "tests/report/test_explain_page.py",
    "tests/cli/test_cli.py",
)
SECONDS = 1800  # a bound; each takes a minute or two of a core


@pytest.mark.parametrize("part", CORE)
def test_the_core_works_without_rooms(part: str, tmp_path: Path) -> None:
    assert all((ROOT / path).exists() for path in LONG)
    without = Roomless(ROOMS, tmp_path)
    left_out = [f"--ignore={path}" for path in LONG]
    without.test("-m", "not integration and not alone", *left_out, *CORE[part], seconds=SECONDS)


@pytest.mark.parametrize("room", ROOMS)
def test_the_core_works_without_one_of_its_rooms(room: str, tmp_path: Path) -> None:
    Roomless([room], tmp_path).test("-m", "not integration and not alone", *SAMPLE, seconds=SECONDS)
