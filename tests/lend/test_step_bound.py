from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.lend.step_bound import StepBound

RATIOS = st.lists(st.floats(0.25, 4.0), min_size=1, max_size=60)


@given(ratios=RATIOS, missed=st.sampled_from([0.5, 0.25, 0.1]), memory=st.integers(10, 30))
def test_the_factor_is_the_rank_of_the_recent_ratios(ratios: list[float], missed: float, memory: int) -> None:
    bound = StepBound(missed, memory)
    for ratio in ratios:
        bound.observe(2.0, 2.0 * ratio)
    recent = sorted(ratios[-memory:])
    # the smallest rank k of n with P(next > k-th) = (n + 1 - k) / (n + 1) <= missed
    ranks = [k for k in range(1, len(recent) + 1) if (len(recent) + 1 - k) / (len(recent) + 1) <= missed + 1e-12]
    if not ranks:
        assert bound.factor is None and bound.bound(1.0) is None
    else:
        assert bound.factor == pytest.approx(recent[ranks[0] - 1])
        assert bound.bound(3.0) == pytest.approx(3 * recent[ranks[0] - 1])


def test_no_more_steps_exceed_it_than_said() -> None:
    rng, over, steps = np.random.default_rng(1), 0, 40_000
    bound = StepBound(missed=0.005)
    for _ in range(steps):
        actual = 0.01 * rng.lognormal(0.0, 0.2)
        limit = bound.bound(0.01)
        over += limit is not None and actual > limit
        bound.observe(0.01, actual)
    share = over / steps
    assert 0.002 < share < 0.005 + 3 * (0.005 / steps) ** 0.5


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StepBound(missed=0.0), "missed is 0"),
        (lambda: StepBound(missed=0.01, memory=50), "needs 99 or more"),
        (lambda: StepBound().observe(0.0, 1.0), "must be positive"),
        (lambda: StepBound().observe(1.0, float("nan")), "must be positive"),
    ],
)
def test_what_is_refused(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
