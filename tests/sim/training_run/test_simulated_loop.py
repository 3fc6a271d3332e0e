"""The training loop under one plan: what is trained when, against times worked out apart from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_cluster import CLASSES
from posttrain_cases import (
    LONGEST,
    TWO_NODES,
    Ruled,
    Timetable,
    agents,
    cost_of,
    costs_of,
    layout_of,
    plan_of,
    recipe_of,
    run,
    seeing,
    single_turns,
    turn_ticks,
)

from libra.config.run import load_config
from libra.cost.sources.files import load_profile
from libra.cost.transfer import colocated_switch_seconds, fabric, weight_sync
from libra.plan.offline import gather, request_from
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.plan import Plan, make_plan
from libra.route.baselines import LeastLoaded, RoundRobin
from libra.route.catalogue import POLICIES, policy_named
from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest
from libra.sim.clock import seconds, ticks
from libra.sim.engine.iteration_cost import DecodeBatch, IterationCost
from libra.sim.engine.request import Request
from libra.sim.planned_engines import planned_engines
from libra.sim.training_run import loop
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.system import System
from libra.sim.training_run.trainer import TrainingPrice
from libra.sim.workload.caller import EpisodeCaller
from libra.trajectory import Trajectory, Turn, read_trajectories

GROUP = 4  # samples
EXAMPLES = Path(__file__).parents[3] / "examples"


@cache
def plans(staleness: int) -> tuple[Plan, Plan, Plan]:
    """Three plans, each placed after the one before."""
    recipe = recipe_of(16, GROUP, staleness=staleness)
    first = plan_of(recipe, layout_of(2), [(1, 3, 1000), (2, 1, LONGEST)])
    second = plan_of(recipe, layout_of(4), [(1, 2, 1000), (2, 1, LONGEST)], placed=first.placement)
    third = plan_of(recipe, layout_of(1, tp=2), [(1, 4, 2000), (2, 1, LONGEST)], placed=second.placement)
    return first, second, third


def system_of(staleness: int, *, changing: bool, policy: str = LeastLoaded.NAME, priority: bool = False) -> System:
    first, second, third = plans(staleness)
    timetable = {1: second, 3: third, 5: first}
    return System(
        "system",
        first,
        lambda: policy_named(policy, seed=1),
        (lambda: Timetable(timetable)) if changing else None,
        serve_by_priority=priority,
    )


# What has to hold of every run


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 4), st.integers(0, 99), st.booleans(), st.sampled_from(POLICIES))
def test_every_group_is_trained_once_and_none_too_late(staleness: int, seed: int, changing: bool, policy: str) -> None:
    steps, groups = 7, 7 * 4
    episodes = agents(GROUP, seed)
    with seeing() as seen:
        outcome = run(system_of(staleness, changing=changing, policy=policy), episodes, steps)
    trained = [name for batch in seen.batches for name, _ in batch]
    assert sorted(trained, key=int) == [str(number) for number in range(groups)]
    assert [step.version for step in outcome.steps] == list(range(1, steps + 1))
    assert len(outcome.changes) == 3 * changing
    for step, batch in zip(outcome.steps, seen.batches, strict=True):
        trajectories = [trajectory for _, group in batch for trajectory in group]
        assert len(trajectories) == step.trajectories == 16
        stale = [step.version - 1 - trajectory.policy_version for trajectory in trajectories]
        assert min(stale) >= 0 and step.worst_staleness == max(stale) <= staleness
        assert step.staleness == sum(stale) / 16
        assert step.generated_tokens == sum(trajectory.generated_tokens for trajectory in trajectories)
        assert step.final_context_tokens == sum(trajectory.final_context for trajectory in trajectories)
        assert step.longest_context == max(trajectory.final_context for trajectory in trajectories)
    for before, after in pairwise(outcome.steps):
        assert after.started >= before.ended - 1e-9
        assert after.waited == pytest.approx(after.started - before.ended, abs=1e-9)
    assert outcome.generated_tokens == sum(
        trajectory.generated_tokens for number in range(groups) for trajectory in episodes.group(number, 0)
    )
    assert 0 < outcome.engine_share <= 1 and outcome.trainer_share <= 1
    trained_on = sum(step.final_context_tokens for step in outcome.steps)
    assert outcome.migrated_share == outcome.migrated_tokens / trained_on >= outcome.moved_tokens / trained_on
    assert max(span.end for span in outcome.engines) == outcome.seconds
    assert all(0 <= span.busy <= span.end - span.start + 1e-9 for span in outcome.engines)
    assert 0 < sum(span.busy for span in outcome.engines) <= outcome.engine_busy + 1e-6
    devices = [step.generating_devices for step in outcome.steps]
    in_service = outcome.engine_seconds / outcome.seconds
    assert min(devices) - 1e-6 <= in_service <= max(devices) + 1e-6


@pytest.mark.parametrize(
    ("policy", "staleness"),
    [
        ("least-loaded", 0),
        ("length-predictor", 2),
        ("shortest-remaining-first", 1),
        ("cmlfq-published", 2),
        ("cmlfq", 2),
    ],
)
def test_the_same_again_and_with_every_iteration_visited(policy: str, staleness: int) -> None:
    priority = policy in ("cmlfq", "shortest-remaining-first")
    system = system_of(staleness, changing=True, policy=policy, priority=priority)
    outcomes = [run(system, agents(GROUP), 6, exact=exact) for exact in (False, False, True)]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(outcomes[0].changes) == 3 and (staleness < 2 or outcomes[0].interrupted > 0)


# One step after the other


def weight_sync_stall(plan: Plan) -> float:
    request = plan.request
    assert request.kind == "cluster"
    nodes = request.cluster.nodes[0]
    return weight_sync(request.model.parameters * 2, 1, 1, fabric(nodes)).stall


def two_turns(cost: IterationCost, prompt: int, first: int, returned: int, second: int, tool_seconds: float) -> int:
    """Ticks of a trajectory that has an engine to itself. The second turn finds in the cache all full blocks of 16
    tokens of what the first one computed: everything but the last token that it generated."""
    cached = (prompt + first - 1) // 16 * 16
    following = turn_ticks(cost, prompt + first + returned, second, cached)
    return turn_ticks(cost, prompt, first) + ticks(tool_seconds) + following


@pytest.mark.parametrize("mode", ["async", "sync", "colocated"])
def test_without_staleness_a_step_is_a_sum(mode: str) -> None:
    """Two trajectories, each on an engine of its own: the longer one, then training, then publication."""
    recipe = recipe_of(2, 1, mode=mode, staleness=0)
    plan = plan_of(recipe, layout_of(1), [(1, 2, LONGEST)])
    tool = Turn(120, "search", "ok", 77, 2.0)
    short, long = (50, (tool, Turn(30, None, None, 0))), (200, (tool, Turn(300, None, None, 0)))
    cost = cost_of(plan)
    rollout = max(two_turns(cost, 50, 120, 77, 30, 2.0), two_turns(cost, 200, 120, 77, 300, 2.0))
    training, publication = costs_of(plan, [50 + 120 + 77 + 30, 200 + 120 + 77 + 300])
    switch = 0
    if mode == "colocated":
        model = plan.request.model  # type: ignore[union-attr]
        switch = ticks(colocated_switch_seconds(model.parameters * 16 / 8, model.parameters * 2 / 8))
    whole = rollout + training + publication + 2 * switch
    outcome = run(System("s", plan, LeastLoaded), Ruled(1, lambda number, sample: (short, long)[number % 2]), 4)
    for number, step in enumerate(outcome.steps):
        assert ticks(step.started) == pytest.approx(number * whole + rollout, abs=3 * (number + 1))  # of rounding
        assert ticks(step.training) == training
    assert ticks(outcome.seconds) == pytest.approx(4 * whole, abs=12)
    assert outcome.step_seconds == pytest.approx(whole / 1e12)


# The recursion


@dataclass(frozen=True)
class Alone:
    """A trajectory of one turn on an engine that nobody else uses, iteration by iteration."""

    cost: IterationCost
    prompt: int
    generated: int
    refresh: bool

    def done(self, start: int, pauses: Sequence[int], stall: int) -> int:
        """The tick at which it ends; `pauses` are the ticks at which the engine was told of new weights."""
        now, due = 0, list(pauses)
        while due and due[0] <= max(now, start):
            now = max(now, due.pop(0)) + stall
        now = max(now, start) + self.cost.mixed(DecodeBatch(0), 0, [(self.prompt, 0)])
        for made in range(1, self.generated):
            paused = False
            while due and due[0] <= now:
                now, paused = now + stall, True
                due.pop(0)
            context = self.prompt + made
            if paused and self.refresh:
                now += self.cost.mixed(DecodeBatch(0), 0, [(context, 0)])
            else:
                base, slope, _ = self.cost.line(DecodeBatch(1), context)
                now += base + slope * context
        return now


@dataclass(frozen=True)
class Recursion:
    """When the trainer begins each of its steps, worked out from who waits for whom.

    Groups g of version u = max(0, g // groups - staleness) start when that is published. The trainer takes the oldest
    complete groups as soon as it is free and no group is left behind that must be in this batch.
    """

    works: Sequence[Alone]  # one trajectory to a group
    groups: int  # of one step
    staleness: int
    stall: int

    def starts(self, plan: Plan) -> list[int]:
        published, free, starts, trained = [0], 0, [], set[int]()
        for version in range(1, len(self.works) // self.groups + 1):
            pauses = [tick - self.stall for tick in published[1:]]
            started = {g: self._version(g) for g in range(len(self.works)) if self._version(g) < version}
            live = sorted(started.keys() - trained)
            done = {g: self.works[g].done(published[started[g]], pauses, self.stall) for g in live}
            for now in sorted({free, *(max(free, tick) for tick in done.values())}):
                here = [g for g in live if published[started[g]] <= now]
                batch = [g for g in here if done[g] <= now][: self.groups]
                left = [g for g in here if g not in batch]
                in_time = all(
                    version + 1 + place // self.groups <= started[g] + 1 + self.staleness
                    for place, g in enumerate(left)
                )
                if len(batch) == self.groups and in_time:
                    break
            else:
                raise AssertionError(f"version {version} is never made")
            trained.update(batch)
            training, publication = costs_of(plan, [self.works[g].prompt + self.works[g].generated for g in batch])
            starts.append(now)
            free = now + training
            published.append(free + publication)
        return starts

    def _version(self, group: int) -> int:
        return max(0, group // self.groups - self.staleness)


LENGTHS = (3000, 400, 2500, 40, 5000, 900, 60, 1500, 3500, 10, 2000, 700, 100, 4500)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize(("groups", "kv", "turn"), [(1, "keep", 0), (2, "keep", 5), (2, "refresh", 9)])
def test_steps_begin_when_the_recursion_says(staleness: int, groups: int, kv: str, turn: int) -> None:
    """Each of 14 trajectories has an engine to itself, so all that they wait for is weights."""
    lengths = LENGTHS[turn:] + LENGTHS[:turn]
    plan = plan_of(
        recipe_of(groups, 1, staleness=staleness, kv_on_update=kv),
        layout_of(1),
        [(1, 15, LONGEST)],
        cluster=TWO_NODES,
    )
    steps = len(lengths) // groups
    outcome = run(System("s", plan, RoundRobin), single_turns(lambda number, _: lengths[number]), steps)
    cost = cost_of(plan)
    works = [Alone(cost, 100, tokens, kv == "refresh") for tokens in lengths]
    recursion = Recursion(works, groups, staleness, ticks(weight_sync_stall(plan)))
    assert [ticks(step.started) for step in outcome.steps] == recursion.starts(plan)


def test_an_update_pauses_a_turn_and_refresh_computes_its_context_again() -> None:
    """One long turn lives through the updates that short ones make: it stops for each, and loses no token."""
    lengths = (5000, 10, 10, 10)
    ends = {}
    for kv in ("keep", "refresh"):
        recipe = recipe_of(1, 1, staleness=3, kv_on_update=kv)
        plan = plan_of(recipe, layout_of(1), [(1, 7, LONGEST)])
        with seeing() as seen:
            run(System("s", plan, RoundRobin), single_turns(lambda number, _: lengths[number]), 4)
        long = next(request for request in seen.cluster.requests if request.output_tokens == 5000)
        assert (long.generated, long.status, long.preemptions) == (5000, "finished", 0)
        engine = seen.cluster.engines[0]
        assert long.engine == 0 and engine.paused_ticks >= 3 * ticks(weight_sync_stall(plan))
        assert long.finish is not None
        ends[kv] = long.finish
        computed = [
            tokens for it in seen.iterations for number, tokens in it.scheduled if number == long.number and tokens > 1
        ]
        # Updates that come while the engine still pauses find nothing new to compute.
        assert computed[0] == 100 and (len(computed) == 1 if kv == "keep" else len(computed) > 1)
        assert all(before < after for before, after in pairwise(computed))
    assert ends["keep"] < ends["refresh"]


# What is refused


@pytest.mark.parametrize(
    ("episodes", "steps", "message"),
    [
        (agents(GROUP), 0, "steps is 0; simulate 1 step or more"),
        (agents(2), 1, "samples_per_prompt is 4 in the recipe and 2 in the episodes"),
        (replace(agents(GROUP), max_context=LONGEST + 1), 1, "trajectories grow to 8193 tokens, .* max_length is 8192"),
        (
            replace(agents(GROUP), max_context=100),
            1,
            "trajectory 0/0 grows to .* tokens, more than 100, the episodes' max_context",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(episodes: Ruled, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(system_of(1, changing=False), episodes, steps)


def test_a_plan_of_slots_is_refused() -> None:
    settings = load_config(EXAMPLES / "calculator.yaml")
    evidence = gather(settings, list(read_trajectories(EXAMPLES / "trajectories.jsonl")))
    plan = make_plan(request_from(settings, evidence, load_profile(EXAMPLES / "profile_2_cores.json")))
    with pytest.raises(
        ValueError, match="system s: this plan is for the slots of one machine, but a plan for a cluster"
    ):
        run(System("s", plan, LeastLoaded), agents(GROUP), 1)


def test_trajectories_that_generate_nothing_are_trained_on_at_once() -> None:
    """A prompt that fills the context: nothing is asked of an engine."""
    silent = Ruled(GROUP, lambda number, sample: (50, (Turn(0, None, None, 0),)))
    outcome = run(system_of(1, changing=False), silent, 3)
    assert (outcome.placements, outcome.generated_tokens) == (0, 0)
    assert [step.final_context_tokens for step in outcome.steps] == [16 * 50] * 3


@pytest.mark.parametrize("by_cache", [False, True])
def test_groups_start_while_the_caches_hold_what_is_unfinished(by_cache: bool) -> None:
    """As many as staleness admits, or as many as one engine's cache has room for; a part of a group never starts."""
    recipe = recipe_of(512, 8, staleness=1)
    plan = plan_of(recipe, layout_of(1), [(1, 1, LONGEST)])
    (engine,) = planned_engines(plan)
    context = sum(cls.share * cls.context_sum for cls in CLASSES) / sum(cls.share * cls.generated for cls in CLASSES)
    held = engine.config.kv_blocks * engine.config.block_size / context
    assert 16 < held < 1024
    unfinished: list[int] = []
    ask = loop.PosttrainingRun._ask

    def asked(self: loop.PosttrainingRun, caller: EpisodeCaller, arrival: int) -> Request:
        unfinished.append(len(self._live))
        return ask(self, caller, arrival)

    system = System("it", plan, LeastLoaded, start_by_cache=by_cache)
    with patch.object(loop.PosttrainingRun, "_ask", asked):
        steps = simulate_posttraining(system, agents(8), 3).steps
    assert [step.trajectories for step in steps] == [512] * 3
    assert held - 8 < max(unfinished) <= held if by_cache else max(unfinished) == 1024


# Training that begins with the groups that are complete, and generation that keeps to its concurrency


def early_system(staleness: int, *, changing: bool = False, **recipe: Any) -> System:
    wanted = recipe_of(16, 4, staleness=staleness, mode="async" if staleness else "sync", **recipe)
    first = plan_of(wanted, layout_of(2), [(1, 3, 1000), (2, 1, LONGEST)])
    second = plan_of(wanted, layout_of(4), [(1, 2, 1000), (2, 1, LONGEST)], placed=first.placement)
    replan = (lambda: Timetable({1: second, 3: first})) if changing else None
    return System("system", first, LeastLoaded, replan)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 3), st.integers(0, 99), st.booleans())
