"""Engine options of batches that start together: what they are for, and what the optimiser sees of it.

Options are uncorrected unless a test is about the factors, so that their formulas can be worked out.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from oracles.small_cluster import A800, CLASSES, CLUSTER, LONG, QWEN_06B, QWEN_14B, SHORT, kv_of

from libra.config.recipe import Recipe
from libra.cost.corrections import UNCORRECTED
from libra.cost.lines import iteration_lines, prefill_line
from libra.cost.rollout import EngineTiming, longest_of, longest_upto
from libra.cost.sources.roofline import roofline, tensor_degrees
from libra.cost.transfer import fabric, weight_sync
from libra.hardware.model import Experts, ModelSpec
from libra.lengths import TrajectoryClass
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.engines import engine_options, most_buckets
from libra.plan.options.price import bucket_prices, price
from libra.plan.planner import Planner
from libra.plan.problem import EngineOption, Problem

SYNC = Recipe(batch=64, samples_per_prompt=8, max_length=8192, mode="sync", max_buckets=2)
STALENESS = (0, 1, 3)
MIDDLE = replace(
    SHORT, share=0.1, peak_context=2000, mean_context=1800.0, generated=250.0, context_sum=250_000.0, tool_seconds=6.0
)
THREE = (replace(SHORT, share=0.65), MIDDLE, LONG)
EXPERTS = ModelSpec("moe", 48, 2048, 32, 4, 128, 0, 151936, False, 40960, experts=Experts(128, 8, 768, 0, 48))


def options_of(
    classes: tuple[TrajectoryClass, ...] = THREE, model: ModelSpec = QWEN_14B, recipe: Recipe = SYNC
) -> tuple[EngineOption, ...]:
    profile = roofline(A800.gpu, model, tensor_degrees(model, A800), intra_bandwidth=A800.intra_bandwidth)
    return engine_options(model, A800, recipe, classes, profile, recipe.max_length, UNCORRECTED)[0]


def stale(staleness: int, recipe: Recipe = SYNC) -> Recipe:
    return recipe.model_copy(update={"mode": "async" if staleness else "sync", "staleness": staleness})


def problem_of(model: ModelSpec = QWEN_14B, recipe: Recipe = SYNC) -> Problem:
    return Planner(CLUSTER, model, recipe).request(THREE).menu(UNCORRECTED).problem


@pytest.mark.parametrize("mode", ["sync", "colocated", "async"])
def test_nothing_is_gained_by_fewer_max_num_seqs(mode: str) -> None:
    options = options_of(recipe=SYNC.model_copy(update={"mode": mode, "staleness": int(mode == "async")}))
    assert {option.max_num_seqs for option in options} == {512}
    assert {option.devices for option in options} == {1, 2, 4, 8}


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("slowed", [1.0, 2.0, 4.0, 8.0, 32.0, 3.0, 20.0])
def test_lines_are_the_seconds_of_the_longest_that_is_slowed(staleness: int, slowed: float) -> None:
    """Met where they join; between, no lower and hardly above."""
    recipe = stale(staleness)
    profile = roofline(A800.gpu, QWEN_14B, tensor_degrees(QWEN_14B, A800), intra_bandwidth=A800.intra_bandwidth)
    grid = profile.grid(4)
    option = next(option for option in options_of(recipe=recipe) if option.devices == 4)
    draws = [(1 + staleness) ** (1 / 3) * recipe.batch * cls.share for cls in THREE]
    prefill = prefill_line(grid, recipe.max_batched_tokens)
    lines = iteration_lines(
        grid, option.max_num_seqs, contexts=(1.0, 8192.0), kv_tokens=float(kv_of(recipe, QWEN_14B, 4))
    )
    timing = EngineTiming(lines, prefill.per_token, prefill.per_token_context, per_turn=0.0)
    longest = [
        longest_of(timing, cls, count, UNCORRECTED).seconds(slowed) for cls, count in zip(THREE, draws, strict=True)
    ]
    for last, wanted in enumerate(longest_upto(longest, draws)):
        found = max(waits + slowed * generates for generates, waits in option.lines(last))
        assert wanted * (1 - 1e-3) <= found <= wanted * (1.001 if slowed in (1, 2, 4, 8, 32) else 1.03)


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)])
def test_a_bucket_takes_its_share_of_the_work_and_its_longest_trajectory(
    first: int, last: int, engines: int, staleness: int
) -> None:
    problem = replace(
        problem_of(recipe=stale(staleness)),
        recall_known=((1.0,) * 3,),
        recall_possible=((1.0,) * 3,),
        use_all_devices=False,
        most_buckets=None,
    )
    peaks = (*problem.peaks[:-1], problem.longest_context)
    buckets = [Bucket("a800/tp2", engines, peaks[first - 1] if first else 0, peaks[last])]
    if first:
        buckets.insert(0, Bucket("a800/tp8", 1, 0, peaks[first - 1]))
    training = problem.training[0]
    found = bucket_prices(problem, Allocation(training.replicas, tuple(buckets), training.layout))[-1]
    fixed = training.after_rollout + training.publish
    option = found.option
    work = max(sum(row[first : last + 1]) for row in option.work) / engines
    if staleness == 0:
        rollout = found.load - option.stall
        slowed = [waits + generates / (1 - work / rollout) for generates, waits in option.lines(last)]
        assert rollout == pytest.approx(max(slowed))
    else:
        step = (found.residence + fixed) / (1 + staleness)
        slowed = [waits + generates / (1 - found.load / step) for generates, waits in option.lines(last)]
        assert found.load == pytest.approx(work + option.stall)
        assert found.residence == pytest.approx(max(slowed))


def test_a_mixture_of_experts_is_priced_near_several_numbers_of_sequences() -> None:
    options = options_of(CLASSES, EXPERTS)
    assert len({(option.devices, option.work) for option in options}) > 4
    assert all(len(option.work) == len(options[0].work) for option in options if option.devices == 1)


def test_where_no_tool_returns_there_is_one_bucket() -> None:
    silent = tuple(replace(cls, before_first_return=1.0) for cls in CLASSES)
    assert [most_buckets(SYNC, classes) for classes in (CLASSES, silent)] == [2, 1]
    assert Planner(CLUSTER, QWEN_06B, SYNC).problem(silent).most_buckets == 1
    assert len(Planner(CLUSTER, QWEN_06B, SYNC).plan(silent).allocation.buckets) == 1


@pytest.mark.parametrize("staleness", STALENESS)
def test_contexts_are_prefilled_again_where_a_batch_outgrows_the_memory_of_its_engines(staleness: int) -> None:
    recipe = stale(staleness, SYNC.model_copy(update={"batch": 8192}))
    kv = kv_of(recipe, QWEN_14B, 1)
    option = next(option for option in options_of(recipe=recipe) if option.devices == 1)
    filled = [recipe.batch * cls.share * cls.context_sum / cls.generated / kv for cls in THREE]
    assert option.kv_occupancy == pytest.approx(filled)
    assert all(again > 0 for again in option.refill)


@pytest.mark.parametrize("staleness", STALENESS)
def test_every_class_counts_and_by_how_often_it_is_met(staleness: int) -> None:
    """Of trajectories that each take what their class takes, so that only how many there are is left to chance."""
    short, long = (replace(cls, generated_std=0.0, tool_seconds_std=0.0) for cls in CLASSES)
    recipe = stale(staleness)

    def waits(rare: float) -> list[float]:
        classes = (replace(short, share=1 - rare), replace(long, share=rare))
        assert Planner(CLUSTER, QWEN_06B, recipe).problem(classes).expected == (True, True)
        return list(options_of(classes, recipe=recipe)[0].residence)

    each_short, each_long = waits(0.5)
    # The batches under way wait for the same trajectory, or each for its own.
    met = (1 + staleness) ** (1 / 3) * 64 * 0.001
    none = math.exp(-met)
    assert waits(0.001) == pytest.approx([each_short, (1 - none) * each_long + none * each_short])


@pytest.mark.parametrize("staleness", STALENESS)
def test_a_step_by_hand(staleness: int) -> None:
    """Trajectories that are all alike and use no tools, without the factors of a batch: 64 of 4 turns that generate 400
    tokens at a mean context of 2,000 and prefill 2,000 tokens, half of 3,500 before them."""
    alike = replace(LONG, share=1.0, generated_std=0.0, tool_seconds=0.0, tool_seconds_std=0.0)
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


def test_factors_reach_the_price() -> None:
    request = Planner(CLUSTER, QWEN_06B, SYNC).request(THREE)
    plain, slower = (request.menu(factors).problem for factors in (UNCORRECTED, replace(UNCORRECTED, generation=2.0)))
    training = plain.training[0]
    allocation = Allocation(training.replicas, (Bucket("a800/tp8", 1, 0, 8192),), training.layout)
    assert price(slower, allocation).step > price(plain, allocation).step
