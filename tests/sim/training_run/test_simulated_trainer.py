"""What a step costs the trainer: the planner's price, of the batch's own lengths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.small_cluster import A800, QWEN_06B
from posttrain_cases import ONE_NODE, layout_of, recipe_of

from libra.hardware.parallel import ParallelLayout
from libra.lengths import TrajectoryClass
from libra.plan.options.layouts import training_layouts
from libra.sim.training_run.trainer import TrainingPrice, batch_of_lengths

RECIPE = recipe_of(32, 4)
NODES = ONE_NODE.nodes[0]
PRICE = TrainingPrice(QWEN_06B, RECIPE, NODES)


def one_class(length: int) -> TrajectoryClass:
    return TrajectoryClass(1.0, length, float(length), 100.0, 50_000.0, 1000.0, 2.0, 3.0, 0.6)


@pytest.mark.parametrize("length", [64, 1000, 4321, 8192])
@pytest.mark.parametrize("reference", ["none", "resident", "offloaded"])
def test_of_equal_lengths_it_is_the_planners(length: int, reference: str) -> None:
    recipe = recipe_of(32, 4, reference=reference)
    menu = training_layouts(QWEN_06B, NODES, recipe, [one_class(length)], held=[layout_of(4), layout_of(1, tp=2)])
    assert len(menu.options) > 3
    for option in menu.options:
        layout = menu.chosen[option.layout, option.replicas]
        assert TrainingPrice(QWEN_06B, recipe, NODES).seconds([length] * 32, layout) == pytest.approx(
            option.seconds, rel=1e-12
        )


def test_a_pipeline_is_simulated_as_the_planner_does() -> None:
    layout = ParallelLayout(1, 2, 2, 1, 1, 8192, "none", "zero1", False)
    menu = training_layouts(QWEN_06B, A800, RECIPE, [one_class(2000)], held=[layout])
    option = next(it for it in menu.options if menu.chosen[it.layout, it.replicas] == layout)
    assert PRICE.seconds([2000] * 32, layout) == pytest.approx(option.seconds, rel=1e-12)


def test_without_the_update_a_part_costs_as_much_less() -> None:
    update = [
        PRICE.seconds([500] * count, layout_of(2)) - PRICE.seconds([500] * count, layout_of(2), update=False)
        for count in (4, 8)
    ]
    assert 0 < update[0] == pytest.approx(update[1])


lengths = st.lists(st.integers(1, 100_000), min_size=1, max_size=80)


@given(lengths)
def test_a_batch_keeps_its_trajectories_and_tokens(lengths: list[int]) -> None:
    batch = batch_of_lengths(lengths)
    assert batch.trajectories == len(lengths)
    assert batch.tokens == pytest.approx(sum(lengths), rel=1e-12)
    assert list(batch.lengths) == sorted(set(batch.lengths), reverse=True)
    assert min(lengths) <= batch.lengths[-1] and batch.lengths[0] <= max(lengths)
    # Only lengths within an eighth of an octave are taken as one, so keys, which are squares, are nearly kept.
    keys = sum(length * (length + 1) / 2 for length in lengths)
    width = 2 ** (1 / 8)
    assert keys / ((1 + width) ** 2 / (4 * width)) * (1 - 1e-9) <= batch.context_sum <= keys * (1 + 1e-9)


@given(lengths, st.randoms(use_true_random=False))
def test_the_order_of_lengths_does_not_matter(lengths: list[int], random: object) -> None:
    shuffled = list(lengths)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = batch_of_lengths(lengths), batch_of_lengths(shuffled)
    assert one.counts == other.counts
    assert one.lengths == pytest.approx(other.lengths, rel=1e-12)


@given(st.lists(st.integers(1, 8000), min_size=8, max_size=8), st.integers(1, 192))
def test_longer_trajectories_cost_more(lengths: list[int], more: int) -> None:
    layout = layout_of(1)  # alone, so that nobody waits for the rank with most
    assert PRICE.seconds([it + more for it in lengths], layout) > 0.99 * PRICE.seconds(lengths, layout)
    assert PRICE.seconds([*lengths, *lengths], layout) > PRICE.seconds(lengths, layout)


@pytest.mark.parametrize("lengths", [[], [0], [5, 0]])
def test_a_batch_without_tokens_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="give trajectories with tokens"):
        batch_of_lengths(lengths)


def test_bins_are_eighths_of_an_octave() -> None:
    edges = [math.ceil(2 ** (10 + step / 8)) for step in range(9)]
    batch = batch_of_lengths([length for edge in edges for length in (edge - 1, edge)])
    assert len(batch.lengths) == 10
    assert batch.counts == (1.0, *[2.0] * 8, 1.0)
