"""Engine options where a step waits for its whole batch: what they are for, and what the optimiser sees of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import A800, CLASSES, CLUSTER, LONG, QWEN_06B, QWEN_14B, SHORT

from libra.cost.collectives import fabric
from libra.cost.corrections import UNCORRECTED
from libra.cost.roofline import roofline
from libra.cost.transfer import weight_sync
from libra.lengths import TrajectoryClass
from libra.model import Experts, ModelSpec
from libra.plan.engines import engine_options, most_buckets, tensor_degrees
from libra.plan.planner import Planner
from libra.plan.price import bucket_prices, price
from libra.plan.problem import Allocation, Bucket, EngineOption, Problem
from libra.recipe import Recipe

SYNC = Recipe(batch=64, samples_per_prompt=8, max_length=8192, mode="sync", max_buckets=2)
MIDDLE = replace(
    SHORT, share=0.1, peak_context=2000, mean_context=1800.0, generated=250.0, context_sum=250_000.0, tool_seconds=6.0
)
THREE = (replace(SHORT, share=0.65), MIDDLE, LONG)
EXPERTS = ModelSpec("moe", 48, 2048, 32, 4, 128, 0, 151936, False, 40960, experts=Experts(128, 8, 768, 0, 48))


def options_of(
    classes: tuple[TrajectoryClass, ...] = THREE, model: ModelSpec = QWEN_14B, recipe: Recipe = SYNC
) -> tuple[EngineOption, ...]:
    profile = roofline(A800.gpu, model, tensor_degrees(model, A800), intra_bandwidth=A800.intra_bandwidth)
    return engine_options(model, A800, recipe, classes, profile, recipe.max_length)[0]


def problem_of(model: ModelSpec = QWEN_14B) -> Problem:
    return Planner(CLUSTER, model, SYNC).problem(THREE)


@pytest.mark.parametrize("mode", ["sync", "colocated"])
def test_nothing_is_gained_by_fewer_seats(mode: str) -> None:
    options = options_of(recipe=SYNC.model_copy(update={"mode": mode}))
    assert {option.seats for option in options} == {512}
    assert {option.devices for option in options} == {1, 2, 4, 8}


def test_an_option_is_for_a_longest_class_and_waits_for_the_longest_of_it() -> None:
    stall = weight_sync(QWEN_14B.parameters * 2, 1, 1, fabric(A800)).stall
    for tp in (1, 2, 4, 8):
        short, middle, long = (option for option in options_of() if option.devices == tp)
        assert short.alone < middle.alone < long.alone
        for option in (short, middle, long):
            assert option.stall - option.alone == pytest.approx(stall)
        # Within its classes an option's longest trajectory takes what the option waits; beyond, as long as can be.
        assert middle.residence[:2] == pytest.approx((short.alone, middle.alone))
        assert middle.residence[2] == pytest.approx(
            max(sum(row) for option in (short, middle, long) for row in option.work) + long.stall
        )


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)])
def test_a_bucket_takes_its_share_of_the_work_and_its_longest_trajectory(first: int, last: int, engines: int) -> None:
    problem = replace(
        problem_of(), reach_tried=((1.0,) * 3,), reach_untried=((1.0,) * 3,), use_all_devices=False, most_buckets=None
    )
    peaks = (*problem.peaks[:-1], problem.longest_context)
    buckets = [Bucket("a800/tp2", engines, peaks[first - 1] if first else 0, peaks[last])]
    if first:
        buckets.insert(0, Bucket("a800/tp8", 1, 0, peaks[first - 1]))
    training = problem.training[0]
    found = bucket_prices(problem, Allocation(training.replicas, tuple(buckets), training.layout))[-1]
    own = [option for option in problem.engines if option.shape == "a800/tp2"]
    work = max(sum(row[first : last + 1]) for row in own[last].work) / engines
    assert max(found.load, found.residence) == pytest.approx(work + own[last].stall)
    # Whoever runs the engine is told how long weights take, not how long a trajectory does.
    assert (found.option.stall, found.option.alone) == (pytest.approx(own[0].stall - own[0].alone), 0.0)


def test_longest_trajectories_that_take_as_long_share_an_option() -> None:
    alike = (replace(SHORT, share=0.5), replace(SHORT, share=0.25, peak_context=1001, generated=100.1), LONG)
    assert len(options_of(alike)) == len(options_of(CLASSES)) == 8


def test_a_mixture_of_experts_is_priced_near_several_numbers_of_sequences() -> None:
    options = options_of(CLASSES, EXPERTS)
    assert len({(option.devices, option.work) for option in options}) > 4
    assert all(len(option.work) == len(options[0].work) for option in options if option.devices == 1)


def test_where_no_tool_returns_there_is_one_bucket() -> None:
    silent = tuple(replace(cls, before_first_return=1.0) for cls in CLASSES)
    assert [most_buckets(SYNC, classes) for classes in (CLASSES, silent)] == [2, 1]
    assert Planner(CLUSTER, QWEN_06B, SYNC).problem(silent).most_buckets == 1
    assert len(Planner(CLUSTER, QWEN_06B, SYNC).plan(silent).allocation.buckets) == 1


def test_contexts_are_prefilled_again_where_a_batch_outgrows_the_memory_of_half_the_nodes() -> None:
    some, crowd = (SYNC.model_copy(update={"batch": batch}) for batch in (128, 4096))

    def for_each(recipe: Recipe) -> float:
        option = options_of(recipe=recipe)[0]
        assert option.devices == 1
        return max(map(sum, option.work)) / recipe.batch

    assert for_each(some) == pytest.approx(for_each(SYNC))
    assert for_each(crowd) > 1.2 * for_each(SYNC)


def test_every_class_counts_where_the_whole_batch_is_waited_for() -> None:
    rare = (replace(SHORT, share=0.999), replace(LONG, share=0.001))
    assert Planner(CLUSTER, QWEN_06B, SYNC).problem(rare).met == (True, True)
    overlapping = SYNC.model_copy(update={"mode": "async", "staleness": 1})
    assert Planner(CLUSTER, QWEN_06B, overlapping).problem(rare).met == (True, False)
    # It counts by how often it is met: in one step of sixteen.
    alone = {
        cls: options_of(cls)[-1].alone for cls in (rare, (replace(SHORT, share=1.0),), (replace(LONG, share=1.0),))
    }
    assert alone[(replace(SHORT, share=1.0),)] < alone[rare] < alone[(replace(LONG, share=1.0),)]


def test_factors_reach_the_price() -> None:
    request = Planner(CLUSTER, QWEN_06B, SYNC).request(THREE)
    plain, slower = (request.menu(factors).problem for factors in (UNCORRECTED, replace(UNCORRECTED, generation=2.0)))
    training = plain.training[0]
    allocation = Allocation(training.replicas, (Bucket("a800/tp8", 1, 0, 8192),), training.layout)
    assert price(slower, allocation).step > price(plain, allocation).step
