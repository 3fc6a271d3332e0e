"""Trackers of parallel workers are one tracker, and none grows with what it has seen."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.lengths import LengthTracker, merge
from libra.trajectory import Trajectory, Turn


def trajectory(context: int, version: int, *, finished: bool = True) -> Trajectory:
    turns = (Turn(context // 2, "tool", "ok", context // 4, float(context % 7)), Turn(1, None, None, 0))
    return Trajectory("a", "p", "t", 10, turns if finished else turns[:1], None, version, finished)


starts = st.tuples(st.integers(1, 3000), st.integers(0, 200), st.booleans(), st.booleans())


def tracked(started: list[tuple[int, int, bool, bool]], half_life: float = 1e4) -> LengthTracker:
    """Of (length, version, finished, _)."""
    tracker = LengthTracker(half_life)
    tracker.observe_running(())
    for length, version, finished, _ in started:
        if finished:
            tracker.observe(trajectory(length, version))
    tracker.observe_running(
        trajectory(length, version, finished=False) for length, version, done, _ in started if not done
    )
    return tracker


def numbers(value: Any) -> list[float]:
    """All numbers of nested JSON values, in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers(value[key])]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [] if value is None else [float(value)]


@settings(deadline=None)
@given(st.lists(starts, max_size=40), st.floats(10, 1e6))
def test_merging_is_having_seen_all(started: list[tuple[int, int, bool, bool]], half_life: float) -> None:
    one = tracked([start for start in started if start[3]], half_life)
    other = tracked([start for start in started if not start[3]], half_life)
    before = one.snapshot(), other.snapshot()
    together, all_ = merge(one, other), tracked(started, half_life)
    assert numbers(together.snapshot()) == pytest.approx(numbers(all_.snapshot()), rel=1e-12)
    assert (one.snapshot(), other.snapshot()) == before
    if any(finished for _, _, finished, _ in started):
        assert [c.share for c in together.classes()] == pytest.approx([c.share for c in all_.classes()])
        assert together.quantile(0.9) == pytest.approx(all_.quantile(0.9))
        assert together.drift().distance == pytest.approx(all_.drift().distance)


def test_more_versions_than_cohorts_are_joined_alike_on_both_ways() -> None:
    random = np.random.default_rng(2)
    started = [(int(x), version, True, bool(version % 2)) for version, x in enumerate(random.lognormal(7, 1, 300))]
    one = tracked([start for start in started if start[3]])
    other = tracked([start for start in started if not start[3]])
    together, all_ = merge(one, other), tracked(started)
    assert len(all_.snapshot()["cohorts"]) <= 64
    assert numbers(together.snapshot()) == pytest.approx(numbers(all_.snapshot()), rel=1e-12)


def test_a_merged_tracker_has_the_wider_cohorts() -> None:
    long = [(100 + version, version, True, True) for version in range(300)]
    short = [(1000 + version, version, True, True) for version in range(10)]
    wide, narrow = tracked(long), tracked(short)
    assert (wide.snapshot()["width"], narrow.snapshot()["width"]) == (8, 1)
    for together in (merge(wide, narrow), merge(narrow, wide)):
        assert numbers(together.snapshot()) == pytest.approx(numbers(tracked(long + short).snapshot()), rel=1e-12)


def test_trackers_that_follow_arrival_add_what_each_remembers() -> None:
    one, other = LengthTracker(4), LengthTracker(4)
    for _ in range(5):
        one.observe(trajectory(1000, 0))
        other.observe(trajectory(100, 3))
    other.observe(trajectory(100, 3))
    together = merge(one, other)
    assert together.snapshot()["opened"] == 3  # the last version of which the order of arrival is what is known
    shares = [c.share for c in together.classes()]
    kept = 2 ** (-np.arange(6) / 4)
    assert shares == pytest.approx(
        [kept.sum() / (kept.sum() + kept[:5].sum()), kept[:5].sum() / (kept.sum() + kept[:5].sum())]
    )


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (LengthTracker(9), "half_life"),
        (LengthTracker(8, 5), "bins_per_octave"),
        (LengthTracker(8, 4, 16), "block_tokens"),
        (tracked([]), "half_life"),
        (tracked([], 8), "observe_running"),
    ],
)
def test_trackers_that_count_differently_are_refused(other: LengthTracker, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        merge(LengthTracker(8), other)


@settings(deadline=None)
@given(st.lists(starts, min_size=1, max_size=20), st.lists(starts, max_size=20))
def test_a_restored_tracker_goes_on_exactly_with_what_is_running(
    before: list[tuple[int, int, bool, bool]], after: list[tuple[int, int, bool, bool]]
) -> None:
    original = tracked(before)
    original.observe(trajectory(50, 3))
    restored = LengthTracker.restore(json.loads(json.dumps(original.snapshot())))
    for tracker in (original, restored):
        for length, version, _, _ in after:
            tracker.observe(trajectory(length, version))
    assert restored.snapshot() == original.snapshot()
    assert restored.classes() == original.classes()
    assert restored.quantile_interval(0.9) == original.quantile_interval(0.9)
    assert restored.forecast(3) == original.forecast(3)


def test_a_hundred_thousand_trajectories_take_no_more_room_than_twenty_thousand() -> None:
    random = np.random.default_rng(1)
    lengths = random.lognormal(8, 1, 100_000).astype(int)
    tracker, sizes = LengthTracker(half_life=1000), []
    tracker.observe_running(())
    for number, length in enumerate(lengths, start=1):
        tracker.observe(trajectory(length, number // 100))
        if number in (20_000, 100_000):
            sizes.append(len(json.dumps(tracker.snapshot())))
    assert sizes[1] < 1.2 * sizes[0]
    assert sizes[1] < 1_000_000


def test_forgotten_cohorts_are_given_up_before_others_are_joined() -> None:
    tracker = tracked([(100, version, True, True) for version in range(200) for _ in range(4)], half_life=20)
    assert tracker.snapshot()["width"] == 1
    assert [key for key, _ in tracker.snapshot()["cohorts"]] == list(range(136, 200))
    slow = tracked([(100, version, True, True) for version in range(200) for _ in range(4)], half_life=1e6)
    assert slow.snapshot()["width"] == 4
    assert len(slow.snapshot()["cohorts"]) == 50
