"""The price of an allocation against numbers worked out by hand, and the reasons why one does not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from oracles.small_request import LONG, PROFILE, REQUEST, SHORT, WORKLOAD, one_bucket, two_buckets

from libra.plan.price import fits, present, price
from libra.plan.problem import Allocation, Bucket, Fleet, PlanRequest, Prediction

MORE_STALE = replace(REQUEST, workload=replace(WORKLOAD, max_staleness=3))
SLOW_TRAINER = replace(MORE_STALE, profile=replace(PROFILE, train=replace(PROFILE.train, per_token=1e-3)))
FEW = replace(REQUEST, workload=replace(WORKLOAD, trajectories=3))
ORACLE = replace(REQUEST, workload=replace(WORKLOAD, router_hit=1.0))
LITTLE_MEMORY = replace(
    REQUEST, shapes=(replace(REQUEST.shapes[0], kv_tokens=1000), replace(REQUEST.shapes[1], kv_tokens=5000))
)

# Base case, 1 trainer and 3 engines: 16 trajectories in flight, 5 an engine; 4 seats on short, 5 on long.
#   work on short by seats, 0.0035 a token: SHORT 0.35 + 0.05 + 0.1 + 0.2 = 0.7, LONG 1.4 + 0.8 + 0.2 + 0.4 = 2.8
#   work on long by seats, 0.003 a token (step / 5 + 0.001): LONG 1.2 + 0.8 + 0.2 + 0.4 = 2.6
#   LONG's own share 0.5 * 0.5 = 0.25; short bucket 6 * 0.7 + 2 * 0.75 * 2.8 = 8.4, long bucket 2 * 0.25 * 2.6 = 1.3
#   residence of LONG at 5 seats: 400 * (0.01 + 0.005 + 0.01) + 0.2 + 0.4 + 10 = 20.6; training 0.5 + 2 = 2.5
PRICES = [
    ("base", REQUEST, two_buckets(1, 1, 2), Prediction(11.55, 8.7, 2.5, (20.6 + 2.5) / 2, "latency")),
    (
        "more engines share the first bucket",
        REQUEST,
        two_buckets(1, 2, 1),
        Prediction(11.55, 4.5, 2.5, 11.55, "latency"),
    ),
    # 2 engines, 8 seats on long: residence 400 * (0.01 + 0.008 + 0.016) + 10.6 = 24.2; training 0.5 + 1 + 0.25
    ("a second trainer", REQUEST, two_buckets(2, 1, 1), Prediction(12.975, 8.7, 1.75, (24.2 + 1.75) / 2, "latency")),
    # 32 in flight, 10 seats on long: residence 400 * (0.01 + 0.01 + 0.02) + 10.6 = 26.6
    ("staleness hides latency", MORE_STALE, two_buckets(1, 1, 2), Prediction(8.7, 8.7, 2.5, 29.1 / 4, "rollout")),
    ("slow trainer", SLOW_TRAINER, two_buckets(1, 1, 2), Prediction(20.5, 8.7, 20.5, 47.1 / 4, "training")),
    # 6 in flight, 2 seats; 0.75 of a LONG a step: absent. Work on short, 0.006 a token: SHORT 0.95, LONG 3.8
    # residence of SHORT 100 * (0.01 + 0.002 + 0.001) + 3.3 = 4.6; training 0.5 + 0.75
    ("an absent class", FEW, two_buckets(1, 1, 2), Prediction(4.575, 4.575, 1.25, (4.6 + 1.25) / 2, "rollout")),
    # LONG's own share 0.5: short 6 * 0.7 + 2 * 0.5 * 2.8 = 7, long 2 * 0.5 * 2.6 = 2.6
    ("an oracle router", ORACLE, two_buckets(1, 1, 2), Prediction(11.55, 7.3, 2.5, 11.55, "latency")),
    # Work on short by memory (0.01 / 1000 + 1e-6 a token of context): SHORT 0.1+0.55+0.3 = 0.95, LONG 0.4+8.8+0.6 = 9.8
    # load 6 * 0.95 + 1.5 * 9.8 = 20.4
    ("little memory", LITTLE_MEMORY, two_buckets(1, 1, 2), Prediction(20.7, 20.7, 2.5, 11.55, "rollout")),
    # One bucket of 3 long engines at 0.003 a token: SHORT 0.3+0.05+0.1+0.2 = 0.65; 6 * 0.65 + 2 * 2.6 = 9.1 over 3
    ("one bucket", REQUEST, one_bucket(1, 3), Prediction(11.55, 9.1 / 3 + 0.3, 2.5, 11.55, "latency")),
    # The first bucket serves no class: the bucket of the shortest class takes its place and all its work.
    ("an idle first bucket", REQUEST, two_buckets(1, 1, 2, cut=500), Prediction(11.55, 4.85, 2.5, 11.55, "latency")),
]


@pytest.mark.parametrize(
    ("request_", "allocation", "wanted"), [row[1:] for row in PRICES], ids=[row[0] for row in PRICES]
)
def test_price(request_: PlanRequest, allocation: Allocation, wanted: Prediction) -> None:
    predicted = price(request_, allocation)
    assert predicted.bottleneck == wanted.bottleneck
    assert (predicted.step, predicted.rollout, predicted.training, predicted.latency) == pytest.approx(
        (wanted.step, wanted.rollout, wanted.training, wanted.latency)
    )


MISFITS = [
    ("too few trainers", REQUEST, two_buckets(0, 2, 2), "0 devices train; the fleet allows 1"),
    ("too many trainers", REQUEST, one_bucket(3, 1), "3 devices train; the fleet allows 1 .core. to 2"),
    ("no engine", REQUEST, Allocation(2, ()), "no engine generates"),
    ("a device too many", REQUEST, two_buckets(1, 2, 2), "uses 5 devices; the fleet has 4"),
    ("a device idle", REQUEST, two_buckets(1, 1, 1), "uses 3 devices; the fleet has 4"),
    ("no core", replace(REQUEST, fleet=Fleet(0, 2, 2)), two_buckets(1, 1, 2), "no core device"),
    ("unknown shape", REQUEST, Allocation(1, (Bucket("wide", 3, 0, 5000),)), "no engine shape is named 'wide'"),
    (
        "wrong order",
        REQUEST,
        Allocation(1, (Bucket("long", 1, 0, 1000), Bucket("short", 2, 1000, 5000))),
        "shape 'short' comes before or with the previous one",
    ),
    ("range too long", REQUEST, two_buckets(1, 1, 2, cut=3000), "bucket up to 3000 tokens: shape 'short' holds 2000"),
    ("memory too small", LITTLE_MEMORY, two_buckets(1, 1, 2, cut=1500), "shape 'short' holds 1000"),
    ("ends too early", REQUEST, two_buckets(1, 1, 2, end=4500), "ends at 4500 tokens; the longest context is 5000"),
]


@pytest.mark.parametrize(
    ("request_", "allocation", "reason"), [row[1:] for row in MISFITS], ids=[row[0] for row in MISFITS]
)
def test_an_allocation_that_does_not_fit_says_why_and_has_no_price(
    request_: PlanRequest, allocation: Allocation, reason: str
) -> None:
    found = fits(request_, allocation)
    assert found is not None
    assert re.search(reason, found)
    with pytest.raises(ValueError, match=reason):
        price(request_, allocation)


@pytest.mark.parametrize(("trajectories", "wanted"), [(1, (True, False)), (3, (True, False)), (4, (True, True))])
def test_a_class_is_present_when_one_such_or_longer_trajectory_is_expected(
    trajectories: int, wanted: tuple[bool, ...]
) -> None:
    assert present(replace(WORKLOAD, trajectories=trajectories)) == wanted


def test_longer_classes_count_towards_the_presence_of_a_shorter_one() -> None:
    thirds = tuple(replace(cls, share=0.5) for cls in (SHORT, LONG))
    assert present(replace(WORKLOAD, trajectories=2, classes=thirds)) == (True, True)
