"""C-MLFQ on the planner's own plans: never slower than sticky least-loaded routing, whatever sizes the engines have."""

from __future__ import annotations

from functools import lru_cache

import pytest

from benchmarks.evaluation.agent_logs import halves
from benchmarks.evaluation.engines import a800_nodes, profiles_of
from benchmarks.rollout_price_cases import make_case
from benchmarks.routing_plans import MOST, OURS, SEARCH, Question, question, ratios
from libra.config.recipe import Recipe
from libra.hardware.model_file import load_model
from libra.trajectory import Trajectory, read_trajectories

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
    return question(log, halves_of(log), cluster, model, recipe, profiles_of(cluster, model, recipe))


@pytest.mark.parametrize("log", ["search", "geometric", "terminal", "blend"])
@pytest.mark.parametrize("sizes", [1, 3])
def test_it_is_never_slower_than_sticky_least_loaded(log: str, sizes: int) -> None:
    found = ratios(asked_of(log, sizes), SEEDS, runs=False, routes=(OURS,))
    assert {measure: its[OURS] <= MOST for measure, its in found.items()} == dict.fromkeys(found, True), found


def test_it_is_much_faster_where_sizes_differ() -> None:
    found = ratios(asked_of("blend", 3), SEEDS, runs=False, routes=(OURS,))
    assert max(its[OURS] for its in found.values()) <= 0.9
