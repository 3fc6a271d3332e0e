"""The workloads that runs are compared on: frozen, sourced, and as long as they are said to be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from oracles.routing_quality import evaluate, static_fleet

from libra.route.catalogue import policy_named
from tests.oracles.workloads.definition import FILES, names, parse, read

# Of parameters and first groups. What results are compared on must not change unnoticed.
DIGESTS = {
    "dapo_math": "a98dbd35c22e55ee946d33acbd1ccfd019e3f473bd87ceff4e599d150f4276f3",
    "r2e_gym": "3f8486087f28e2d3116103d7ed86270d3505cf1b73502f0e3a9f75057a55366a",
    "search_r1": "e6f6e1f4773651afcd6952b81aefe6afde0b5a288c3d346859a8fb6922ed4aca",
}


@pytest.mark.parametrize("name", names())
def test_a_workload_is_what_it_was(name: str) -> None:
    assert read(name).digest() == DIGESTS[name]


def test_the_three_workloads_are_there() -> None:
    assert names() == ("dapo_math", "r2e_gym", "search_r1")


@pytest.mark.parametrize(("progress", "published"), [(0.0, 2_500), (1.0, 11_500)])
def test_search_r1_drifts_as_published(progress: float, published: int) -> None:
    workload = read("search_r1")
    episodes, version = workload.episodes("strong"), round(progress * workload.steps)
    trajectories = [each for number in range(200) for each in episodes.group(number, version)]
    assert np.mean([each.final_context for each in trajectories]) == pytest.approx(published, rel=0.06)


def test_another_number_of_steps_is_the_same_drift() -> None:
    workload = read("r2e_gym")
    short, long = workload.episodes("medium"), workload.episodes("medium", steps=3 * workload.steps)
    for one, other in zip(short.group(5, 20), long.group(5, 60), strict=True):
        assert one.turns == other.turns
    assert workload.episodes("medium", seed=1).group(5, 20) != short.group(5, 20)


def document(name: str = "search_r1") -> dict[str, Any]:
    read_back: dict[str, Any] = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))
    return read_back


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: it["sources"].pop("limits"), r"sources lack or do not need \['limits'\]"),
        (lambda it: it["sources"].update(limits="made up"), "source of limits must begin with"),
        (lambda it: it["signals"].pop("medium"), "signals are none, airline, strong"),
        (lambda it: it["signals"].update(strong=0.5), "tool_signal differs from signals.strong"),
        (lambda it: it.update(extra=1), "extra"),
        (lambda it: it["shape"].update(turn_sigmas=1), "turn_sigmas"),
    ],
)
def test_a_wrong_file_is_refused(change: Any, message: str) -> None:
    changed = document()
    change(changed)
    with pytest.raises(ValueError, match=message):
        parse(json.dumps(changed))


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of dapo_math, r2e_gym, search_r1"):
        read("../search_r1")
    with pytest.raises(ValueError, match="signal is 'loud'; choose one of none, airline, medium, strong"):
        read("search_r1").episodes("loud")


def test_published_rules_are_as_accurate_on_search_r1_as_published() -> None:
    """Single-shot routing accuracy, Libra (arXiv 2606.03077): what the workload was set by, on a seed that was not used
    for it. The first step teaches and is not counted."""
    workload = read("search_r1")
    episodes = workload.episodes("strong", seed=11)
    numbers = range(workload.steps * workload.groups_per_step)
    trajectories = [each for number in numbers for each in episodes.group(number, number // workload.groups_per_step)]
    step = workload.groups_per_step * episodes.samples_per_prompt
    fleet = static_fleet(workload.limits, turn_tokens=2_048)
    for policy, published in (("mlfq", 0.448), ("length-predictor", 0.652), ("cmlfq-published", 0.911)):
        quality = evaluate(policy_named(policy), trajectories, fleet, batch=step, warm_up=step)
        assert quality.single_shot_accuracy == pytest.approx(published, abs=0.05), policy
