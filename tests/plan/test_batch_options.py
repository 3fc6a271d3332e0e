"""Engine options of batches that start together: what they are for, and what the optimiser sees of it.

Options are uncorrected unless a test is about the factors, so that their formulas can be worked out.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from oracles.small_cluster import A800, CLASSES, CLUSTER, LONG, QWEN_06B, QWEN_14B, SHORT, kv_of

from libra.config.recipe import Recipe
from libra.cost.collectives import fabric
from libra.cost.corrections import UNCORRECTED
from libra.cost.grid import prefill_line
from libra.cost.sources.roofline import roofline
from libra.cost.transfer import weight_sync
from libra.hardware.model import Experts, ModelSpec
from libra.lengths import TrajectoryClass
from libra.plan.options.engines import engine_options, most_buckets, tensor_degrees
from libra.plan.options.price import bucket_prices, infeasibility, price
from libra.plan.planner import Planner
from libra.plan.problem import Allocation, Bucket, EngineOption, Problem

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
def test_nothing_is_gained_by_fewer_seats(mode: str) -> None:
    options = options_of(recipe=SYNC.model_copy(update={"mode": mode, "staleness": int(mode == "async")}))
    assert {option.seats for option in options} == {512}
    assert {option.devices for option in options} == {1, 2, 4, 8}


@pytest.mark.parametrize("staleness", STALENESS)
def test_an_option_is_for_a_longest_class_and_waits_for_the_longest_of_it(staleness: int) -> None:
    stall = weight_sync(QWEN_14B.parameters * 2, 1, 1, fabric(A800)).stall
    batches = 1 + staleness
    for tp in (1, 2, 4, 8):
        short, middle, long = (option for option in options_of(recipe=stale(staleness)) if option.devices == tp)
        assert short.alone < middle.alone < long.alone
        for option in (short, middle, long):
            assert option.stall == pytest.approx(stall)
        # Within its classes an option's longest trajectory takes what it takes by itself; beyond, as long as can be.
        assert middle.residence[:2] == pytest.approx((short.alone, middle.alone))
        by_one = max(sum(row) for option in (short, middle, long) for row in option.work) + stall
        assert middle.residence[2] == pytest.approx(batches * by_one + long.alone)


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
    own = [option for option in problem.engines if option.shape == "a800/tp2"]
    work = max(sum(row[first : last + 1]) for row in own[last].work) / engines
    if staleness == 0:
        assert max(found.load, found.residence) == pytest.approx(work + own[last].stall + own[last].alone)
    else:
        step = (found.residence + fixed) / (1 + staleness)
        slowed = own[last].generates / (1 - found.load / step)
        assert found.load == pytest.approx(work + own[last].stall)
        assert found.residence == pytest.approx(slowed + own[last].waits)


def test_what_others_generate_while_tools_run_counts_where_batches_overlap() -> None:
    """A bucket of the middle class alone: its longest generates for some of its seconds, and waits for the rest."""
    synchronous, stale_ = (options_of((replace(MIDDLE, share=1.0),), recipe=stale(it))[0] for it in (0, 1))
    # Others slow generation, so of what overlaps the longest is more often one that generates much.
    assert 0 < stale_.waits / stale_.alone < synchronous.waits / synchronous.alone < 1
    tools = replace(UNCORRECTED, decode_beside_tools=0.0)
    profile = roofline(A800.gpu, QWEN_14B, tensor_degrees(QWEN_14B, A800), intra_bandwidth=A800.intra_bandwidth)
    for plain, staleness in ((synchronous, 0), (stale_, 1)):
        recipe = stale(staleness)
        spared = engine_options(QWEN_14B, A800, recipe, (replace(MIDDLE, share=1.0),), profile, 8192, tools)[0][0]
        assert (spared.work == plain.work) == (staleness > 0)


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


def test_contexts_are_prefilled_again_where_a_batch_outgrows_the_memory_of_its_engines() -> None:
    """Nothing is priced for a batch that one engine holds. For a larger one, options forget the less the more engines
    they are for, and of (1 + x) times as much as fits a share x."""
    some, crowd = (SYNC.model_copy(update={"batch": batch}) for batch in (128, 8192))
    kv = kv_of(some, QWEN_14B, 1)

    def of_one_device(recipe: Recipe) -> list[EngineOption]:
        options = [option for option in options_of(recipe=recipe) if option.devices == 1]
        return [option for option in options if option.generates == options[0].generates]

    def tokens(recipe: Recipe) -> float:
        return recipe.batch * sum(cls.share * cls.context_sum / cls.generated for cls in THREE)

    (held,) = of_one_device(some)
    assert tokens(some) < kv and held.fills == ()
    few, *many = of_one_device(crowd)
    assert len(many) > 1 and few.fills == () and all(option.fills for option in many)
    works = [max(map(sum, option.work)) / crowd.batch for option in (few, *many)]
    assert works == sorted(works, reverse=True)
    assert works[-1] == pytest.approx(max(map(sum, held.work)) / some.batch)
    assert sum(many[-1].fills) == pytest.approx(tokens(crowd) / kv)
    assert [sum(many[-1].fills) / sum(option.fills) - 1 for option in many] == pytest.approx(
        [0.5, 0.25, 0.125, 0.0][-len(many) :]
    )


@pytest.mark.parametrize("staleness", STALENESS)
def test_every_class_counts_and_by_how_often_it_is_met(staleness: int) -> None:
    """Of trajectories that each take what their class takes, so that only how many there are is left to chance."""
    short, long = (replace(cls, generated_std=0.0, tool_seconds_std=0.0) for cls in CLASSES)
    recipe = stale(staleness)

    def waits(rare: float) -> list[float]:
        classes = (replace(short, share=1 - rare), replace(long, share=rare))
        assert Planner(CLUSTER, QWEN_06B, recipe).problem(classes).expected == (True, True)
        return [option.alone for option in options_of(classes, recipe=recipe) if not option.fills][:2]

    each_short, each_long = waits(0.5)
    # There are one or two buckets, and the batches under way wait for the same trajectory, or each for its own.
    met = math.sqrt(2) * (1 + staleness) ** (1 / 3) * 64 * 0.001
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


def test_a_longer_lag_never_makes_a_step_longer_where_nobody_waits_for_tools() -> None:
    generating = tuple(replace(cls, tool_seconds=0.0, tool_seconds_std=0.0) for cls in THREE)
    steps: dict[Allocation, list[float]] = {}
    for staleness in range(6):
        problem = Planner(CLUSTER, QWEN_14B, stale(staleness)).request(generating).menu(UNCORRECTED).problem
        for training in problem.training:
            buckets = (Bucket("a800/tp1", 1, 0, 1000), Bucket("a800/tp4", 1, 1000, 8192))
            allocation = Allocation(training.replicas, buckets, training.layout)
            if infeasibility(problem, allocation) is None:
                steps.setdefault(allocation, []).append(price(problem, allocation).step)
    assert steps
    for found in steps.values():
        assert len(found) == 6
        assert found == sorted(found, reverse=True)
        assert found[-1] < found[0]


def test_factors_reach_the_price() -> None:
    request = Planner(CLUSTER, QWEN_06B, SYNC).request(THREE)
    plain, slower = (request.menu(factors).problem for factors in (UNCORRECTED, replace(UNCORRECTED, generation=2.0)))
    training = plain.training[0]
    allocation = Allocation(training.replicas, (Bucket("a800/tp8", 1, 0, 8192),), training.layout)
    assert price(slower, allocation).step > price(plain, allocation).step
