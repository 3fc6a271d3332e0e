"""Forecasts against drifts that are known, and what they claim about their own errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.lengths import LengthTracker, TrajectoryClass
from libra.lengths.cohorts import Cell, Cohort, sums_of
from libra.lengths.evidence import weigh
from libra.lengths.forecast import DAMPING, Trend, cohort_levels, fit, project
from libra.trajectory import Trajectory, Turn

PER_VERSION = 60


def trajectory(context: int, version: int) -> Trajectory:
    prompt = context // 4
    turns = (Turn(context // 2 - prompt, "tool", "ok", 0, 2.0), Turn(context - context // 2, None, None, 0))
    return Trajectory("a", "p", "t", prompt, turns, None, version, True)


def drifting(seed: int, slope: float, versions: int = 40, jump: float = 1.0) -> LengthTracker:
    """Mean log length rises by `slope` a version, and once by log `jump`, half way."""
    random = np.random.default_rng(seed)
    tracker = LengthTracker(half_life=2 * PER_VERSION)
    tracker.observe_running(())
    for version in range(versions):
        median = 2000 * math.exp(slope * version) * (jump if version >= versions // 2 else 1)
        for context in random.lognormal(math.log(median), 0.5, PER_VERSION):
            tracker.observe(trajectory(int(context), version))
    return tracker


def mean_log(classes: tuple[TrajectoryClass, ...]) -> float:
    """Mean logarithm of the final context; all of a narrow class counts as its mean."""
    return sum(cls.share * math.log(cls.mean_context) for cls in classes)


@pytest.mark.parametrize("slope", [0.03, 0.0, -0.03])
def test_a_steady_trend_is_continued_within_the_stated_error(slope: float) -> None:
    misses, errors, without = [], [], []
    for seed in range(20):
        tracker = drifting(seed, slope)
        forecast = tracker.forecast(5, limit=128)
        truth = math.log(2000) + slope * 44
        misses.append(abs(mean_log(forecast.classes) - truth))
        errors.append(forecast.error)
        without.append(abs(mean_log(tracker.classes(128)) - truth))
    assert np.mean(np.array(misses) < 2 * np.array(errors)) > 0.8  # two standard errors hold 95 %
    if slope:
        assert np.mean(misses) < 0.5 * np.mean(without)
    else:
        assert np.mean(misses) < 0.06


def test_running_ones_enter_with_the_length_expected_of_them() -> None:
    bins = {100: 26, 200: 30, 1000: 39, 10_000: 53}  # four an octave
    old, new = Cohort(128), Cohort(128)
    for cohort, context in [(old, 100), (old, 1000), (old, 10_000), (new, 100)]:
        cohort.add(Cell(bins[context], bins[context]), sums_of(trajectory(context, 0), 1))
    for _ in range(2):
        new.add_running(Cell(bins[200], bins[200]), 0.0)
    levels = cohort_levels([old, new], weigh([old, new], 1e12))
    # A third each end at 100, 1000 and 10,000, so those beyond 200 are expected at their mean logarithm.
    expected = math.log(1000 * 10_000) / 2
    assert levels == pytest.approx([math.log(100 * 1000 * 10_000) / 3, (math.log(100) + 2 * expected) / 3])


def test_the_longest_running_ones_are_expected_to_end_in_their_bin() -> None:
    old, new = Cohort(128), Cohort(128)
    old.add(Cell(26, 26), sums_of(trajectory(100, 0), 1))
    new.add_running(Cell(40, 40), 0.0)
    assert cohort_levels([old, new], weigh([old, new], 1e12)) == pytest.approx([math.log(100), 10.125 * math.log(2)])


def test_a_jump_is_not_a_trend() -> None:
    for seed in range(6):
        assert drifting(seed, 0.0, jump=2.0).forecast(5).scale == pytest.approx(1, abs=0.1)
    tracker = drifting(1, 0.03, versions=60, jump=2.0)
    assert tracker.forecast(5).scale == pytest.approx(math.exp(0.03 * (2 + 4)), abs=0.1)


def test_noise_is_shrunk_to_no_trend_more_often_than_not() -> None:
    assert sum(drifting(seed, 0.0).forecast(5).scale == 1 for seed in range(16)) >= 8


def test_before_versions_are_known_there_is_no_trend() -> None:
    tracker = LengthTracker(half_life=200)
    for version in range(30):
        for _ in range(10):
            tracker.observe(trajectory(1000 + 100 * version, version))
    forecast = tracker.forecast(5)
    assert forecast.scale == 1
    assert forecast.classes == tracker.classes()


@given(st.floats(-0.1, 0.1), st.floats(-1, 1), st.integers(6, 30))
def test_a_noiseless_line_is_found_with_and_without_a_step(slope: float, step: float, count: int) -> None:
    versions = np.arange(count, dtype=float)
    levels = 8 + slope * versions + step * (versions >= count // 2)
    trend = fit(versions, levels, np.ones(count))
    assert trend.slope == pytest.approx(slope, abs=1e-5)
    assert trend.error == pytest.approx(0, abs=1e-5)


def test_a_line_against_the_textbook() -> None:
    random = np.random.default_rng(3)
    versions = np.arange(12, dtype=float)
    levels = 0.5 * versions + random.normal(0, 1, 12)
    slope, at_zero = np.polyfit(versions, levels, 1)
    noise = ((levels - slope * versions - at_zero) ** 2).sum() / 10
    error = math.sqrt(noise / ((versions - versions.mean()) ** 2).sum())
    trend = fit(versions, levels, np.full(12, 3.0))
    assert trend.error == pytest.approx(error)
    assert trend.slope == pytest.approx(slope * (1 - (error / slope) ** 2))


def test_a_class_grows_by_more_of_the_same_turns() -> None:
    (cls,) = drifting(1, 0.0).classes(1)
    forecast = project([cls], Trend(0.1, 0.02), age=2.0, steps=3, level_error=0.01, longest=None)
    damped = DAMPING + DAMPING**2 + DAMPING**3
    scale = math.exp(0.1 * (2 + damped))
    (grown,) = forecast.classes
    assert forecast.scale == pytest.approx(scale)
    assert forecast.error == pytest.approx(math.sqrt(0.01**2 + (5 * 0.02) ** 2 + (0.1 * (3 - damped)) ** 2))
    assert grown.peak_context == math.ceil(cls.peak_context * scale)
    for name in ("mean_context", "generated", "prefill", "turns", "tool_seconds"):
        assert getattr(grown, name) == pytest.approx(getattr(cls, name) * scale)
    assert grown.context_sum == pytest.approx(cls.context_sum * scale**2)
    assert grown.before_first_return * grown.generated == pytest.approx(cls.before_first_return * cls.generated)
    assert grown.share == cls.share


def test_nothing_grows_beyond_the_longest_context() -> None:
    tracker = drifting(1, 0.05)
    longest = tracker.classes()[-1].peak_context
    assert tracker.forecast(10).classes[-1].peak_context > longest
    held = tracker.forecast(10, longest=longest).classes
    assert held[-1] == tracker.classes()[-1]
    assert all(cls.peak_context <= longest for cls in held)
    assert held[0].peak_context > tracker.classes()[0].peak_context


@pytest.mark.parametrize(
    ("steps", "longest", "name"), [(-1, None, "steps"), (math.nan, None, "steps"), (1, 0, "longest")]
)
def test_impossible_questions_are_refused(steps: float, longest: int | None, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        drifting(1, 0.0, versions=1).forecast(steps, longest=longest)


def test_an_empty_tracker_has_no_future() -> None:
    with pytest.raises(ValueError, match="observe"):
        LengthTracker().forecast(1)
