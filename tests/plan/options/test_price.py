"""The price of an allocation against numbers worked out by hand and by the oracle, and why one does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.enumerate_problems import priced, problems, step_of
from oracles.small_problem import LONG, ONE, PROBLEM, SHORT_FEW, SHORT_MANY, TWO, one_bucket, two_buckets
from tables import by_name

from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.price import (
    bucket_prices,
    devices_used,
    fixed_seconds,
    infeasibility,
    price,
    step_parts,
    training_option,
)
from libra.plan.problem import Pool, Problem, TrainingOption
from libra.plan.solution import Prediction, StepPart

RUNNING = replace(PROBLEM, current=two_buckets(1, 2, 1))
SYNC = replace(PROBLEM, staleness=0)
COLOCATED = replace(SYNC, colocated=True, switch=1.5)
UNMET = replace(PROBLEM, expected=(True, False))
PATIENT = replace(PROBLEM, staleness=7)
REFRESH = replace(PATIENT, engines=(replace(LONG, refresh=(4.0, 2.0)),))
SYNC_REFRESH = replace(REFRESH, staleness=0)


def batched(staleness: int, training: TrainingOption = ONE, residence: float = 10.0) -> Problem:
    """Batches that start together: a long engine takes new weights in 1 s; by itself its longest trajectory generates
    for 6 s and waits for 4 s."""
    option = replace(LONG, generates=((6.0, 6.0),), waits=((4.0, 4.0),), residence=(5.0, residence))
    return replace(PROBLEM, engines=(option,), training=(training,), staleness=staleness)


BATCHED_REFRESH = replace(
    batched(1), engines=(replace(batched(1).engines[0], generates=((4.995, 4.995),), refresh=(4.0, 2.0)),)
)
# A second line, of a trajectory that waits for 10 s and hardly generates; and one for each class.
LINES = replace(
    batched(1),
    engines=(replace(batched(1).engines[0], generates=((0.0, 6.0), (0.0, 0.5)), waits=((0.0, 4.0), (0.0, 10.0))),),
)
FORGETFUL = replace(batched(1), engines=(replace(batched(1).engines[0], refill=(10.0, 20.0), kv_occupancy=(0.5, 1.0)),))
SYNC_FORGETFUL = replace(SYNC, engines=(replace(LONG, refill=(10.0, 20.0), kv_occupancy=(1.5, 1.5)),))


def only_waits(seconds: float) -> Problem:
    """Batches whose longest trajectory never generates."""
    option = replace(LONG, generates=((0.0, 0.0),), waits=((seconds, seconds),), residence=(0.0, 0.0))
    return replace(batched(1), engines=(option,))


# Two buckets, 2 short engines and 1 long. Work of the first, with 4 seats, by routers (1, 0.5) and (0.5, 0):
#   by seats 8 + 0.5 * 16 = 16 and 8 + 16 = 24, by memory 6 + 10 = 16 and 6 + 20 = 26; loads 26 / 2 + 0.5
#   with 8 seats: 4 + 4 and 4 + 8, 6 + 6 and 6 + 12 = 18; load 18 / 2 + 0.5 = 9.5, residence 10, of class 1
# Work of the second: 0.5 * 10 and 0; load 5 + 1, residence 10. Training 8 + 1.
PRICES = [
    ("another router is possible", PROBLEM, two_buckets(1, 2, 1), Prediction(9.5, 9.5, 8.0, 9.5, "rollout")),
    # 12 / 2 + 0.5 with 8 seats against 16 / 2 + 0.5 with 4
    ("ranges that run are known", RUNNING, two_buckets(1, 2, 1), Prediction(9.5, 6.5, 8.0, 9.5, "latency")),
    # 12 / 3 + 0.5
    ("so with other engines", RUNNING, two_buckets(1, 3, 2), Prediction(9.5, 4.5, 8.0, 9.5, "latency")),
    ("but no other ranges", RUNNING, two_buckets(1, 2, 1, cut=1001), Prediction(9.5, 9.5, 8.0, 9.5, "rollout")),
    # The long engines take everything, (5 + 10) / 2 + 1
    ("one bucket", PROBLEM, one_bucket(1, 2), Prediction(9.5, 8.5, 8.0, 9.5, "latency")),
    # (10 + 9) / 8
    ("staleness hides latency", PATIENT, one_bucket(1, 2), Prediction(8.5, 8.5, 8.0, 19 / 8, "rollout")),
    ("training lasts longest", PATIENT, one_bucket(1, 3), Prediction(8.0, 6.0, 8.0, 19 / 8, "training")),
    ("two train", PATIENT, one_bucket(2, 3), Prediction(6.0, 6.0, 4.0, 15 / 8, "rollout")),
    # 2 short engines by 8 seats, as above; no residence in the second bucket
    ("a class is not met", UNMET, two_buckets(1, 2, 1), Prediction(9.5, 9.5, 8.0, 7.5, "rollout")),
    ("and cannot be late", UNMET, one_bucket(1, 2), Prediction(8.5, 8.5, 8.0, 7.0, "rollout")),
    # max(10, 8.5) + 8 + 1, and with one engine 16 + 8 + 1
    ("synchronous, the longest", SYNC, one_bucket(1, 2), Prediction(19.0, 8.5, 8.0, 19.0, "latency")),
    ("synchronous, the work", SYNC, one_bucket(1, 1), Prediction(25.0, 16.0, 8.0, 25.0, "latency")),
    ("synchronous, training", replace(SYNC, training=(replace(ONE, seconds=12.0),)), one_bucket(1, 2),
     Prediction(23.0, 8.5, 12.0, 23.0, "latency")),
    # max(10, 15 / 4 + 1) + 8 + 1 + 2 * 1.5, all 8 devices
    ("colocated", COLOCATED, one_bucket(1, 4), Prediction(22.0, 4.75, 8.0, 22.0, "latency")),
    # step = 15 + 1 + 6 / step, so 16.367...; on two engines 8.5 + 3 / step
    ("refresh", REFRESH, one_bucket(1, 1), Prediction(8 + 70**0.5, 8 + 70**0.5, 8.0, 19 / 8, "rollout")),
    # step = 16 + 6 / step + 9
    ("synchronous refresh", SYNC_REFRESH, one_bucket(1, 1),
     Prediction(12.5 + 162.25**0.5, 3.5 + 162.25**0.5, 8.0, 12.5 + 162.25**0.5, "latency")),
    # Two engines work 8.5 s, so (2 T - 9 - 4) (T - 8.5) = 6 T; of 2 T training has 8 and the longest alone 10
    ("batches", batched(1), one_bucket(1, 2),
     Prediction(9 + 25.75**0.5, 8.5, 8.0, 9 + 25.75**0.5, "latency")),
    # One works 16 s: (2 T - 13) (T - 16) = 6 T, 20.4 s, and slows the longest by 21.8 of 40.8
    ("batches, one engine", batched(1), one_bucket(1, 1),
     Prediction((51 + 937**0.5) / 4, 16.0, 8.0, (51 + 937**0.5) / 4, "latency")),
    # (4 T - 13) (T - 8.5) = 6 T
    ("batches, staler", batched(3), one_bucket(1, 2),
     Prediction((53 + 1041**0.5) / 8, 8.5, 8.0, (53 + 1041**0.5) / 8, "latency")),
    # (R - 4) (R - 7.5) = 6 R, and 1 + 9
    ("batches, synchronous", batched(0), one_bucket(1, 2),
     Prediction(18.75 + 186.25**0.5 / 2, 9.75 + 186.25**0.5 / 2, 8.0, 18.75 + 186.25**0.5 / 2, "latency")),
    # (2 T - 9 - 10) (T - 8.5) = 0.5 T asks for less than the other line, (2 T - 13) (T - 8.5) = 6 T
    ("batches, several lines", LINES, one_bucket(1, 2),
     Prediction(9 + 25.75**0.5, 8.5, 8.0, 9 + 25.75**0.5, "latency")),
    # 1.5 times as much as one cache holds, so half of 30 s of refill: (2 T - 13) (T - 31) = 6 T
    ("batches, forgetting", FORGETFUL, one_bucket(1, 1),
     Prediction((81 + 3337**0.5) / 4, 31.0, 8.0, (81 + 3337**0.5) / 4, "latency")),
    ("batches, two caches hold all", FORGETFUL, one_bucket(1, 2),
     Prediction(9 + 25.75**0.5, 8.5, 8.0, 9 + 25.75**0.5, "latency")),
    # Half of 30 s, on two engines; 15 / 2 + 15 / 2 + 1
    ("synchronous, forgetting", SYNC_FORGETFUL, one_bucket(1, 2), Prediction(25.0, 16.0, 8.0, 25.0, "latency")),
    # (40 + 9) / 2, which is more than the 14.1 above
    ("batches, the longest", batched(1, residence=40.0), one_bucket(1, 2),
     Prediction(24.5, 8.5, 8.0, 24.5, "latency")),
    # On three engines (4 T - 31 - 4) (T - 6) = 6 T; training takes longer than these 11.8 s
    ("batches, training alone", batched(3, replace(ONE, seconds=30.0)), one_bucket(1, 3),
     Prediction(30.0, 6.0, 30.0, (65 + 865**0.5) / 8, "training")),
    # (2 T - 19 - 4) (T - 6) = 6 T, 16.3 s: training alone takes just less, though half of it is the largest part
    ("batches, mostly training", batched(1, replace(ONE, seconds=16.0, publish=3.0)), one_bucket(1, 3),
     Prediction((41 + 577**0.5) / 4, 6.0, 16.0, (41 + 577**0.5) / 4, "latency")),
    # A step of 20 s has 16 + 6 / 20 of load: (40 - 13) (20 - 16.3) = 4.995 * 20
    ("batches, refresh", BATCHED_REFRESH, one_bucket(1, 1), Prediction(20.0, 16.3, 8.0, 20.0, "latency")),
    # (8 + 1 + 40) / 2, and (8 + 1 + 4) / 2, for which engines have no time
    ("batches, only tools", only_waits(40.0), one_bucket(1, 2), Prediction(24.5, 8.5, 8.0, 24.5, "latency")),
    ("batches, few tools", only_waits(4.0), one_bucket(1, 2), Prediction(8.5, 8.5, 8.0, 6.5, "rollout")),
    # A first bucket without a class takes what goes astray: with 8 seats by memory 0.5 * 6 + 12
    ("an idle first bucket", PATIENT, two_buckets(1, 2, 2, cut=500), Prediction(8.0, 8.0, 8.0, 19 / 8, "rollout")),
]  # fmt: skip


@by_name("problem, allocation, wanted", PRICES)
def test_price(problem: Problem, allocation: Allocation, wanted: Prediction) -> None:
    predicted = price(problem, allocation)
    assert predicted.bottleneck == wanted.bottleneck
    assert (predicted.step, predicted.rollout, predicted.training, predicted.latency) == pytest.approx(
        (wanted.step, wanted.rollout, wanted.training, wanted.latency)
    )


def test_a_bucket_runs_with_the_max_num_seqs_that_delay_the_step_least() -> None:
    """Many seats for the work; few where the longest trajectory alone counts."""
    busy = bucket_prices(PROBLEM, two_buckets(1, 2, 1))[0]
    assert (busy.option, busy.load, busy.residence) == (SHORT_MANY, 9.5, 10.0)
    late = replace(
        PROBLEM, engines=(*(replace(o, residence=(o.residence[0] * 9, 0.0)) for o in PROBLEM.engines[:2]), LONG)
    )
    assert bucket_prices(late, two_buckets(1, 2, 1))[0].option.max_num_seqs == SHORT_FEW.max_num_seqs


@settings(max_examples=100, deadline=None)
@given(problems(), st.data())
def test_the_step_is_the_oracle_s(problem: Problem, data: st.DataObject) -> None:
    for plan in data.draw(st.lists(st.sampled_from(priced(problem)), min_size=1, max_size=10)):
        predicted = price(problem, plan.allocation)
        assert infeasibility(problem, plan.allocation) is None
        assert predicted.step == pytest.approx(plan.step, rel=1e-9)
        assert predicted.step == max(predicted.rollout, predicted.training, predicted.latency)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_what_runs_has_the_oracle_s_price_wherever_it_fits(problem: Problem) -> None:
    """Also where a bucket has lost its classes, or ends between two of them."""
    current = problem.current
    if current is not None and infeasibility(problem, current) is None:
        assert price(problem, current).step == pytest.approx(step_of(problem, current), rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_synchronous_steps_are_a_sum(problem: Problem) -> None:
    synchronous = replace(problem, staleness=0)
    for plan in priced(synchronous)[:5]:
        training = next(
            t for t in problem.training if t.replicas == plan.allocation.replicas and t.layout == plan.allocation.layout
        )
        generation = max(max(b.load, b.residence) for b in bucket_prices(synchronous, plan.allocation))
        switches = 2 * problem.switch if problem.colocated else 0.0
        follows = training.seconds if training.tail is None else training.tail
        wanted = max(training.seconds, generation + follows + training.publish + switches)
        assert price(synchronous, plan.allocation).step == pytest.approx(wanted)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 4), st.data())
def test_a_longer_lag_never_makes_a_step_longer(problem: Problem, staleness: int, data: st.DataObject) -> None:
    """Neither of an allocation nor of the best one."""
    problem = replace(problem, colocated=False, switch=0.0)
    plans = priced(replace(problem, staleness=staleness))
    if plans:
        allocation = data.draw(st.sampled_from(plans)).allocation
        sooner, later = (price(replace(problem, staleness=by), allocation).step for by in (staleness, staleness + 1))
        assert later <= sooner * (1 + 1e-12)
        best = min(plan.step for plan in priced(replace(problem, staleness=staleness + 1)))
        assert best <= min(plan.step for plan in plans) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_no_price_is_less_for_more_of_it(problem: Problem, data: st.DataObject) -> None:
    """More work, refill, refresh, contexts in the caches, and longest trajectories that generate or wait for longer."""
    fields = ("work", "generates", "waits", "refill", "refresh", "residence", "kv_occupancy", "stall")
    field = data.draw(st.sampled_from(fields))
    factor = data.draw(st.sampled_from([1.0001, 1.3, 10.0]))
    engines = tuple(replace(o, **{field: _scaled(getattr(o, field), factor)}) for o in problem.engines)
    more = replace(problem, engines=engines)
    for plan in data.draw(st.lists(st.sampled_from(priced(problem)), min_size=1, max_size=10)):
        assert price(more, plan.allocation).step >= plan.step * (1 - 1e-9)


def _scaled(prices: Any, factor: float) -> Any:
    return prices * factor if isinstance(prices, float) else tuple(_scaled(it, factor) for it in prices)


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_prices_have_no_cliffs(problem: Problem, data: st.DataObject) -> None:
    """Were all seconds longer by a factor the step would be, too; so for a part of them it is no more. As much of
    kv_occupancy forgets twice the factor more of the returns at most, D / n being 2 where all are forgotten; and no
    step grows by more than an engine's work does, as (B T - f) (T - W) = g T has dT/dW <= 1 for every f >= 0."""
    field = data.draw(st.sampled_from(("work", "refill", "generates", "waits", "kv_occupancy")))
    more = data.draw(st.sampled_from([1e-6, 1e-3, 0.1]))
    engines = tuple(replace(o, **{field: _scaled(getattr(o, field), 1 + more)}) for o in problem.engines)
    changed = replace(problem, engines=engines)
    for plan in data.draw(st.lists(st.sampled_from(priced(problem)), min_size=1, max_size=10)):
        longest = plan.step * (1 + more)
        if field == "kv_occupancy":
            refilled = (
                sum(option.refill) / bucket.engines
                for bucket in plan.allocation.buckets
                for option in problem.engines
                if option.shape == bucket.shape
            )
            longest = plan.step + 2 * more * max(refilled)
        assert price(changed, plan.allocation).step <= longest * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_a_step_is_as_long_as_its_bottleneck_and_its_parts_add_up_to_it(problem: Problem, data: st.DataObject) -> None:
    allocation = data.draw(st.sampled_from(priced(problem))).allocation
    predicted, parts = price(problem, allocation), step_parts(problem, allocation)
    seconds = {"rollout": predicted.rollout, "training": predicted.training, "latency": predicted.latency}
    assert seconds[predicted.bottleneck] == predicted.step == max(seconds.values())
    assert sum(parts.values()) == pytest.approx(predicted.step)
    assert predicted.bottleneck == "latency" or list(parts) == [predicted.bottleneck]
    option = training_option(problem, allocation)
    assert option is not None
    if len(parts) > 1:
        assert parts["training"] == pytest.approx(option.after_rollout / (1 + problem.staleness))
    elif "training" in parts:
        assert predicted.step == option.seconds


