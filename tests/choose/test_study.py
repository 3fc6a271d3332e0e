"""Policies compared on the same draws."""

from __future__ import annotations

import random
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_cluster import CLUSTER, QWEN_06B, RECIPE, trajectories

from libra.choose.study import Rollouts, Study, WholeRuns, compare_policies
from libra.plan.planner import Planner
from libra.route.catalogue import policy_named
from libra.sim.engines_file import load_engines
from libra.sim.of_plan import run_of, teach
from libra.sim.workload.replay import draw

EXAMPLES = Path(__file__).parents[2] / "examples"
LOG = tuple(trajectories(0, 4, 48))


def rollouts() -> Rollouts:
    return Rollouts(load_engines(EXAMPLES / "engines.yaml", lambda _: None), LOG, LOG, concurrency=16)


@given(st.lists(st.tuples(*[st.floats(1, 1000)] * 3), min_size=2, max_size=8))
@settings(deadline=None)
def test_differences_are_paired_by_seed(values: list[tuple[float, float, float]]) -> None:
    columns = tuple((tuple(column),) for column in zip(*values, strict=True))
    found = Study(("makespan",), ("a", "b", "c"), tuple(range(len(values))), columns)
    mean, _ = found.over_first(2, 0)
    first = sum(it[0] for it in values)
    assert isclose(mean, (sum(it[2] for it in values) - first) / first, abs_tol=1e-9)
    assert found.over_first(0, 0) == (0.0, 0.0)
    # What all policies share, such as a long trajectory of a draw, does not widen the interval.
    shifted = Study(
        ("makespan",), ("a", "b"), found.seeds, ((columns[0][0],), (tuple(it + 7.0 for it in columns[0][0]),))
    )
    gain, error = shifted.over_first(1, 0)
    assert error is not None and error < 1e-6 * (1 + gain) + 1e-6


def test_the_same_seed_draws_the_same_for_all() -> None:
    found = compare_policies(rollouts(), ("least-loaded", "round-robin"), (0, 1, 2))
    assert found.metrics == ("makespan", "mean trajectory")
    assert len({its for its in found.seconds[0][0]}) == 3
    again = compare_policies(rollouts(), ("round-robin", "least-loaded"), (2, 0), jobs=2)
    assert again.seconds[1][0] == (found.seconds[0][0][2], found.seconds[0][0][0])
    assert again.seconds[0][1] == (found.seconds[1][1][2], found.seconds[1][1][0])


def test_whole_runs_are_those_of_a_rehearsal() -> None:
    planner = Planner(CLUSTER, QWEN_06B, RECIPE)
    tracker = planner.tracker(LOG)
    plan = planner.plan(tracker)
    found = compare_policies(WholeRuns(plan, LOG, LOG, 2), ("cmlfq", "sticky"), (3,))
    policy = policy_named("sticky", seed=3)
    teach(policy, LOG)
    times = run_of(plan, LOG, 100, policy, seed=3).published(4)
    assert found.seconds[1][0][0] == pytest.approx((times[3] - times[1]) / 2)
    assert found.over_first(1, 0)[1] is None


def test_a_policy_of_the_users_own_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from libra.route.baselines import LeastLoaded\n\n\nclass Mine(LeastLoaded):\n    NAME = 'mine'\n",
        encoding="utf-8",
    )
    found = compare_policies(rollouts(), ("least-loaded", f"{file}:Mine"), (0, 1), jobs=2)
    assert found.seconds[0] == found.seconds[1]


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        (("cmlfq", "cmlfq"), "cmlfq is given twice; name each policy once"),
        (("cmlfq", "fastest"), "fastest"),
        (("cmlfq", "nowhere.py:Mine"), "there is no file nowhere.py"),
    ],
)
def test_policies_that_cannot_be_compared_are_refused(policies: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compare_policies(rollouts(), policies, (0,))


def test_draws_with_replacement_repeat_some_and_rename_them() -> None:
    drawn = draw(LOG, 48, 5, same_prompts=False, replaced=True)
    assert len(drawn) == 48 and len({it.id for it in drawn}) == 48
    assert 20 < len({it.id.split(" (drawn")[0] for it in drawn}) < 48
    by_id = {it.id: it for it in LOG}
    rng = random.Random(0)
    for it in rng.sample(drawn, 10):
        original = by_id[it.id.split(" (drawn")[0]]
        assert replace(it, id=original.id, prompt_id=original.prompt_id) == original
