"""What a training loop calls: one value, whose plans are the same however and wherever they are made."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from oracles.small_cluster import A800, CLASSES, CLUSTER, LONG, QWEN_06B, QWEN_14B, RECIPE, SHORT
from tables import by_name

from libra.config.recipe import Mode, Recipe
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.lengths import LengthTracker
from libra.plan.options.price import infeasibility, price
from libra.plan.plan import Plan, dump_plan, make_plan, parse_plan
from libra.plan.planner import CLASSES as MOST_CLASSES
from libra.plan.planner import Planner, rooflines
from libra.plan.problem import InfeasiblePlanError
from libra.trajectory import Trajectory, Turn

ROOT = Path(__file__).parents[2]
PLANNER = Planner(CLUSTER, QWEN_06B, RECIPE)
MIXED = Cluster((A800, NodeClass("l40s", 2, 4, GPUS["L40S"], intra_bandwidth=32e9, inter_bandwidth=12.5e9)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return PLANNER.plan(CLASSES)


def recipe(mode: Mode) -> Recipe:
    return Recipe(batch=64, samples_per_prompt=8, max_length=8192, mode=mode)


def devices(plan: Plan) -> list[tuple[str, int, int]]:
    return [(group.pool, node, gpu) for group in plan.placement for node in group.nodes for gpu in group.gpus]


PLANNED = [
    ("async", Planner(CLUSTER, QWEN_06B, recipe("async"))),
    ("sync", Planner(CLUSTER, QWEN_06B, recipe("sync"))),
    ("colocated", Planner(CLUSTER, QWEN_06B, recipe("colocated"))),
    ("two classes of nodes", Planner(MIXED, QWEN_06B, RECIPE)),
    ("a larger model", Planner(CLUSTER, QWEN_14B, RECIPE)),
]


@pytest.mark.parametrize("planner", [row[1] for row in PLANNED], ids=[row[0] for row in PLANNED])
def test_a_plan_is_proven_priced_and_placed(planner: Planner) -> None:
    plan = planner.plan(CLASSES)
    problem = planner.problem(CLASSES)
    assert plan.request == planner.request(CLASSES)
    assert plan.proof.status == "optimal"
    assert 0 <= plan.proof.gap <= 1e-3
    assert plan.proof.bound <= plan.predicted.step * (1 + 1e-9)
    assert infeasibility(problem, plan.allocation) is None
    assert plan.predicted == price(problem, plan.allocation)
    assert len(plan.max_num_seqs) == len(plan.allocation.buckets)
    # The layout is that of the option, and its groups are as large as its replicas.
    assert plan.layout is not None
    training = [group for group in plan.placement if group.role == "train"]
    assert len(training) == plan.allocation.replicas == plan.layout.dp
    assert {group.devices for group in training} == {plan.layout.replica_devices}
    assert len(plan.placement) - len(training) == plan.allocation.engines
    if planner.recipe.mode != "colocated":
        assert len(set(devices(plan))) == len(devices(plan)) <= planner.cluster.devices


def test_a_plan_needs_no_profile_but_takes_one() -> None:
    profiles = rooflines(CLUSTER, QWEN_06B, RECIPE)
    assert PLANNER.request(CLASSES).profiles == profiles
    slow = tuple(replace(profile, model=QWEN_06B.name) for profile in rooflines(CLUSTER, QWEN_14B, RECIPE))
    with pytest.raises(ValueError, match=r"is of Qwen/Qwen3-14B on A800; give one of Qwen/Qwen3-0\.6B"):
        replace(PLANNER, profiles=rooflines(CLUSTER, QWEN_14B, RECIPE)).request(CLASSES)
    assert replace(PLANNER, profiles=slow).request(CLASSES).profiles == slow
    assert replace(PLANNER, profiles=slow).plan(CLASSES).predicted.step > PLANNER.plan(CLASSES).predicted.step


def trajectory(number: int) -> Trajectory:
    turns = (Turn(20 + number, "tool", "ok", 30, 0.5), Turn(10, None, None, 0))
    return Trajectory(f"t{number}", "p", "task", 100, turns, None, 0, finished=True)


def test_a_tracker_is_asked_for_as_many_classes_as_are_planned_with() -> None:
    tracker = LengthTracker()
    for number in range(2000):
        tracker.observe(trajectory(number))
    request = PLANNER.request(tracker)
    assert request.classes == tracker.classes(MOST_CLASSES)
    assert PLANNER.plan(tracker) == PLANNER.plan(tracker.classes(MOST_CLASSES))


def test_what_runs_stays_where_it_is(plan: Plan) -> None:
    again = PLANNER.plan(CLASSES, plan)
    assert again.allocation == plan.allocation
    assert again.placement == plan.placement
    assert plan.layout is not None
    assert again.request == replace(plan.request, current=plan.allocation, held=(("a800", plan.layout),))
    # Placed the other way round, it stays the other way round.
    mirrored = replace(
        plan,
        placement=tuple(
            replace(group, nodes=tuple(sorted(1 - node for node in group.nodes))) for group in plan.placement
        ),
    )
    places = {(group.kind, group.nodes, group.gpus) for group in mirrored.placement}
    assert {(group.kind, group.nodes, group.gpus) for group in PLANNER.plan(CLASSES, mirrored).placement} == places


def test_a_plan_on_other_nodes_and_in_another_mode_is_no_obstacle() -> None:
    before = Planner(Cluster((replace(A800, count=4, gpus=4),)), QWEN_06B, recipe("colocated")).plan(CLASSES)
    after = PLANNER.plan(CLASSES, before)
    assert after.allocation == PLANNER.plan(CLASSES).allocation
    assert len(set(devices(after))) == len(devices(after))
    assert max(node for _, node, _ in devices(after)) < 2


def test_asynchronous_training_without_staleness_is_synchronous() -> None:
    eager = Recipe(batch=64, samples_per_prompt=8, max_length=8192, mode="async", staleness=0)
    plans = [Planner(CLUSTER, QWEN_06B, each).plan(CLASSES) for each in (eager, recipe("sync"))]
    assert plans[0].predicted == plans[1].predicted
    assert plans[0].allocation == plans[1].allocation


def test_plans_survive_pickling_and_answer_their_own_requests(plan: Plan) -> None:
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert make_plan(parse_plan(dump_plan(again)).request) == plan
    assert pickle.loads(pickle.dumps(PLANNER)) == PLANNER


def test_threads_may_share_a_planner() -> None:
    together = threading.Barrier(4)

    def ask(classes: Sequence[object]) -> str:
        together.wait(timeout=60)
        return dump_plan(PLANNER.plan(classes))  # type: ignore[arg-type]

    questions = [CLASSES, (replace(LONG, share=1.0),)] * 2
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, questions))
    assert answers == [dump_plan(PLANNER.plan(classes)) for classes in questions]


def test_every_process_gives_the_same_bytes() -> None:
    code = (
        "import hashlib\n"
        "from oracles.small_cluster import CLASSES\n"
        "from plan.test_planner import MIXED, QWEN_06B, RECIPE, Planner, dump_plan\n"
        "text = dump_plan(Planner(MIXED, QWEN_06B, RECIPE).plan(CLASSES))\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    here = hashlib.sha256(dump_plan(Planner(MIXED, QWEN_06B, RECIPE).plan(CLASSES)).encode()).hexdigest()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "tests")},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert (done.returncode, done.stdout) == (0, here + "\n"), done.stderr


def test_a_model_that_fits_nowhere_has_no_plan() -> None:
    one = Cluster((replace(A800, count=1, gpus=1),))
    with pytest.raises(InfeasiblePlanError, match="no layout trains Qwen/Qwen3-14B on any class of nodes"):
        Planner(one, QWEN_14B, RECIPE).plan(CLASSES)


REFUSED = [
    ("no class", (), "classes is empty"),
    ("half of the trajectories", (replace(SHORT, share=0.5),), "the shares sum to 0.5"),
    ("longer than allowed", (replace(LONG, share=1.0, peak_context=8193),), r"classes\[0\].peak_context is 8193"),
]


@by_name("classes, message", REFUSED)
def test_statistics_that_do_not_fit_are_refused(classes: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PLANNER.plan(classes)  # type: ignore[arg-type]


def test_an_empty_tracker_is_refused() -> None:
    with pytest.raises(ValueError, match="trajector"):
        PLANNER.plan(LengthTracker())
