"""The load of an engine over time, against sums over every moment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.live.pace import Pace
from libra.live.work import HeldTurn, LiveWork


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 1000)), max_size=60))
def test_the_mean_load_of_a_turn_is_that_of_all_moments_that_it_took(events: list[tuple[int, int, int]]) -> None:
    """An event: whole seconds pass, then a turn begins, or one of four that are under way ends."""
    now, loads = 0, list[int]()  # the load in each second so far
    work = LiveWork(Pace(), clock=lambda: float(now))
    turns: list[tuple[HeldTurn, int]] = []
    for seconds, which, tokens in events:
        loads += [work.load_tokens] * seconds
        now += seconds
        if which < len(turns):
            held, since = turns.pop(which)
            took = work.ended(held)
            assert took.seconds == now - since
            if now > since:
                assert took.load_tokens == pytest.approx(sum(loads[since:now]) / (now - since))
        else:
            turns.append((work.begun(tokens), now))
        assert work.load_tokens == sum(held.tokens for held, _ in turns)


def test_the_pace_is_for_one_more_turn() -> None:
    now = 0.0
    work = LiveWork(Pace(), clock=lambda: now)
    assert work.token_seconds is None
    held = work.begun(100)
    now = 2.0
    took = work.ended(held)
    work.pace.observe(20, took.seconds, took.load_tokens)
    assert work.token_seconds == pytest.approx(0.05)  # idle: half of 0.1 s
    work.begun(100)
    assert work.token_seconds == pytest.approx(0.15)  # beside 200 tokens


def test_others_load_counts() -> None:
    now = 0.0
    work = LiveWork(Pace(), clock=lambda: now)
    held = work.begun(100)
    work.load_tokens += 300
    now = 1.0
    assert work.ended(held).load_tokens == 400 and work.load_tokens == 300
