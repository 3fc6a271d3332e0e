"""Intervals: against published quantiles, closed forms and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.evaluation.intervals import (
    Interval,
    bootstrap_interval,
    mean_interval,
    median_interval,
    ratio_interval,
    t_quantile,
)

REPEATS = 2000  # of a simulated study: the standard error of its coverage is half a percent
FINITE = st.floats(-1e6, 1e6)
POSITIVE = st.floats(1e-3, 1e3)


@pytest.mark.parametrize(
    ("degrees", "level", "quantile"),
    [  # Abramowitz and Stegun 1964, table 26.10
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (3, 0.95, 3.182),
        (4, 0.95, 2.776),
        (9, 0.95, 2.262),
        (10, 0.95, 2.228),
        (30, 0.95, 2.042),
        (120, 0.95, 1.980),
        (5, 0.99, 4.032),
        (8, 0.90, 1.860),
    ],
)
def test_quantiles_are_those_of_the_tables(degrees: int, level: float, quantile: float) -> None:
    assert t_quantile(degrees, level) == pytest.approx(quantile, abs=5.1e-4)


def test_a_mean_by_hand() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half), rel=1e-6)


@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_means_are_covered_as_often_as_promised(size: int) -> None:
    samples = np.random.default_rng(size).normal(7.0, 3.0, (REPEATS, size))
    covered = [one.low <= 7.0 <= one.high for one in map(mean_interval, samples)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_ratios_are_covered_as_often_as_promised_and_pairing_helps() -> None:
    generator = np.random.default_rng(1)
    hard = generator.lognormal(3.0, 1.0, (REPEATS, 5))  # what both runs of a seed share
    above, below = (hard * generator.lognormal(mean, 0.05, hard.shape) for mean in (math.log(1.5), 0.0))
    found = [ratio_interval(a, b) for a, b in zip(above, below, strict=True)]
    assert np.mean([one.low <= 1.5 <= one.high for one in found]) == pytest.approx(0.95, abs=0.02)
    assert max(one.high / one.low for one in found) < 2  # unpaired logarithms would differ by a standard deviation of 1


@pytest.mark.parametrize("size", [6, 9, 20])
def test_medians_are_covered_at_least_as_often_as_promised(size: int) -> None:
    samples = np.random.default_rng(size).lognormal(0.0, 2.0, (REPEATS, size))
    covered = [one.low <= 1.0 <= one.high for one in map(median_interval, samples)]
    assert 0.94 <= np.mean(covered) <= 0.99


def test_a_median_by_hand() -> None:
    # Of 10 values the second smallest and largest: 2 * (1 + 10) / 1024 = 2.1 % outside; the third: 10.9 %.
    assert median_interval([3, 1, 2, 10, 9, 8, 7, 6, 5, 4]) == Interval(5.5, 2, 9)


def test_bootstrap_intervals_cover_nearly_as_often_as_promised() -> None:
    generator = np.random.default_rng(3)
    covered = []
    for seed in range(200):
        below = generator.lognormal(0.0, 1.0, 40)
        above = 2 * below * generator.lognormal(0.0, 0.3, 40)
        one = bootstrap_interval(lambda a, b: float(np.median(a / b)), above, below, seed=seed, resamples=300)
        covered.append(one.low <= 2.0 <= one.high)
    assert 0.88 <= np.mean(covered) <= 0.99


def test_the_bootstrap_keeps_partners_together() -> None:
    numbers = np.arange(1.0, 30.0)
    assert bootstrap_interval(lambda a, b: float(np.mean(a / b)), 3 * numbers, numbers, seed=0) == Interval(3, 3, 3)


@settings(max_examples=50)
@given(st.lists(FINITE, min_size=2, max_size=20), st.integers(0, 5))
def test_a_bootstrap_is_a_function_of_its_seed_and_holds_the_estimate(values: list[float], seed: int) -> None:
    first, again = (bootstrap_interval(np.max, values, seed=seed, resamples=100) for _ in range(2))
    assert first == again
    rounding = 1e-12 * abs(min(values))  # percentiles lie between two resamples, and so do those of equal ones
    assert min(values) - rounding <= first.low <= first.value == max(values) <= first.high


@given(st.lists(FINITE, min_size=2, max_size=20), FINITE, st.floats(0.1, 10))
def test_means_move_with_their_unit(values: list[float], offset: float, factor: float) -> None:
    one, other = mean_interval(values), mean_interval([factor * value + offset for value in values])
    expected = [factor * value + offset for value in (one.value, one.low, one.high)]
    tolerance = 1e-9 * (1 + abs(offset) + factor * max(map(abs, values)) * 100)
    assert [other.value, other.low, other.high] == pytest.approx(expected, abs=tolerance)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=10))
def test_exchanged_ratios_are_inverted(pairs: list[tuple[float, float]]) -> None:
    above, below = zip(*pairs, strict=True)
    one, other = ratio_interval(above, below), ratio_interval(below, above)
    wanted = [-math.log(value) for value in (one.value, one.high, one.low) if 0 < value < math.inf]
    if len(wanted) == 3:
        assert [math.log(it) for it in (other.value, other.low, other.high)] == pytest.approx(wanted, abs=1e-9)


@given(st.lists(FINITE, min_size=6, max_size=30))
def test_a_higher_level_is_a_wider_interval(values: list[float]) -> None:
    for interval in (mean_interval, median_interval):
        narrow, wide = interval(values, 0.8), interval(values, 0.95)
        assert wide.low <= narrow.low <= narrow.value == wide.value <= narrow.high <= wide.high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_interval([1.0]), "a list of 2 or more"),
        (lambda: mean_interval([[1.0, 2.0]]), "a list of 2 or more"),
        (lambda: mean_interval([1.0, math.nan]), "not finite"),
        (lambda: mean_interval([1.0, 2.0], 1.0), "level is 1.0"),
        (lambda: ratio_interval([1.0, 2.0], [1.0, 0.0]), "0 or less"),
        (lambda: ratio_interval([1.0, 2.0], [1.0, 2.0, 3.0]), "2 numerators and 3 denominators"),
        (lambda: median_interval([1.0] * 5), "there are 5 values; a 95% interval of a median takes 6 or more"),
        (lambda: median_interval([1.0] * 7, 0.99), "takes 8 or more"),
        (lambda: bootstrap_interval(np.mean, seed=0), "no array"),
        (lambda: bootstrap_interval(np.dot, [1.0, 2.0], [1.0, 2.0, 3.0], seed=0), r"\[2, 3\] entries"),
        (lambda: t_quantile(0), "degrees is 0"),
        (lambda: Interval(1.0, 2.0, 3.0), "does not hold"),
    ],
)
def test_what_cannot_be_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


def test_as_many_values_as_the_refusal_asks_for_do() -> None:
    for level in (0.8, 0.9, 0.95, 0.99, 0.999):
        needed = next(size for size in range(1, 40) if 2 * 0.5**size <= (1 - level) * (1 + 1e-12))
        assert median_interval(range(needed), level) == Interval((needed - 1) / 2, 0, needed - 1)
        with pytest.raises(ValueError, match=f"takes {needed} or more"):
            median_interval(range(needed - 1), level)