def with_less(problem: Problem, part: StepPart) -> Problem:
    """The problem in which everything that the part is made of takes a tenth less."""
    if part == "training":
        options = (replace(o, seconds=0.9 * o.seconds, tail=o.tail and 0.9 * o.tail) for o in problem.training)
        return replace(problem, training=tuple(options))
    if part == "publication":
        options = (replace(option, publish=0.9 * option.publish) for option in problem.training)
        return replace(problem, training=tuple(options), switch=0.9 * problem.switch)
    fields = ("work", "refresh", "refill", "stall") if part == "rollout" else ("generates", "waits", "residence")
    keeping = problem.synchronous and any(it.generates or it.waits for it in problem.engines)
    if part == "rollout" and keeping:  # trajectories that generate or wait keep the seats that others need
        fields += ("generates", "waits", "residence")
    less = (replace(o, **{field: _scaled(getattr(o, field), 0.9) for field in fields}) for o in problem.engines)
    return replace(problem, engines=tuple(less))


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from(get_args(StepPart)), st.data())
def test_a_part_of_the_step_shortens_it_and_nothing_else_does(
    problem: Problem, part: StepPart, data: st.DataObject
) -> None:
    """One engine option a shape: with several, a faster trajectory lets engines have more seats, which spares work."""
    one = {option.shape: option for option in reversed(problem.engines)}
    problem = replace(problem, engines=tuple(reversed(one.values())))
    alone = [plan.allocation for plan in priced(problem) if len(plan.allocation.buckets) == 1]
    assume(alone)
    allocation = data.draw(st.sampled_from(alone))
    predicted, parts = price(problem, allocation), step_parts(problem, allocation)
    others = sorted([predicted.rollout, predicted.training, predicted.latency])
    assume(others[-2] < 0.999 * predicted.step)  # what is as long binds, too
    after = price(with_less(problem, part), allocation).step
    if parts.get(part, 0.0) > 1e-6 * predicted.step:
        assert after < predicted.step * (1 - 1e-9)
    elif not (problem.synchronous and any(o.generates or o.waits for o in problem.engines)):  # there it is all rollout
        assert after == pytest.approx(predicted.step, rel=1e-9)


