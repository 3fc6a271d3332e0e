"""Length by prompt: ranks are matched as counting by hand would match them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.routing_quality import static_fleet
from libra.route.expected_length import KEPT, LengthByPrompt, QuantileMatch
from libra.route.policy import TurnRequest
from libra.trajectory import Trajectory, Turn

pairs = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=1, max_size=12)


def done(prompt_tokens: int, final_context: int, id: str = "done") -> Trajectory:
    turns = (Turn(final_context - prompt_tokens, None, None, 0),)
    return Trajectory(id, "p", "task", prompt_tokens, turns, None, 0, finished=True)


def by_hand(seen: list[tuple[int, int]], prompt: int) -> int:
    """With a half-life of one trajectory, in exact fractions."""
    weighed = [(pair, Fraction(1, 2**age)) for age, pair in enumerate(reversed(seen))]
    total = sum(weight for _, weight in weighed)
    shorter = sum((weight for (p, _), weight in weighed if p < prompt), Fraction(0))
    equal = sum((weight for (p, _), weight in weighed if p == prompt), Fraction(0))
    rank = shorter + equal / 2
    assert 0 <= rank <= total
    return min(
        final
        for (_, final), _ in weighed
        if sum((weight for (_, other), weight in weighed if other <= final), Fraction(0)) >= rank
    )


@given(pairs, st.integers(0, 13))
def test_ranks_are_matched_as_by_hand(seen: list[tuple[int, int]], prompt: int) -> None:
    match = QuantileMatch(half_life=1.0)
    for pair in seen:
        match.add(*pair)
    assert match.match(prompt) == by_hand(seen, prompt)


@given(pairs, st.integers(1, 12), st.integers(0, 13))
def test_only_the_latest_are_kept(seen: list[tuple[int, int]], kept: int, prompt: int) -> None:
    match, of_the_latest = QuantileMatch(kept), QuantileMatch()
    for pair in seen:
        match.add(*pair)
    for pair in seen[-kept:]:
        of_the_latest.add(*pair)
    assert match.pairs == seen[-kept:]
    assert match.match(prompt) == of_the_latest.match(prompt)


@given(pairs)
def test_longer_prompts_are_never_expected_to_become_shorter(seen: list[tuple[int, int]]) -> None:
    match = QuantileMatch(pairs=seen)
    expected = [match.match(prompt) for prompt in range(14)]
    assert None not in expected
    assert expected == sorted(expected, key=lambda it: it or 0)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30, unique=True))
def test_where_length_follows_the_prompt_it_is_known(prompts: list[int]) -> None:
    match = QuantileMatch(pairs=[(prompt, 3 * prompt + 7) for prompt in prompts])
    assert [match.match(prompt) for prompt in prompts] == [3 * prompt + 7 for prompt in prompts]


def test_equal_prompts_are_given_the_median() -> None:
    assert QuantileMatch(pairs=[(5, final) for final in (90, 10, 50, 20, 70)], half_life=1e9).match(5) == 50


def test_recent_lengths_count_more() -> None:
    old_then_new = [(5, 100)] * 600 + [(5, 900)] * 400
    assert QuantileMatch(pairs=old_then_new).match(5) == 900
    assert QuantileMatch(pairs=old_then_new, half_life=1e9).match(5) == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 1.0), "kept is 0"), ((1, 0.0), "half_life is 0.0"), ((1, float("nan")), "half_life is nan")],
)
def test_what_cannot_be_is_refused(arguments: tuple[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantileMatch(*arguments)


# The policy.


def test_a_prompt_goes_to_the_bucket_of_its_rank_and_is_told_once() -> None:
    policy, fleet = LengthByPrompt(), static_fleet((100, 1_000), turn_tokens=10)
    for number in range(10):
        policy.finished(done(number, 50 if number < 5 else 500, str(number)))
    for prompt, bucket in [(0, 0), (4, 0), (5, 1), (9, 1), (50, 1)]:
        placement = policy.place(TurnRequest(f"t{prompt}", "p", prompt, prompt), fleet)
        assert placement is not None and placement.bucket == bucket
    # What is learned later does not move what runs.
    for number in range(KEPT):
        policy.finished(done(number, 5_000, str(number)))
    again = policy.place(TurnRequest("t0", "p", 0, 20), fleet)
    assert again is not None and again.bucket == 0
    assert len(policy.snapshot()["rule"]) == KEPT


def test_the_final_context_is_the_most_it_ever_held() -> None:
    policy = LengthByPrompt()
    compacted = (Turn(400, "search", "ok", 95), Turn(5, None, None, 0, context_tokens=20))
    policy.finished(Trajectory("done", "p", "task", 5, compacted, None, 0, finished=True))
    assert policy.snapshot()["rule"] == [[5, 500]]


def test_an_unfinished_trajectory_is_refused() -> None:
    with pytest.raises(ValueError, match="'done' is unfinished"):
        LengthByPrompt().finished(Trajectory("done", "p", "task", 5, (), None, 0, finished=False))
