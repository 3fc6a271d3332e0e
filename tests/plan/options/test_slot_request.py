"""What a request for one machine may ask, and the prices it is turned into, against numbers worked out by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from oracles.small_request import LONG, PROFILE, REQUEST, SHORT, WORKLOAD, one_bucket, slot_requests, two_buckets
from tables import by_name

from libra.plan.allocation import ONE_DEVICE, Allocation
from libra.plan.model.solve import solve
from libra.plan.options.price import bucket_prices, price
from libra.plan.options.slots import EngineShape, LentSlots, SlotCounts, SlotRequest
from libra.plan.problem import InfeasiblePlanError, Pool, TrainingOption
from libra.plan.solution import Prediction

MORE_STALE = replace(REQUEST, workload=replace(WORKLOAD, max_staleness=3))
SLOW_TRAINER = replace(MORE_STALE, profile=replace(PROFILE, train=replace(PROFILE.train, per_token=1e-3)))
FEW = replace(REQUEST, workload=replace(WORKLOAD, trajectories=3))
ORACLE = replace(REQUEST, workload=replace(WORKLOAD, router_hit=1.0))
SYNCHRONOUS = replace(REQUEST, workload=replace(WORKLOAD, max_staleness=0))
LITTLE_MEMORY = replace(
    REQUEST, shapes=(replace(REQUEST.shapes[0], kv_tokens=1000), replace(REQUEST.shapes[1], kv_tokens=5000))
)


def longest(short: float, long: float, trajectories: int = 8) -> float:
    """Seconds of the longest, given those of each class: the share of steps that have a LONG, and of those that have
    only SHORT, where a quarter of the trajectories are LONG."""
    no_long, no_short = math.exp(-0.25 * trajectories), math.exp(-0.75 * trajectories)
    return (1 - no_long) * long + no_long * (1 - no_short) * short


# Base case, 1 trainer and 3 engines: 16 trajectories in flight, so 5, 8 or 16 seats on long; 4 on short.
#   work on short by seats, 0.0035 a token: SHORT 0.35 + 0.05 + 0.1 + 0.2 = 0.7, LONG 1.4 + 0.8 + 0.2 + 0.4 = 2.8
#   LONG's own share 0.5 * 0.5 = 0.25; short bucket 6 * 0.7 + 2 * 0.75 * 2.8 = 8.4
#   residence of LONG at 5 seats: 400 * (0.01 + 0.005 + 0.01) + 0.2 + 0.4 + 10 = 20.6
#   and of SHORT 100 * (0.01 + 0.005 + 0.0025) + 3.3 = 5.05
#   those that begin on short, with 4 seats: 400 * (0.01 + 0.004 + 0.008) + 10.6 = 19.4 and 4.9; a router that brings as
#   much as it can brings half of LONG's work to long, where it takes longer, and so is the one to have time for
#   training 0.5 + 2 = 2.5, and 0.3 until engines have the weights
def begun(short: float, long: float, beginning: tuple[float, float] = (4.9, 19.4), trajectories: int = 8) -> float:
    """Half of its work where it begins."""
    return (longest(short, long, trajectories) + longest(*beginning, trajectories)) / 2


ALONE = (longest(5.05, 20.6) + 2.8) / 2
LATENCY = (begun(5.05, 20.6) + 2.8) / 2
PRICES = [
    ("base", REQUEST, two_buckets(1, 1, 2), Prediction(LATENCY, 8.7, 2.8, LATENCY, "latency")),
    ("more engines share the first bucket", REQUEST, two_buckets(1, 2, 1),
     Prediction(LATENCY, 4.5, 2.8, LATENCY, "latency")),
    # training 0.5 + 1 + 0.25
    ("a second trainer", REQUEST, two_buckets(2, 1, 1),
     Prediction(LATENCY - 0.375, 8.7, 2.05, LATENCY - 0.375, "latency")),
    # 32 in flight, 10 seats on long: residence 400 * (0.01 + 0.01 + 0.02) + 10.6 = 26.6
    # and of SHORT 100 * (0.01 + 0.01 + 0.005) + 3.3 = 5.8
    ("staleness hides latency", MORE_STALE, two_buckets(1, 1, 2),
     Prediction(8.7, 8.7, 2.8, (begun(5.8, 26.6) + 2.8) / 4, "rollout")),
    ("slow trainer", SLOW_TRAINER, two_buckets(1, 1, 2),
     Prediction(20.8, 8.7, 20.8, (begun(5.8, 26.6) + 20.8) / 4, "training")),
    # Nothing overlaps; 8 in flight, so 2 seats on long are enough: residence 400 * (0.01 + 0.002 + 0.004) + 10.6 = 17
    # and of SHORT 100 * (0.01 + 0.002 + 0.001) + 3.3 = 4.6. On short, too: with 2 seats at 0.006 a token SHORT has
    # 0.95 s of work, LONG 3.8, so 6 * 0.95 + 1.5 * 3.8; with 4, LONG would be there for longer
    ("synchronous", SYNCHRONOUS, two_buckets(1, 1, 2),
     Prediction(longest(4.6, 17) + 2.8, 11.7, 2.8, longest(4.6, 17) + 2.8, "latency")),
    # 6 in flight: 2 seats take least. 0.75 of a LONG a step. Load 2.25 * 0.95 + 0.75 * 0.75 * 3.8
    # training 0.5 + 0.75
    ("a class that is seldom there", FEW, two_buckets(1, 1, 2),
     Prediction((longest(4.6, 17, 3) + 1.55) / 2, 4.575, 1.55, (longest(4.6, 17, 3) + 1.55) / 2, "latency")),
    # LONG's own share 0.5: short 6 * 0.7 + 2 * 0.5 * 2.8 = 7
    ("an oracle router", ORACLE, two_buckets(1, 1, 2), Prediction(LATENCY, 7.3, 2.8, LATENCY, "latency")),
    # Work on short by memory (0.01 / 1000 + 1e-6 a token of context): SHORT 0.1+0.55+0.3 = 0.95, LONG 0.4+8.8+0.6 = 9.8
    # load 6 * 0.95 + 1.5 * 9.8 = 20.4
    # Memory of long holds 2.5 of LONG: residence 400 * (0.01 + 0.0025 + 0.005) + 10.6 = 17.6; that of short, which one
    # is generated in at a time, 400 * (0.01 + 0.001 + 0.002) + 10.6 = 15.8, and 4.6 for 2 of SHORT
    ("little memory", LITTLE_MEMORY, two_buckets(1, 1, 2),
     Prediction(20.7, 20.7, 2.8, (begun(5.05, 17.6, (4.6, 15.8)) + 2.8) / 2, "rollout")),
    # One bucket of 3 long engines at 0.003 a token: SHORT 0.3+0.05+0.1+0.2 = 0.65, LONG 1.2 + 0.8 + 0.2 + 0.4 = 2.6
    # load 6 * 0.65 + 2 * 2.6 = 9.1 over 3
    ("one bucket", REQUEST, one_bucket(1, 3), Prediction(ALONE, 9.1 / 3 + 0.3, 2.8, ALONE, "latency")),
    # All trajectories start in a first bucket that no class ends in: SHORT leaves 0.8 of its work there, LONG 0.75.
    # load 6 * 0.8 * 0.7 + 2 * 0.75 * 2.8 = 7.56
    ("an idle first bucket", REQUEST, two_buckets(1, 1, 2, cut=500),
     Prediction(LATENCY, 7.86, 2.8, LATENCY, "latency")),
]  # fmt: skip


@by_name("request_, allocation, wanted", PRICES)
def test_price(request_: SlotRequest, allocation: Allocation, wanted: Prediction) -> None:
    predicted = price(request_.menu().problem, allocation)
    assert predicted.bottleneck == wanted.bottleneck
    assert (predicted.step, predicted.rollout, predicted.training, predicted.latency) == pytest.approx(
        (wanted.step, wanted.rollout, wanted.training, wanted.latency)
    )


def test_max_num_seqs_are_those_with_which_some_number_of_engines_share_what_is_in_flight() -> None:
    # 16 in flight over 1, 2 or 3 engines: 16, 8 or 5 each, of which short seats 4.
    options = REQUEST.menu().problem.engines
    assert [(option.shape, option.max_num_seqs) for option in options] == [
        ("short", 4),
        ("long", 5),
        ("long", 8),
        ("long", 16),
    ]
    assert {(option.pool, option.devices, option.stall) for option in options} == {("slots", 1, 0.3)}


def test_an_engine_holds_no_more_than_its_length_and_its_memory() -> None:
    assert {(option.shape, option.holds) for option in REQUEST.menu().problem.engines} == {
        ("short", 2000),
        ("long", 6000),
    }
    assert {(option.shape, option.holds) for option in LITTLE_MEMORY.menu().problem.engines} == {
        ("short", 1000),
        ("long", 5000),
    }


def test_every_device_may_train_or_generate_as_its_role_allows() -> None:
    problem = REQUEST.menu().problem
    assert problem.pools == (Pool("slots", 4, 1),)
    assert problem.use_all_devices
    assert problem.one_bucket_per_shape
    assert problem.training == (
        TrainingOption(ONE_DEVICE, "slots", devices=1, replicas=1, seconds=2.8, publish=0.0),
        TrainingOption(ONE_DEVICE, "slots", devices=2, replicas=2, seconds=2.05, publish=0.0),
    )


def test_ranges_that_run_are_loaded_as_the_router_was_seen_to_hit_and_others_as_a_perfect_one_might() -> None:
    # LONG's own share of 2 * 2.6 is 0.25 as seen and 0.5 when perfect, over two engines.
    allocation = two_buckets(1, 1, 2)
    tried = replace(REQUEST, current=two_buckets(1, 2, 1))
    assert bucket_prices(REQUEST.menu().problem, allocation)[1].load == pytest.approx(0.5 * 5.2 / 2 + 0.3)
    assert bucket_prices(tried.menu().problem, allocation)[1].load == pytest.approx(0.25 * 5.2 / 2 + 0.3)


@settings(max_examples=30, deadline=None)
@given(slot_requests())
def test_work_of_a_step_is_that_of_all_its_trajectories(request: SlotRequest) -> None:
    """Against the rate at which each resource of an engine is used up."""
    cost, workload = request.profile.engine, request.workload
    memory = {shape.name: shape.kv_tokens for shape in request.shapes}
    for option in replace(request, lent=None).menu().problem.engines:
        for index, cls in enumerate(workload.classes):
            iterations = (cls.generated / option.max_num_seqs, cls.context_sum / memory[option.shape])
            busy = (
                cost.per_sequence * cls.generated
                + cost.per_context_token * cls.context_sum
                + cost.per_prefill_token * cls.prefill
                + cost.per_turn * cls.turns
            )
            wanted = [workload.trajectories * cls.share * (busy + cost.step * count) for count in iterations]
            assert [row[index] for row in option.work] == pytest.approx(wanted)


@settings(max_examples=30, deadline=None)
@given(slot_requests())
def test_every_device_has_a_role_that_it_may_have(request: SlotRequest) -> None:
    found = solve(request.menu().problem).allocation
    fleet = request.fleet
    assert fleet.core <= found.replicas <= fleet.core + fleet.hybrid
    lent = request.lent.devices if request.lent is not None else 0
    assert found.engines_by_shape["lent"] in (0, lent)
    assert found.replicas + found.engines == fleet.devices + found.engines_by_shape["lent"]
    assert len({bucket.shape for bucket in found.buckets}) == len(found.buckets)


INFEASIBLE = [
    (SlotCounts(0, 2, 2), "fleet.core is 0, and 2 hybrid and 2 rollout devices cannot replace it: .*one of them core"),
    (SlotCounts(4, 0, 0), "all 4 are core and always train; add a device to fleet.hybrid or fleet.rollout"),
]  # fmt: skip


@pytest.mark.parametrize(("fleet", "message"), INFEASIBLE, ids=["no core", "no engine"])
def test_a_fleet_that_cannot_train_and_generate_has_no_problem(fleet: SlotCounts, message: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=message):
        replace(REQUEST, fleet=fleet).menu()


REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("no name", lambda: EngineShape("", 1, 1, 1), "name of an engine shape is empty"),
    ("no length", lambda: EngineShape("a", 0, 1, 1), "max_model_len is 0; set it to 1 or more"),
    ("no seats", lambda: EngineShape("a", 1, 0, 1), "max_num_seqs is 0; set it to 1 or more"),
    ("no memory", lambda: EngineShape("a", 1, 1, 0), "kv_tokens is 0; set it to 1 or more"),
    ("negative core", lambda: SlotCounts(-1, 1, 1), "core is -1; set it to 0 or more"),
    ("negative hybrid", lambda: SlotCounts(1, -1, 1), "hybrid is -1; set it to 0 or more"),
    ("negative rollout", lambda: SlotCounts(1, 1, -1), "rollout is -1; set it to 0 or more"),
    ("no batch", lambda: replace(WORKLOAD, trajectories=0), "trajectories is 0; set it to 1 or more"),
    ("no group", lambda: replace(WORKLOAD, group_size=0), "group_size is 0; set it to 1 or more"),
    ("no turn", lambda: replace(WORKLOAD, max_turn_tokens=0), "max_turn_tokens is 0; set it to 1 or more"),
    ("negative staleness", lambda: replace(WORKLOAD, max_staleness=-1), "max_staleness is -1; set it to 0 or more"),
    ("train tokens", lambda: replace(WORKLOAD, train_tokens=float("nan")), "train_tokens is nan; give the expected"),
    ("router above 1", lambda: replace(WORKLOAD, router_hit=1.5), "router_hit is 1.5; give a share between 0 and 1"),
    ("no class", lambda: replace(WORKLOAD, classes=()), "classes is empty"),
    ("class too long", lambda: replace(WORKLOAD, longest_context=3999), "classes[1].peak_context is 4000; it lies"),
    ("class order", lambda: replace(WORKLOAD, classes=(LONG, SHORT)), "classes are not ordered; sort them"),
    ("two shapes of a name", lambda: replace(REQUEST, shapes=REQUEST.shapes[:1] * 2), "shapes: two have the same name"),
    ("shape order", lambda: replace(REQUEST, shapes=REQUEST.shapes[::-1]), "shapes are not ordered; sort them"),
]


@by_name("make, message", REFUSED)
def test_a_value_that_cannot_be_is_refused_with_its_field(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_lent_device_is_as_slow_as_its_share() -> None:
    """Its engine has a pool, a shape and prices of its own; those of one's own devices stay as they are."""
    shape = EngineShape("lent", 2000, 16, 20_000)
    few_long = (replace(SHORT, share=0.95), replace(LONG, share=0.05, before_first_return=0.0))
    workload = replace(WORKLOAD, trajectories=64, max_staleness=4, classes=few_long, router_hit=1.0)
    busy = replace(REQUEST, fleet=SlotCounts(1, 0, 1), workload=workload)
    alone, shared = busy.menu().problem, replace(busy, lent=LentSlots(shape, 2, 0.5)).menu().problem
    assert shared.pools == (Pool("slots", 2, 1), Pool("lent", 2, 1, serves=True))
    own = tuple(option for option in shared.engines if option.pool == "slots")
    lent = tuple(option for option in shared.engines if option.pool == "lent")
    assert own == alone.engines and {option.shape for option in lent} == {"lent"}
    whole = {option.max_num_seqs: option for option in own if option.shape == "long"}  # with the same memory
    assert {option.max_num_seqs for option in lent} & {*whole}
    for option in lent:
        if option.max_num_seqs in whole:
            for slow, fast in zip(option.work, whole[option.max_num_seqs].work, strict=True):
                assert slow == pytest.approx(tuple(2 * seconds for seconds in fast))
    solution = solve(shared)
    engines = solution.allocation.engines_by_shape
    assert engines["lent"] == 2 and solution.allocation.replicas == engines["long"] == 1
    assert solution.predicted.step < solve(alone).predicted.step


@pytest.mark.parametrize(
    ("lent", "message"),
    [
        (lambda: LentSlots(EngineShape("lent", 10, 1, 10), 0, 0.5), "devices is 0; set it to 1 or more"),
        (lambda: LentSlots(EngineShape("lent", 10, 1, 10), 1, 0.0), "share is 0.0; it is the share of a device's time"),
        (
            lambda: replace(REQUEST, lent=LentSlots(EngineShape("long", 10, 1, 10), 1, 0.5)),
            "shapes: two have the same name",
        ),
    ],
)
def test_lent_slots_that_cannot_be(lent: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lent()