RANGES = [
    # (2 T - 13) (T - 8.5) = 6 T: 8 s of training, and in the next step the rest of twice 14.1 s
    ("latency", batched(1), one_bucket(1, 2), (8.0, 2 * (9 + 25.75**0.5) - 8)),
    # (40 + 9) / 4 against 8.5 s of work: four batches end together
    ("latency, staler", batched(3, residence=40.0), one_bucket(1, 2), (8.0, 49 - 3 * 8)),
    ("latency, mostly of others", batched(1), one_bucket(1, 1), None),
    ("latency, mostly training", batched(1, replace(ONE, seconds=16.0, publish=3.0)), one_bucket(1, 3), None),
    ("training", batched(3, replace(ONE, seconds=30.0)), one_bucket(1, 3), None),
    ("synchronous", batched(0), one_bucket(1, 2), None),
    ("batches do not overlap", PROBLEM, one_bucket(1, 2), None),
]


@by_name("problem, allocation, wanted", RANGES)
def test_steps_alternate_where_batches_that_overlap_wait_for_their_longest(
    problem: Problem, allocation: Allocation, wanted: tuple[float, float] | None
) -> None:
    found = price(problem, allocation).step_range
    assert found == (wanted if wanted is None else pytest.approx(wanted))


@settings(max_examples=100, deadline=None)
@given(problems(), st.data())
def test_the_longest_trajectory_has_what_the_others_leave_of_its_engine(problem: Problem, data: st.DataObject) -> None:
    """And no step is longer than if all that others do came before it."""
    overlapping = replace(problem, colocated=False, switch=0.0, staleness=max(1, problem.staleness))
    plans = priced(overlapping)
    if not plans:
        return
    allocation = data.draw(st.sampled_from(plans)).allocation
    training = training_option(overlapping, allocation)
    assert training is not None
    batches, fixed = 1 + overlapping.staleness, fixed_seconds(overlapping, training)
    for bucket, its in zip(allocation.buckets, bucket_prices(overlapping, allocation), strict=True):
        step = max(its.load, (its.residence + fixed) / batches)
        assert step <= (its.load + (its.alone + fixed) / batches) * (1 + 1e-9)
        own = [j for j, peak in enumerate(overlapping.peaks) if bucket.above < peak <= bucket.up_to]
        for generates, waits in its.option.stays.lines(own[-1]):
            if generates and bucket.above == 0:  # they begin and end there
                assert its.residence >= (waits + generates / (1 - its.load / step)) * (1 - 1e-9)


