"""GPUs that train and generate by turns: the rule is held against steps that are played through second by second."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from libra.plan.time_sharing import SharedRates, SharedStep


def played(step: SharedStep, ready: int | None, steps: int = 40) -> float:
    """Mean seconds of later steps. `ready`: samples for which shared GPUs generate first; None: they only train."""
    queue, now, began = 0.0, 0.0, 0.0
    batch = step.samples / step.batches
    for number in range(steps):
        if number == steps // 2:
            began = now
        if ready is not None:
            queue += step.alone * step.switch
            wait = max(0.0, (ready - queue) / (step.alone + step.shared))
            queue += wait * (step.alone + step.shared)
            now += wait + step.switch
        for _ in range(step.batches):
            wait = max(0.0, (batch - queue) / step.alone)
            queue += step.alone * wait - batch
            now += wait + step.training / step.batches
            queue += step.alone * step.training / step.batches
    return (now - began) / (steps - steps // 2)


_steps = st.builds(
    SharedStep,
    samples=st.integers(1, 64).map(lambda n: 8 * n),
    batches=st.sampled_from([1, 2, 4]),
    alone=st.floats(0.2, 20),
    shared=st.floats(0.1, 40),
    training=st.floats(1, 200),
    switch=st.floats(0, 30),
)


@given(_steps)
def test_its_times_are_those_of_steps_that_are_played(step: SharedStep) -> None:
    assert step.without == pytest.approx(played(step, None), rel=0.15)
    if step.pays:
        expected = step.generating + step.training + step.switch
        assert played(step, step.ready) == pytest.approx(expected, rel=0.1, abs=2 / step.alone)


@given(_steps)
def test_no_other_number_of_ready_samples_is_much_better(step: SharedStep) -> None:
    assume(step.pays)
    best = min(played(step, ready) for ready in range(0, step.samples + 1, 8))
    assert played(step, step.ready) <= best * 1.02 + 2 / step.alone


def test_a_trainer_that_never_waits_keeps_its_gpus() -> None:
    step = SharedStep(samples=64, batches=4, alone=2.0, shared=6.0, training=40.0, switch=1.0)
    assert step.without == 40 and not step.pays


def test_rates_are_found_again() -> None:
    rates = SharedRates(64, 4, ratio=3.0)
    assert rates.expected is None
    for _ in range(12):  # 0.5 samples a second alone, 2 together; 20 s together, 40 s of training, 4 s of changes
        rates.observe(seconds=64.0, generated=62, shared=20.0, waited=0.0, switch=4.0)
    expected = rates.expected
    assert expected is not None
    assert (expected.alone, expected.shared, expected.training) == pytest.approx((0.5, 1.5, 40.0), rel=0.01)
    assert expected.switch == 4.0
    rates.observe(seconds=40.0, generated=4, shared=0.0, waited=0.0, switch=0.0)  # engines that stood still
    assert rates.expected is not None and rates.expected.alone == pytest.approx(0.5, rel=0.01)
    assert rates.expected.switch == 4.0


def test_where_all_gpus_are_shared_there_is_nothing_to_decide() -> None:
    rates = SharedRates(64, 1, ratio=math.inf)
    rates.observe(10.0, 64, 5.0, 0.0, 1.0)
    assert rates.expected is None
