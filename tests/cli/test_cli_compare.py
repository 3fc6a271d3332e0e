"""`libra compare`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from calls import EXAMPLES, assert_refused, libra
from click.testing import Result

ENGINES, LOG = EXAMPLES / "engines.yaml", EXAMPLES / "trajectories.jsonl"


def compare(*arguments: object) -> Result:
    return libra("compare", *arguments, "--on", ENGINES, "-t", LOG)


def test_policies_are_compared_on_engines(tmp_path: Path) -> None:
    table, page = tmp_path / "runs.csv", tmp_path / "study.html"
    told = compare(
        "least-loaded", "round-robin", "cmlfq", "--seeds", 3, "--concurrency", 32, "--csv", table, "--html", page
    )
    assert told.exit_code == 0, told.stderr
    assert told.stdout.startswith("Lowest makespan: ")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 3 * 3 * 2
    assert {row["policy"] for row in rows} == {"least-loaded", "round-robin", "cmlfq"}
    assert all(float(row["seconds"]) > 0 for row in rows)
    text = page.read_text()
    assert "<svg" in text and "round-robin" in text and "http" not in text.replace("http://www.w3.org", "")


def test_json_has_each_run_and_the_paired_difference() -> None:
    told = compare("least-loaded", "round-robin", "--seeds", 2, "--json")
    assert told.exit_code == 0, told.stderr
    first, second = json.loads(told.stdout)["policies"]
    assert first["makespan"]["over_first"] == 0
    pairs = zip(second["makespan"]["seconds"], first["makespan"]["seconds"], strict=True)
    gaps = [its - other for its, other in pairs]
    assert second["makespan"]["over_first"] == pytest.approx(sum(gaps) / 2 / first["makespan"]["mean"])


def test_policies_are_compared_in_whole_runs_of_a_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    log = EXAMPLES / "search_agent.jsonl"
    made = libra(
        *("plan", EXAMPLES / "cluster_48_a800.yaml", "-m", "Qwen/Qwen3-8B", "-t", log),
        *("-r", EXAMPLES / "request.yaml", "-p", "roofline", "--no-simulation", "-o", plan),
    )
    assert made.exit_code == 0, made.stderr
    told = libra(
        *("compare", "cmlfq", "least-loaded", "--on", plan, "--workload", log, "--seeds", 1, "--steps", 2, "--json")
    )
    assert told.exit_code == 0, told.stderr
    first, second = json.loads(told.stdout)["policies"]
    assert first["step"]["mean"] > 0 and second["step"]["over_first_error"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cmlfq",), "POLICY... names one policy; give two or more to compare"),
        (("cmlfq", "sticky", "--cold", "--learn-from", LOG), "--cold and --learn-from contradict each other"),
        (("cmlfq", "sticky", "--steps", 3), "--steps is for a plan: a file of engines"),
        (("cmlfq", "quickest"), "quickest"),
        (("cmlfq", "sticky", "--learn-from", "/dev/null"), "/dev/null"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: tuple[object, ...], words: str) -> None:
    assert_refused(compare(*arguments), words)
