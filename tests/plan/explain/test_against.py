"""A split of one's own beside a plan: no split is better than the plan, the best one is as good, and each side waits
for what the other takes."""

from __future__ import annotations

import pytest
from oracles import small_request
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_06B
from tables import by_name

from libra.config.recipe import Recipe
from libra.config.yaml_file import ConfigError
from libra.plan.explain.against import OwnSplit, against, parse_split
from libra.plan.plan import Plan, make_plan
from libra.plan.planner import Planner
from libra.report.explain_table import against_sentences

RECIPE = Recipe(batch=64, samples_per_prompt=8, max_length=8192)
TOLERANCE = 1e-3  # relative: of the solver
SPLITS = [OwnSplit(train, 16 - train) for train in (1, 2, 4, 8, 12, 14)]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Planner(CLUSTER, QWEN_06B, RECIPE).plan(CLASSES)


def test_no_split_is_better_than_the_plan_and_its_own_is_as_good(plan: Plan) -> None:
    own = against(plan, SPLITS[0]).plan
    kept = against(plan, OwnSplit(own.train, 16 - own.train))
    assert kept.longer == pytest.approx(0, abs=TOLERANCE)
    assert all(against(plan, split).longer > -TOLERANCE for split in SPLITS)


def test_shares_of_the_step_are_what_each_side_does_not_take(plan: Plan) -> None:
    for split in SPLITS:
        found = against(plan, split).split
        assert found.train == split.train
        assert found.generate <= split.generate
        assert 0 <= found.trainers_wait < 1 and 0 <= found.engines_wait < 1
        if found.bottleneck == "training":
            assert found.trainers_wait == 0
        if found.bottleneck == "rollout":
            assert found.engines_wait == 0


def test_more_trainers_wait_longer(plan: Plan) -> None:
    few, many = (against(plan, split).split for split in (SPLITS[0], SPLITS[-1]))
    assert few.trainers_wait < many.trainers_wait


def test_a_split_of_another_size_is_on_a_cluster_of_its_own(plan: Plan) -> None:
    twice = against(plan, OwnSplit(16, 16)).split
    assert (twice.train, twice.generate) == (16, 16)
    assert twice.step < against(plan, OwnSplit(8, 8)).split.step


def test_the_sentences_name_both_splits_and_who_waits(plan: Plan) -> None:
    first, second = against_sentences(against(plan, OwnSplit(8, 8)))
    assert first.startswith("train 8, generate 8: a step of ")
    assert "the plan's " in first
    assert second.startswith("With the split trainers wait ")
    assert "; with the plan trainers wait " in second


REFUSED = [
    ("one side", "train=8", "--against train=8: give GPUs of both sides, such as train=64,generate=192"),
    ("no number", "train=8,generate=many", "give GPUs of both sides"),
    ("none that train", "train=0,generate=16", "give GPUs of both sides"),
    ("another key", "train=8,rollout=8", "give GPUs of both sides"),
    ("half a node", "train=8,generate=10", "--against: gpus is 18; nodes of 'a800' have 8: give a positive multiple"),
    ("no such layout", "train=15,generate=1", "no layout trains on 15 GPUs; give 14 or 16"),
]


@by_name("text, words", REFUSED)
def test_what_is_no_split_is_refused(plan: Plan, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        against(plan, parse_split(text))
    assert words in str(refusal.value)


def test_plans_without_two_sides_are_refused(plan: Plan) -> None:
    colocated = Planner(CLUSTER, QWEN_06B, RECIPE.model_copy(update={"mode": "colocated", "staleness": 0}))
    with pytest.raises(ConfigError, match="in a colocated plan, all GPUs train and generate"):
        against(colocated.plan(CLASSES), OwnSplit(8, 8))
    with pytest.raises(ValueError, match="this plan is for the slots of one machine"):
        against(make_plan(small_request.REQUEST), OwnSplit(1, 3))
