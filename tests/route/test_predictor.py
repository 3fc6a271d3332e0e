"""The length predictor: the regression is the batch ridge, and it learns with what a prediction can know."""

from __future__ import annotations

import json
import math
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.routing_quality import static_fleet
from libra.route import expected_length
from libra.route.expected_length import FEATURES, HALF_LIFE, PENALTY, TASKS, LengthPredictor, Ridge, features, log_k
from libra.route.policy import Placement, TurnRequest
from libra.trajectory import Trajectory, Turn

FLEET = static_fleet((1_000, 4_000, 16_000), turn_tokens=100)


def done(
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0, 0.9), "features is 0"),
        ((2, 0.0, 0.9), "penalty is 0.0"),
        ((2, 1.0, 0.0), "decay is 0.0"),
        ((2, 1.0, 1.1), "decay is 1.1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[int, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ridge(*arguments)


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
        policy.finished(done(prompt, 5 * prompt, id=str(number)))
    for prompt, wanted in [(120, 0), (300, 1), (700, 1), (1_000, 2), (2_000, 2)]:
        assert bucket(policy.place(TurnRequest(f"t{prompt}", "new", prompt, prompt), FLEET)) == wanted


def test_tasks_are_told_apart() -> None:
    policy = LengthPredictor()
    for number in range(100):
        policy.finished(done(100, 500, id=f"a{number}", task="short"))
        policy.finished(done(100, 10_000, id=f"b{number}", task="long"))
    assert bucket(policy.place(TurnRequest("t", "new", 100, 100, "short"), FLEET)) == 0
    assert bucket(policy.place(TurnRequest("u", "new", 100, 100, "long"), FLEET)) == 2
    assert bucket(policy.place(TurnRequest("v", "new", 100, 100), FLEET)) == 1  # their geometric mean is 2,236


def test_earlier_samples_of_the_prompt_are_used() -> None:
    policy = LengthPredictor()
    for number in range(100):
        for sample in range(4):
            name, length = ("a", 500) if number % 2 else ("b", 10_000)
            policy.finished(done(100, length, id=f"{number}/{sample}", prompt_id=f"{name}{number}"))
    assert bucket(policy.place(TurnRequest("t", "a99", 100, 100), FLEET)) == 0
    assert bucket(policy.place(TurnRequest("u", "b98", 100, 100), FLEET)) == 2
    assert bucket(policy.place(TurnRequest("v", "new", 100, 100), FLEET)) == 1


def test_it_learns_with_what_it_knew_when_it_predicted() -> None:
    # Two samples run side by side: neither prediction had the other, so neither lesson has.
    policy = LengthPredictor()
    for id in "tu":
        policy.place(TurnRequest(id, "p", 100, 100, "asked"), FLEET)
    for id in "tu":
        policy.finished(done(100, 2_000, id=id, prompt_id="p", task="told"))
    expected = Ridge(FEATURES, PENALTY, 2 ** (-1 / HALF_LIFE))
    for _ in "tu":
        expected.add(features(100, "asked", None), log_k(2_000))
    assert policy.snapshot()["rule"]["ridge"] == expected.snapshot()
    assert policy.snapshot()["rule"]["asked"] == []
    # One read from a log counts with what was known when it was read.
    policy.finished(done(100, 3_000, id="v", prompt_id="p", task="told"))
    expected.add(features(100, "told", log_k(2_000)), log_k(3_000))
    assert policy.snapshot()["rule"]["ridge"] == expected.snapshot()


def test_it_predicts_once() -> None:
    policy = LengthPredictor()
    assert bucket(policy.place(TurnRequest("t", "p", 100, 100), FLEET)) == 0
    for number in range(20):
        policy.finished(done(100, 10_000, id=str(number)))
    assert bucket(policy.place(TurnRequest("t", "p", 100, 150), FLEET)) == 0
    assert bucket(policy.place(TurnRequest("u", "p", 100, 100), FLEET)) == 2


def test_a_prediction_off_any_scale_is_still_a_number_of_tokens() -> None:
    policy = LengthPredictor()
    for prompt in (1_000, 1_100, 1_200):
        policy.finished(done(prompt, prompt**3, id=str(prompt)))
    placement = policy.place(TurnRequest("t", "p", 10**9, 100), FLEET)
    assert placement is not None
    json.loads(json.dumps(policy.snapshot(), allow_nan=False))


def test_prompts_are_forgotten_from_the_least_recently_updated_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_length, "MAX_PROMPTS", 3)
    policy = LengthPredictor()
    for prompt_id in "abcadd":
        policy.finished(done(100, 1_024, id=prompt_id, prompt_id=prompt_id))
    assert policy.snapshot()["rule"]["prompts"] == [["c", 1, 0.0], ["a", 2, 0.0], ["d", 2, 0.0]]


def test_an_abandoned_trajectory_leaves_nothing() -> None:
    policy = LengthPredictor()
    policy.place(TurnRequest("t", "p", 100, 100), FLEET)
    policy.forget("t")
    assert policy.snapshot() == LengthPredictor().snapshot()
    with pytest.raises(ValueError, match="'t' is unfinished"):
        policy.finished(Trajectory("t", "p", "", 5, (), None, 0, finished=False))
