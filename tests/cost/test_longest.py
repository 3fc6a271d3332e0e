"""The longest trajectory of a step: by hand, against every way to draw a step, and against drawing."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.small_cluster import SHORT

from libra.cost.corrections import UNCORRECTED
from libra.cost.device import EngineCost
from libra.cost.longest import MemberSeconds, longest_upto
from libra.cost.rollout import measured_timing
from libra.lengths import LengthTracker, TrajectoryClass
from libra.lengths.members import Member
from libra.trajectory import Trajectory, Turn

TIMING = measured_timing(
    EngineCost(step=0.01, per_sequence=0.001, per_context_token=1e-6, per_prefill_token=1e-4, per_turn=0.1)
)
CLASS = replace(SHORT, share=1.0, generated=100.0, context_sum=50_000.0, prefill=1000.0, turns=2.0, tool_seconds=3.0)
# Alone, an iteration takes 0.01 + 0.001 + 1e-6 * 500 seconds; prompt and turns of the mean take 0.1 + 0.2.
TOKEN = 0.0115
APART = 0.3
GENERATES = Member(0.25, 200.0, 1000.0, 2.0, 0.0)
WAITS = Member(0.75, 100.0, 1000.0, 2.0, 3.0)


def expected(chances: list[tuple[float, float]]) -> float:
    """The longest of what is there, with nothing for 0 seconds: by every way to be there."""
    found = 0.0
    for met in product((False, True), repeat=len(chances)):
        chance = math.prod(p if there else 1 - p for there, (_, p) in zip(met, chances, strict=True))
        found += chance * max((seconds for there, (seconds, _) in zip(met, chances, strict=True) if there), default=0.0)
    return found


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5), st.integers(0, 2)), min_size=1, max_size=7))
def test_the_longest_of_each_classes_and_shorter_ones_against_every_way_to_meet_them(
    members: list[tuple[float, float, int]],
) -> None:
    seconds, draws, of_class = (np.array(column) for column in zip(*members, strict=True))
    for last, found in enumerate(longest_upto(seconds, draws, of_class)):
        its = [(s, -math.expm1(-count)) for s, count, own in members if own <= last]
        assert found == pytest.approx(expected(its))


def test_a_member_has_its_own_tokens_and_its_own_tools() -> None:
    members = MemberSeconds.of(TIMING, (replace(CLASS, members=(GENERATES, WAITS)),))
    assert members.generates == pytest.approx([200 * TOKEN + APART, 100 * TOKEN + APART])
    assert members.waits == pytest.approx([0.0, 3.0])
    # Alone, the one that waits is the longest; where generation is slowed, the other one.
    alone, slowed = (members.longest(1e9, factor)[0] for factor in (1.0, 10.0))
    assert alone == pytest.approx(100 * TOKEN + APART + 3.0)
    assert slowed == pytest.approx(10 * (200 * TOKEN + APART))
    assert members.means(1) == pytest.approx([125 * TOKEN + APART + 2.25])


def test_a_class_without_members_is_its_mean() -> None:
    members = MemberSeconds.of(TIMING, (CLASS,))
    assert members.longest(1e9) == pytest.approx([100 * TOKEN + APART + 3.0])


def test_sequences_that_decode_together_make_each_token_slower() -> None:
    (found,) = MemberSeconds.of(TIMING, (CLASS,), together=(10.0,)).longest(1e9)
    assert found == pytest.approx(100 * TIMING.iteration_seconds(10, 5000) + APART + 3.0)


def test_factors_correct_what_is_generated() -> None:
    (found,) = MemberSeconds.of(TIMING, (CLASS,)).corrected(replace(UNCORRECTED, generation=2.0)).longest(1e9)
    assert found == pytest.approx(2 * (100 * TOKEN + APART) + 3.0)


def test_more_seconds_of_a_class_are_those_of_its_members() -> None:
    two = (replace(CLASS, share=0.5), replace(CLASS, share=0.5, members=(GENERATES, WAITS)))
    members = MemberSeconds.of(TIMING, two)
    more = members.more(generates=[1.0, 2.0], waits=[3.0, 4.0])
    assert (more.generates - members.generates).tolist() == pytest.approx([1.0, 2.0, 2.0])
    assert (more.waits - members.waits).tolist() == pytest.approx([3.0, 4.0, 4.0])


def of_tools(seconds: list[float], seen: float | None) -> TrajectoryClass:
    """Trajectories that generate nothing."""
    share = 1 / len(seconds)
    members = tuple(Member(share, 0.0, 0.0, 0.0, each) for each in seconds)
    return replace(CLASS, generated=0.0, context_sum=0.0, members=members, seen=seen)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_as_many_as_were_seen_are_drawn_without_replacement(seconds: list[float], ratio: float) -> None:
    count = len(seconds)
    members = MemberSeconds.of(TIMING, (of_tools(seconds, float(count)),))
    assert members.longest(ratio * count)[0] == pytest.approx(expected([(each, ratio) for each in seconds]))


def test_as_many_draws_as_were_seen_have_the_longest_that_was_seen() -> None:
    members = MemberSeconds.of(TIMING, (of_tools([float(k) for k in range(20)], 20.0),))
    assert members.longest(20.0) == pytest.approx([19.0])


def test_more_draws_than_were_seen_have_the_longest_that_was_seen() -> None:
    members = MemberSeconds.of(TIMING, (of_tools([float(k) for k in range(20)], 20.0),))
    assert members.longest(60.0) == pytest.approx([19.0])


def test_what_is_known_exactly_has_none_that_is_longer() -> None:
    members = MemberSeconds.of(TIMING, (of_tools([1.0, 2.0], None),))
    assert members.longest(1e6) == pytest.approx([2.0])


def test_more_draws_are_never_shorter() -> None:
    members = MemberSeconds.of(TIMING, (of_tools([1.0, 2.0, 7.0, 7.5], 40.0),))
    found = [members.longest(draws)[0] for draws in (1.0, 10.0, 39.0, 40.0, 41.0, 80.0, 400.0)]
    assert found == sorted(found)


@pytest.mark.parametrize("calling", [1.0, 0.3], ids=["all call tools", "some call tools"])
@pytest.mark.parametrize("sigma", [1.0, 1.7])
def test_the_longest_tools_of_tracked_trajectories_against_drawing(sigma: float, calling: float) -> None:
    """The mean over trackers of 1,024 trajectories: the price is right on average, whatever each was given."""
    generator = np.random.default_rng(5)
    draws = 128

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        seconds = np.exp(generator.normal(0.0, sigma, shape))
        return np.where(generator.random(shape) < calling, seconds, 0.0)

    prices = []
    for _ in range(60):
        tracker = LengthTracker(half_life=1e6)
        for number, seconds in enumerate(drawn((1024,)).tolist()):
            called = Turn(10, "tool", "ok", 0, seconds) if seconds else Turn(10, None, None, 0)
            turns = (called, Turn(10, None, None, 0)) if seconds else (called,)
            tracker.observe(Trajectory(str(number), "p", "t", 100, turns, None, 0, True))
        members = MemberSeconds.of(replace(TIMING, lines=(replace(TIMING.lines[0], step=0.0),)), tracker.classes(8))
        prices.append(replace(members, generates=np.zeros_like(members.waits)).longest(draws)[-1])
    truth = drawn((20_000, draws)).max(axis=1).mean()
    error = np.std(prices) / math.sqrt(len(prices)) / truth
    assert np.mean(prices) / truth == pytest.approx(1.0, abs=0.02 + 2 * error)
