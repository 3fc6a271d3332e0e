"""The pace of an engine, from turns whose times are known."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.live.pace import Pace, pace_classes

TURNS = st.lists(
    st.tuples(st.integers(0, 5000), st.floats(0, 600), st.floats(0, 1e7)), min_size=1, max_size=40
)  # generated tokens, seconds, mean load


def observed(turns: list[tuple[int, float, float]], like: Pace | None = None) -> Pace:
    pace = Pace(like)
    for turn in turns:
        pace.observe(*turn)
    return pace


@given(TURNS, st.lists(st.floats(0, 1e7), min_size=2, max_size=5))
def test_a_pace_never_falls_as_the_load_rises_and_is_never_below_zero(
    turns: list[tuple[int, float, float]], loads: list[float]
) -> None:
    pace = observed(turns)
    told = [pace.token_seconds(load) for load in sorted(loads)]
    if not any(tokens and seconds for tokens, seconds, _ in turns):
        assert told == [None] * len(loads)
        return
    paces = [each for each in told if each is not None]
    assert len(paces) == len(loads) and paces[0] >= 0
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(paces))


@given(st.floats(0, 0.1), st.floats(1e-8, 1e-6), st.integers(3, 200), st.floats(0, 5e5))
def test_turns_on_a_line_give_the_line_but_for_the_assumption(
    idle: float, slope: float, turns: int, load: float
) -> None:
    """The loads are spread widely, so the told pace is between the line's and the assumed one."""
    loads = [10_000.0 + 30_000.0 * (number % 3) for number in range(turns)]
    pace = observed([(100, 100 * (idle + slope * each), each) for each in loads])
    told = pace.token_seconds(load)
    mean, steepest = pace.token_seconds(40_000.0), pace.token_seconds(0.0)
    assert told is not None and mean is not None and steepest is not None
    exact = idle + slope * load
    assumed = (idle + slope * 40_000) * (0.5 + 0.5 * load / 40_000)
    low, high = sorted((exact, assumed))
    slack = 0.2 * (idle + slope * 40_000) * (1 + load / 40_000)  # recent turns weigh more, so the mean load is another
    assert low - slack <= told <= high + slack


def test_a_turn_counts_by_its_tokens() -> None:
    assert observed([(10, 1.0, 500.0), (990, 4.0, 500.0)]).token_seconds(500.0) == pytest.approx(0.005, rel=0.01)


def test_an_engine_that_slows_down_is_found_out() -> None:
    pace = observed([(100, 1.0, 500.0)] * 1000 + [(100, 3.0, 500.0)] * 1000)
    assert pace.token_seconds(500.0) == pytest.approx(0.03, rel=0.1)


def test_similar_engines_stand_in_until_an_engine_has_turns_of_its_own() -> None:
    kind = Pace()
    known, new = Pace(like=kind), Pace(like=kind)
    for _ in range(100):
        known.observe(100, 1.0, 500.0)
    assert new.token_seconds(500.0) == pytest.approx(0.01)
    new.observe(2048, 2048 * 0.03, 500.0)
    assert 0.018 < (new.token_seconds(500.0) or 0) < 0.025  # as much its own as theirs
    for _ in range(100):
        new.observe(2048, 2048 * 0.03, 500.0)
    assert new.token_seconds(500.0) == pytest.approx(0.03, rel=0.05)


@given(st.lists(st.floats(1e-3, 1.0), max_size=8))
def test_a_gap_in_the_paces_parts_two_classes(paces: list[float]) -> None:
    classes = pace_classes(paces)
    for own, number in zip(paces, classes, strict=True):
        for other, its in zip(paces, classes, strict=True):
            between = sorted(it for it in paces if min(own, other) <= it <= max(own, other))
            gap = any(high > 1.25 * low for low, high in pairwise(between))
            assert (number != its) == gap
            assert own >= other or number <= its
    assert set(classes) == set(range(len(set(classes))))


def test_engines_of_unknown_pace_are_of_one_class() -> None:
    assert pace_classes([0.0, 0.0, 0.0]) == [0, 0, 0]
