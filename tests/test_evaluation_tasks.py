"""Drifting tasks: equal draws at every stage, shares and causes as the shape says, and tool returns that tell."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from libra.sim.training_run.episodes import prompt_at
from libra.trajectory import Trajectory
from tests.oracles.workloads.drifting_tasks import DriftingTasks
from tests.oracles.workloads.task_shape import LengthClass, TaskShape, ToolOutcome

SHORT = LengthClass(200, 0.2, 2, 0.3, 0.7, 0.2)
MIDDLE = LengthClass(1_000, 0.2, 5, 0.3, 0.2, 0.3)
LONG = LengthClass(5_000, 0.2, 9, 0.3, 0.1, 0.5)
EXACT = tuple(
    replace(each, sigma=0.0, turns_median=1, turns_sigma=0.0) for each in (SHORT, MIDDLE, LONG)
)  # of one turn
OUTCOMES = (
    ToolOutcome("search", "ok", 400, 0.5, 300, 0.3, 0.5, 0.5),
    ToolOutcome("search", "error", 2_000, 0.1, 30, 0.3, 0.2, 0.5),
    ToolOutcome("open", "ok", 2_000, 0.25, 900, 0.3, 1.0, 0.5),
    ToolOutcome("search", "timeout", 40_960, 0.15, 20, 0.3, 20.0, 0.0),
)
SHAPE = TaskShape(
    tasks=("a", "b", "c", "d"),
    prompts=40,
    task_share=0.3,
    prompt_share=0.3,
    prompt_median=150,
    prompt_sigma=0.4,
    prompt_correlation=0.5,
    lengths=(SHORT, MIDDLE, LONG),
    growth=1.2,
    max_turns=30,
    turn_sigma=0.4,
    tools=OUTCOMES,
    returned_limit=2_000,
    seconds_limit=10.0,
    tool_signal=0.8,
    samples_per_prompt=8,
    max_context=12_000,
)
STEPS = 20


def episodes(seed: int = 5, steps: int = STEPS, **changes: Any) -> DriftingTasks:
    return DriftingTasks(replace(SHAPE, **changes), seed, steps)


def groups(made: DriftingTasks, count: int, version: int = STEPS // 2) -> list[Trajectory]:
    return [each for number in range(count) for each in made.group(number, version)]


def unversioned(group: tuple[Trajectory, ...]) -> list[Trajectory]:
    return [replace(trajectory, policy_version=0) for trajectory in group]


shares = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)).map(
    lambda parts: tuple(part / sum(parts) for part in parts)
)


@st.composite
def shapes(draw: st.DrawFn) -> TaskShape:
    first, last = draw(shares), draw(shares)
    task = draw(st.floats(0, 1))
    return replace(
        SHAPE,
        prompts=draw(st.integers(1, 50)),
        task_share=task,
        prompt_share=draw(st.floats(0, 1)) * (1 - task),
        prompt_median=draw(st.floats(1, 20_000)),
        prompt_sigma=draw(st.floats(0, 3)),
        prompt_correlation=draw(st.floats(-1, 1)),
        lengths=tuple(
            LengthClass(
                draw(st.floats(1, 20_000)),
                draw(st.floats(0, 4)),
                draw(st.floats(1, 50)),
                draw(st.floats(0, 2)),
                one,
                other,
            )
            for one, other in zip(first, last, strict=True)
        ),
        growth=draw(st.floats(0.2, 5)),
        turn_sigma=draw(st.floats(0, 3)),
        tool_signal=draw(st.floats(0, 1)),
        samples_per_prompt=draw(st.integers(1, 20)),
        max_context=draw(st.integers(2, 50_000)),
    )


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 10**6), st.integers(0, 200), st.integers(0, 40))
def test_every_group_keeps_the_contract(shape: TaskShape, seed: int, number: int, version: int) -> None:
    group = DriftingTasks(shape, seed, STEPS).group(number, version)
    assert [trajectory.id for trajectory in group] == [f"{number}/{sample}" for sample in range(len(group))]
    assert len(group) == shape.samples_per_prompt
    assert {trajectory.prompt_id for trajectory in group} == {str(prompt_at(number, shape.prompts, seed))}
    assert len({(trajectory.task, trajectory.policy_version) for trajectory in group}) == 1
    known = {(outcome.tool, outcome.status) for outcome in shape.tools}
    for trajectory in group:
        assert trajectory.finished and trajectory.policy_version == version and trajectory.task in shape.tasks
        assert trajectory.peak_context <= shape.max_context
        assert 1 <= len(trajectory.turns) <= shape.max_turns
        for turn in trajectory.turns[:-1]:
            assert (turn.tool, turn.status) in known and turn.context_tokens is None
            assert turn.tool_seconds is not None and 0 <= turn.tool_seconds <= shape.seconds_limit * (1 + 1e-9)
            assert 1 <= turn.returned_tokens <= shape.returned_limit
        assert all(turn.generated_tokens >= 1 for turn in trajectory.turns)
        assert trajectory.turns[-1].tool is None


def test_a_group_follows_from_its_arguments_alone() -> None:
    made = episodes()
    backwards = {(number, version): made.group(number, version) for version in (20, 7, 0) for number in (90, 3, 41)}
    for (number, version), group in backwards.items():
        assert episodes().group(number, version) == group
    assert made.group(3, 7) != episodes(seed=6).group(3, 7)
    assert [t.turns for t in made.group(3, 7)] != [t.turns for t in made.group(4, 7)]


def test_the_drift_is_over_progress_and_stops_at_its_end() -> None:
    short, long = episodes(steps=20), episodes(steps=40)
    for number in range(20):
        assert unversioned(short.group(number, 9)) == unversioned(long.group(number, 18))
        assert unversioned(short.group(number, 20)) == unversioned(short.group(number, 35))


def test_the_same_draw_never_gets_shorter_as_the_policy_drifts() -> None:
    made = episodes()
    longer = 0
    for number in range(30):
        stages = [[t.generated_tokens for t in made.group(number, version)] for version in (0, 5, 10, 15, 20)]
        for before, after in pairwise(stages):
            # Rounding, and the context limit, are the only ways down.
            assert all(
                b >= a - 30 or t.peak_context == made.max_context
                for a, b, t in zip(before, after, made.group(number, 20), strict=True)
            )
            longer += sum(b > a for a, b in zip(before, after, strict=True))
    assert longer > 500


@pytest.mark.parametrize("version", [0, 10, 20])
@pytest.mark.parametrize(("task_share", "prompt_share"), [(0.0, 0.0), (0.3, 0.3), (0.0, 1.0)])
def test_classes_have_their_shares(version: int, task_share: float, prompt_share: float) -> None:
    made = episodes(
        lengths=EXACT, growth=1.0, task_share=task_share, prompt_share=prompt_share, prompts=400, max_context=40_960
    )
    found = Counter(trajectory.generated_tokens for trajectory in groups(made, 400, version))
    assert set(found) <= {200, 1_000, 5_000}
    for each, share in zip(EXACT, made.shape.class_shares(version / STEPS), strict=True):
        assert found[int(each.median)] / found.total() == pytest.approx(share, abs=0.025)


def test_what_tasks_and_prompts_explain_is_all_there_is_where_they_have_all_the_variance() -> None:
    by_task = groups(episodes(lengths=EXACT, task_share=1.0, prompt_share=0.0), 40)
    by_prompt = groups(episodes(lengths=EXACT, task_share=0.0, prompt_share=1.0), 40)
    assert len({(t.task, t.generated_tokens) for t in by_task}) == len({t.task for t in by_task}) == 4
    assert len({(t.prompt_id, t.generated_tokens) for t in by_prompt}) == 40
    assert len({(t.task, t.generated_tokens) for t in by_prompt}) > 4
    of_nothing = groups(episodes(lengths=EXACT, task_share=0.0, prompt_share=0.0), 40)
    assert len({(t.prompt_id, t.generated_tokens) for t in of_nothing}) > 80


def test_longer_prompts_are_harder_as_far_as_they_are_said_to_be() -> None:
    known: dict[str, Any] = {
        "lengths": EXACT,
        "task_share": 0.0,
        "prompt_share": 1.0,
        "prompts": 300,
        "prompt_median": 1_000,
    }
    ordered = sorted(
        (t.prompt_tokens, t.generated_tokens) for t in groups(episodes(prompt_correlation=1.0, **known), 300)
    )
    generated = [tokens for _, tokens in ordered]
    assert generated == sorted(generated)
    unrelated = groups(episodes(prompt_correlation=0.0, **known), 300)
    pairs = np.log([(t.prompt_tokens, t.generated_tokens) for t in unrelated])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.15


def remainders(trajectory: Trajectory) -> list[int]:
    """Tokens still to be generated after each tool return."""
    generated = [turn.generated_tokens for turn in trajectory.turns]
    return [sum(generated[turn + 1 :]) for turn in range(len(generated) - 1)]


def test_a_return_that_tells_is_typical_of_what_remains() -> None:
    made = episodes(tool_signal=1.0, max_context=40_960)
    limits = [400, 2_000, 40_960]
    seen = Counter[str]()
    for trajectory in groups(made, 60):
        assert trajectory.peak_context < made.max_context
        for turn, remaining in zip(trajectory.turns, remainders(trajectory), strict=False):
            slack = len(trajectory.turns)  # each turn is rounded to whole tokens
            level = next(n for n, limit in enumerate(limits) if remaining - slack <= limit)
            highest = next(n for n, limit in enumerate(limits) if remaining + slack <= limit)
            its = next(o for o in OUTCOMES if (o.tool, o.status) == (turn.tool, turn.status))
            assert level <= limits.index(int(its.typical_until)) <= highest
            seen[f"{turn.tool} {turn.status}"] += 1
    assert len(seen) == 4
    # Of equally telling outcomes, each comes by its share.
    assert seen["open ok"] / (seen["open ok"] + seen["search error"]) == pytest.approx(0.25 / 0.35, abs=0.05)


def test_a_return_that_tells_nothing_comes_by_its_share() -> None:
    made = episodes(tool_signal=0.0)
    long, all_of_them = Counter[str](), Counter[str]()
    for trajectory in groups(made, 300):
        for turn, remaining in zip(trajectory.turns, remainders(trajectory), strict=False):
            name = f"{turn.tool} {turn.status}"
            all_of_them[name] += 1
            long[name] += remaining > 2_000
    for outcome in OUTCOMES:
        name = f"{outcome.tool} {outcome.status}"
        assert all_of_them[name] / all_of_them.total() == pytest.approx(outcome.share, abs=0.02)
        assert long[name] / long.total() == pytest.approx(outcome.share, abs=0.03)


def test_lengths_are_the_same_whatever_tools_tell() -> None:
    silent, telling = episodes(tool_signal=0.0, max_context=40_960), episodes(tool_signal=1.0, max_context=40_960)
    for one, other in zip(groups(silent, 20), groups(telling, 20), strict=True):
        assert [turn.generated_tokens for turn in one.turns] == [turn.generated_tokens for turn in other.turns]


def test_a_few_prompts_have_the_mean_difficulty_of_many() -> None:
    for seed in range(5):
        made = episodes(seed=seed, lengths=EXACT, task_share=0.0, prompt_share=1.0, prompts=40)
        found = Counter(trajectory.generated_tokens for trajectory in groups(made, 40, version=0))
        assert found[200] / found.total() == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ()}, "tasks, lengths and tools"),
        ({"prompts": 0}, "prompts"),
        ({"task_share": 0.6, "prompt_share": 0.6}, "task_share and prompt_share are more than 1 together"),
        ({"tool_signal": 1.5}, "tool_signal"),
        ({"growth": math.inf}, "growth"),
        ({"tasks": ("a",)}, "one task differs from no other"),
        ({"lengths": (SHORT, MIDDLE)}, "first_share of lengths add up to"),
        ({"tools": OUTCOMES[:2]}, "share of tools add up to"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TypeAdapter(TaskShape).validate_python(asdict(SHAPE) | changes)
