"""The solver against every allocation there is, and the causes it names when there is none."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.enumerate_plans import allocations, best_step, move_count, requests
from oracles.small_request import LONG, REQUEST, SHORT, WORKLOAD, two_buckets

from libra.cost.device import EngineCost, TrainCost
from libra.plan.cpsat import STEP_TOLERANCE, AllocationModel, solve
from libra.plan.document import dump_plan
from libra.plan.price import price
from libra.plan.problem import Allocation, EngineShape, Fleet, InfeasiblePlanError, PlanRequest

FEW = settings(max_examples=60, deadline=None)


def rounding(request: PlanRequest) -> float:
    """Seconds by which the integer model and the floating-point price may differ."""
    return (len(request.workload.classes) + 3) * AllocationModel(request).tick


@FEW
@given(requests())
def test_the_bound_is_the_brute_force_optimum_up_to_rounding(request: PlanRequest) -> None:
    plan = solve(request)
    optimum = best_step(request)
    assert plan.proof.status == "optimal"
    assert plan.proof.bound <= optimum <= plan.proof.bound + rounding(request)
    assert optimum <= plan.predicted.step <= optimum * (1 + STEP_TOLERANCE) + rounding(request)


@FEW
@given(requests(with_current=True))
def test_within_the_tolerance_nothing_has_fewer_moves_then_buckets_then_seconds(request: PlanRequest) -> None:
    plan = solve(request)
    slack = rounding(request)
    limit = best_step(request) * (1 + STEP_TOLERANCE) - slack
    chosen = (move_count(request, plan.allocation), len(plan.allocation.buckets), plan.predicted.step - 2 * slack)
    for other in allocations(request):
        step = price(request, other).step
        if step <= limit:
            assert chosen <= (move_count(request, other), len(other.buckets), step)


@FEW
@given(requests())
def test_ties_go_to_the_first_allocation_in_order(request: PlanRequest) -> None:
    plan = solve(request)
    chosen = (len(plan.allocation.buckets), plan.predicted)
    ties = [other for other in allocations(request) if (len(other.buckets), price(request, other)) == chosen]
    assert plan.allocation == min(ties, key=lambda other: place_in_order(request, other))


def place_in_order(request: PlanRequest, allocation: Allocation) -> tuple[object, ...]:
    engines = {bucket.shape: bucket.engines for bucket in allocation.buckets}
    names = [shape.name for shape in request.shapes]
    serving = [
        names.index(bucket.shape)
        for cls in request.workload.classes
        for bucket in allocation.buckets
        if bucket.above < cls.peak_context <= bucket.up_to
    ]
    return (allocation.replicas, [engines.get(name, 0) for name in names], serving)


@FEW
@given(requests(with_current=True))
def test_a_plan_prices_its_own_allocation_and_is_proven_no_better_than_its_bound(request: PlanRequest) -> None:
    plan = solve(request)
    assert plan.request == request
    assert plan.allocation in allocations(request)
    assert plan.predicted == price(request, plan.allocation)
    assert plan.proof.bound <= plan.predicted.step
    assert plan.proof.gap * plan.predicted.step == pytest.approx(plan.predicted.step - plan.proof.bound)


@settings(max_examples=20, deadline=None)
@given(requests(with_current=True), st.integers(0, 3))
def test_the_same_request_gives_the_same_bytes(request: PlanRequest, seed: int) -> None:
    assert dump_plan(solve(request, seed=seed)) == dump_plan(solve(request, seed=seed))


BARELY = EngineShape("barely", 6000, 16, 4000)

IMPOSSIBLE = [
    ("no core", replace(REQUEST, fleet=Fleet(0, 2, 2)), "fleet.core is 0.*at least one device must always train"),
    ("no engine", replace(REQUEST, fleet=Fleet(4, 0, 0)), "no device is left for a rollout engine: all 4 are core"),
    (
        "too short",
        replace(REQUEST, shapes=REQUEST.shapes[:1]),
        r"holds the longest context of 5000 tokens; there are: short \(max_model_len 2000, kv_tokens 10000\)",
    ),
    ("too little memory", replace(REQUEST, shapes=(BARELY,)), r"barely \(max_model_len 6000, kv_tokens 4000\)"),
    ("no shape", replace(REQUEST, shapes=()), "there are: none; add a shape"),
]


@pytest.mark.parametrize(("request_", "cause"), [row[1:] for row in IMPOSSIBLE], ids=[row[0] for row in IMPOSSIBLE])
def test_a_request_that_no_allocation_can_serve_is_refused_with_the_cause(request_: PlanRequest, cause: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=cause):
        solve(request_)


def test_every_device_but_one_may_be_needed_for_training() -> None:
    """Hybrids alone generate, so one of them has to."""
    plan = solve(replace(REQUEST, fleet=Fleet(1, 2, 0)))
    assert plan.allocation.replicas + plan.allocation.engines == 3
    assert plan.allocation.engines >= 1


def test_a_known_plan() -> None:
    """One engine with many seats for the many, two with a single seat for the few.

    Short has 42 seats and memory for them, long has 1. The first bucket's load is 6 * 0.474 of SHORT and 1 * 1.895 of
    LONG, the second's 1 * 5.8: with the weight loads 5.04 s on one short engine and 3.2 s on each of two long ones.
    Any other split leaves one long engine alone (6.1 s) or puts everything on long engines (7.1 s).
    """
    short, long = REQUEST.shapes
    patient = replace(
        REQUEST,
        shapes=(replace(short, max_num_seqs=64, kv_tokens=1_000_000), replace(long, max_num_seqs=1)),
        workload=replace(WORKLOAD, max_staleness=15, router_hit=1.0),
    )
    plan = solve(patient)
    assert plan.allocation == two_buckets(1, 1, 2)
    assert plan.predicted.step == pytest.approx(6 * (10 / 420 + 0.45) + (40 / 420 + 1.8) + 0.3)
    assert plan.predicted.bottleneck == "rollout"


def test_classes_of_equal_length_stay_together() -> None:
    """One of them alone would be better off in a bucket of its own, which no range of lengths can say."""
    busy = replace(SHORT, share=0.5, generated=2000.0)
    few_seats = replace(REQUEST.shapes[1], max_num_seqs=1)
    twins = replace(
        REQUEST,
        shapes=(REQUEST.shapes[0], few_seats),
        workload=replace(WORKLOAD, max_staleness=15, longest_context=5000, classes=(replace(SHORT, share=0.5), busy)),
    )
    assert solve(twins).allocation in allocations(twins)
    assert len(solve(twins).allocation.buckets) == 1


@pytest.mark.parametrize("cut", [1000, 2000])
def test_ranges_stay_when_others_are_no_better(cut: int) -> None:
    """Training bounds the step whatever the ranges are."""
    middle = replace(SHORT, peak_context=2000, share=0.25)
    current = two_buckets(2, 1, 1, cut=cut)
    request = replace(
        REQUEST,
        profile=replace(REQUEST.profile, train=replace(REQUEST.profile.train, per_token=1.0)),
        workload=replace(
            WORKLOAD, classes=(replace(SHORT, share=0.5), middle, replace(SHORT, share=0.25, peak_context=4000))
        ),
        current=current,
    )
    assert solve(request).allocation == current


def test_no_part_of_the_tolerance_is_given_away() -> None:
    """A second trainer shortens the step by 0.24 %, at no move and no bucket more."""
    shapes = (replace(REQUEST.shapes[1], max_num_seqs=4),)
    classes = (SHORT, replace(LONG, tool_seconds=300.0))
    assert solve(replace(REQUEST, shapes=shapes, workload=replace(WORKLOAD, classes=classes))).allocation.replicas == 2


@pytest.mark.parametrize("factor", [1e-6, 1e-5, 1.0, 1e3, 1e6])
def test_the_bound_holds_for_steps_of_microseconds_and_of_months(factor: float) -> None:
    """Below a tick everything is rounding; above a few minutes the tick is coarser than a microsecond."""
    engine = EngineCost(*(seconds * factor for seconds in astuple(REQUEST.profile.engine)))
    train = TrainCost(*(seconds * factor for seconds in astuple(REQUEST.profile.train)))
    switch = replace(REQUEST.profile.switch, weight_load=0.0)
    classes = tuple(
        replace(SHORT, share=0.125, peak_context=500 * (j + 1), generated=100.0 * (j + 1), tool_seconds=0.0)
        for j in range(8)
    )
    request = replace(
        REQUEST,
        fleet=Fleet(2, 6, 8),
        profile=replace(REQUEST.profile, engine=engine, train=train, switch=switch),
        workload=replace(WORKLOAD, trajectories=64, max_staleness=3, router_hit=0.8, classes=classes),
    )
    plan = solve(request)
    assert plan.proof.status == "optimal"
    assert 0 <= best_step(request) - plan.proof.bound <= rounding(request)


def test_a_search_without_time_for_any_plan_names_the_limit() -> None:
    with pytest.raises(RuntimeError, match="deterministic_limit; raise it"):
        solve(REQUEST, deterministic_limit=0.0)


@FEW
@given(requests(with_current=True), st.floats(1e-6, 1e-3))
def test_a_search_that_is_cut_short_vouches_only_for_what_it_proved(request: PlanRequest, limit: float) -> None:
    try:
        plan = solve(request, deterministic_limit=limit)
    except RuntimeError:
        return
    optimum = best_step(request)
    assert plan.allocation in allocations(request)
    assert plan.proof.bound <= optimum
    if plan.proof.status == "optimal":
        assert plan.predicted.step <= optimum * (1 + STEP_TOLERANCE) + rounding(request)