def test_every_trajectory_is_trained_on_once_and_in_time(staleness: int, seed: int, changing: bool) -> None:
    steps, episodes = 6, agents(4, seed)
    outcome = run(early_system(staleness, changing=changing, early_gradients=True), episodes, steps)
    assert [step.version for step in outcome.steps] == list(range(1, steps + 1))
    assert all(step.trajectories == 16 and step.worst_staleness <= staleness for step in outcome.steps)
    assert outcome.generated_tokens == sum(
        trajectory.generated_tokens for number in range(steps * 4) for trajectory in episodes.group(number, 0)
    )
    end = 0.0
    for step in outcome.steps:
        # What is not training is waiting: there is nothing else between two steps.
        assert step.ended - end == pytest.approx(step.waited + step.training)
        assert end <= step.started + 1e-9
        end = step.ended


def test_only_the_last_part_follows_the_last_trajectory() -> None:
    """Two groups of one sample each, alone on their engines: the short one is trained on while the long one runs."""
    recipe = recipe_of(2, 1, mode="sync", early_gradients=True)
    plan = plan_of(recipe, layout_of(1), [(1, 2, LONGEST)])
    lengths = {0: 50, 1: 4000}
    outcome = run(System("early", plan, LeastLoaded), single_turns(lambda number, sample: lengths[number]), 1)
    request = plan.request
    assert isinstance(request, ClusterRequest) and plan.layout is not None
    price = TrainingPrice(request.model, recipe, request.cluster.nodes[0])
    short, long = (seconds(turn_ticks(cost_of(plan), 100, tokens)) for tokens in lengths.values())
    first = price.seconds([150], plan.layout, update=False)
    last = price.seconds([4100], plan.layout)
    assert short + first < long, "the case is meant to have time for the first part"
    (step,) = outcome.steps
    assert step.started == pytest.approx(short)
    assert step.training == pytest.approx(first + last)
    assert step.ended == pytest.approx(long + last)
    assert step.waited == pytest.approx(short + (long - short - first))


