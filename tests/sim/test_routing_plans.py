"""C-MLFQ on the planner's own plans: never slower than sticky least-loaded routing, whatever sizes the engines have."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.evaluation.setting import a800_nodes, profiles_of
from benchmarks.routing_plans import MOST, OURS, SEARCH, Question, halves, question, ratios, without_waits
from libra import Planner
from libra.config.recipe import Recipe
from libra.hardware.model_file import load_model
from libra.trajectory import Trajectory, Turn, read_trajectories
from tests.oracles.random_clusters import make_case

SEEDS = range(2)
LONGEST = 16_384


def halves_of(log: str) -> tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]:
    if log == "search":
        return halves([it for it in read_trajectories(SEARCH) if it.finished], seed=0)
    case = make_case(log, seed=0)
    return case.make(12, 0, 8), case.make(12, 1, 8)


@lru_cache
def asked_of(log: str, sizes: int) -> Question:
    cluster, model = a800_nodes(3), load_model("Qwen/Qwen3-14B")
    recipe = Recipe(batch=96, samples_per_prompt=8, max_length=LONGEST, mode="async", staleness=1, max_buckets=sizes)
    return question(log, halves_of(log), Planner(cluster, model, recipe, profiles_of(cluster, model, recipe)))


@pytest.mark.parametrize("log", ["search", "geometric", "terminal", "blend"])
@pytest.mark.parametrize("sizes", [1, 3])
def test_it_is_never_slower_than_sticky_least_loaded(log: str, sizes: int) -> None:
    found = ratios(asked_of(log, sizes), SEEDS, runs=False, routes=(OURS,))
    assert {measure: its[OURS] <= MOST for measure, its in found.items()} == dict.fromkeys(found, True), found


def test_it_is_much_faster_where_sizes_differ() -> None:
    found = ratios(asked_of("blend", 3), SEEDS, runs=False, routes=(OURS,))
    assert max(its[OURS] for its in found.values()) <= 0.9


def episode(id: str, prompt: str, *tools: str) -> Trajectory:
    turns = (*(Turn(1, tool, "ok", 1, 5.0) for tool in tools), Turn(1, None, None, 0))
    return Trajectory(id, prompt, "task", 100, turns, None, 0, True)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 5))
def test_halves_share_no_prompt(prompts: list[int], seed: int) -> None:
    log = [episode(f"t{number}", f"p{prompt}") for number, prompt in enumerate(prompts)]
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
    whole = episode("a", "a", "run", "user", "run")
    left = without_waits(whole)
    assert [turn.tool_seconds for turn in left.turns] == [5.0, None, 5.0, None]
    assert left.final_context == whole.final_context
