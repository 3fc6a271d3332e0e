"""Routing on logs of agents: how agreement is measured, and what is left out of what teaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.evaluation_page import require_found, require_places

from benchmarks.evaluation.agent_logs import FILES, VARIABLE, halves, log_file, read_log, without_waits
from benchmarks.evaluation.agent_routing import (
    EACH,
    FOLDS,
    MEASURES,
    PREDICTORS,
    Ranked,
    compared,
    explained,
    folds,
    makespan,
    predictions,
    rank_correlation,
    returns,
)
from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.routing_real import EXPERIMENT as REAL
from benchmarks.evaluation.routing_real import ratio
from libra.trajectory import Trajectory, Turn, write_trajectories


def episode(id: str, prompt: str, *turns: tuple[int, int], prompt_tokens: int = 100) -> Trajectory:
    """Turns of (generated, returned); the last one's return is not taken."""
    made = [
        Turn(generated, "user" if number % 2 else "run", "ok", back, 5.0)
        for number, (generated, back) in enumerate(turns)
    ]
    made[-1] = Turn(turns[-1][0], None, None, 0)
    return Trajectory(id, prompt, "task", prompt_tokens, tuple(made), None, 0, True)


# Agreement

PAIRS = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5), st.integers(0, 3)), min_size=2, max_size=12).filter(
    lambda rows: len({truth for truth, _, weight in rows if weight}) > 1
)


def average_ranks(values: list[float]) -> list[float]:
    return [sum(it < value for it in values) + (sum(it == value for it in values) + 1) / 2 for value in values]


@given(PAIRS)
@settings(max_examples=200)
def test_a_sample_of_weight_n_counts_as_n_samples(rows: list[tuple[int, int, int]]) -> None:
    truth, predicted, weight = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    one = [float(t) for t, _, n in rows for _ in range(n)]
    other = [float(p) for _, p, n in rows for _ in range(n)]
    mean = sum(one) / len(one)
    error = sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
    assert explained(truth, (truth - predicted) ** 2, weight) == pytest.approx(
        1 - error / sum((a - mean) ** 2 for a in one)
    )
    found = rank_correlation(Ranked(truth), Ranked(predicted), weight)
    if len(set(other)) == 1:
        assert found == 0
    else:
        wanted = np.corrcoef(average_ranks(one), average_ranks(other))[0, 1]
        assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("predicted", "r2", "rank"),
    [
        ([1.0, 2.0, 9.0], 1.0, 1.0),
        ([4.0, 4.0, 4.0], 0.0, 0.0),  # the mean
        ([1.0, 2.0, 3.0], 1 - 36 / 38, 1.0),
        ([9.0, 2.0, 1.0], 1 - 128 / 38, -1.0),
    ],
)
def test_agreement_by_hand(predicted: list[float], r2: float, rank: float) -> None:
    truth, ours = np.array([1.0, 2.0, 9.0]), np.array(predicted)
    assert explained(truth, (truth - ours) ** 2, np.ones(3)) == pytest.approx(r2)
    assert rank_correlation(Ranked(truth), Ranked(ours), np.ones(3)) == pytest.approx(rank)


def test_what_does_not_vary_cannot_be_explained() -> None:
    with pytest.raises(ValueError, match="does not vary"):
        explained(np.ones(3), np.zeros(3), np.ones(3))


def test_differences_are_paired() -> None:
    generator = np.random.default_rng(0)
    truth = generator.normal(size=120)
    ours = truth + generator.normal(size=120)
    prompts = [f"p{number // 4}" for number in range(120)]
    found = compared(truth, {"cmlfq": ours, "cmlfq-published": ours + 1e-6, "attained service": -ours}, prompts, 0)
    for measure in MEASURES:
        value, low, high = found[measure]["cmlfq"]
        assert low < value < high
        # Unpaired, the difference of two that are alike would be as uncertain as each of them.
        assert max(abs(it) for it in found[measure]["cmlfq - cmlfq-published"]) < 1e-4 < high - low
        assert found[measure]["cmlfq - attained service"][1] > 0


# What teaches


@given(st.lists(st.integers(0, 40), min_size=2, max_size=60), st.sampled_from(("prompts", "samples")))
@settings(max_examples=60)
def test_all_are_judged_once_by_what_was_taught_by_others(prompts: list[int], unseen: str) -> None:
    log = [episode(f"t{number}", f"p{prompt}", (1, 0)) for number, prompt in enumerate(prompts)]
    found = list(folds(log, unseen))
    assert sorted(it.id for _, judged in found for it in judged) == sorted(it.id for it in log)
    for known, judged in found:
        assert {it.id for it in known} | {it.id for it in judged} == {it.id for it in log}
        if unseen == "prompts":
            assert not {it.prompt_id for it in known} & {it.prompt_id for it in judged}
        else:
            assert len(judged) == 1 and len(known) == len(log) - 1
    if unseen == "prompts":
        distinct = len(set(prompts))
        assert len(found) == (distinct if distinct <= EACH else FOLDS)


