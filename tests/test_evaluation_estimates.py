"""Estimates and their intervals: against closed forms and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.evaluation.estimates import Estimate, mean, ratio

REPEATS = 2000  # of a simulated study: the standard error of its coverage is half a percent
FINITE = st.floats(-1e6, 1e6)
POSITIVE = st.floats(1e-3, 1e3)


def ends(found: Estimate) -> tuple[float, float]:
    assert found.ends is not None
    return found.ends


@pytest.mark.parametrize(("size", "quantile"), [(2, 12.706), (3, 4.303), (5, 2.776), (10, 2.262), (31, 2.042)])
def test_a_mean_by_hand(size: int, quantile: float) -> None:
    """The quantiles are those of Abramowitz and Stegun 1964, table 26.10."""
    values = np.arange(1.0, size + 1)
    half = quantile * values.std(ddof=1) / math.sqrt(size)
    low, high = ends(mean(values))
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-3)


@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_means_are_covered_as_often_as_promised(size: int) -> None:
    samples = np.random.default_rng(size).normal(7.0, 3.0, (REPEATS, size))
    covered = [low <= 7.0 <= high for low, high in (ends(mean(one)) for one in samples)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_ratios_are_covered_as_often_as_promised_and_pairing_helps() -> None:
    generator = np.random.default_rng(1)
    hard = generator.lognormal(3.0, 1.0, (REPEATS, 5))  # what both runs of a seed share
    above, below = (hard * generator.lognormal(mean, 0.05, hard.shape) for mean in (math.log(1.5), 0.0))
    found = [ends(ratio(a, b)) for a, b in zip(above, below, strict=True)]
    assert np.mean([low <= 1.5 <= high for low, high in found]) == pytest.approx(0.95, abs=0.02)
    assert max(high / low for low, high in found) < 2  # unpaired logarithms would differ by a standard deviation of 1


@given(st.lists(FINITE, min_size=2, max_size=20), FINITE, st.floats(0.1, 10))
def test_means_move_with_their_unit(values: list[float], offset: float, factor: float) -> None:
    one, other = mean(values), mean([factor * value + offset for value in values])
    expected = [factor * value + offset for value in (one.value, *ends(one))]
    tolerance = 1e-9 * (1 + abs(offset) + factor * max(map(abs, values)) * 100)
    assert [other.value, *ends(other)] == pytest.approx(expected, abs=tolerance)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=10))
def test_exchanged_ratios_are_inverted(pairs: list[tuple[float, float]]) -> None:
    above, below = zip(*pairs, strict=True)
    one, other = ratio(above, below), ratio(below, above)
    wanted = [-math.log(value) for value in (one.value, *reversed(ends(one))) if 0 < value < math.inf]
    if len(wanted) == 3:
        assert [math.log(it) for it in (other.value, *ends(other))] == pytest.approx(wanted, abs=1e-9)


def test_one_seed_has_a_value_and_no_interval() -> None:
    assert mean([3.0]) == Estimate(3.0, None)
    assert ratio([3.0], [2.0]) == Estimate(1.5, None)
    assert ratio([3.0], [2.0]).written(".2f") == "1.50"
    assert mean([1.0, 1.0]).written(".1f") == "1.0 (1.0 to 1.0)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean([]), "a list of 1 or more"),
        (lambda: mean([[1.0, 2.0]]), "a list of 1 or more"),
        (lambda: mean([1.0, math.nan]), "not finite"),
        (lambda: ratio([1.0, 2.0], [1.0, 0.0]), "0 or less"),
        (lambda: ratio([1.0, 2.0], [1.0, 2.0, 3.0]), "2 numerators and 3 denominators"),
    ],
)
def test_what_cannot_be_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
