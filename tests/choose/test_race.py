"""The race: which contender wins, what it costs, and what is said of those that are not told apart."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from itertools import count
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from libra.choose.intervals import mean_and_error
from libra.choose.race import MOST_SAMPLES, Expected, Standings, race


class Listed:
    """A sampler with samples that are known beforehand; remembers how many were taken of each contender."""

    def __init__(self, *samples: list[float]) -> None:
        self.samples = samples
        self.taken = [0] * len(samples)

    def upto(self, wanted: Mapping[int, int]) -> Generator[tuple[int, tuple[float, ...]], None, None]:
        for contender, samples in wanted.items():
            self.taken[contender] = max(self.taken[contender], samples)
            yield contender, tuple(self.samples[contender][:samples])


def steady(seconds: float) -> list[float]:
    return [seconds] * 64


def unknown(contenders: int, seconds: float = 10.0) -> list[Expected]:
    """Nothing is expected of their differences."""
    return [Expected(seconds, 1e6)] * contenders


@given(st.lists(st.floats(1, 100), min_size=1, max_size=9, unique=True))
def test_without_noise_the_fastest_wins_and_the_control_stays(seconds: list[float]) -> None:
    sampler = Listed(*map(steady, seconds))
    standings = race(sampler, unknown(len(seconds)))
    assert seconds[standings.finalists[0]] == pytest.approx(min(seconds))  # two may differ by less than a mean's error
    assert 0 in standings.finalists
    assert sampler.taken[0] == max(sampler.taken)


def test_rounds_cost_the_same_and_halve_the_field_until_two_are_left() -> None:
    # Alternating noise keeps anything from being separated before the end.
    samples = [[100 + place + (7 if sample % 2 else -7) * place for sample in range(64)] for place in range(8)]
    sampler = Listed(*samples)
    standings = race(sampler, unknown(8, 100.0))
    assert sorted(sampler.taken, reverse=True) == [MOST_SAMPLES, MOST_SAMPLES, 3, 3, 1, 1, 1, 1]
    assert len(standings.finalists) == 2
    assert not standings.decided and not standings.cut_short


def test_a_race_ends_as_soon_as_the_fastest_is_separated() -> None:
    sampler = Listed(steady(10.0), steady(15.0), steady(16.0), steady(17.0))
    standings = race(sampler, unknown(4), first=3)
    assert standings.finalists[0] == 0 and not standings.cut_short
    assert sampler.taken == [3, 3, 3, 3]


def test_a_race_ends_as_soon_as_those_that_are_left_are_surely_equals() -> None:
    sampler = Listed(steady(10.0), steady(10.001))
    expected = [Expected(10.0, 1e-3), Expected(10.0, 1e-3)]
    assert race(sampler, expected).equals == (0, 1)
    assert sampler.taken == [1, 1]


def test_when_time_is_up_two_were_sampled_and_the_others_are_not_ranked() -> None:
    sampler = Listed(steady(10.0), steady(9.0), steady(1.0))
    standings = race(sampler, unknown(3), time_left=lambda: False)
    assert standings.samples == ((10.0,), (9.0,), ())
    assert standings.finalists == (1, 0)
    assert standings.cut_short


def test_time_that_is_up_in_a_later_round_leaves_the_samples_in_common() -> None:
    asked = count()
    sampler = Listed([10, 10, 10, 10], [9, 30, 30, 30], [11, 11, 11, 11], [12, 12, 12, 12])
    standings = race(sampler, unknown(4), time_left=lambda: next(asked) < 4)
    assert [len(samples) for samples in standings.samples] == [1, 3, 1, 1]
    assert standings.finalists[0] == 1  # by the first sample, the only one that both have
    assert standings.cut_short


def test_time_that_is_up_between_rounds_cuts_a_race_short() -> None:
    asked = count()
    standings = race(Listed(steady(10.0), steady(10.0)), unknown(2), time_left=lambda: next(asked) < 1)
    assert standings.samples == ((10.0,), (10.0,))
    assert standings.cut_short


def test_few_samples_do_not_outweigh_what_was_expected() -> None:
    """Three pairs that agree by chance: their own variance would separate them."""
    few = Standings((Expected(300.0, 0.0), Expected(320.0, 0.04)), ((300.0,) * 3, (285.0, 286.0, 284.0)), (1, 0))
    assert abs(few.gap(1, 0).seconds) < 15 and not few.gap(1, 0).separates
    assert few.slower(1, 0)[0] == -15.0
    many = replace(few, samples=((300.0,) * 60, (285.0, 286.0, 284.0) * 20))
    assert many.gap(1, 0).separates and many.equals == (1,)


@given(
    st.floats(-50, 50),
    st.floats(0.01, 0.5),
    st.lists(st.floats(-50, 50), min_size=1, max_size=12),
)
def test_what_is_known_of_a_difference_lies_between_both_figures(
    prior: float, error: float, differences: list[float]
) -> None:
    samples = tuple(100.0 + it for it in differences)
    standings = Standings(
        (Expected(100.0, 0.0), Expected(100.0 + prior, error)), ((100.0,) * len(samples), samples), (0, 1)
    )
    mean = fmean(differences)
    gap = standings.gap(1, 0)
    assert min(prior, mean) - 1e-6 <= gap.seconds <= max(prior, mean) + 1e-6
    back = standings.gap(0, 1)
    assert (back.seconds, back.error) == (pytest.approx(-gap.seconds, abs=1e-6), pytest.approx(gap.error))
    unsampled = replace(standings, samples=((), ()))
    assert unsampled.gap(1, 0).seconds == pytest.approx(prior, abs=1e-9)


@pytest.mark.parametrize("values", [[1.0, 2.0], [3.0, 1.0, 2.0, 8.0], [float(it % 7) for it in range(31)]])
def test_the_interval_is_students(values: list[float]) -> None:
    mean, error = mean_and_error(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=stats.sem(values))
    assert error == pytest.approx((high - low) / 2, rel=5e-4)


def test_one_value_has_no_interval() -> None:
    assert mean_and_error([4.0]) == (4.0, None)
