"""Measured seconds to coefficients, against every active set."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.cost.sources.fit import fit_linear

FEATURES = [(1.0, float(b), float(b * context)) for b in (1, 4, 8) for context in (16, 64, 150)]


def seconds(coefficients: tuple[float, ...]) -> list[float]:
    return [sum(c * f for c, f in zip(coefficients, row, strict=True)) for row in FEATURES]


@pytest.mark.parametrize(
    "coefficients",
    [(4e-3, 2e-4, 3e-6), (4e-3, 0.0, 3e-6), (4e-3, 0.0, 0.0), (0.0, 2e-4, 0.0), (0.0, 0.0, 3e-6)],
)
def test_exact_data_gives_its_coefficients_back(coefficients: tuple[float, ...]) -> None:
    fit = fit_linear(FEATURES, seconds(coefficients))
    assert fit.coefficients == pytest.approx(coefficients, rel=1e-6, abs=1e-12)
    assert fit.heldout_error == pytest.approx(0.0, abs=1e-9)


def test_errors_are_relative() -> None:
    """Two measurements of the same work: a mean would be 5.5, the smallest relative error lies near the shorter."""
    fit = fit_linear([[1.0], [1.0]], [1.0, 10.0])
    assert fit.coefficients[0] == pytest.approx((1 / 1 + 1 / 10) / (1 / 1 + 1 / 100))
    # Left out, each is predicted by the other: |10 - 1| / 1 and |1 - 10| / 10.
    assert fit.heldout_error == pytest.approx((9.0 + 0.9) / 2)


def test_work_that_seems_to_save_time_costs_nothing() -> None:
    rows = [(1.0, float(x)) for x in range(6)]
    fit = fit_linear(rows, [6.0 - x for x, _ in enumerate(rows)])
    assert fit.coefficients[1] == 0.0
    assert fit.coefficients[0] > 0


def test_a_feature_that_never_occurs_costs_nothing() -> None:
    assert fit_linear([(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)], [2.0, 4.0, 6.0]).coefficients == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("samples", [0, 1, 2, 3])
def test_too_few_samples_are_refused(samples: int) -> None:
    with pytest.raises(ValueError, match="measure more points"):
        fit_linear(FEATURES[:samples], [1.0] * samples)


def test_samples_and_seconds_must_match() -> None:
    with pytest.raises(ValueError, match="measure more points"):
        fit_linear(FEATURES, [1.0] * (len(FEATURES) - 1))


@pytest.mark.parametrize("bad", [0.0, -1e-3])
def test_a_time_that_is_not_positive_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not positive: measure again"):
        fit_linear([(1.0,), (1.0,)], [1.0, bad])


def misfit(rows: np.ndarray, times: np.ndarray, solution: np.ndarray) -> float:
    return float((((rows @ solution - times) / times) ** 2).sum())


def best_misfit(rows: np.ndarray, times: np.ndarray) -> float:
    """The smallest squared relative error over all sets of features that may cost something."""
    width = rows.shape[1]
    best = misfit(rows, times, np.zeros(width))
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            solution = np.zeros(width)
            scaled = rows[:, chosen] / times[:, None]
            solution[list(chosen)] = np.linalg.lstsq(scaled, np.ones(len(times)), rcond=None)[0]
            if (solution >= 0).all():
                best = min(best, misfit(rows, times, solution))
    return best


@st.composite
def measurements(draw: st.DrawFn) -> tuple[list[list[float]], list[float]]:
    width = draw(st.integers(1, 4))
    count = draw(st.integers(width + 1, width + 4))
    row = st.lists(st.integers(0, 9).map(float), min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=count, max_size=count))
    times = draw(st.lists(st.integers(1, 40).map(lambda tenths: tenths / 10), min_size=count, max_size=count))
    return rows, times


@settings(deadline=None)
@given(measurements())
def test_no_set_of_features_fits_better(measured: tuple[list[list[float]], list[float]]) -> None:
    rows, times = measured
    fit = fit_linear(rows, times)
    assert all(coefficient >= 0 for coefficient in fit.coefficients)
    arrays = np.array(rows), np.array(times)
    assert misfit(*arrays, np.array(fit.coefficients)) == pytest.approx(best_misfit(*arrays), rel=1e-6, abs=1e-6)


def test_large_features_and_short_times_end() -> None:
    fit = fit_linear([[1000.0, 2000.0], [2000.0, 3000.0], [3000.0, 2000.0]], [1e-3] * 3)
    assert all(coefficient >= 0 for coefficient in fit.coefficients)
