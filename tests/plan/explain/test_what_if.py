"""What may be assumed in words, how what cannot be is refused, and plans made again for what is assumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import small_request
from oracles.small_cluster import A800, CLASSES, CLUSTER, QWEN_06B
from tables import by_name

from libra.config.recipe import Recipe
from libra.config.yaml_file import ConfigError
from libra.hardware.cluster import GPUS, Cluster, NodeClass, override
from libra.plan.explain.what_if import assume, assume_otherwise
from libra.plan.plan import make_plan
from libra.plan.planner import Planner, rooflines

L40S = NodeClass("l40s", 1, 4, GPUS["L40S"], intra_bandwidth=32e9, inter_bandwidth=12.5e9)
MIXED = Cluster((A800, L40S))
GIVEN = {"batch": 64, "samples_per_prompt": 8, "max_length": 8192, "horizon": 7}
RECIPE = Recipe(**GIVEN)
WORDS = ("mode", "kv_on_update", "reference", "dtype", "optimiser")  # written as they are


def counts(cluster: Cluster) -> dict[str, int]:
    return {nodes.name: nodes.count for nodes in cluster.nodes}


ASSUMED: list[tuple[str, Cluster, tuple[str, ...], dict[str, int], dict[str, object]]] = [
    ("nothing", MIXED, (), {"a800": 2, "l40s": 1}, {}),
    ("GPUs", CLUSTER, ("gpus=64",), {"a800": 8}, {}),
    ("nodes of a class", MIXED, ("l40s=5",), {"a800": 2, "l40s": 5}, {}),
    ("a class less", MIXED, ("l40s=0",), {"a800": 2}, {}),
    ("of several the last", CLUSTER, ("gpus=64", "a800=3"), {"a800": 3}, {}),
    ("a number", CLUSTER, ("batch=1024",), {"a800": 2}, {"batch": 1024}),
    ("a fraction", CLUSTER, ("router_hit=0.5",), {"a800": 2}, {"router_hit": 0.5}),
    ("a word", CLUSTER, ("kv_on_update=refresh",), {"a800": 2}, {"kv_on_update": "refresh"}),
    ("nothing of something", CLUSTER, ("rollout_dtype=null",), {"a800": 2}, {"rollout_dtype": None}),
    ("two that agree", CLUSTER, ("batch=10", "samples_per_prompt=5"), {"a800": 2},
     {"batch": 10, "samples_per_prompt": 5}),
    ("both", MIXED, ("a800=4", "batch=128"), {"a800": 4, "l40s": 1}, {"batch": 128}),
]  # fmt: skip


@by_name("cluster, assumptions, nodes, changes", ASSUMED)
def test_what_is_not_named_stays_as_it_is(
    cluster: Cluster, assumptions: Sequence[str], nodes: dict[str, int], changes: dict[str, object]
) -> None:
    changed, recipe = assume(cluster, RECIPE, assumptions)
    assert counts(changed) == nodes
    assert [replace(each, count=1) for each in changed.nodes] == [
        replace(each, count=1) for each in cluster.nodes if each.name in nodes
    ]
    assert recipe == Recipe(**{**GIVEN, **changes})


@pytest.mark.parametrize("mode", ["sync", "colocated"])
def test_another_mode_has_its_own_staleness(mode: str) -> None:
    stale = Recipe(**GIVEN, staleness=3)
    assert assume(CLUSTER, stale, [f"mode={mode}"])[1] == Recipe(**GIVEN, mode=mode)
    assert assume(CLUSTER, Recipe(**GIVEN, mode=mode, staleness=0), ["mode=async"])[1].staleness == 1
    assert assume(CLUSTER, RECIPE, ["mode=async", "staleness=2"])[1].staleness == 2


REFUSED: list[tuple[str, Cluster, tuple[str, ...], str]] = [
    ("no value", CLUSTER, ("gpus",), "--what-if gpus: give KEY=VALUE, such as gpus=64 or batch=1024"),
    ("no count", CLUSTER, ("gpus=many",), "--what-if gpus=many: 'many' is not a count; give a whole number, 0 or more"),
    ("part of a node", CLUSTER, ("gpus=60",), "--what-if gpus=60: gpus is 60; nodes of 'a800' have 8: give a positive"),
    ("no GPU", CLUSTER, ("gpus=0",), "--what-if gpus=0: gpus is 0; nodes of 'a800' have 8: give a positive multiple"),
    ("GPUs of which class", MIXED, ("gpus=64",), "give nodes by class, as in a800=2, l40s=1"),
    (
        "fewer than none",
        CLUSTER,
        ("a800=-1",),
        "--what-if a800=-1: '-1' is not a count; give a whole number, 0 or more",
    ),
    (
        "no node left",
        CLUSTER,
        ("a800=0",),
        "--what-if a800=0: nodes is empty; a cluster has at least one node: give 1 or more",
    ),
    ("half a node", CLUSTER, ("a800=1.5",), "--what-if a800=1.5: '1.5' is not a count"),
    ("unknown", CLUSTER, ("bach=64",), "--what-if bach=64: unknown what-if 'bach'; did you mean batch?"),
    ("unlike anything", CLUSTER, ("xyzzy=1",), "known are a800, batch, "),
    ("of the wrong type", CLUSTER, ("batch=many",), "--what-if batch=many: batch: Input should be a valid integer"),
    ("too small", CLUSTER, ("batch=0",), "--what-if batch=0: batch: Input should be greater than or equal to 1"),
    (
        "an unknown word",
        CLUSTER,
        ("mode=fast",),
        "--what-if mode=fast: mode: Input should be 'async', 'sync' or 'colocated'",
    ),
    (
        "not finite",
        CLUSTER,
        ("tool_seconds_if_unknown=NaN",),
        "--what-if tool_seconds_if_unknown=NaN: tool_seconds_if_unknown: Input should be",
    ),
    (
        "a contradiction",
        CLUSTER,
        ("batch=63",),
        "--what-if batch=63: batch is 63, which 8 samples_per_prompt do not divide: make batch a",
    ),
    (
        "stale in step",
        CLUSTER,
        ("mode=sync", "staleness=2"),
        "--what-if mode=sync staleness=2: staleness is 2, but mode is sync: set staleness to 0, or mode",
    ),
]


@by_name("cluster, assumptions, message", REFUSED)
def test_what_cannot_be_is_refused(cluster: Cluster, assumptions: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        assume(cluster, RECIPE, assumptions)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@given(
    st.sampled_from(["gpus", "a800", *Recipe.model_fields, "x"]),
    st.text() | st.sampled_from(["!!bool x", "2024-13-01", "[" * 2000, "{", "1e999", "٣", "²"]),
)
def test_whatever_is_assumed_is_answered_or_refused(key: str, value: str) -> None:
    try:
        cluster, recipe = assume(CLUSTER, RECIPE, [f"{key}={value}"])
    except ConfigError as error:
        assert "--what-if" in str(error)
        return
    if key == "gpus":
        assert cluster.devices == int(value)
    elif key == "a800":
        assert counts(cluster) == {"a800": int(value)}
    elif key == "router":  # any name, which is looked up when there is a question
        assert recipe.router and recipe.router in value
    else:
        found, wanted = getattr(recipe, key), value if key in WORDS else json.loads(value)
        assert found == wanted and isinstance(found, bool) == isinstance(wanted, bool)  # 0 seconds are 0.0, yet not no


PLAN = Planner(CLUSTER, QWEN_06B, RECIPE).plan(CLASSES)


def test_another_cluster_or_recipe_is_planned_as_if_asked_for_at_once() -> None:
    (nodes,) = CLUSTER.nodes
    larger = override(CLUSTER, {nodes.name: nodes.count + 1})
    slower = RECIPE.model_copy(update={"staleness": 0})
    for cluster, recipe in ((larger, RECIPE), (CLUSTER, slower)):
        wanted = Planner(cluster, QWEN_06B, recipe).plan(CLASSES)
        found = assume_otherwise(PLAN, cluster, recipe)
        assert (found.request, found.allocation, found.predicted) == (
            wanted.request,
            wanted.allocation,
            wanted.predicted,
        )


def test_a_machine_and_nodes_without_a_profile_are_not_assumed() -> None:
    with pytest.raises(ValueError, match="the plan is for a run on one machine: change the run's configuration"):
        assume_otherwise(make_plan(small_request.REQUEST), CLUSTER, RECIPE)
    (nodes,) = CLUSTER.nodes
    other = Cluster((*CLUSTER.nodes, replace(nodes, name="others")))
    with pytest.raises(ValueError, match="the plan has no profile for nodes others: plan again with these nodes"):
        assume_otherwise(PLAN, other, RECIPE)


def test_other_weights_have_profiles_of_their_own() -> None:
    narrow = RECIPE.model_copy(update={"rollout_dtype": "fp8"})
    found = assume_otherwise(PLAN, CLUSTER, narrow)
    assert found.request == Planner(CLUSTER, QWEN_06B, narrow).request(CLASSES)
    assert found.request.profiles == rooflines(CLUSTER, QWEN_06B, narrow) != PLAN.request.profiles  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [{"tool_seconds_if_unknown": 9.0}, {"max_length": 8191}])
def test_what_the_statistics_were_made_with_cannot_be_assumed_otherwise(change: dict[str, object]) -> None:
    with pytest.raises(
        ValueError, match=f"{next(iter(change))} is part of the plan's statistics: give it to libra plan"
    ):
        assume_otherwise(PLAN, CLUSTER, RECIPE.model_copy(update=change))
