"""Plans that change while a run goes on: what stops, what goes on, and what is told to whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.small_cluster import QWEN_06B
from posttrain_cases import (
    LONGEST,
    ONE_NODE,
    TWO_NODES,
    Ruled,
    Seen,
    Timetable,
    agents,
    costs_of,
    layout_of,
    plan_of,
    recipe_of,
    run,
    seeing,
    single_turns,
)

from libra.cost.device import SwitchCost
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.plan.replanner import Replanner
from libra.route.baselines import LeastLoaded, RoundRobin
from libra.route.bucket import AttainedService
from libra.route.cmlfq import CMLFQ
from libra.route.expected_length import LengthPredictor
from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest
from libra.sim.clock import seconds, ticks
from libra.sim.planned_engines import planned_engines
from libra.sim.training_run.outcome import SimulatedRun
from libra.sim.training_run.system import Replanning, System
from libra.sim.workload.caller import EpisodeCaller
from libra.trajectory import Trajectory, Turn

GROUP = 4
SWITCH = SwitchCost(engine_start=1.5, trainer_join=1.0, weight_load=0.0)


@cache
def plans() -> tuple[Plan, Plan, Plan, Plan]:
    """`first`, two that keep one of its engines (with other lengths, and with others beside it), and one of none."""
    recipe = recipe_of(16, GROUP, staleness=2)
    first = plan_of(recipe, layout_of(2), [(1, 3, 1000), (2, 1, LONGEST)])
    fewer = plan_of(recipe, layout_of(2), [(2, 1, LONGEST)], placed=first.placement)
    others = plan_of(recipe, layout_of(2), [(1, 2, 600), (4, 1, LONGEST)], placed=first.placement)
    anew = plan_of(recipe, layout_of(4), [(4, 1, LONGEST)])
    assert not {it.name for it in planned_engines(first)} & {it.name for it in planned_engines(anew)}
    return first, fewer, others, anew


class Recording(LeastLoaded):
    """Least loaded, and a record of what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: defaultdict[str, list[int]] = defaultdict(list)  # tokens returned, by trajectory
        self.contexts: defaultdict[str, list[int]] = defaultdict(list)  # of its requests, in their order
        self.ended: list[str] = []
        self.gone: list[str] = []

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        self.contexts[request.trajectory_id].append(request.context_tokens)
        return super().place(request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        self.returns[request.trajectory_id].append(returned.returned_tokens)
        self.contexts[request.trajectory_id].append(request.context_tokens)
        return super().tool_returned(request, returned, fleet)

    def finished(self, trajectory: Trajectory) -> None:
        self.ended.append(trajectory.id)
        super().finished(trajectory)

    def instance_gone(self, instance: str) -> None:
        self.gone.append(instance)
        super().instance_gone(instance)


class Moving(Recording):
    """Each turn where there is least to do, wherever the one before was."""

    def __init__(self) -> None:
        super().__init__()
        self._sticky = False


def generated_by_trajectory(seen: Seen) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for request in seen.cluster.requests:
        assert request.status in ("finished", "interrupted")
        assert (request.generated == request.output_tokens) == (request.status == "finished")
        assert isinstance(request.owner, EpisodeCaller)
        tokens[request.owner.trajectory.id] += request.generated
    return tokens


def all_of(episodes: Ruled, groups: int) -> list[Trajectory]:
    return [trajectory for number in range(groups) for trajectory in episodes.group(number, 0)]


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 99),
    st.dictionaries(st.integers(1, 4), st.sampled_from([0, 1, 2, 3]), min_size=1),
    st.sampled_from([Recording, Moving]),
    st.booleans(),
)
@example(1, {1: 1}, Recording, True)
@example(3, {1: 3}, Recording, False)
def test_no_token_is_lost_or_made_twice(seed: int, table: dict[int, int], route: type[Recording], kv: bool) -> None:
    episodes = agents(GROUP, seed, mean=400)
    policies: list[Recording] = []

    def routing() -> Recording:
        policies.append(route())
        return policies[-1]

    with seeing() as seen:
        timetable = Timetable({version: plans()[which] for version, which in table.items()})
        system = System("s", plans()[0], routing, lambda: timetable, switch=SWITCH, move_kv=kv)
        outcome = run(system, episodes, 5)
    trajectories = all_of(episodes, 20)
    assert generated_by_trajectory(seen) == {it.id: it.generated_tokens for it in trajectories}
    interrupted = [request for request in seen.cluster.requests if request.status == "interrupted"]
    assert outcome.interrupted == len(interrupted)
    for request in interrupted:
        rest = min(
            (it for it in seen.cluster.requests if it.owner is request.owner and it.number > request.number),
            key=lambda it: it.number,
        )
        assert request.finish is not None and rest.arrival >= request.finish
        if table == {1: 1}:  # nobody waits for new engines
            assert rest.arrival == request.finish
        assert rest.prompt_tokens == request.prompt_tokens + request.generated
        assert rest.output_tokens == request.output_tokens - request.generated
    (policy,) = policies
    assert sorted(policy.ended) == sorted(it.id for it in trajectories)
    for it in trajectories:
        assert policy.returns[it.id] == [turn.returned_tokens for turn in it.turns[:-1]]  # each told once
        contexts = policy.contexts[it.id]
        assert contexts == sorted(contexts) and set(it.contexts()) <= set(contexts)
    assert not policy.snapshot()["live"]
    assert len({id(request) for request in seen.cluster.requests}) == len(seen.cluster.requests)


