"""The solver against every allocation there is, and the causes it names when there is none."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.enumerate_plans import allocations, best_step, move_count, requests
from oracles.small_request import REQUEST, WORKLOAD, two_buckets

from libra.cost.device import EngineCost
from libra.plan.cpsat import STEP_TOLERANCE, AllocationModel, solve
from libra.plan.document import dump_plan
from libra.plan.price import price
from libra.plan.problem import Allocation, EngineShape, Fleet, InfeasiblePlanError, PlanRequest

KNOWN = two_buckets(1, 2, 1)
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
    """With much staleness work decides: two short engines for the many, one long engine for the few."""
    patient = replace(REQUEST, workload=replace(WORKLOAD, max_staleness=15, router_hit=1.0))
    plan = solve(patient)
    assert plan.allocation == KNOWN
    assert plan.predicted.bottleneck == "rollout"


@pytest.mark.parametrize("factor", [1.0, 1e3, 1e6])
def test_long_steps_do_not_overflow_the_solver(factor: float) -> None:
    """A coarser tick replaces the microsecond where sums of costs would leave the solver's range."""
    engine = EngineCost(*(seconds * factor for seconds in astuple(REQUEST.profile.engine)))
    slow = replace(REQUEST, profile=replace(REQUEST.profile, engine=engine))
    plan = solve(slow)
    assert plan.proof.bound == pytest.approx(best_step(slow), abs=rounding(slow), rel=0)


def test_a_search_that_is_cut_short_says_so() -> None:
    with pytest.raises(RuntimeError, match="deterministic_limit"):
        solve(REQUEST, deterministic_limit=0.0)
