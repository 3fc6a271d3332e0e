from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.lend.quota import KVLimits, KVQuota

LIMITS = KVLimits(capacity=1000, reserve=200, context=50, quiet=10.0)


def test_the_loan_shrinks_by_halves_and_grows_after_a_training_step_and_a_quiet_time() -> None:
    quota = KVQuota(LIMITS)
    assert quota.observe(100, 0.0) == 700  # all but the reserve and what serving uses
    assert quota.observe(150, 1.0) == 350  # 650 are free of reserve, 700 were lent
    assert quota.observe(100, 12.0) == 350  # quiet, but no training step yet
    quota.trained()
    assert quota.observe(100, 12.5) == 650  # beside the 150 that serving used since
    assert quota.observe(520, 13.0) == 162
    quota.trained()
    assert quota.observe(100, 22.9) == 162  # not quiet for long enough
    assert quota.observe(100, 23.0) == 280
    assert quota.observe(790, 24.0) == 0  # 10 would be left, less than a context


@given(
    seen=st.lists(st.tuples(st.integers(0, 1000), st.floats(0.0, 20.0), st.booleans()), max_size=40),
    reserve=st.integers(0, 500),
    context=st.integers(1, 500),
)
def test_the_reserve_is_free_and_a_loan_is_of_use(
    seen: list[tuple[int, float, bool]], reserve: int, context: int
) -> None:
    quota, now, before = KVQuota(KVLimits(1000, reserve, context, quiet=10.0)), 0.0, 0
    calm = -float("inf")
    for serving, passed, trained in seen:
        now += passed
        if trained:
            quota.trained()
        lent = quota.observe(serving, now)
        assert lent == 0 or lent >= context
        assert lent == 0 or serving + lent + reserve <= 1000
        if lent > before:
            assert now - calm >= 10.0
        elif lent < before:
            calm = now
        before = lent


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KVLimits(100, 60, 50, 1.0), "reserve of 60 and one rollout context of 50"),
        (lambda: KVLimits(100, -1, 50, 1.0), "reserve and quiet are 0 or more"),
        (lambda: KVQuota(LIMITS).observe(1001, 0.0), "serving uses 1,001 of 1,000"),
    ],
)
def test_what_is_refused(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