class Counting(AttainedService):
    """Attained service, and a record of what it was told of turns that run."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: dict[str, TurnRequest] = {}  # by trajectory
        self.outgrown: list[tuple[TurnRequest, int, int]] = []  # as placed, context, limit of its bucket
        self._limits: dict[str, int] = {}

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        self.placed[request.trajectory_id] = request
        return self._noted(request, super().place(request, fleet), fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        self.placed[request.trajectory_id] = request
        return self._noted(request, super().tool_returned(request, returned, fleet), fleet)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        who = request.trajectory_id
        assert request == self.placed[who]
        self.outgrown.append((request, request.context_tokens + generated_tokens, self._limits[who]))
        return self._noted(request, super().bucket_overrun(request, generated_tokens, fleet), fleet)

    def _noted(self, request: TurnRequest, placement: Placement | None, fleet: Fleet) -> Placement | None:
        if placement is not None:
            self._limits[request.trajectory_id] = fleet.limits[placement.bucket]
        return placement


def test_a_turn_leaves_its_bucket_with_the_token_that_outgrows_it_wherever_it_was_before() -> None:
    """A turn that was stopped by a change of the plan is counted from where it was placed anew."""
    policy = Counting()
    timetable = Timetable({1: plans()[1], 2: plans()[2]})
    with seeing() as seen:
        run(System("s", plans()[0], lambda: policy, lambda: timetable, switch=SWITCH), agents(GROUP, 1, mean=400), 5)
    stopped = set()
    starts: dict[str, set[int]] = {}  # contexts of its turns
    for request in seen.cluster.requests:
        assert isinstance(request.owner, EpisodeCaller)
        trajectory = request.owner.trajectory
        starts[trajectory.id] = set(trajectory.contexts())
        if request.status == "interrupted":
            stopped.add((trajectory.id, request.prompt_tokens + request.generated))
    anew = 0
    for placed, context, limit in policy.outgrown:
        assert context == limit + 1 and (placed.trajectory_id, context) in stopped
        anew += placed.context_tokens not in starts[placed.trajectory_id]
    assert 0 < anew < len(policy.outgrown)


@pytest.mark.parametrize("route", [LeastLoaded, AttainedService, LengthPredictor, CMLFQ])
def test_engines_serve_from_when_they_are_ready_until_they_close(route: type) -> None:
    first, _, others, _ = plans()
    with seeing() as seen:
        system = System("s", first, route, lambda: Timetable({2: others}), switch=SWITCH, serve_by_priority=True)
        outcome = run(system, agents(GROUP, 2), 6)
    (change,) = outcome.changes
    decided = ticks(change.seconds)
    names = {spec.name for spec in planned_engines(first)}, {spec.name for spec in planned_engines(others)}
    assert names[0] & names[1] and change.stopped == len(names[0] - names[1])
    assert change.started == len(names[1] - names[0]) > 0
    assert (change.training_devices, change.generating_devices) == (2, 6)
    cluster = seen.cluster
    assert [spec.name for spec in cluster.specs[4:]] == [
        spec.name for spec in planned_engines(others) if spec.name not in names[0]
    ]
    for engine, spec in zip(cluster.engines, cluster.specs, strict=True):
        its = [iteration for iteration in seen.iterations if iteration.engine == engine.index]
        requests = [request for request in cluster.requests if request.engine == engine.index]
        assert its and requests
        if spec.name not in names[1]:
            assert engine.closed and max(it.start for it in its) <= decided
            assert all(request.arrival <= decided for request in requests)
        elif spec.name not in names[0]:
            ready = decided + ticks(SWITCH.engine_start)
            assert min(it.start for it in its) >= ready and all(it.arrival >= ready for it in requests)
        else:  # goes on, with all that it has in its cache
            assert min(it.start for it in its) < decided < max(it.start for it in its)
    kept = next(i for i, spec in enumerate(cluster.specs) if spec.name in names[0] & names[1])
    across = [it for it in cluster.requests if it.engine == kept and it.arrival < decided < (it.finish or 0)]
    assert across and all(it.preemptions == 0 for it in across)
    if route is LeastLoaded:  # others stop turns that outlive their bucket
        assert all(it.status == "finished" for it in across)
        before = {id(it.owner) for it in across}
        after = [it for it in cluster.requests if it.engine == kept and it.arrival > decided and id(it.owner) in before]
        assert after and all(it.cached_tokens > 0 for it in after)


def test_engines_that_are_wanted_again_start_again() -> None:
    """Called off before they are ready, and called for once more: what was begun is not taken up where it was left."""
    recipe = recipe_of(64, 8, staleness=1)
    first = plan_of(recipe, layout_of(1), [(1, 6, LONGEST)])
    fewer = plan_of(recipe, layout_of(1), [(1, 5, LONGEST)], placed=first.placement)
    (extra,) = {it.name for it in planned_engines(first)} - {it.name for it in planned_engines(fewer)}
    episodes = single_turns(lambda *_: 1, samples=8, prompt=8000)
    training = seconds(costs_of(first, [8001] * 64)[0])
    switch = SwitchCost(engine_start=2.5 * training, trainer_join=1.0, weight_load=0.0)
    with seeing() as seen:
        timetable = Timetable({1: first, 2: fewer, 3: first})
        outcome = run(System("s", fewer, LeastLoaded, lambda: timetable, switch=switch), episodes, 8)
    assert [change.started for change in outcome.changes] == [1, 0, 1]
    assert [spec.name for spec in seen.cluster.specs].count(extra) == 1
    at = len(seen.cluster.specs) - 1
    first_used = min(it.start for it in seen.iterations if it.engine == at)
    assert first_used >= ticks(outcome.changes[2].seconds) + ticks(switch.engine_start)


# Trainers


def trained(first: Plan, *changes: tuple[int, Plan], join: float, steps: int = 7) -> SimulatedRun:
    """A run that training bounds: the trainer never waits for a batch, only for itself."""
    switch = SwitchCost(engine_start=1.0, trainer_join=join, weight_load=0.0)
    system = System("s", first, LeastLoaded, lambda: Timetable(dict(changes)), switch=switch)
    return run(system, single_turns(lambda *_: 1, samples=8, prompt=8000), steps)


@cache
def trainers(dp: int, tp: int = 1) -> Plan:
    recipe = recipe_of(64, 8, staleness=2)
    start = plan_of(recipe, layout_of(1), [(1, 4, LONGEST)])
    return plan_of(recipe, layout_of(dp, tp=tp), [(1, 4, LONGEST)], placed=start.placement)


def step_seconds(plan: Plan) -> float:
    return seconds(costs_of(plan, [8001] * 64)[0])


@cache
def fewer_engines() -> Plan:
    return plan_of(recipe_of(64, 8, staleness=2), layout_of(2), [(1, 3, LONGEST)], placed=trainers(2).placement)


# Replicas of the plans by version, seconds to join in steps of one replica -> replicas that train each step
REPLICAS: dict[str, tuple[dict[int, Plan], float, list[int]]] = {
    "leave at once": ({0: trainers(2), 2: trainers(1)}, 5.0, [2, 2, 1, 1, 1, 1, 1]),
    # Decided at the end of step 2; step 4 begins one step later, too early, and step 5 in time.
    "join when they are ready": ({0: trainers(1), 2: trainers(2)}, 1.5, [1, 1, 1, 1, 2, 2, 2]),
    "join though engines change": ({0: trainers(1), 2: trainers(2), 3: fewer_engines()}, 1.5, [1, 1, 1, 1, 2, 2, 2]),
    "are no longer wanted": ({0: trainers(1), 2: trainers(2), 3: trainers(1)}, 1.5, [1] * 7),
    "are wanted once more and begin anew": (
        {0: trainers(1), 1: trainers(2), 2: trainers(1), 3: trainers(2)},
        2.5,
        [1, 1, 1, 1, 1, 1, 2],
    ),
}


@pytest.mark.parametrize(("plans", "join", "replicas"), REPLICAS.values(), ids=REPLICAS)
def test_replicas_leave_and_join_while_training_goes_on(
    plans: dict[int, Plan], join: float, replicas: list[int]
) -> None:
    first, *changes = (plans[version] for version in plans)
    outcome = trained(first, *zip([*plans][1:], changes, strict=True), join=join * step_seconds(trainers(1)))
    assert [step.training_devices for step in outcome.steps] == replicas
    assert all(step.waited == pytest.approx(0, abs=1e-9) for step in outcome.steps[1:])
    assert [step.training for step in outcome.steps] == pytest.approx([step_seconds(trainers(it)) for it in replicas])


def test_another_layout_stops_training() -> None:
    outcome = trained(trainers(2), (2, trainers(1, tp=2)), join=5.0)
    assert [step.training_devices for step in outcome.steps] == [2] * 7
    assert [round(step.waited, 6) for step in outcome.steps[1:]] == [0, 5.0, 0, 0, 0, 0]
    assert outcome.steps[2].training == pytest.approx(step_seconds(trainers(1, tp=2)))
    assert outcome.steps[2].training != pytest.approx(outcome.steps[1].training)


def test_as_many_replicas_as_the_old_expert_parallelism_could_not_have_are_another_layout() -> None:
    """Two replicas that divide experts among themselves give way to a single one."""
    two = trainers(2)
    assert two.layout is not None
    divided = replace(two, layout=replace(two.layout, ep=2))
    outcome = trained(divided, (2, trainers(1)), join=5.0)
    assert [step.training_devices for step in outcome.steps] == [2, 2, 1, 1, 1, 1, 1]
    assert [round(step.waited, 6) for step in outcome.steps[1:]] == [0, 5.0, 0, 0, 0, 0]


def test_training_that_moves_to_nodes_of_another_class_stops_and_is_priced_there() -> None:
    h800 = NodeClass("h800", 1, 8, GPUS["H800"], intra_bandwidth=200e9, inter_bandwidth=25e9)
    recipe, cluster = recipe_of(64, 8, staleness=2), Cluster((*ONE_NODE.nodes, h800))
    here, there = (
        plan_of(recipe, layout_of(1), [(1, 4, LONGEST)], cluster=cluster, trains=its) for its in ("a800", "h800")
    )
    outcome = trained(here, (2, there), join=5.0)
    assert [round(step.waited, 6) for step in outcome.steps[1:]] == [0, 5.0, 0, 0, 0, 0]
    assert step_seconds(there) < 0.9 * step_seconds(here)
    expected = [step_seconds(here)] * 2 + [step_seconds(there)] * 5
    assert [step.training for step in outcome.steps] == pytest.approx(expected)


def test_versions_arrive_in_their_order_when_they_are_sent_faster() -> None:
    """One GPU of two nodes sends its weights for longer than a whole step takes; a node sends them in less."""
    recipe = recipe_of(4, 1, staleness=4)
    alone = plan_of(recipe, layout_of(1), [(1, 8, LONGEST)], cluster=TWO_NODES)
    node = plan_of(recipe, layout_of(4), [(1, 8, LONGEST)], cluster=TWO_NODES, placed=alone.placement)
    slow, fast = costs_of(alone, [110] * 4), costs_of(node, [110] * 4)
    assert fast[0] + fast[1] < slow[1]  # what follows would overtake
    switch = SwitchCost(engine_start=1.0, trainer_join=0.0, weight_load=0.0)
    system = System("s", alone, LeastLoaded, lambda: Timetable({1: node}), switch=switch)
    outcome = run(system, single_turns(lambda *_: 10), 12)
    versions = [step.version for step in outcome.steps]
    assert versions == list(range(1, 13)) and max(step.worst_staleness for step in outcome.steps) <= 4
    assert {step.training_devices for step in outcome.steps} == {1, 4}


# What a replanner is told


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_moment_says_what_has_happened_and_no_more(staleness: int) -> None:
    recipe = recipe_of(16, GROUP, staleness=staleness)
    plan = plan_of(recipe, layout_of(2), [(1, 3, 1000), (2, 1, LONGEST)])
    episodes = agents(GROUP, 5, mean=500)
    told = []
    for exact in (False, True):
        timetable = Timetable({}, period=2)
        outcome = run(System("s", plan, RoundRobin, lambda it=timetable: it), episodes, 9, exact=exact)
        told.append([(it.version, it.finished, it.running, it.seconds_per_step) for it in timetable.moments])
    assert told[0] == told[1]
    moments = timetable.moments
    assert [moment.version for moment in moments] == [2, 4, 6, 8]
    wholes = {it.id: it for it in all_of(episodes, 36)}
    finished: list[str] = []
    for moment in moments:
        finished += [it.id for it in moment.finished]
        running = {it.id for it in moment.running}
        assert all(it.finished for it in moment.finished) and len(running) == len(moment.running)
        assert not running & set(finished)
        assert len(running) <= 16 * staleness
        # Whatever has been trained on has finished, and whatever started has been told of.
        assert len(finished) >= 16 * moment.version
        for it in moment.running:
            whole = wholes[it.id]
            assert not it.finished and it.reward is None
            assert it.generated_tokens < whole.generated_tokens and len(it.turns) <= len(whole.turns)
            assert it.turns[:-1] == whole.turns[: len(it.turns) - 1]
            if it.turns:
                last, there = it.turns[-1], whole.turns[len(it.turns) - 1]
                assert 0 < last.generated_tokens <= there.generated_tokens
                # Either the turn is over and its tool too, or nobody knows yet what the tool will return.
                if last.tool is None:
                    assert last == there or (last.status, last.returned_tokens, last.tool_seconds) == (None, 0, None)
                elif last != there:
                    assert (last.tool, last.status, last.returned_tokens) == (there.tool, "unknown", 0)
                    assert last.tool_seconds is not None
                    assert 0 <= last.tool_seconds <= (there.tool_seconds or recipe.tool_seconds_if_unknown)
    assert len(finished) == len(set(finished)) and any(moment.running for moment in moments) == bool(staleness)
    ends = [outcome.steps[moment.version - 1].ended for moment in moments]
    assert [moment.seconds_per_step for moment in moments] == pytest.approx(
        [(after - before) / 2 for before, after in zip([0.0, *ends], ends, strict=False)]
    )


def test_what_a_tool_will_return_is_not_known_while_it_runs() -> None:
    """The tool of the first trajectory takes longer than the steps of all others."""
    turns = (Turn(20, "search", "ok", 500, 30.0), Turn(40, None, None, 0))
    episodes = Ruled(1, lambda number, sample: (100, turns if number == 0 else (Turn(30, None, None, 0),)))
    plan = plan_of(recipe_of(1, 1, staleness=3), layout_of(1), [(1, 2, LONGEST)])
    timetable = Timetable({})
    run(System("s", plan, LeastLoaded, lambda: timetable), episodes, 4)
    seen = [(moment, it) for moment in timetable.moments for it in moment.running if it.id == "0/0"]
    waits = []
    for _, first in seen:
        (turn,) = first.turns
        assert (turn.generated_tokens, turn.tool, turn.status, turn.returned_tokens) == (20, "search", "unknown", 0)
        assert turn.tool_seconds is not None and first.final_context == 120
        waits.append(turn.tool_seconds)
    # It has waited longer each time it is looked at, by what has passed.
    passed = [moment.seconds_per_step for moment, _ in seen[1:]]
    assert len(waits) > 1 and np.diff(waits) == pytest.approx(passed)


# The library's replanner


REPLANNED = recipe_of(32, GROUP, staleness=1)


@cache
def replanned(replicas: int) -> Plan:
    return plan_of(REPLANNED, layout_of(replicas), [(1, 2, 1000), (2, 1, LONGEST)])


def long_prompts() -> Ruled:
    """There is little to generate and much to train on."""

    def rule(number: int, sample: int) -> tuple[int, tuple[Turn, ...]]:
        made = 20 + (7 * number + 3 * sample) % 40
        return 3000 + 100 * (number % 9), (Turn(made, "search", "ok", 500, 0.1), Turn(made, None, None, 0))

    return Ruled(GROUP, rule)


def test_the_librarys_replanner_leads_away_from_a_bad_plan() -> None:
    planner = Planner(ONE_NODE, QWEN_06B, REPLANNED)
    switch = SwitchCost(engine_start=1.0, trainer_join=1.0, weight_load=0.0)
    made: list[Replanner] = []

    def replan() -> Replanning:
        made.append(Replanner(planner, replanned(1), period=2, switch=switch))
        return Replanning(made[-1], 2)

    stays = run(System("s", replanned(1), LeastLoaded), long_prompts(), 8)
    system = System("s", replanned(1), LeastLoaded, replan, switch=switch)
    outcome = run(system, long_prompts(), 8)
    assert outcome.changes and outcome.seconds < stays.seconds
    (replanner,) = made
    looks = replanner.looks
    assert len(looks) == 3
    # What each decision came to is told with the next one.
    ends = [outcome.steps[version - 1].ended for version in (2, 4, 6)]
    assert [look.realised for look in looks[:2]] == pytest.approx(
        [(after - before) / 2 for before, after in pairwise(ends)]
    )
    assert sum(look.decision.taken for look in looks) == len(outcome.changes)
    assert run(system, long_prompts(), 8) == outcome


def test_a_timetable_of_the_same_plan_changes_nothing() -> None:
    alone = run(System("s", replanned(4), LeastLoaded), agents(GROUP), 4)
    again = run(System("s", replanned(4), LeastLoaded, lambda: Timetable({2: replanned(4)})), agents(GROUP), 4)
    assert again.steps == alone.steps and again.seconds == alone.seconds
    assert [(it.stopped, it.started) for it in again.changes] == [(0, 0)]
