"""`libra plan --compare`, and costs of plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from calls import EXAMPLES, assert_refused, libra, write
from click.testing import Result

CLUSTER = EXAMPLES / "cluster_48_a800.yaml"
WORK = (
    *("--model", "Qwen/Qwen3-8B", "-t", EXAMPLES / "search_agent.jsonl", "-r", EXAMPLES / "request.yaml"),
    *("-p", "roofline"),
)
OFFERED = ("--compare", "h100:8..24,h20:8..16", "--cost", "h100=2.5,h20=1", "--steps", 500)


def offers(*arguments: object) -> Result:
    return libra("plan", *WORK, *arguments)


def priced(tmp_path: Path, cost: float) -> Path:
    cluster: dict[str, Any] = yaml.safe_load(CLUSTER.read_text())
    cluster["nodes"][0]["cost_per_hour"] = cost
    return write(tmp_path / "cluster.yaml", cluster)


def test_offers_are_compared(tmp_path: Path) -> None:
    page = tmp_path / "offers.html"
    told = offers(*OFFERED, "--no-simulation", "--json", "--html", page, "-o", tmp_path / "offers.json")
    assert told.exit_code == 0, told.stderr
    found = json.loads(told.stdout)
    assert (tmp_path / "offers.json").read_text() == told.stdout
    by_name = {it["name"]: it for it in found["offers"]}
    assert list(by_name) == ["8 h100", "16 h100", "24 h100", "8 h20", "16 h20"]
    for it in by_name.values():
        assert it["seconds"] == pytest.approx(500 * it["step"])
        assert it["dollars"] == pytest.approx(it["gpu_hours"] * (2.5 if "h100" in it["name"] else 1.0))
        assert it["gpu_hours"] == pytest.approx(it["gpus"] * it["seconds"] / 3600)
    assert found["fastest"] == min(by_name, key=lambda name: float(by_name[name]["seconds"]))
    assert found["cheapest"] == min(by_name, key=lambda name: float(by_name[name]["dollars"]))
    assert by_name[found["fastest"]]["on_front"] and by_name[found["cheapest"]]["on_front"]
    assert "nodes of 8 H100 with" in told.stderr
    text = page.read_text()
    assert "The fastest: 24 h100" in text and "<svg" in text and "http" not in text.replace("http://www.w3.org", "")


def test_the_chosen_are_simulated_and_said_first() -> None:
    told = offers("--compare", "h100:8..16", "--steps", 100, "--simulate-for", 1, "--deadline", "30d")
    assert told.exit_code == 0, told.stderr
    assert told.stdout.startswith("The ")
    assert "in simulation under cmlfq" in told.stdout.splitlines()[0]
    assert "GPU-hours" in told.stdout


def test_a_missed_deadline_has_its_own_status() -> None:
    told = offers(*OFFERED, "--no-simulation", "--deadline", "1min")
    assert told.exit_code == 3
    assert told.stdout.startswith("No offered cluster makes 500 steps within 1 min 00 s. The fastest: ")


def test_classes_of_the_cluster_file_are_offered(tmp_path: Path) -> None:
    found = json.loads(
        libra(
            *("plan", priced(tmp_path, 16.0), *WORK, "--compare", "a800:16..24", "--steps", 10),
            *("--no-simulation", "--json"),
        ).stdout
    )
    for it in found["offers"]:
        assert it["dollars"] == pytest.approx(2.0 * it["gpu_hours"])


def test_a_plan_says_what_a_step_and_a_training_cost(tmp_path: Path) -> None:
    told = libra("plan", priced(tmp_path, 16.0), *WORK, "--steps", 1000, "--no-simulation")
    assert told.exit_code == 0, told.stderr
    words = " ".join(told.stdout.split())
    assert "at $96.0 an hour for the nodes." in words
    assert "1,000 steps take " in words and " and cost $" in words


def test_what_if_takes_any_gpu(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    made = libra("plan", CLUSTER, *WORK, "--no-simulation", "-o", plan)
    assert made.exit_code == 0, made.stderr
    explained = json.loads(libra("explain", plan, "--what-if", "gpu=h200", "--json").stdout)
    planned = libra("plan", CLUSTER, *WORK, "--no-simulation", "--what-if", "gpu=H200", "--json")
    again = json.loads(planned.stdout)
    assert explained["plan"]["predicted"]["step"] == pytest.approx(again["predicted"]["step"], rel=0.02)
    assert again["predicted"]["step"] < json.loads(plan.read_text())["predicted"]["step"]
    assert_refused(libra("explain", plan, "--what-if", "gpu=H1000"), "--what-if gpu=H1000: gpu: unknown GPU 'H1000'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--compare", "h100:8"), "--steps is missing: give the optimiser steps of the training"),
        (("--compare", "h100:12", "--steps", 10), "--compare h100: 12 GPUs are not whole nodes of 8"),
        (("--compare", "h100:8", "--steps", 10, "--cost", "h100"), "--cost h100: give NAME=DOLLARS, the cost of"),
        (("--compare", "h100:8", "--steps", 10, "--cost", "h100=-1"), "libra: --cost h100=-1: give NAME=DOLLARS"),
        (("--compare", "h100:8", "--steps", 10, "--confirm"), "--confirm checks one plan, but --compare makes several"),
        (("--compare", "h100:8", "--steps", 10, "--cost", "h100=1,H100=2"), "--cost H100=2: H100 has a cost already"),
        (("--compare", "h100:8", "--steps", 10, "--what-if", "gpus=16"), "--what-if cannot change nodes or GPUs"),
        (("--compare", "h100:8", "--steps", 10, "--deadline", "soon"), "--deadline is 'soon'; give seconds, or a"),
        (("--deadline", "7d"), "--deadline needs --compare: name clusters"),
        ((), "CLUSTER is missing: give a cluster.yaml"),
    ],
)
def test_what_is_missing_is_named(arguments: tuple[object, ...], words: str) -> None:
    assert_refused(offers(*arguments), words)


def test_a_comparison_needs_a_model() -> None:
    told = libra("plan", "-t", EXAMPLES / "search_agent.jsonl", "--compare", "h100:8", "--steps", 10)
    assert_refused(told, "--model is missing: --compare plans clusters of GPUs")


def test_costs_that_no_node_has_are_refused(tmp_path: Path) -> None:
    told = libra("plan", priced(tmp_path, -1.0), *WORK)
    assert_refused(told, "nodes.0.cost_per_hour is -1; a node costs more than $0 and at most $1000 an hour")