MISFITS = [
    ("replicas", PROBLEM, one_bucket(3, 1), "no option trains 3 replicas as 'copies'; options of this layout: 1, 2"),
    ("layout", PROBLEM, Allocation(1, one_bucket(1, 1).buckets, "other"), "as 'other'; options of this layout: none"),
    ("no engine", PROBLEM, Allocation(1, (), "copies"), "no engine generates"),
    ("buckets", replace(PROBLEM, most_buckets=1), two_buckets(1, 1, 1), "there are 2 buckets; at most 1 are allowed"),
    ("shape", PROBLEM, Allocation(1, (Bucket("wide", 1, 0, 5000),), "copies"), "no engine shape is named 'wide'"),
    ("twice", replace(PROBLEM, one_bucket_per_shape=True),
     Allocation(1, (Bucket("long", 1, 0, 1000), Bucket("long", 1, 1000, 5000)), "copies"), "another bucket already"),
    ("too long", PROBLEM, two_buckets(1, 1, 1, cut=3000), "bucket up to 3000 tokens: shape 'short' holds 2000"),
    ("too short", PROBLEM, two_buckets(1, 1, 1, end=4500), "ends at 4500 tokens; the longest context is 5000"),
    ("too many", PROBLEM, two_buckets(2, 5, 1), "uses 9 devices of pool a; it has 8"),
    ("colocated", COLOCATED, one_bucket(2, 5), "uses 10 devices of pool a; it has 8"),
    ("idle", replace(PROBLEM, use_all_devices=True), two_buckets(2, 2, 1), "uses 6 devices of pool a; it has 8"),
]  # fmt: skip


@by_name("problem, allocation, reason", MISFITS)
def test_an_allocation_that_does_not_fit_says_why_and_has_no_price(
    problem: Problem, allocation: Allocation, reason: str
) -> None:
    found = infeasibility(problem, allocation)
    assert found is not None and reason in found
    with pytest.raises(ValueError, match="does not fit has no price"):
        price(problem, allocation)


def test_two_pools_count_their_own_devices() -> None:
    pools = (Pool("a", 1, 2), Pool("b", 1, 4))
    problem = replace(PROBLEM, pools=pools, engines=(replace(LONG, pool="b"),))
    assert devices_used(problem, one_bucket(TWO.replicas, 2)) == {"a": (2, 0), "b": (0, 4)}
    assert infeasibility(problem, one_bucket(2, 2)) is None
    assert infeasibility(problem, one_bucket(2, 3)) == "the allocation uses 6 devices of pool b; it has 4"
