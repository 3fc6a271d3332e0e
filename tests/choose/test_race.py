"""The race: which contender wins, what it costs, and what is said of those that are not told apart."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from libra.choose.intervals import mean_and_error
from libra.choose.race import race


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


@given(st.lists(st.floats(1, 100), min_size=1, max_size=9, unique=True))
def test_without_noise_the_fastest_wins_and_the_control_stays(seconds: list[float]) -> None:
    sampler = Listed(*map(steady, seconds))
    standings = race(sampler, len(seconds))
    assert seconds[standings.finalists[0]] == min(seconds)
    assert 0 in standings.finalists
    assert sampler.taken[0] == max(sampler.taken)


def test_rounds_cost_the_same_and_halve_the_field() -> None:
    # Alternating noise that is common to all keeps anything from being separated before the end.
    samples = [[100 + place + (7 if sample % 2 else -7) * place for sample in range(64)] for place in range(8)]
    sampler = Listed(*samples)
    standings = race(sampler, 8)
    assert sorted(sampler.taken, reverse=True) == [7, 7, 3, 3, 1, 1, 1, 1]
    assert len(standings.finalists) == 2


def test_a_race_ends_as_soon_as_the_fastest_is_separated() -> None:
    sampler = Listed(steady(10.0), steady(11.0), steady(12.0), steady(13.0))
    assert race(sampler, 4, first=3).finalists[0] == 0
    assert sampler.taken == [3, 3, 3, 3]


def test_when_time_is_up_two_were_sampled_and_the_others_are_not_ranked() -> None:
    sampler = Listed(steady(10.0), steady(9.0), steady(1.0))
    standings = race(sampler, 3, time_left=lambda: False)
    assert standings.samples == ((10.0,), (9.0,), ())
    assert standings.finalists == (1, 0)


def test_time_that_is_up_in_a_later_round_leaves_the_samples_in_common() -> None:
    asked = count()
    sampler = Listed([10, 10, 10, 10], [9, 30, 30, 30], [11, 11, 11, 11], [12, 12, 12, 12])
    standings = race(sampler, 4, time_left=lambda: next(asked) < 3)
    assert standings.samples[1] == (9, 30, 30) or standings.samples[0] == (10, 10, 10)
    assert standings.finalists[0] == 1  # by the first sample, the only one that both have


def test_few_or_noisy_pairs_separate_nothing() -> None:
    one = race(Listed([10.0], [5.0]), 2)
    assert set(one.equals) == {0, 1}
    assert one.slower(0, 1) == (5.0, None)
    noisy = race(Listed([10.0, 20.0, 10.0, 20.0], [15.0, 12.0, 16.0, 11.0]), 2, first=4)
    assert set(noisy.equals) == {0, 1}
    clear = race(Listed([10.0, 20.0, 10.0, 20.0], [9.0, 19.0, 9.1, 18.9]), 2, first=4)
    assert clear.equals == (1,)


@pytest.mark.parametrize("values", [[1.0, 2.0], [3.0, 1.0, 2.0, 8.0], [float(it % 7) for it in range(31)]])
def test_the_interval_is_students(values: list[float]) -> None:
    mean, error = mean_and_error(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=stats.sem(values))
    assert error == pytest.approx((high - low) / 2, rel=5e-4)


def test_one_value_has_no_interval() -> None:
    assert mean_and_error([4.0]) == (4.0, None)
