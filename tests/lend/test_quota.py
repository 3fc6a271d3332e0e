from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.lend.quota import KVLimits, KVQuota, KVView, ceded

LIMITS = KVLimits(capacity=1000, reserve=200, context=50, addresses=1000, quiet=10.0)


def view(need: int) -> KVView:
    """Of a serving engine that cedes all that anybody could ask for."""
    return KVView(1000, 200, need, ceded=1000)


def test_the_loan_shrinks_by_halves_and_grows_after_a_training_step_and_a_quiet_time() -> None:
    quota = KVQuota(LIMITS)
    lent = []
    for need, now, trained in (
        (100, 0.0, False),  # all but the reserve and what serving needs: 700
        (150, 1.0, False),  # 650 are free of reserve, 700 were lent
        (100, 12.0, False),  # quiet, but no training step yet
        (100, 12.5, True),  # beside the 150 that serving needed since
        (520, 13.0, False),
        (100, 22.9, True),  # not quiet for long enough
        (100, 23.0, False),
        (100, 40.0, False),  # no training step since
        (100, 41.0, True),  # what was needed at 13.0 is past
        (790, 42.0, False),  # 10 would be left, less than a context
        (990, 42.0, True),  # nothing is left to take back
        (100, 53.0, False),
        (100, 64.0, False),
    ):
        if trained:
            quota.trained()
        quota.observe(view(need), now)
        lent.append(quota.lent)
    assert lent == [700, 350, 350, 650, 162, 162, 280, 280, 700, 0, 0, 0, 700]


def test_rollout_has_what_was_ceded_for_its_asking_and_what_lies_beside() -> None:
    quota = KVQuota(replace(LIMITS, beside=60))
    assert quota.observe(view(100), 0.0) == 60 and quota.asked == 700
    assert quota.observe(replace(view(100), ceded=300), 1.0) == 360
    assert quota.observe(view(100), 2.0) == 760
    assert quota.observe(replace(view(100), ceded=0), 3.0) == 60  # a serving engine that has begun again
    few = KVQuota(replace(LIMITS, addresses=90))
    few.observe(view(0), 0.0)
    assert few.asked == 90


@pytest.mark.parametrize(
    ("now", "asked", "held", "free", "wanted", "then"),
    [
        pytest.param(0, 50, 0, 100, 10, 50, id="what is asked for"),
        pytest.param(0, 90, 0, 100, 10, 70, id="the reserve stays free beside what requests may take"),
        pytest.param(40, 90, 40, 20, 10, 40, id="less than the reserve is free"),
        pytest.param(40, 10, 30, 60, 10, 30, id="rollout still has more than it asks for"),
        pytest.param(40, 10, 0, 60, 10, 10, id="back as rollout lets go"),
        pytest.param(40, 90, 40, 20, 35, 25, id="a burst takes what it needs, asked for or not"),
        pytest.param(40, 40, 40, 20, 90, 0, id="and all there is"),
        pytest.param(30, 40, 60, 50, 10, 40, id="a server that has begun again"),
    ],
)
def test_what_serving_cedes(now: int, asked: int, held: int, free: int, wanted: int, then: int) -> None:
    assert ceded(now, asked=asked, held=held, free=free, wanted=wanted, reserve=20) == then


