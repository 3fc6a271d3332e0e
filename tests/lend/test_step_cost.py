"""What steps take, learnt: bounds that hold, and budgets that are the largest that fit."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.lend.gate import ServingView
from libra.lend.step_cost import LearntServingCost, RolloutQueue, StepCost, StepShape, TokenBudget


def seconds(shape: StepShape, noise: float = 1.0) -> float:
    return noise * (0.004 + 1e-4 * shape.sequences + 4e-5 * shape.new_tokens + 1e-8 * shape.context)


def shapes(rng: random.Random, most: int = 64) -> StepShape:
    sequences = rng.randint(1, most)
    return StepShape(sequences, rng.choice([0, 0, rng.randint(0, 200)]), sequences * rng.randint(10, 900))


def learnt(steps: int, missed: float = 0.01) -> StepCost:
    rng, cost = random.Random(0), StepCost(missed)
    for _ in range(steps):
        shape = shapes(rng)
        cost.observe(shape, seconds(shape, rng.uniform(0.9, 1.3)))
    return cost


def test_nothing_is_bounded_before_enough_steps_were_seen_and_few_exceed_the_bound_then() -> None:
    assert learnt(98).bound(StepShape(1, 0, 10)) is None
    cost, rng = learnt(200), random.Random(1)
    exceeded = 0
    for _ in range(4000):
        shape = shapes(rng)
        bound, taken = cost.bound(shape), seconds(shape, rng.uniform(0.9, 1.3))
        assert bound is not None and bound < 2 * taken
        exceeded += taken > bound
        cost.observe(shape, taken)
    assert exceeded == cost.over <= 0.02 * 4000
    assert cost.predicted(StepShape(32, 100, 9000)) == pytest.approx(seconds(StepShape(32, 100, 9000), 1.1), rel=0.1)


def test_a_device_that_becomes_slower_is_followed() -> None:
    cost, rng = learnt(400), random.Random(2)
    for _ in range(2000):
        shape = shapes(rng)
        cost.observe(shape, 3 * seconds(shape))
    assert (cost.bound(StepShape(8, 0, 800)) or 0) >= 3 * seconds(StepShape(8, 0, 800))


def test_care_is_twice_what_nearly_all_kept_to_until_there_is_a_bound() -> None:
    shape, cost = StepShape(2, 0, 20), StepCost(0.01)
    assert cost.careful(shape) is None
    for _ in range(20):
        cost.observe(shape, 0.01)
    assert cost.careful(shape) == pytest.approx(0.02)
    cost.observe(shape, 0.03)
    assert cost.careful(shape) == pytest.approx(0.02)  # once in 21 steps is not to be waited out
    cost.observe(shape, 0.03)
    assert cost.careful(shape) == pytest.approx(0.06)
    cost.forget()
    assert cost.careful(shape) is None and cost.seen == 0


def test_a_serving_engine_is_not_bounded_before_its_steps_were_seen() -> None:
    view = ServingView(live=4, waiting=0, due=1.0, queued=0, context=400)
    assert LearntServingCost(StepCost(), 128, 2048).longest_step(view) == math.inf
    assert LearntServingCost(StepCost(), 128, 2048).catch_up(view) == math.inf
    cost = learnt(400)
    longest = LearntServingCost(cost, 128, 2048).longest_step(view)
    assert longest == cost.bound(StepShape(5, 123, 404 + 123))  # one more, with a full chunk
    assert LearntServingCost(cost, 128, 50).longest_step(view) == cost.bound(StepShape(5, 50, 404 + 50))
    waiting = ServingView(live=4, waiting=1, due=1.0, queued=500, context=400)
    assert LearntServingCost(cost, 128, 2048).catch_up(waiting) == 4 * (cost.bound(StepShape(4, 125, 900)) or 0)


@given(
    running=st.integers(0, 8),
    waiting=st.integers(0, 8),
    prefilling=st.booleans(),
    grant=st.floats(0.001, 0.03),
    most=st.integers(1, 150),
)
def test_the_budget_is_the_largest_that_is_over_in_time_however_it_is_spread(
    running: int, waiting: int, prefilling: bool, grant: float, most: int
) -> None:
    cost = BOUNDED
    budget = TokenBudget(cost, most)
    for _ in range(9):
        budget.observe(StepShape(150, 0, 0), seconds(StepShape(150, 0, 0)))
    queue = RolloutQueue(running, waiting, prefilling and running > 0, 100 * (running + waiting))
    tokens = budget.within(grant, queue)

    def longest(count: int) -> float:
        """Of all the ways that an engine may spread so many tokens."""
        turns = running + waiting
        fewest = 1 if queue.prefilling else max(1, min(count, running))
        ways = range(fewest, min(count, turns) + 1)
        return max(cost.bound(StepShape(it, count - it, queue.context + count)) or math.inf for it in ways)

    usable = most if waiting or queue.prefilling else min(most, running)
    assert tokens == max(
        (count for count in range(1, usable + 1) if running + waiting and longest(count) <= grant), default=0
    )


BOUNDED = learnt(400)


def test_an_engine_that_is_new_feels_its_way() -> None:
    budget, queue = TokenBudget(StepCost(0.01), 2048), RolloutQueue(4, 30, True, 5000)
    seen = []
    for _ in range(300):
        tokens = budget.within(0.025, queue)
        seen.append(tokens)
        shape = StepShape(1, tokens - 1, 5000)
        budget.observe(shape, seconds(shape))
    assert seen[:6] == [1, 2, 4, 8, 16, 32]
    assert all(after <= 2 * max(seen[: number + 1]) for number, after in enumerate(seen[1:]))
    assert 400 < seen[-1] < 600  # (0.025 - 0.004) s / 40 us a token
    assert budget.within(0.001, queue) == 0
    budget.start_anew()
    assert budget.within(0.001, queue) == 1
    assert budget.within(1.0, RolloutQueue(0, 0, False, 0)) == 0


def test_a_step_that_took_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="give a positive and finite time"):
        StepCost().observe(StepShape(1, 0, 0), 0.0)