def test_a_plan_for_early_training_waits_for_its_tail_only() -> None:
    whole, early = (
        plan_of(recipe_of(16, 4, staleness=1, early_gradients=early), layout_of(2), [(1, 2, LONGEST)])
        for early in (False, True)
    )
    assert early.predicted.training == whole.predicted.training
    assert early.predicted.latency < whole.predicted.latency


class Counting(LeastLoaded):
    """Knows how many trajectories are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.most = 0

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        self.live[request.trajectory_id] = 1
        self.most = max(self.most, self.live.total())
        return super().place(request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        assert self.live[request.trajectory_id]
        return super().tool_returned(request, returned, fleet)

    def finished(self, trajectory: Trajectory) -> None:
        del self.live[trajectory.id]
        super().finished(trajectory)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("concurrency", "most"), [(4, 4), (10, 10), (32, 32), (None, 48), (1000, 48)])
def test_no_more_trajectories_are_under_way_than_allowed(concurrency: int | None, most: int, early: bool) -> None:
    made: list[Counting] = []
    tried = early_system(2, concurrency=concurrency, early_gradients=early)

    def route() -> Counting:
        made.append(Counting())
        return made[-1]

    outcome = run(System("capped", tried.plan, route), agents(4), 5)
    assert len(outcome.steps) == 5
    assert made[0].most == most
