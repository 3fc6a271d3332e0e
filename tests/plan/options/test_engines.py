"""Ways to generate: which there are, why others are not, and prices against the profile they come from.

Options are without the factors of a batch, so that their formulas can be worked out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from oracles.reshaped import reshaped
from oracles.small_cluster import A800, CLASSES, CLUSTER, LONG, QWEN_06B, QWEN_14B, RECIPE, SHORT, kv_of
from tables import by_name

from libra.config.recipe import Recipe
from libra.cost.corrections import UNCORRECTED
from libra.cost.grid import EngineProfile
from libra.cost.lines import iteration_lines, prefill_line
from libra.cost.longest import MemberSeconds
from libra.cost.rollout import EngineTiming
from libra.cost.sources.roofline import engine_degrees, node_roofline, roofline, tensor_degrees
from libra.cost.transfer import NETWORK_LATENCY, Fabric, Group, all_reduce_seconds, fabric, weight_sync
from libra.hardware.cluster import GPUS, NodeClass
from libra.hardware.decoder import decoder
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.lengths import TrajectoryClass
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.engines import engine_options
from libra.plan.options.price import price
from libra.plan.planner import Planner
from libra.plan.problem import EngineOption

SIX = replace(A800, gpus=6)
L40S = NodeClass("l40s", 1, 4, GPUS["L40S"], intra_bandwidth=32e9, inter_bandwidth=12.5e9)
SYNC = Recipe(batch=64, samples_per_prompt=8, max_length=8192, mode="sync", max_buckets=2)
STALENESS = (0, 1, 3)
MIDDLE = replace(
    SHORT, share=0.1, peak_context=2000, mean_context=1800.0, generated=250.0, context_sum=250_000.0, tool_seconds=6.0
)
THREE = (replace(SHORT, share=0.65), MIDDLE, LONG)
MOE = decoder("moe", 48, 2048, 32, 4, 128, 0, 151936, False, 40960, experts=Experts(128, 8, 768, 0), sparse=48)


def profile_of(model: ModelSpec, nodes: NodeClass = A800) -> EngineProfile:
    return roofline(nodes.gpu, model, tensor_degrees(model, nodes), intra_bandwidth=nodes.intra_bandwidth)


def options_of(
    model: ModelSpec,
    recipe: Recipe = RECIPE,
    classes: Sequence[TrajectoryClass] = CLASSES,
    nodes: NodeClass = A800,
) -> tuple[EngineOption, ...]:
    return engine_options(model, nodes, recipe, classes, profile_of(model, nodes), recipe.max_length, UNCORRECTED)[0]


def stale(staleness: int, recipe: Recipe = SYNC) -> Recipe:
    return recipe.model_copy(update={"mode": "async" if staleness else "sync", "staleness": staleness})


DEGREES = [
    ("eight GPUs", QWEN_14B, A800, (1, 2, 4, 8)),
    ("six GPUs", QWEN_14B, SIX, (1, 2)),
    ("twelve GPUs", QWEN_14B, replace(A800, gpus=12), (1, 2, 4)),
    ("one GPU", QWEN_14B, replace(A800, gpus=1), (1,)),
    ("sixteen heads", QWEN_06B, replace(A800, gpus=32), (1, 2, 4, 8, 16)),
    ("KV heads in threes", reshaped(QWEN_06B, heads=12, kv_heads=6), A800, (1, 2)),
]


@by_name("model, nodes, wanted", DEGREES)
def test_degrees_divide_node_and_heads(model: ModelSpec, nodes: NodeClass, wanted: tuple[int, ...]) -> None:
    assert tensor_degrees(model, nodes) == wanted


@pytest.mark.parametrize("staleness", STALENESS)
def test_a_dense_model_has_an_option_a_shape(staleness: int) -> None:
    options = options_of(QWEN_14B, stale(staleness))
    assert [option.footprint for option in options] == [("a800", tp, 8192) for tp in (1, 2, 4, 8)]
    assert {option.max_num_seqs for option in options} == {512}  # what the profile knows; memory lasts for more


def test_max_num_seqs_are_no_more_than_memory_has_for_the_shortest_class() -> None:
    # 268,960 tokens of KV for contexts of 2,000 tokens
    options = [option for option in options_of(QWEN_14B, classes=[replace(LONG, share=1.0)]) if option.devices == 1]
    assert {option.max_num_seqs for option in options} == {kv_of(RECIPE, QWEN_14B, 1) // 2000} == {134}


def test_an_engine_that_cannot_hold_the_longest_context_holds_what_its_memory_does() -> None:
    recipe = RECIPE.model_copy(update={"max_length": 40960, "gpu_memory_utilization": 0.45})
    classes = (replace(SHORT, share=0.5), replace(LONG, share=0.5, peak_context=40960))
    options = options_of(QWEN_14B, recipe, classes)
    kv = kv_of(recipe, QWEN_14B, 1)
    assert 1000 < kv < 40960
    assert {option.holds for option in options if option.devices == 1} == {kv}
    assert {option.holds for option in options if option.devices > 1} == {40960}


REJECTED = [
    ("no room at all", RECIPE.model_copy(update={"gpu_memory_utilization": 0.37}), ("a800/tp1",),
     "29.5 GB of weights leave room for 0 tokens of KV in 85.9"),
    ("nothing holds it", RECIPE.model_copy(update={"gpu_memory_utilization": 0.05}),
     ("a800/tp1", "a800/tp2", "a800/tp4", "a800/tp8"), "the shortest class needs 1,000"),
]  # fmt: skip


@by_name("recipe, shapes, reason", REJECTED)
def test_a_size_that_holds_no_trajectory_is_rejected_with_its_reason(
    recipe: Recipe, shapes: tuple[str, ...], reason: str
) -> None:
    options, rejected = engine_options(QWEN_14B, A800, recipe, CLASSES, profile_of(QWEN_14B), recipe.max_length)
    assert tuple(each.name for each in rejected) == shapes
    assert all(reason in each.reason for each in rejected)
    assert not {option.shape for option in options} & set(shapes)
    assert len({option.shape for option in options}) + len(rejected) == 4


@pytest.mark.parametrize("model", [QWEN_06B, QWEN_14B, MOE], ids=lambda model: model.name)
def test_work_of_a_full_engine_and_a_lone_trajectory_are_what_the_profile_says(model: ModelSpec) -> None:
    """Of trajectories that all have the same context, so that nothing but the profile is left to know; as many as fill
    any engine."""
    cls = TrajectoryClass(1.0, 2001, 2000.0, 100.0, 200_000.0, 500.0, 1.0, 0.0, 1.0)
    recipe = RECIPE.model_copy(update={"batch": 4096})
    profile = profile_of(model)
    options = options_of(model, recipe, [cls])
    for tp in (1, 2, 4):
        grid = profile.grid(tp)
        full = kv_of(recipe, model, tp) / 2000  # sequences
        line = prefill_line(grid, recipe.max_batched_tokens)
        prefill = 500 * (line.per_token + line.per_token_context * 1000)
        wanted = 4096 * (100 * grid.decode_seconds(full, 2000) / full + prefill)
        work = min(max(row[0] for row in option.work) for option in options if option.devices == tp)
        assert work == pytest.approx(wanted, rel=1e-6) if model.experts is None else wanted <= work <= 1.1 * wanted
        generates = min(option.generates[0][0] for option in options if option.devices == tp)
        assert generates == pytest.approx(100 * grid.decode_seconds(1, 2000) + prefill)
        assert max(wait for option in options for row in option.waits for wait in row) == pytest.approx(0.0, abs=1e-9)


def test_residence_is_no_shorter_than_decoding_alone() -> None:
    profile = profile_of(QWEN_14B)
    for tp in (1, 2, 4, 8):
        option = next(option for option in options_of(QWEN_14B) if option.devices == tp)
        assert option.residence[1] >= 400 * profile.grid(tp).decode_seconds(1, 1000)
        assert option.residence[0] < option.residence[1] == pytest.approx(option.stays.alone(1))


def test_all_engines_stall_for_the_whole_weights() -> None:
    sync = weight_sync(QWEN_14B.parameters * 2, 1, 1, fabric(A800))
    assert all(option.stall == pytest.approx(sync.stall) for option in options_of(QWEN_14B))


def test_kv_that_is_kept_costs_nothing() -> None:
    assert {option.refresh for option in options_of(QWEN_06B)} == {(0.0, 0.0)}


def test_kv_that_is_made_again_costs_a_refill_of_what_is_alive_at_an_update() -> None:
    refresh = RECIPE.model_copy(update={"kv_on_update": "refresh", "staleness": 1})
    grid = profile_of(QWEN_06B).grid(1)
    line = prefill_line(grid, RECIPE.max_batched_tokens)
    # Contexts of 500 and 2,000 tokens; prefilled ones have half of 900 and 3,500 before them. One trajectory takes:
    refills = [context * (line.per_token + line.per_token_context * context / 2) for context in (500, 2000)]
    prefills = [
        tokens * (line.per_token + line.per_token_context * final / 2) for tokens, final in ((1000, 900), (2000, 3500))
    ]
    decodes = [100 * grid.decode_seconds(1, 500), 400 * grid.decode_seconds(1, 2000)]
    stays = [sum(parts) for parts in zip(decodes, prefills, (3.0, 10.0), strict=True)]
    # 48 of 64 have 2 turns and 16 have 4; half and three quarters of them go on after an update.
    wanted = [48 * stays[0] * 0.5 * refills[0], 16 * stays[1] * 0.75 * refills[1]]
    for kept, made in zip(options_of(QWEN_06B), options_of(QWEN_06B, refresh), strict=True):
        assert made.work == kept.work
        if made.devices > 1:
            continue
        assert made.refresh == pytest.approx(wanted, rel=1e-3)
        # Two updates meet a trajectory of LONG, but only one of SHORT, which has one turn after the first.
        later = [after - before for after, before in zip(made.residence, kept.residence, strict=True)]
        assert later == pytest.approx([1 * refills[0], 2 * refills[1]])


def test_nothing_is_alive_at_a_synchronous_update() -> None:
    recipe = Recipe(batch=64, samples_per_prompt=8, max_length=8192, mode="sync", kv_on_update="refresh")
    assert {option.refresh for option in options_of(QWEN_06B, recipe)} == {(0.0, 0.0)}


# Batches that start together.


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("slowed", [1.0, 2.0, 4.0, 8.0, 32.0, 3.0, 20.0])
def test_lines_are_the_seconds_of_the_longest_that_is_slowed(staleness: int, slowed: float) -> None:
    """Met where they join; between, no lower and hardly above."""
    recipe = stale(staleness)
    grid = profile_of(QWEN_14B).grid(4)
    option = next(option for option in options_of(QWEN_14B, recipe, THREE) if option.devices == 4)
    draws = (1 + staleness) ** (1 / 3) * recipe.batch
    prefill = prefill_line(grid, recipe.max_batched_tokens)
    lines = iteration_lines(
        grid, option.max_num_seqs, contexts=(1.0, 8192.0), kv_tokens=float(kv_of(recipe, QWEN_14B, 4))
    )
    timing = EngineTiming(lines, prefill.per_token, prefill.per_token_context, per_turn=0.0)
    for last, wanted in enumerate(MemberSeconds.of(timing, THREE).longest(draws, slowed)):
        found = max(waits + slowed * generates for generates, waits in option.stays.lines(last))
        assert wanted * (1 - 1e-3) <= found <= wanted * (1.001 if slowed in (1, 2, 4, 8, 32) else 1.03)


def test_a_mixture_of_experts_is_priced_near_several_numbers_of_sequences() -> None:
    options = options_of(MOE, SYNC)
    assert len({(option.devices, option.work) for option in options}) > 4
    assert all(len(option.work) == len(options[0].work) for option in options if option.devices == 1)


@pytest.mark.parametrize("staleness", STALENESS)
def test_contexts_are_prefilled_again_where_a_batch_outgrows_the_memory_of_its_engines(staleness: int) -> None:
    recipe = stale(staleness, SYNC.model_copy(update={"batch": 8192}))
    kv = kv_of(recipe, QWEN_14B, 1)
    option = next(option for option in options_of(QWEN_14B, recipe, THREE) if option.devices == 1)
    filled = [recipe.batch * cls.share * cls.context_sum / cls.generated / kv for cls in THREE]
    assert option.kv_occupancy == pytest.approx(filled)
    assert all(again > 0 for again in option.refill)


@pytest.mark.parametrize("staleness", STALENESS)
def test_every_class_counts_and_by_how_often_it_is_met(staleness: int) -> None:
    """Of trajectories that each take what their class takes, so that only how many there are is left to chance."""
    short, long = CLASSES
    recipe = stale(staleness)

    def waits(rare: float) -> list[float]:
        classes = (replace(short, share=1 - rare), replace(long, share=rare))
        assert Planner(CLUSTER, QWEN_06B, recipe).problem(classes).expected == (True, True)
        return list(options_of(QWEN_14B, recipe, classes)[0].residence)

    each_short, each_long = waits(0.5)
    met = 64 * 0.001  # of a batch, as each waits for its own
    none = math.exp(-met)
    assert waits(0.001) == pytest.approx([each_short, (1 - none) * each_long + none * each_short])


@pytest.mark.parametrize("staleness", STALENESS)
def test_a_step_by_hand(staleness: int) -> None:
    """Trajectories that are all alike and use no tools, without the factors of a batch: 64 of 4 turns that generate 400
    tokens at a mean context of 2,000 and prefill 2,000 tokens, half of 3,500 before them."""
    alike = replace(LONG, share=1.0, tool_seconds=0.0)
    recipe = stale(staleness)
    request = Planner(CLUSTER, QWEN_14B, recipe).request((alike,))
    problem = request.menu(UNCORRECTED).problem
    grid = request.profiles[0].grid(4)
    prefill = prefill_line(grid, recipe.max_batched_tokens)
    prefilled = 2000 * (prefill.per_token + prefill.per_token_context * 1750)
    kv = kv_of(recipe, QWEN_14B, 4)
    full = kv / 2000  # sequences, more than the batch has
    work = 64 * (400 * grid.decode_seconds(full, 2000) / full + prefilled)
    alone = 400 * grid.decode_seconds(1, 2000) + prefilled
    stall = weight_sync(QWEN_14B.parameters * 2, 1, 1, fabric(A800)).stall
    training = problem.training[0]
    found = price(problem, Allocation(training.replicas, (Bucket("a800/tp4", 2, 0, 8192),), training.layout))
    load, follows = work / 2 + stall, training.seconds + training.publish
    if staleness == 0:
        assert found.rollout == pytest.approx(load + alone, rel=1e-6)
        assert found.step == pytest.approx(load + alone + follows, rel=1e-6)
    else:
        assert found.rollout == pytest.approx(load, rel=1e-6)
        # alone / (1 - load / T) + follows = (1 + staleness) T
        middle = ((1 + staleness) * load + alone + follows) / 2
        step = (middle + math.sqrt(middle**2 - (1 + staleness) * load * follows)) / (1 + staleness)
        assert found.latency == pytest.approx(step, rel=1e-6)
        assert found.step == pytest.approx(max(training.seconds, step), rel=1e-6)


# Qwen3-14B on A800: what is known of tensor parallelism.


def seconds_per_device(cls: TrajectoryClass, tp: int) -> float:
    """Device seconds of the work of a step, the wait for its longest trajectory left out."""
    recipe = RECIPE.model_copy(update={"max_length": 40960})
    options = [option for option in options_of(QWEN_14B, recipe, [cls]) if option.devices == tp]
    return min(tp * max(sum(row) for row in option.work) for option in options)


def generating(context: int) -> TrajectoryClass:
    """Trajectories that do nothing but generate at about this context."""
    return TrajectoryClass(1.0, context + 500, context + 500, 1000.0, 1000.0 * context, 0.0, 1.0, 0.0, 1.0)


def test_eight_devices_decode_one_sequence_faster_than_one() -> None:
    profile = profile_of(QWEN_14B)
    for context in (500, 8000, 32000):
        assert profile.grid(8).decode_seconds(1, context) < profile.grid(1).decode_seconds(1, context) / 2
    stays = {option.devices: option.residence for option in options_of(QWEN_14B)}  # of the last: for the longest
    assert all(eight < alone for eight, alone in zip(stays[8], stays[1], strict=True))


def test_each_of_eight_generates_less_than_one_alone_at_high_batch_and_short_context() -> None:
    assert seconds_per_device(generating(500), 8) > 1.3 * seconds_per_device(generating(500), 1)


def test_each_of_eight_generates_more_than_one_alone_where_one_runs_out_of_memory() -> None:
    # An A800 holds seven such contexts, eight of them 97.
    context = 36_000
    recipe = RECIPE.model_copy(update={"max_length": 40960})
    assert kv_of(recipe, QWEN_14B, 1) // context == 7
    assert kv_of(recipe, QWEN_14B, 8) // context > 90
    assert seconds_per_device(generating(context), 8) < seconds_per_device(generating(context), 1)


# Weights of DeepSeek-V3 in bf16 are 1,343 GB; a node of eight H200 has 1,200 GB.
WIDE = NodeClass("h200", 8, 8, GPUS["H200"], intra_bandwidth=450e9, inter_bandwidth=400e9)
DEEPSEEK = load_model("deepseek-ai/DeepSeek-V3")
BF16 = RECIPE.model_copy(update={"rollout_dtype": "bf16", "max_length": 32768})


def test_a_model_that_no_node_holds_has_engines_on_whole_nodes() -> None:
    assert engine_degrees(DEEPSEEK, WIDE, BF16)[-2:] == (16, 32)
    assert engine_degrees(DEEPSEEK, replace(WIDE, count=1), BF16)[-1] == 8
    assert engine_degrees(DEEPSEEK, WIDE, BF16.model_copy(update={"rollout_dtype": "fp8"}))[-1] == 8


def test_an_all_reduce_over_nodes_takes_no_less_than_its_network_needs() -> None:
    """It carries 2 (n - 1) / n of the bytes at its full speed; a network of endless speed costs latency alone."""
    size = np.array([1e6, 1e8])
    for nodes in (1, 2, 4):
        seconds = all_reduce_seconds(size / 8, Group(nodes, 8), Fabric(8, 1e30, 400e9))
        assert (seconds >= 2 * (nodes - 1) / nodes * size / 400e9).all()
        assert (seconds > 0).all() == (nodes > 1)
        endless = all_reduce_seconds(size / 8, Group(nodes, 8), Fabric(8, 1e30, 1e30))
        assert endless == pytest.approx(2 * math.log2(nodes) * NETWORK_LATENCY)


def test_engines_over_nodes_are_priced_by_the_network_between_them() -> None:
    fast, slow = (node_roofline(replace(WIDE, inter_bandwidth=rate), DEEPSEEK, BF16) for rate in (400e9, 50e9))
    assert slow.grid(8) == fast.grid(8)
    assert (np.array(slow.grid(16).decode) > np.array(fast.grid(16).decode)).all()


@pytest.mark.parametrize(("framework", "largest"), [("slime", 32), ("verl", 8), ("vllm", 8)])
def test_engines_over_nodes_are_offered_where_the_framework_starts_them(framework: str, largest: int) -> None:
    recipe = BF16.model_copy(update={"framework": framework, "max_batched_tokens": 8192})
    options, _ = engine_options(DEEPSEEK, WIDE, recipe, CLASSES, node_roofline(WIDE, DEEPSEEK, recipe), 4000)
    assert max((option.devices for option in options), default=8) == largest
