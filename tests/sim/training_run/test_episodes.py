"""Resampled logs: every sample is the log's, candidates are the prompt's own or the nearest, each as likely."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.sim.training_run.episodes import Resampled, prompt_at
from libra.trajectory import Trajectory, Turn, read_trajectories, truncate

DATA = Path(os.environ.get("LIBRA_DATA", Path(__file__).parents[3] / "../shared/data/trajectories"))


def trajectory(id: str, prompt: str, generated: int, task: str = "web", finished: bool = True) -> Trajectory:
    turns = (Turn(generated, "search", "ok", 10, None), Turn(5, None, None, 0))
    return Trajectory(id, prompt, task, 20, turns if finished else turns[:1], None, 7, finished, started_at=3.0)


REPEATED = tuple(trajectory(f"{p}-{n}", f"p{p}", 1_000 * p + 100 * (n + 1)) for p in range(5) for n in range(4))
SINGLE = tuple(trajectory(f"t{p}", f"p{p}", 10 + p**3, task="web" if p % 2 else "code") for p in range(20))


def source(trajectory: Trajectory, log: tuple[Trajectory, ...]) -> Trajectory:
    """The trajectory of the log that this one is; all of a log here differ in their turns."""
    return next(each for each in log if each.turns == trajectory.turns)


def test_samples_are_the_prompts_own_as_they_were() -> None:
    made = Resampled(REPEATED, 6, 40_960, seed=1)
    prompts = []
    for number in range(made.prompts):
        group = made.group(number, 3)
        assert [each.id for each in group] == [f"{number}/{sample}" for sample in range(6)]
        for each in group:
            origin = source(each, REPEATED)
            assert each == replace(origin, id=each.id, policy_version=3, started_at=None)
        prompts += [group[0].prompt_id]
        assert {each.prompt_id for each in group} == {group[0].prompt_id}
    assert sorted(prompts) == [f"p{p}" for p in range(5)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=2, max_size=15), st.integers(1, 6))
def test_a_single_sample_is_joined_by_the_nearest_of_its_task(sizes: list[tuple[int, bool]], neighbours: int) -> None:
    log = tuple(
        trajectory(f"t{n:02}", f"p{n:02}", 2_000 * n + size, task="web" if web else "code")
        for n, (size, web) in enumerate(sizes)
    )
    made = Resampled(log, 60, 10**6, seed=2, neighbours=neighbours)
    for number in range(made.prompts):
        group = made.group(number, 0)
        own = next(each for each in log if each.prompt_id == group[0].prompt_id)

        def distance(other: Trajectory, own: Trajectory = own) -> tuple[float, str]:
            return abs(math.log(other.final_context) - math.log(own.final_context)), other.id

        of_task = sorted((each for each in log if each.task == own.task), key=distance)
        nearest = {each.id for each in of_task[:neighbours]}
        assert own.id in nearest
        assert {source(each, log).id for each in group} <= nearest
        assert {each.task for each in group} == {own.task}
    everyone = {source(each, log).id for number in range(made.prompts) for each in made.group(number, 0)}
    assert everyone == {each.id for each in log}  # 60 draws from 6 candidates leave none out


def test_of_equally_long_trajectories_all_are_borrowed_alike() -> None:
    made = [trajectory(f"t{p:02}", f"p{p:02}", 5_000) for p in range(60)]
    log = tuple(
        replace(each, turns=(replace(each.turns[0], tool_seconds=p), each.turns[1])) for p, each in enumerate(made)
    )
    drawn = Resampled(log, 70, 40_960, seed=3, neighbours=7)
    waits = Counter(each.turns[0].tool_seconds for number in range(60) for each in drawn.group(number, 0))
    assert len(waits) == 60 and max(waits.values()) < 2 * 70  # each is a candidate of as many prompts as any other


def test_candidates_are_drawn_alike() -> None:
    made = Resampled(REPEATED[:4], 4_000, 40_960, seed=3)
    counts = Counter(source(each, REPEATED).id for each in made.group(0, 2))
    assert [counts[each.id] / 4_000 for each in REPEATED[:4]] == pytest.approx([0.25] * 4, abs=0.03)


def test_a_group_follows_from_its_arguments_alone() -> None:
    made = Resampled(REPEATED, 5, 40_960, seed=5)
    asked = {(number, version): made.group(number, version) for number in (17, 0, 6) for version in (4, 1)}
    for (number, version), group in asked.items():
        assert Resampled(REPEATED, 5, 40_960, seed=5).group(number, version) == group
    assert made.group(0, 0) != Resampled(REPEATED, 5, 40_960, seed=6).group(0, 0)


def test_what_is_too_long_is_cut_and_what_is_unfinished_left_out() -> None:
    log = (*SINGLE, trajectory("cut short", "p99", 100, finished=False))
    made = Resampled(log, 8, 500, seed=1)
    cut = [truncate(each, 500) for each in SINGLE]
    for number in range(2 * made.prompts):
        for each in made.group(number, 0):
            assert each.finished and each.peak_context <= 500
            assert each.turns in [one.turns for one in cut]
    assert made.prompts == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 0}, "samples_per_prompt is 0; give 1 or more"),
        ({"max_context": 0}, "max_context is 0; give 1 or more"),
        ({"seed": -1}, "seed is -1; give 0 or more"),
        ({"neighbours": 0}, "neighbours is 0; give 1 or more"),
        ({"log": (trajectory("a", "p", 1, finished=False),)}, "none of 1 trajectories is finished"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Resampled(SINGLE, samples_per_prompt=2, max_context=100, seed=0), **changes)


@pytest.mark.parametrize(("name", "prompts"), [("tau_bench_airline.jsonl", 25), ("claude_code_sessions.jsonl", 355)])
def test_groups_of_a_real_log(name: str, prompts: int) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not here")
    log = tuple(read_trajectories(DATA / name))
    made = Resampled(log, 16, 40_960, seed=0)
    assert made.prompts == prompts
    turns = {truncate(each, 40_960).turns for each in log}
    for number in range(prompts):
        group = made.group(number, 0)
        assert len({each.id for each in group}) == 16
        assert all(each.turns in turns and each.peak_context <= 40_960 for each in group)


@pytest.mark.parametrize("prompts", [1, 2, 7, 100])
def test_each_pass_over_the_prompts_takes_every_one_once(prompts: int) -> None:
    passes = [[prompt_at(n + prompts * epoch, prompts, 3) for n in range(prompts)] for epoch in range(3)]
    assert all(sorted(order) == list(range(prompts)) for order in passes)
    assert prompts < 7 or (passes[0] != passes[1] != passes[2])