def test_folds_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="give prompts or samples"):
        list(folds([episode("a", "a", (1, 0))], "tasks"))


def test_what_remains_and_what_was_attained_at_each_return() -> None:
    found = [
        (left, attained, context, len(states))
        for left, attained, context, states in returns(episode("a", "a", (10, 5), (20, 7), (30, 0), prompt_tokens=100))
    ]
    assert found == [(57, 15, 115, 1), (30, 42, 142, 2)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 5))
def test_halves_share_no_prompt(prompts: list[int], seed: int) -> None:
    log = [episode(f"t{number}", f"p{prompt}", (1, 0)) for number, prompt in enumerate(prompts)]
    distinct = len(set(prompts))
    if distinct < 2:
        with pytest.raises(ValueError, match="two halves need 2 or more"):
            halves(log, seed)
        return
    one, other = halves(log, seed)
    assert sorted(it.id for it in (*one, *other)) == sorted(it.id for it in log)
    assert len({it.prompt_id for it in one}) == distinct // 2
    assert not {it.prompt_id for it in one} & {it.prompt_id for it in other}


def test_only_the_waits_of_persons_are_left_out() -> None:
    left = without_waits(episode("a", "a", (1, 1), (1, 1), (1, 1), (1, 0)))
    assert [turn.tool_seconds for turn in left.turns] == [5.0, None, 5.0, None]
    assert left.final_context == episode("a", "a", (1, 1), (1, 1), (1, 1), (1, 0)).final_context


def test_without_its_logs_it_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert not any(log_file("airline") in cell.inputs for cell in REAL.cells(True))
    for call in (lambda: predictions("airline", "prompts", 0), lambda: makespan("airline", False, 0, ["cmlfq"])):
        with pytest.raises(ValueError, match=r"tau_bench_airline.jsonl is not in .*set LIBRA_DATA"):
            call()
    write_trajectories(log_file("airline"), [episode("a", "a", (1, 0))])
    assert [it.id for it in read_log("airline")] == ["a"]
    assert any(log_file("airline") in cell.inputs for cell in REAL.cells(True))


def test_a_log_whose_tools_tell_all_is_explained_by_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    log = [
        episode(f"t{number}", f"p{number // 2}", (50, 600 if number % 2 else 5), (4_000 if number % 2 else 20, 0))
        for number in range(80)
    ]
    write_trajectories(log_file("airline"), log)
    found = predictions("airline", "prompts", 0)
    assert found == predictions("airline", "prompts", 0)
    assert (found["returns"], found["prompts"], found["trajectories"]) == (80, 40, 80)
    assert found["R^2"]["cmlfq"][0] > 0.9
    assert found["rank correlation"]["cmlfq"][0] > 0.9
    # Of an unseen prompt the published tree knows nothing but the mean of all.
    assert found["R^2"]["cmlfq-published"][0] < 0.01


@pytest.mark.skipif(not log_file("airline").is_file(), reason="the logs of real agents are not here")
def test_a_rollout_of_real_agents_lasts_longer_than_its_mean_trajectory() -> None:
    found = makespan("airline", False, 0, ["cmlfq", "least-loaded"])
    assert 1 <= len(found["plan"]) <= 2
    assert all(found[route]["seconds"] >= found[route]["mean"] > 0 for route in ("cmlfq", "least-loaded"))


# What is said of the results


def routed(cell: Cell) -> dict[str, Any]:
    asked = cell.arguments
    if "unseen" in asked:
        names = [*PREDICTORS, *(f"cmlfq - {name}" for name in PREDICTORS[1:])]
        return {"returns": 9} | {measure: {name: [0.1, -0.2, 0.3] for name in names} for measure in MEASURES}
    return {"plan": [["a800/tp1", 2, 9]]} | {
        route: {"seconds": 100.0 * (1 + number + asked["seed"]), "mean": 50.0 * (1 + number + asked["seed"])}
        for number, route in enumerate(asked["routes"])
    }


def test_what_is_found_has_its_places_on_the_page() -> None:
    results = [Result(cell, routed(cell), 1.0, found=False) for cell in REAL.cells(False)]
    require_places(REAL, require_found(REAL, results))


def test_a_ratio_is_of_the_same_seeds() -> None:
    seeds = [{"a": {"seconds": 2.0 * it}, "b": {"seconds": it}} for it in (1.0, 10.0, 100.0)]
    found = ratio(seeds, "a", "b")
    assert found.ends is not None
    assert (found.value, *found.ends) == pytest.approx((2, 2, 2))


def test_without_its_logs_an_experiment_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    lacking = REAL.lacks()
    assert lacking is not None and str(tmp_path) in lacking and VARIABLE in lacking
    for name in FILES.values():
        (tmp_path / name).touch()
    assert REAL.lacks() is None