class Device:
    """Both sides as they run, in units of a block; every store and every look is an event of its own."""

    def __init__(self, limits: KVLimits) -> None:
        self.quota, self.capacity, self.reserve = KVQuota(limits), limits.capacity, limits.reserve
        self.used = self.need = self.ceded = 0  # of serving; what it has published is `said`
        self.said = KVView(self.capacity, self.reserve)
        self.asked = self.held = self.target = 0  # of rollout; `asked` as published
        self.lowering = self.capacity  # what serving is about to leave to rollout, if less than it does
        # What the loan that rollout has, or is about to have, was reckoned with.
        self.reckoned, self.settled = self.need, self.need

    @property
    def most(self) -> int:
        """What serving may need if it is to stay within its reserve of all that rollout reckons with, now or at its
        next look, which may come before serving has said what it needs."""
        return min(self.capacity, min(self.reckoned, self.settled, self.said.need) + self.reserve)

    def serve(self, need: int | None = None) -> None:
        """What serving does before a step that needs `need`, up to the next of its looks or stores. None: go on."""
        if need is not None:
            self.need = need
            then = self.cession()
            if then < self.ceded:
                self.lowering = then
                return
            self.ceded = then
        elif self.said.ceded > self.lowering:  # said first
            self.said = KVView(self.capacity, self.reserve, self.need, self.lowering)
            return
        else:  # then looked again
            self.ceded = min(self.ceded, max(self.lowering, self.cession()))
        self.lowering = self.capacity
        free, wanted = self.capacity - self.ceded - self.used, max(0, self.need - self.used)
        assert wanted <= free or self.ceded == 0  # it is refused nothing that rollout has
        self.used = self.need
        self.said = KVView(self.capacity, self.reserve, self.need, self.ceded)

    @property
    def serving(self) -> bool:
        """It has not come to its step yet."""
        return self.lowering < self.capacity

    def cession(self) -> int:
        free, wanted = self.capacity - self.ceded - self.used, max(0, self.need - self.used)
        return ceded(self.ceded, asked=self.asked, held=self.held, free=free, wanted=wanted, reserve=self.reserve)

    def look(self, now: float) -> None:
        self.reckoned = self.said.need
        self.target = self.quota.observe(self.said, now)
        assert self.quota.lent == 0 or self.quota.lent + self.reserve + self.said.need <= self.capacity

    def settle(self) -> None:
        self.held, self.asked, self.settled = self.target, self.quota.asked, self.reckoned


@given(
    needs=st.lists(st.integers(0, 20) | st.integers(0, 100), min_size=40, max_size=40),
    seed=st.integers(0, 2**32),
    reserve=st.integers(0, 60),
    quiet=st.sampled_from([0.0, 3.0]),
    within=st.booleans(),
)
def test_serving_is_refused_nothing_that_rollout_has(
    needs: list[int], seed: int, reserve: int, quiet: float, within: bool
) -> None:
    """Whatever an adversary has serving need, and whenever either side runs. And as long as that stays within the
    reserve, no memory is had by both."""
    device, now, looked, random = Device(KVLimits(100, reserve, 1, 100, quiet)), 0.0, False, Random(seed)
    turns = list(needs)
    while turns:
        now += 1.0
        if random.random() < 0.2:
            device.quota.trained()
        if random.random() < 0.6:
            if looked:
                device.settle()
            else:
                device.look(now)
            looked = not looked
        elif device.serving:
            device.serve()
        else:
            need = turns.pop()
            device.serve(min(need, device.most) if within else need)
        if within:
            assert device.held <= device.ceded
            assert device.used + device.held <= device.capacity


@given(
    seen=st.lists(st.tuples(st.integers(0, 1000), st.floats(0.0, 20.0), st.booleans()), max_size=40),
    reserve=st.integers(0, 500),
    context=st.integers(1, 500),
)
def test_a_loan_is_of_use_and_does_not_swing(seen: list[tuple[int, float, bool]], reserve: int, context: int) -> None:
    quota, now, before = KVQuota(KVLimits(1000, reserve, context, 1000, quiet=10.0)), 0.0, 0
    calm, stepped, needs = -float("inf"), True, []
    for need, passed, trained in seen:
        now += passed
        needs.append((now, need))
        if trained:
            quota.trained()
            stepped = True
        quota.observe(KVView(1000, reserve, need, 1000), now)
        assert quota.lent == 0 or quota.lent >= context
        if quota.lent > before:
            assert now - calm >= 10.0 and stepped
            assert all(quota.lent + reserve + it <= 1000 for at, it in needs if now - at < 10.0)
        if quota.lent < before:
            assert quota.lent <= before // 2
        if quota.lent != before:
            calm, stepped = now, False
        before = quota.lent


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capacity": 240}, "reserve of 200 and one rollout context of 50 bytes are more than the 240 of the device"),
        ({"reserve": -1}, "reserve and quiet are 0 or more"),
        ({"addresses": 49}, "one rollout context is 50 bytes of KV and the rollout engine has addresses for 49"),
        ({"beside": -7}, "weights are 7 bytes more than the memory beside the serving engine"),
    ],
)
def test_limits_that_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(LIMITS, **changes)


def test_serving_that_needs_more_than_there_is() -> None:
    with pytest.raises(ValueError, match="serving needs 1,001 of 1,000"):
        KVQuota(LIMITS).observe(view(1001), 0.0)
