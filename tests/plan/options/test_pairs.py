"""Prefill/decode pairs: which are on the menu, what they take, and that engines of one kind gain nothing by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_cluster import LONG, QWEN_06B, SHORT
from oracles.two_kinds import BOTH, FAST, LONGEST, TOLD, WIDE, paired_plan, paired_recipe

from libra.cost.corrections import UNCORRECTED
from libra.cost.sources.roofline import roofline
from libra.cost.transfer import fabric
from libra.hardware.cluster import NodeClass
from libra.lengths import TrajectoryClass
from libra.plan.options.engines import engine_options
from libra.plan.options.menu import PrefillDecodePair
from libra.plan.options.pairs import pair_options
from libra.plan.plan import dump_plan, parse_plan
from libra.plan.planner import Planner
from libra.plan.problem import EngineOption

ONE_OF = (replace(FAST, gpus=1), replace(FAST, name="alike", gpus=1))  # alike, with one degree each


def pairs_of(
    nodes: tuple[NodeClass, ...], classes: tuple[TrajectoryClass, ...], running: str = "", gpus: int = 1
) -> tuple[tuple[EngineOption, ...], tuple[PrefillDecodePair, ...], int]:
    profiles = [roofline(its.gpu, QWEN_06B, range(1, gpus + 1)) for its in nodes]
    options, pairs, rejected = pair_options(QWEN_06B, nodes, paired_recipe(), classes, profiles, UNCORRECTED, [running])
    return options, pairs, len(rejected)


def test_engines_of_one_kind_are_no_pair() -> None:
    assert pairs_of(ONE_OF, TOLD) == ((), (), 2)


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.sampled_from(["8 {} > 1 {}", "1 {} > 1 {}", "3 {} > 2 {}", "1 {} > 4 {}"]),
    told=st.floats(0.0, 100.0),
    said=st.floats(0.1, 10.0),
    turns=st.floats(1.0, 20.0),
)
def test_on_engines_of_one_kind_a_pair_takes_as_long_as_both_for_all_or_longer(
    ratio: str, told: float, said: float, turns: float
) -> None:
    """The busier half has no less than its share of what as many engines take that do everything."""
    classes = tuple(
        replace(cls, prefill=told * cls.prefill, generated=said * cls.generated, turns=turns) for cls in (SHORT, LONG)
    )
    shape = ratio.format("fast/tp1", "alike/tp1")
    (option,), _, _ = pairs_of(ONE_OF, classes, shape)
    profile = roofline(FAST.gpu, QWEN_06B, [1])
    (alone,), _ = engine_options(QWEN_06B, ONE_OF[0], paired_recipe(), classes, profile, LONGEST, UNCORRECTED)
    engines = sum(option.uses.values())
    assert option.uses == {"alike": option.devices, "fast": engines - option.devices}
    assert max(map(sum, option.work)) >= max(map(sum, alone.work)) / engines * (1 - 1e-9)
    assert all(a >= b * (1 - 1e-9) for a, b in zip(option.residence, alone.residence, strict=True))
    assert option.holds <= alone.holds and option.stall >= alone.stall


def test_prompts_belong_where_arithmetic_is_cheap() -> None:
    nodes = (replace(FAST, gpus=1), replace(WIDE, gpus=1))
    options, pairs, rejected = pairs_of(nodes, TOLD)
    assert rejected == 1  # the other way round
    assert {(pair.prefill.shape, pair.decode.shape) for pair in pairs} == {("fast/tp1", "wide/tp1")}
    assert [option.shape for option in options] == [pair.shape for pair in pairs]
    assert {option.prefill for option in options} == {("fast", pair.prefill.engines) for pair in pairs}


def test_rows_of_work_are_prompts_links_and_decoding() -> None:
    (option,), _, _ = pairs_of(ONE_OF, TOLD, "2 fast/tp1 > 3 alike/tp1")
    recipe = paired_recipe()
    counts = [recipe.batch * cls.share for cls in TOLD]
    token = QWEN_06B.kv_bytes_per_token(2) / fabric(ONE_OF[0]).network
    assert option.work[1] == pytest.approx([n * cls.prefill * token / 2 for n, cls in zip(counts, TOLD, strict=True)])
    one, _, _ = pairs_of(ONE_OF, TOLD, "1 fast/tp1 > 1 alike/tp1")
    assert option.work[0] == pytest.approx([seconds / 2 for seconds in one[0].work[0]])
    assert option.work[2] == pytest.approx([seconds / 3 for seconds in one[0].work[2]])
    # Of two turns, what the first one generated is computed with the second one's prompt.
    short = replace(TOLD[0], prefill=TOLD[0].prefill + TOLD[0].generated / 2, turns=1.0)
    (single,), _, _ = pairs_of(ONE_OF, (short, TOLD[1]), one[0].shape)
    assert TOLD[0].turns == 2 and one[0].work[0][0] == pytest.approx(single.work[0][0])


def test_a_plan_says_where_both_halves_are() -> None:
    plan = paired_plan(paired_recipe(), [("wide/tp1", 1, 4000), ("1 fast/tp1 > 2 wide/tp1", 1, LONGEST)])
    assert [(it.role, it.name, it.bucket, it.pool) for it in plan.placement] == [
        ("train", plan.allocation.layout, None, "fast"),
        ("generate", "wide/tp1", 0, "wide"),
        ("prefill", "fast/tp1", 1, "fast"),
        ("decode", "wide/tp1", 1, "wide"),
        ("decode", "wide/tp1", 1, "wide"),
    ]
    taken = [(it.pool, node, gpu) for it in plan.placement for node in it.nodes for gpu in it.gpus]
    assert len(set(taken)) == len(taken) == 5
    assert parse_plan(dump_plan(plan)) == plan


def test_an_engine_that_changes_its_role_stays_where_it_is() -> None:
    recipe = paired_recipe()
    before = paired_plan(recipe, [("wide/tp1", 4, LONGEST)])
    after = paired_plan(recipe, [("1 fast/tp1 > 4 wide/tp1", 1, LONGEST)], before.placement)
    assert {it.gpus for it in after.placement if it.role == "decode"} == {(0,), (1,), (2,), (3,)}
    less = paired_plan(recipe, [("wide/tp1", 1, 4000), ("1 fast/tp1 > 3 wide/tp1", 1, LONGEST)], after.placement)
    roles = {it.gpus: it.role for it in less.placement if it.pool == "wide"}
    assert sorted(roles.values()) == ["decode", "decode", "decode", "generate"]


def test_pairs_are_chosen_only_where_they_were_asked_for() -> None:
    nodes = replace(BOTH, nodes=(replace(FAST, count=2), replace(WIDE, count=2)))
    steps = {}
    for asked in (False, True):
        plan = Planner(nodes, QWEN_06B, paired_recipe(prefill_decode=asked, batch=512)).plan(TOLD)
        assert ("prefill_decode" in dump_plan(plan)) is asked
        assert asked or all(it.role in ("train", "generate") for it in plan.placement)
        steps[asked] = plan.predicted.step
    assert steps[True] <= steps[False] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"kv_on_update": "refresh"}, "kv_on_update is refresh.*set kv_on_update to keep"),
        ({"mode": "colocated"}, "mode is colocated.*set mode to async"),
    ],
)
def test_what_is_not_simulated_is_refused(others: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        paired_recipe(**others)
