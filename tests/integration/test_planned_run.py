"""Runs that begin as a plan file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from small_runs import SMALL_RUN, SmallRuns
from typer.testing import CliRunner

from libra.cli.app import app
from libra.plan.plan import parse_plan

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_run_on_cpu_slots_is_what_the_plan_says(small_runs: SmallRuns, tmp_path: Path) -> None:
    asked, file = tmp_path / "asked.yaml", tmp_path / "plan.json"
    asked.write_text(yaml.safe_dump(SMALL_RUN))
    log, profile = EXAMPLES / "trajectories.jsonl", EXAMPLES / "profile_2_cores.json"
    planned = CliRunner().invoke(app, ["plan", str(asked), "-t", str(log), "-p", str(profile), "-o", str(file)])
    assert planned.exit_code == 0, planned.stderr
    plan = parse_plan(file.read_text()).allocation
    other = {"replicas": 1, "buckets": [{"shape": "long", "engines": 3, "up_to": 192}]}
    process = small_runs.start("--plan", str(file), "--allocation", "static", start=other, training__steps=2)
    status, _, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    for row in small_runs.rows("metrics"):
        assert row["allocation"] == plan.describe()
        roles = list(row["roles"].values())
        assert roles.count("train") == plan.replicas
        assert {f"rollout:{name}": count for name, count in plan.engines_by_shape.items()} == {
            role: roles.count(role) for role in roles if role != "train"
        }
    [event] = [row for row in small_runs.rows("events") if row["kind"] == "plan"]
    assert event["text"] == f"{plan.describe()}; layout one device"
    assert event["text"].replace("<=", "&lt;=") in (small_runs.run_directory / "report.html").read_text()
