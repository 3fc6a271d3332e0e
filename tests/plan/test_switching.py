"""What changes on a cluster are, and what they cost, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_14B, RECIPE

from libra.cost.device import SwitchCost
from libra.plan.allocation import Allocation, Bucket
from libra.plan.decision import ENGINE_START, TRAINER_START, live_refill, switch_cost, switch_seconds
from libra.plan.planner import Planner
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption
from libra.plan.transition import group_transition

REQUEST = Planner(CLUSTER, QWEN_14B, RECIPE).request(CLASSES)
SWITCH = SwitchCost(engine_start=50.0, trainer_join=30.0, weight_load=2.0)


def engine(shape: str, devices: int) -> EngineOption:
    return EngineOption(shape, "pool", devices, 4, 5000, 0.0, ((1.0, 1.0),), (0.0, 0.0), (0.0, 0.0))


PROBLEM = Problem(
    pools=(Pool("pool", 2, 8),),
    engines=(engine("tp1", 1), engine("tp4", 4)),
    training=(TrainingOption("a", "pool", 4, 2, 1.0, 0.0), TrainingOption("b", "pool", 8, 2, 1.0, 0.0)),
    peaks=(1000, 5000),
    expected=(True, True),
    longest_context=5000,
    recall_known=((1.0, 1.0),),
    recall_possible=((1.0, 1.0),),
)


def allocation(replicas: int, small: int, large: int, layout: str = "a", cut: int = 1000) -> Allocation:
    return Allocation(replicas, (Bucket("tp1", small, 0, cut), Bucket("tp4", large, cut, 5000)), layout)


TABLE = [
    ("nothing", allocation(2, 4, 2), (), 0.0),
    ("ranges only", allocation(2, 4, 2, cut=2000), (), 0.0),
    (
        "engines start side by side",
        allocation(2, 6, 3),
        ("idle -> rollout:tp4", "2 x idle -> rollout:tp1"),
        50.0,
    ),
    ("a replica joins", allocation(3, 4, 2), ("idle -> train:a",), 30.0),
    ("a replica leaves", allocation(1, 4, 2), ("train:a -> idle",), 0.0),
    # Another layout starts all replicas anew.
    ("another layout", allocation(2, 4, 2, "b"), ("2 x train:a -> idle", "2 x idle -> train:b"), 30.0),
    # 4 of 12 generating devices lose their contexts; 60 device seconds a third of which are made up for on 12 devices.
    (
        "one shape for another",
        allocation(2, 8, 1),
        ("rollout:tp4 -> idle", "4 x idle -> rollout:tp1"),
        50.0 + 60 / 3 / 12,
    ),
    # 2 of 12 stop, 10 remain; a replica starts meanwhile.
    (
        "from engines to a replica",
        allocation(3, 2, 2),
        ("2 x rollout:tp1 -> idle", "idle -> train:a"),
        30.0 + 60 / 6 / 10,
    ),
]


@pytest.mark.parametrize(("wanted", "way", "cost"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_changes_and_their_seconds(wanted: Allocation, way: tuple[str, ...], cost: float) -> None:
    current = allocation(2, 4, 2)
    transition = group_transition(current, wanted)
    ranges = ("new bucket ranges",) if transition.rebuckets else ()
    assert transition.words() == (*way, *ranges)
    assert switch_seconds(PROBLEM, current, wanted, SWITCH, refill=60.0) == pytest.approx(cost)


def test_a_shape_that_is_no_longer_there_loses_nothing_more() -> None:
    gone = Allocation(2, (Bucket("tp2", 4, 0, 1000), Bucket("tp4", 2, 1000, 5000)), "a")
    assert switch_seconds(PROBLEM, gone, allocation(2, 4, 2), SWITCH, refill=60.0) == 50.0


def test_stated_costs_of_a_cluster() -> None:
    """Qwen3-14B: 14.77e9 parameters; 16 bytes each cross 200 Gb/s, 90 % of it achieved; 2 bytes load at 68 GB/s."""
    cost = switch_cost(REQUEST)
    assert cost.weight_load == pytest.approx(1.2 + 14.77e9 * 2 / 68e9, rel=1e-3)
    assert cost.engine_start == ENGINE_START + cost.weight_load
    assert cost.trainer_join == pytest.approx(TRAINER_START + 14.77e9 * 16 / 22.5e9, rel=1e-3)


def test_refill_grows_with_what_is_alive() -> None:
    """At 312 TFLOP/s two FLOPs for each of 14.77e9 parameters and each live token are the least that prefill takes."""
    seconds = live_refill(REQUEST)
    tokens = 2 * RECIPE.batch * sum(cls.share * cls.context_sum / cls.generated for cls in CLASSES)
    assert 1.0 < seconds / (tokens * 2 * 14.77e9 / 312e12) < 4.0
    assert live_refill(replace(REQUEST, recipe=RECIPE.model_copy(update={"staleness": 3}))) == 2 * seconds
