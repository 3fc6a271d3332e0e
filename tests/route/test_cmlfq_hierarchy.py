"""Estimates of remaining tokens: shrinkage from context to context, running trajectories, and real logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.route.hierarchy import RECENT, SHRINKAGE, Hierarchy, contexts_of
from libra.route.policy import TurnRequest
from libra.route.remaining import EDGES, bin_of
from libra.route.tool_state import ToolState, payload_class
from libra.trajectory import Trajectory, Turn, read_trajectories

LOGS = Path(__file__).parents[3] / "shared/data/trajectories"

OK, FAIL = ToolState("search", "small", "ok"), ToolState("search", "small", "error")


def done(id: str, prompt_id: str, states: Sequence[ToolState], after: int, *, task: str = "task") -> Trajectory:
    """Each of its turns generates 10 tokens and is returned 5, but the last, which generates `after`."""
    turns = (*(Turn(10, state.tool, state.status, 5) for state in states), Turn(after, None, None, 0))
    return Trajectory(id, prompt_id, task, 100, turns, None, 0, finished=True)


def asked(prompt_id: str, returns: int, *, task: str = "task", id: str = "asked") -> TurnRequest:
    return TurnRequest(id, prompt_id, 100, 100 + 15 * returns, task)


def middle(tokens: int) -> float:
    """Mean of the bin."""
    return (EDGES[bin_of(tokens)] + EDGES[bin_of(tokens) + 1]) / 2


def mean(hierarchy: Hierarchy, prompt_id: str, *states: ToolState, task: str = "task") -> float:
    remaining = hierarchy.predict(asked(prompt_id, len(states), task=task), states)
    assert remaining is not None
    return remaining.mean


def learned(*trajectories: Trajectory) -> Hierarchy:
    hierarchy = Hierarchy(half_life=1e9)
    for trajectory in trajectories:
        hierarchy.learn(trajectory)
    return hierarchy


def test_nothing_finished_is_no_estimate() -> None:
    assert Hierarchy().predict(asked("p", 0), ()) is None
    assert Hierarchy().turn_tokens == 0


def test_one_trajectory_is_all_there_is_to_say_of_its_own_path() -> None:
    hierarchy = learned(done("a", "p", [OK, FAIL], 2_000))
    # The contexts of all moments blend in what remained at the others: 2,030, 2,015 and 2,000 tokens, one bin or two.
    assert mean(hierarchy, "p", OK, FAIL) == pytest.approx(2_000, rel=0.1)
    assert hierarchy.turn_tokens == pytest.approx(2_020 / 3)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.lists(st.integers(200, 9_000), min_size=1, max_size=6))
def test_a_prompt_is_shrunk_towards_all_others_by_its_evidence(own: list[int], others: list[int]) -> None:
    hierarchy = learned(
        *(done(f"own {n}", "p", [OK], 50 * after) for n, after in enumerate(own)),
        *(done(f"other {n}", f"q{n}", [OK], 10 * after) for n, after in enumerate(others)),
    )
    unseen = mean(hierarchy, "unseen", OK)
    of_prompt = float(np.mean([middle(50 * after) for after in own]))
    found = mean(hierarchy, "p", OK)
    # The prompt comes in by two contexts, its last return and its last two, which say the same here.
    parent = (SHRINKAGE / (len(own) + SHRINKAGE)) ** 2
    assert found == pytest.approx(parent * unseen + (1 - parent) * of_prompt, rel=1e-3)
    assert min(unseen, of_prompt) * 0.999 <= found <= max(unseen, of_prompt) * 1.001


trajectories = st.lists(
    st.builds(
        lambda prompt, states, after: (prompt, tuple(states), after),
        st.sampled_from("pqr"),
        st.lists(st.sampled_from([OK, FAIL]), max_size=5),
        st.integers(0, 100_000),
    ),
    min_size=1,
    max_size=12,
)


@given(trajectories, st.sampled_from("pqrs"), st.lists(st.sampled_from([OK, FAIL]), max_size=5))
def test_an_estimate_is_the_blend_of_its_contexts(
    log: list[tuple[str, tuple[ToolState, ...], int]], prompt_id: str, states: list[ToolState]
) -> None:
    hierarchy = learned(*(done(str(n), *of) for n, of in enumerate(log)))

    def contexts(prompt: str, past: Sequence[ToolState]) -> tuple[object, ...]:
        return contexts_of(prompt, "task", tuple(past[-RECENT:]), len(past), 100 + 15 * len(past))

    def evidence(number: int) -> tuple[float, float]:
        """Trajectories that came to the context, and the mean of what remained to each of them there."""
        count = total = 0.0
        wanted = contexts(prompt_id, states)[number]
        for prompt, past, after in log:
            left = [
                middle(15 * (len(past) - at) + after)
                for at in range(len(past) + 1)
                if contexts(prompt, past[:at])[number] == wanted
            ]
            if left:
                count, total = count + 1, total + float(np.mean(left))
        return count, total

    def blend(number: int, parent: float) -> float:
        count, total = evidence(number)
        return (total + SHRINKAGE * parent) / (count + SHRINKAGE)

    count, total = evidence(0)
    everyone = total / count
    task, anywhere = blend(1, everyone), blend(2, everyone)
    last = blend(3, (task + anywhere) / 2)
    sequence = blend(6, blend(5, blend(4, last)))
    context = blend(7, last)
    wanted = blend(9, blend(8, (sequence + context) / 2))
    assert mean(hierarchy, prompt_id, *states) == pytest.approx(wanted, rel=1e-3)


def test_what_a_return_means_is_learned_from_other_prompts_and_tasks() -> None:
    hierarchy = learned(
        *(done(f"ok {n}", f"p{n}", [OK], 100) for n in range(20)),
        *(done(f"fail {n}", f"p{n}", [FAIL], 10_000) for n in range(20)),
    )
    assert mean(hierarchy, "unseen", FAIL) > 5 * mean(hierarchy, "unseen", OK)
    assert mean(hierarchy, "unseen", FAIL, task="other") > 2 * mean(hierarchy, "unseen", OK, task="other")


def test_one_old_sample_does_not_decide() -> None:
    log = [done(f"{n}", f"p{n}", [OK], 100) for n in range(50)]
    alone = mean(learned(*log), "p", OK)
    with_one = mean(learned(*log, done("one", "p", [OK], 50_000)), "p", OK)
    assert alone < 200
    assert with_one < 25_000


def test_newer_policy_versions_age_what_was_learned() -> None:
    hierarchy = Hierarchy(half_life=4)
    for number in range(40):
        hierarchy.learn(done(f"old {number}", f"p{number}", [OK], 100))
    for number in range(40):
        hierarchy.learn(done(f"new {number}", f"q{number}", [OK], 10_000))
    assert mean(hierarchy, "unseen", OK) == pytest.approx(middle(10_000), rel=0.1)


@given(st.lists(st.integers(4, 9), min_size=1, max_size=8), trajectories)
def test_samples_that_outlive_all_that_finished_raise_the_estimate(
    times: list[int], log: list[tuple[str, tuple[ToolState, ...], int]]
) -> None:
    hierarchy = learned(*(done(str(n), *of) for n, of in enumerate(log)))
    before = mean(hierarchy, "p")
    longest = max(15 * len(states) + after for _, states, after in log)
    for number, factor in enumerate(times):
        hierarchy.started(asked("p", 0, id=f"runs {number}"))
        hierarchy.reached(TurnRequest(f"runs {number}", "p", 100, 100), max(200, factor * longest))
    assert mean(hierarchy, "p") > before
    for number in range(len(times)):
        hierarchy.ended(f"runs {number}")
    assert mean(hierarchy, "p") == before


def test_samples_that_run_long_say_that_the_prompt_is_hard() -> None:
    hierarchy = learned(*(done(f"{n}", f"p{n}", [OK], 100) for n in range(20)))
    for number in range(8):
        hierarchy.started(asked("p", 0, id=f"runs {number}"))
        hierarchy.reached(TurnRequest(f"runs {number}", "p", 100, 5_000))
    # 8 of 28 have come to 5,000 tokens, and all that is known of them is that they go on.
    assert mean(hierarchy, "p") > 1.5 * mean(hierarchy, "q") > 1.5 * 2_000


def test_an_unfinished_trajectory_is_no_evidence() -> None:
    unfinished = Trajectory("a", "p", "task", 100, (Turn(10, "search", "ok", 5),), None, 0, finished=False)
    with pytest.raises(ValueError, match="is unfinished"):
        Hierarchy().learn(unfinished)


def test_memory_is_bounded() -> None:
    hierarchy = Hierarchy(max_contexts=50)
    for number in range(100):
        hierarchy.learn(done(str(number), f"p{number}", [OK, FAIL, OK], 100))
    assert len(hierarchy.snapshot()["evidence"]["contexts"]) == 50
    assert mean(hierarchy, "unseen", OK) == pytest.approx(middle(100), rel=0.3)


@given(trajectories, trajectories)
def test_a_restored_hierarchy_goes_on_as_the_original(
    before: list[tuple[str, tuple[ToolState, ...], int]], after: list[tuple[str, tuple[ToolState, ...], int]]
) -> None:
    hierarchy = learned(*(done(str(n), *of) for n, of in enumerate(before)))
    hierarchy.started(asked("p", 0, id="runs"))
    hierarchy.reached(TurnRequest("runs", "p", 100, 900))
    twin = Hierarchy.restore(json.loads(json.dumps(hierarchy.snapshot())))
    for each in (hierarchy, twin):
        for number, of in enumerate(after):
            each.learn(done(str(number), *of))
    assert mean(twin, "p") == mean(hierarchy, "p")
    assert mean(twin, "q", OK) == mean(hierarchy, "q", OK)
    assert json.dumps(twin.snapshot()) == json.dumps(hierarchy.snapshot())


# Real logs, where they are at hand.


def explained(log: Sequence[Trajectory], group: Callable[[Trajectory], str]) -> float:
    """Share of the variance of remaining tokens, over all tool returns, that is explained where a group is left out."""
    pairs = []
    for left_out in sorted({group(trajectory) for trajectory in log}):
        hierarchy = learned(*(trajectory for trajectory in log if group(trajectory) != left_out))
        for trajectory in log:
            if group(trajectory) != left_out:
                continue
            states: list[ToolState] = []
            remaining = sum(turn.generated_tokens + turn.returned_tokens for turn in trajectory.turns)
            for turn, context in zip(trajectory.turns, trajectory.contexts()[1:], strict=False):
                assert turn.tool is not None and turn.status is not None
                remaining -= turn.generated_tokens + turn.returned_tokens
                states.append(ToolState(turn.tool, payload_class(turn.returned_tokens), turn.status))
                request = TurnRequest(
                    trajectory.id, trajectory.prompt_id, trajectory.prompt_tokens, context, trajectory.task
                )
                predicted = hierarchy.predict(request, states)
                assert predicted is not None
                pairs.append((remaining, predicted.mean))
    true, found = np.array(pairs).T
    return 1 - float(((true - found) ** 2).sum() / ((true - true.mean()) ** 2).sum())


@pytest.mark.skipif(not (LOGS / "tau_bench_airline.jsonl").exists(), reason="no recorded log")
def test_tool_returns_of_a_real_log_explain_what_remains() -> None:
    log = list(read_trajectories(LOGS / "tau_bench_airline.jsonl"))
    assert explained(log, lambda trajectory: trajectory.prompt_id) > 0.1  # prompts never seen
    assert explained(log[:40], lambda trajectory: trajectory.id) > 0.1  # the other samples of the prompt seen
