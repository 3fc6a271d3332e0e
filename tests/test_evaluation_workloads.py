"""The workloads that runs are compared on: frozen, sourced, and as long as they are said to be."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.routing_quality import evaluate, static_fleet

from benchmarks.workloads.definition import FILES, SIGNALS, names, parse, read
from benchmarks.workloads.facts import BATCH, at_version, explained, facts, longest_tenth, returns, tail
from libra.route.catalogue import policy_named
from libra.trajectory import Trajectory, Turn

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
    trajectories = at_version(workload.episodes("strong"), round(progress * workload.steps), 200)
    assert np.mean([each.final_context for each in trajectories]) == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize("name", names())
def test_tools_tell_as_much_as_the_setting_says(name: str) -> None:
    workload = read(name)
    found = {
        signal: facts(at_version(workload.episodes(signal), workload.steps // 2, 80), 0.015).signal
        for signal in SIGNALS
    }
    assert found["none"] == pytest.approx(0, abs=0.02)
    assert found["airline"] == pytest.approx(0.18, abs=0.05)
    assert found["medium"] == pytest.approx(0.40, abs=0.06)
    assert found["strong"] > found["medium"]


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


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50)), min_size=2, max_size=30))
def test_explained_is_one_minus_the_unbiased_variances(pairs: list[tuple[int, int]]) -> None:
    groups, values = zip(*pairs, strict=True)
    found = explained(groups, values)
    sizes = Counter(groups)
    freedom = len(values) - len(sizes)
    total = float(np.var(values, ddof=1))
    if freedom == 0 or total == 0:
        assert found == 0
        return
    means = {group: sum(v for g, v in pairs if g == group) / size for group, size in sizes.items()}
    within = sum((value - means[group]) ** 2 for group, value in pairs) / freedom
    assert found == pytest.approx(1 - within / total, abs=1e-9)


def test_explained_of_nothing_is_nothing_on_average() -> None:
    random = np.random.default_rng(0)
    found = [explained(random.integers(20, size=60).tolist(), random.standard_normal(60)) for _ in range(300)]
    assert np.mean(found) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize(
    ("values", "share"), [([1.0] * 10, 0.1), ([1.0] * 9 + [9.0], 0.5), ([2.0] * 11, 2 / 11), ([5.0], 1.0)]
)
def test_longest_tenth(values: list[float], share: float) -> None:
    assert longest_tenth(np.array(values)) == pytest.approx(share)


def test_tail_is_the_mean_over_whole_batches() -> None:
    even, late = np.full(BATCH, 2.0), np.full(BATCH, 1.0)
    late[7] = 4.0
    assert tail(even) == 0
    assert tail(np.concatenate([even, late, np.full(BATCH - 1, 100.0)])) == pytest.approx((0 + 0.75) / 2)
    assert tail(np.array([1.0] * 9 + [10.0])) == pytest.approx(0.9)
    assert tail(np.array([1.0] * 8 + [10.0, 10.0])) == 0


def test_facts_by_hand() -> None:
    def made(id: str, prompt: str, *turns: Turn) -> Trajectory:
        return Trajectory(id, prompt, "t", 100, turns, None, 0, True)

    one = made("a", "p", Turn(100, "search", "ok", 50, 2.0), Turn(50, "user", "ok", 5, None), Turn(50, None, None, 0))
    two = made("b", "q", Turn(400, None, None, 0))
    found = facts([one, two], token_seconds=0.01)
    assert (found.mean_final_context, found.mean_generated, found.mean_turns, found.most_turns) == (427.5, 300, 2, 3)
    assert (found.no_return_share, found.mean_tool_seconds) == (0.5, 1.0)
    assert found.tool_time_share == pytest.approx(2 / 8)  # 2 + 2 s and 4 s
    assert found.longest_tenth_tokens == pytest.approx(400 / 600)
    assert found.final_context[0] == 355 and found.final_context[-1] == 500
    assert [remaining for _, remaining in returns(one)] == [105, 50]
    assert [(state.tool, remaining) for state, remaining in returns(one, passive=("user",))] == [("search", 105)]
    with pytest.raises(ValueError, match="there is no trajectory"):
        facts([], 0.01)


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
