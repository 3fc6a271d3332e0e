"""What a run learns of its prices: factors by bottleneck, and by how much they may be wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import by_name

from libra.plan.price_bias import BOTTLENECKS, EXACT, FRESH, PeriodSeconds, PriceBias, measured, measured_mean
from libra.plan.solution import Bottleneck, Prediction


def priced(rollout: float, training: float = 0.1, latency: float = 0.1) -> Prediction:
    parts: dict[Bottleneck, float] = {"rollout": rollout, "training": training, "latency": latency}
    bottleneck = max(parts, key=lambda name: parts[name])
    return Prediction(parts[bottleneck], rollout, training, latency, bottleneck)


ROLLOUT, TRAINING = priced(2.0), priced(0.1, 2.0)


@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
def test_a_fresh_run_corrects_nothing_and_knows_that_it_may_be_wrong(bottleneck: Bottleneck) -> None:
    assert FRESH.factor(bottleneck) == EXACT.factor(bottleneck) == 1.0
    assert EXACT.error(bottleneck) == 0.0
    assert 0.1 < FRESH.error(bottleneck) < 0.5
    spans = replace(ROLLOUT, step_range=(1.0, 3.0))
    assert FRESH.corrected(spans) == spans


ratios = st.floats(0.2, 5.0)
errors = st.floats(0.01, 0.5)


@given(ratios, errors)
def test_what_is_learned_lies_between_what_was_known_and_what_was_measured(ratio: float, error: float) -> None:
    bias = FRESH.learned(ROLLOUT, PeriodSeconds(2.0 * ratio, 2.0 * ratio * error))
    assert min(1.0, ratio) - 1e-9 <= bias.factor("rollout") <= max(1.0, ratio) + 1e-9
    assert bias.covariance[0][0] < FRESH.covariance[0][0]
    # What was measured of one bottleneck says less of another, in the same direction.
    assert min(1.0, bias.factor("rollout")) - 1e-9 <= bias.factor("training") <= max(1.0, bias.factor("rollout")) + 1e-9
    assert bias.error("rollout") <= bias.error("training") + 1e-9


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from((ROLLOUT, TRAINING)), ratios, errors, st.booleans()), max_size=8))
def test_a_filter_of_all_periods_is_a_normal_distribution(
    periods: list[tuple[Prediction, float, float, bool]],
) -> None:
    """Against linear algebra: the joint normal distribution of all factors, conditioned on all that was measured."""
    bias, mean, covariance = FRESH, np.zeros(3), np.array(FRESH.covariance)
    for price, ratio, error, untried in periods:
        index = BOTTLENECKS.index(bias.corrected(price).bottleneck)
        part = (price.rollout, price.training, price.latency)[index]
        bias = bias.learned(price, PeriodSeconds(ratio, ratio * error), untried=untried)
        before = covariance + np.eye(3) * (bias.untried**2 if untried else 0.0)
        seen = np.eye(3)[index]
        gain = before @ seen / (seen @ before @ seen + error**2)
        mean = mean + gain * (math.log(ratio / part) - seen @ mean)
        covariance = (np.eye(3) - np.outer(gain, seen)) @ before
        kept = 0.97
        mean, covariance = kept * mean, kept**2 * covariance + (1 - kept**2) * np.array(FRESH.covariance)
        assert np.array(bias.covariance) == pytest.approx(covariance)
        assert bias.means == pytest.approx(mean)
        assert np.linalg.eigvalsh(covariance).min() > 0
        most = math.sqrt(len(periods)) * bias.untried
        errors = [bias.error(name) / math.sqrt(bias.surprise) for name in BOTTLENECKS if bias.surprise > 0]
        assert all(error <= math.hypot(FRESH.error("rollout"), most) + 1e-12 for error in errors)


def test_more_evidence_leaves_less_error_but_never_none() -> None:
    """The error of prices drifts: old periods count less and less."""
    bias, errors = FRESH, [FRESH.error("rollout")]
    for _ in range(20):
        bias = replace(bias.learned(ROLLOUT, PeriodSeconds(3.0, 0.3)), surprise=1.0)
        errors.append(bias.error("rollout"))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0.03
    assert bias.factor("rollout") == pytest.approx(1.5, rel=0.03)
    assert errors[-1] < bias.error("training") < FRESH.error("training")
    assert 1.0 < bias.factor("training") < bias.factor("rollout")


def test_prices_that_prove_right_may_be_trusted_more_and_those_that_jump_less() -> None:
    right = jumping = FRESH
    for number in range(10):
        right = right.learned(ROLLOUT, PeriodSeconds(2.0, 0.2))
        jumping = jumping.learned(ROLLOUT, PeriodSeconds(1.0 if number % 2 else 4.0, 0.2))
    for name in BOTTLENECKS:
        assert right.error(name) < FRESH.error(name)
        assert jumping.error(name) > 2 * right.error(name)
    assert right.factor("rollout") == 1.0


def test_each_part_is_corrected_by_its_own_factor_and_the_largest_is_the_step() -> None:
    bias = replace(FRESH, means=(math.log(2.0), 0.0, math.log(0.5)))
    assert bias.corrected(replace(priced(1.0, 1.5, 3.0), step_range=(2.0, 4.0))) == Prediction(
        2.0, 2.0, 1.5, 1.5, "rollout", pytest.approx((4 / 3, 8 / 3))
    )


def test_nothing_is_learned_of_a_step_without_a_price() -> None:
    free = priced(0.0, 0.0, 0.0)
    assert FRESH.learned(free, PeriodSeconds(1.0, 0.1)) == FRESH
    assert FRESH.corrected(free) == free


KNOWN = PriceBias((0.0, 0.0, 0.0), ((0.04, 0.03, 0.03), (0.03, 0.04, 0.03), (0.03, 0.03, 0.04)), 0.0, FRESH.covariance)
SHARED: list[tuple[str, dict[Bottleneck, float], dict[Bottleneck, float], float, float]] = [
    ("the same bottleneck: only the difference is wrong", {"rollout": 3.0}, {"rollout": 2.0}, 0.0, 0.2),
    ("nothing between them", {"rollout": 3.0}, {"rollout": 3.0}, 0.0, 0.0),
    ("two bottlenecks: what they have in common cancels", {"rollout": 3.0}, {"training": 2.0}, 0.0,
     math.sqrt(9 * 0.04 + 4 * 0.04 - 12 * 0.03)),
    ("by cases", {"rollout": 2.0, "training": 1.0}, {"training": 1.0}, 0.0, 0.4),
    ("one that was never tried", {"rollout": 3.0}, {"rollout": 2.0}, 0.1, math.hypot(0.2, 0.2)),
]  # fmt: skip


@by_name("current, other, untried, error", SHARED)
def test_errors_that_two_steps_share_cancel(
    current: dict[Bottleneck, float], other: dict[Bottleneck, float], untried: float, error: float
) -> None:
    assert replace(KNOWN, untried=untried).error_between(current, other) == pytest.approx(error)


def test_the_error_of_a_difference_is_that_of_drawn_factors() -> None:
    rng = np.random.default_rng(5)
    small = replace(KNOWN, covariance=tuple(tuple(value / 100 for value in row) for row in KNOWN.covariance))
    factors = np.exp(rng.multivariate_normal(small.means, np.array(small.covariance), 20_000))
    for a, b in product(range(3), repeat=2):
        gains = 3.0 * factors[:, a] - 2.0 * factors[:, b]
        expected = small.error_between({BOTTLENECKS[a]: 3.0}, {BOTTLENECKS[b]: 2.0})
        assert float(gains.std()) == pytest.approx(expected, rel=0.05)


def test_few_steps_say_little_of_how_much_steps_vary() -> None:
    assert measured([2.0]).seconds == 2.0
    assert measured([2.0]).error == pytest.approx(measured_mean(2.0, 1).error)
    even, uneven = measured([2.0] * 10), measured([1.0, 3.0] * 5)
    assert 0 < even.error < measured_mean(2.0, 10).error < uneven.error
    many = [1.0, 3.0] * 5000
    assert measured(many).error == pytest.approx(1 / math.sqrt(len(many)), rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "error"), [(0.0, 0.1), (math.nan, 0.1), (math.inf, 0.1), (1.0, -0.1), (1.0, math.nan)]
)
def test_what_cannot_have_been_measured_is_refused(seconds: float, error: float) -> None:
    with pytest.raises(ValueError, match="give"):
        PeriodSeconds(seconds, error)


def test_a_period_without_a_step_measures_nothing() -> None:
    with pytest.raises(ValueError, match="no step was measured"):
        measured([])
