"""Plans with prefill/decode pairs, simulated: rollouts, whole runs, and engines that change their role meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.two_kinds import LONGEST, paired_plan, paired_recipe
from posttrain_cases import Timetable, agents, run, seeing

from libra.plan.decision import ROLE_CHANGE, cluster_seconds, switch_cost
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.transition import group_transition
from libra.route.baselines import LeastLoaded
from libra.route.cmlfq import CMLFQ
from libra.sim.clock import seconds, ticks
from libra.sim.of_plan import planned_run, simulate_plan
from libra.sim.outcome.metrics import metrics_of
from libra.sim.planned_engines import planned_engines
from libra.sim.simulate import simulate
from libra.sim.training_run.outcome import SimulatedRun
from libra.sim.training_run.system import System
from libra.trajectory import Trajectory

RECIPE = paired_recipe(staleness=1)
ALONE = paired_plan(RECIPE, [("wide/tp1", 4, LONGEST)])
PAIR = paired_plan(RECIPE, [("1 fast/tp1 > 3 wide/tp1", 1, LONGEST)], ALONE.placement)
MIXED = paired_plan(RECIPE, [("wide/tp1", 1, 1000), ("1 fast/tp1 > 1 wide/tp1", 3, LONGEST)], PAIR.placement)
EPISODES = agents(4)
STEPS = 6


def log() -> list[Trajectory]:
    return [trajectory for number in range(8) for trajectory in EPISODES.group(number, 0)]


def test_a_bucket_has_its_prompts_on_one_kind_and_its_tokens_on_the_other() -> None:
    deployment, _ = planned_run(MIXED, log())
    roles = {(it.role.name, it.bucket, it.node) for it in deployment.engines}
    assert roles == {("colocated", 0, "wide-0"), ("prefill", 1, "fast-0"), ("decode", 1, "wide-0")}
    assert deployment.kv_transfer is not None and deployment.kv_transfer.bandwidth == 50e9 * 0.9 / 4
    result = simulate_plan(MIXED, log(), "length-by-prompt", learned=log())
    told = metrics_of(result)
    assert told.trajectories == told.trajectories_completed == RECIPE.batch
    assert told.finished + told.interrupted == told.requests
    assert planned_run(ALONE, log())[0].kv_transfer is None


def test_turns_that_stay_where_tokens_are_generated_need_no_placing_before() -> None:
    """The policy of the prefill engines hears of a trajectory with the first prompt that goes there."""
    deployment, work = planned_run(PAIR, log())
    network = deployment.kv_transfer
    assert network is not None
    some = {}
    for below in (0, 70, LONGEST):
        result = simulate(
            deployment.engines,
            work,
            "least-loaded",
            kv_transfer=replace(network, local_below=below),
            decode_route="cmlfq",
        )
        assert metrics_of(result).trajectories_completed == RECIPE.batch
        some[below] = sum(it.iterations for it in result.engines if it.name.startswith("fast"))
    assert some[0] > some[70] > some[LONGEST] == 0


def simulated(plan: object, changes: dict[int, object], *, drain: bool, exact: bool = False) -> SimulatedRun:
    timetable = Timetable(changes)  # type: ignore[arg-type]
    return run(System("s", plan, CMLFQ, lambda: timetable, drain=drain), EPISODES, STEPS, exact=exact)  # type: ignore[arg-type]


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("plans", [(ALONE, {1: PAIR, 3: MIXED}), (MIXED, {2: ALONE}), (PAIR, {})])
def test_whole_runs_train_on_every_group_once(plans: tuple[object, dict[int, object]], drain: bool) -> None:
    first, changes = plans
    with seeing() as seen:
        outcome = simulated(first, changes, drain=drain)
    assert [step.trajectories for step in outcome.steps] == [RECIPE.batch] * STEPS
    groups = [name for batch in seen.batches for name, _ in batch]
    assert len(set(groups)) == len(groups) == STEPS * RECIPE.prompts
    cluster = seen.cluster
    assert all(request.status in ("finished", "interrupted") for request in cluster.requests)
    assert cluster.pairs is not None and cluster.pairs.idle and cluster.pairs.transfers > 0
    assert all(engine.pool.held == 0 for engine in cluster.engines if not engine.closed)


@pytest.mark.parametrize("drain", [True, False])
def test_visiting_every_iteration_gives_the_same_run(drain: bool) -> None:
    changes: dict[int, object] = {1: PAIR, 3: MIXED, 4: PAIR}
    assert simulated(ALONE, changes, drain=drain) == simulated(ALONE, changes, drain=drain, exact=True)


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_comes_back_in_its_new_role(drain: bool) -> None:
    """After the switch and, drained, after what it had; dropped, that goes on elsewhere at once."""
    timetable = Timetable({2: PAIR})
    with seeing() as seen:
        outcome = run(System("s", ALONE, LeastLoaded, lambda: timetable, drain=drain), EPISODES, STEPS)
    decided = ticks(outcome.changes[0].seconds)
    specs = seen.cluster.specs
    changed = {spec.name for spec in planned_engines(PAIR) if spec.role.name == "decode"}
    assert changed < {spec.name for spec in planned_engines(ALONE)}
    for name in changed:
        old, new = (index for index, spec in enumerate(specs) if spec.name == name)
        assert [specs[old].role.name, specs[new].role.name] == ["colocated", "decode"]
        its = [it for it in seen.cluster.requests if it.engine == old]
        begins = min(it.start for it in seen.iterations if it.engine == new)
        last = max([decided, *(it.finish or 0 for it in its)]) if drain else decided
        assert begins >= last + ticks(ROLE_CHANGE)
        assert all(it.arrival <= decided for it in its)
        assert not drain or all(it.status == "finished" for it in its)
        assert drain or all(it.start <= decided for it in seen.iterations if it.engine == old)
    assert seconds(last) < outcome.seconds


def test_a_role_change_is_priced_below_a_start() -> None:
    request = PAIR.request
    assert isinstance(request, ClusterRequest)
    problem, switch = request.menu().problem, switch_cost(request)
    kept = group_transition(PAIR.allocation, PAIR.allocation, PAIR.placement, PAIR.placement)
    assert cluster_seconds(problem, kept, switch) == 0.0
    swapped = tuple(
        it if it.role != "decode" else type(it)("prefill", it.name, it.bucket, it.pool, it.nodes, it.gpus)
        for it in PAIR.placement
    )
    change = group_transition(PAIR.allocation, PAIR.allocation, PAIR.placement, swapped)
    assert {str(move.before).rpartition(" ")[2] for move in change.moves} == {"decode", "idle"}
    assert cluster_seconds(problem, change, switch) == ROLE_CHANGE
    started = group_transition(ALONE.allocation, PAIR.allocation, ALONE.placement, PAIR.placement)
    assert cluster_seconds(problem, started, switch) == switch.engine_start  # of the H100, which had nothing to do
