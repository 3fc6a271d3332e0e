"""Length by prompt: ranks are matched as by hand. Length predictor: the batch ridge, of what a prediction can know."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.routing_quality import static_fleet

from libra.route import expected_length
from libra.route.expected_length import (
    FEATURES,
    HALF_LIFE,
    KEPT,
    PENALTY,
    TASKS,
    LengthByPrompt,
    LengthPredictor,
    QuantileMatch,
    Ridge,
    features,
    log_k,
)
from libra.route.policy import Placement, TurnRequest
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


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: QuantileMatch(0, 1.0), "kept is 0"),
    (lambda: QuantileMatch(1, 0.0), "half_life is 0.0"),
    (lambda: QuantileMatch(1, math.nan), "half_life is nan"),
    (lambda: Ridge(0, 1.0, 0.9), "features is 0"),
    (lambda: Ridge(2, 0.0, 0.9), "penalty is 0.0"),
    (lambda: Ridge(2, 1.0, 0.0), "decay is 0.0"),
    (lambda: Ridge(2, 1.0, 1.1), "decay is 1.1"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


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


# Length predictor: the regression is the batch ridge, and it learns with what a prediction can know.

FLEET = static_fleet((1_000, 4_000, 16_000), turn_tokens=100)


def finished(
    prompt_tokens: int, final_context: int, *, id: str = "done", prompt_id: str = "", task: str = ""
) -> Trajectory:
    turns = (Turn(final_context - prompt_tokens, None, None, 0),)
    return Trajectory(id, prompt_id or f"of {id}", task, prompt_tokens, turns, None, 0, finished=True)


def bucket(placement: Placement | None) -> int:
    assert placement is not None
    return placement.bucket


values = st.floats(-3, 3, allow_subnormal=False)


@given(
    st.lists(st.tuples(values, values, values), min_size=1, max_size=12),
    st.floats(0.01, 10),
    st.floats(0.5, 1),
)
def test_updating_gives_the_ridge_of_all_samples_at_once(
    samples: list[tuple[float, float, float]], penalty: float, decay: float
) -> None:
    ridge = Ridge(3, penalty, decay)
    for a, b, y in samples:
        ridge.add(np.array([1.0, a, b]), y)
        ridge.coefficients()  # asking in between changes nothing
    # Ridge is least squares with a row sqrt(penalty) for each coefficient but the intercept.
    root = np.sqrt(decay ** np.arange(len(samples))[::-1])
    x = np.array([[1.0, a, b] for a, b, _ in samples]) * root[:, None]
    y = np.array([y for _, _, y in samples]) * root
    rows = np.sqrt(penalty) * np.eye(3)[1:]
    expected, *_ = np.linalg.lstsq(np.vstack([x, rows]), np.concatenate([y, [0.0, 0.0]]), rcond=None)
    found = ridge.coefficients()
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_penalty_does_not_fade() -> None:
    # A feature that was never seen keeps its coefficient of 0, and one seen long ago returns to it.
    ridge = Ridge(3, 1.0, 0.9)
    ridge.add(np.array([1.0, 1.0, 0.0]), 5.0)
    for _ in range(20_000):
        ridge.add(np.array([1.0, 0.0, 0.0]), 1.0)
    found = ridge.coefficients()
    assert found is not None
    np.testing.assert_allclose(found, [1.0, 0.0, 0.0], atol=1e-9)


def test_features() -> None:
    x = features(4_096, "math", None)
    assert len(x) == FEATURES == 5 + TASKS
    np.testing.assert_allclose(x[:5], [1.0, math.log(4), math.log(4) ** 2, 0.0, 0.0])
    assert x[5 + crc32(b"math") % TASKS] == x[5:].sum() == 1.0
    assert features(10, "", 0.5)[3:].tolist() == [1.0, 0.5, *[0.0] * TASKS]
    assert features(0, "", None)[1] == log_k(0) == -math.log(1_024)


# The policy.


def test_length_that_follows_the_prompt_is_learned() -> None:
    policy = LengthPredictor()
    for number in range(300):
        prompt = 100 + 7 * (number * 37 % 300)
        policy.finished(finished(prompt, 5 * prompt, id=str(number)))
    for prompt, wanted in [(120, 0), (300, 1), (700, 1), (1_000, 2), (2_000, 2)]:
        assert bucket(policy.place(TurnRequest(f"t{prompt}", "new", prompt, prompt), FLEET)) == wanted


def test_tasks_are_told_apart() -> None:
    policy = LengthPredictor()
    for number in range(100):
        policy.finished(finished(100, 500, id=f"a{number}", task="short"))
        policy.finished(finished(100, 10_000, id=f"b{number}", task="long"))
    assert bucket(policy.place(TurnRequest("t", "new", 100, 100, "short"), FLEET)) == 0
    assert bucket(policy.place(TurnRequest("u", "new", 100, 100, "long"), FLEET)) == 2
    assert bucket(policy.place(TurnRequest("v", "new", 100, 100), FLEET)) == 1  # their geometric mean is 2,236


def test_earlier_samples_of_the_prompt_are_used() -> None:
    policy = LengthPredictor()
    for number in range(100):
        for sample in range(4):
            name, length = ("a", 500) if number % 2 else ("b", 10_000)
            policy.finished(finished(100, length, id=f"{number}/{sample}", prompt_id=f"{name}{number}"))
    assert bucket(policy.place(TurnRequest("t", "a99", 100, 100), FLEET)) == 0
    assert bucket(policy.place(TurnRequest("u", "b98", 100, 100), FLEET)) == 2
    assert bucket(policy.place(TurnRequest("v", "new", 100, 100), FLEET)) == 1


def test_it_learns_with_what_it_knew_when_it_predicted() -> None:
    # Two samples run side by side: neither prediction had the other, so neither lesson has.
    policy = LengthPredictor()
    for id in "tu":
        policy.place(TurnRequest(id, "p", 100, 100, "asked"), FLEET)
    for id in "tu":
        policy.finished(finished(100, 2_000, id=id, prompt_id="p", task="told"))
    expected = Ridge(FEATURES, PENALTY, 2 ** (-1 / HALF_LIFE))
    for _ in "tu":
        expected.add(features(100, "asked", None), log_k(2_000))
    assert policy.snapshot()["rule"]["ridge"] == expected.snapshot()
    assert policy.snapshot()["rule"]["asked"] == []
    # One read from a log counts with what was known when it was read.
    policy.finished(finished(100, 3_000, id="v", prompt_id="p", task="told"))
    expected.add(features(100, "told", log_k(2_000)), log_k(3_000))
    assert policy.snapshot()["rule"]["ridge"] == expected.snapshot()


def test_it_predicts_once() -> None:
    policy = LengthPredictor()
    assert bucket(policy.place(TurnRequest("t", "p", 100, 100), FLEET)) == 0
    for number in range(20):
        policy.finished(finished(100, 10_000, id=str(number)))
    assert bucket(policy.place(TurnRequest("t", "p", 100, 150), FLEET)) == 0
    assert bucket(policy.place(TurnRequest("u", "p", 100, 100), FLEET)) == 2


def test_a_prediction_off_any_scale_is_still_a_number_of_tokens() -> None:
    policy = LengthPredictor()
    for prompt in (1_000, 1_100, 1_200):
        policy.finished(finished(prompt, prompt**3, id=str(prompt)))
    placement = policy.place(TurnRequest("t", "p", 10**9, 100), FLEET)
    assert placement is not None
    json.loads(json.dumps(policy.snapshot(), allow_nan=False))


def test_prompts_are_forgotten_from_the_least_recently_updated_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_length, "MAX_PROMPTS", 3)
    policy = LengthPredictor()
    for prompt_id in "abcadd":
        policy.finished(finished(100, 1_024, id=prompt_id, prompt_id=prompt_id))
    assert policy.snapshot()["rule"]["prompts"] == [["c", 1, 0.0], ["a", 2, 0.0], ["d", 2, 0.0]]
