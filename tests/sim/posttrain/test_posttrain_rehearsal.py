"""Plans tried out before one is proposed: all for the same work, and nobody notices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from oracles.small_cluster import QWEN_06B
from posttrain_cases import LONGEST, ONE_NODE, Ruled, Timetable, agents, layout_of, plan_of, recipe_of, run

from libra.cost.device import SwitchCost
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.plan.replanner import Replanner
from libra.route.attained import AttainedService
from libra.route.baselines import LeastLoaded, TwoChoices
from libra.route.cmlfq import CMLFQ
from libra.route.policy import Policy
from libra.route.predictor import LengthPredictor
from libra.route.published import PublishedCMLFQ
from libra.sim.posttrain import rehearsal
from libra.sim.posttrain.rehearsal import STEPS, Rehearsal
from libra.sim.posttrain.replanning import Replanning
from libra.sim.posttrain.resampled import Resampled
from libra.sim.posttrain.system import Moment, System
from libra.trajectory import Trajectory, Turn

GROUP = 4
RECIPE = recipe_of(32, GROUP, staleness=1)
ROUTERS: list[type] = [LeastLoaded, TwoChoices, LengthPredictor, AttainedService, CMLFQ, PublishedCMLFQ]


@cache
def good() -> Plan:
    return plan_of(RECIPE, layout_of(4), [(1, 2, 1000), (2, 1, LONGEST)])


@cache
def bad() -> Plan:
    """A single GPU does all the training."""
    return plan_of(RECIPE, layout_of(1), [(1, 2, 1000), (2, 1, LONGEST)])


def long_prompts(seed: int = 0) -> Ruled:
    """There is little to generate and much to train on."""

    def rule(number: int, sample: int) -> tuple[int, tuple[Turn, ...]]:
        made = 20 + (seed + 7 * number + 3 * sample) % 40
        return 3000 + 100 * (number % 9), (Turn(made, "search", "ok", 500, 0.1), Turn(made, None, None, 0))

    return Ruled(GROUP, rule)


def finished(groups: int = 12) -> list[Trajectory]:
    return [it for number in range(groups) for it in long_prompts(7).group(number, 0)]


def mean_context(trajectories: list[Trajectory]) -> float:
    return sum(it.final_context for it in trajectories) / len(trajectories)


@dataclass
class Rehearsing:
    """A `Replan` that rehearses at each decision, and changes nothing."""

    rehearsal: Rehearsal | None
    snapshots: list[tuple[str, str]]
    period: int = 1

    def decide(self, moment: Moment) -> Plan | None:
        if self.rehearsal is None:
            return None
        before = json.dumps(moment.policy.snapshot())
        self.rehearsal.prepare(moment.finished, moment.running, moment.policy)
        self.rehearsal([good(), bad()], 500.0)
        self.snapshots.append((before, json.dumps(moment.policy.snapshot())))
        return None


@pytest.mark.parametrize("route", ROUTERS)
def test_neither_the_run_nor_its_router_notices(route: Callable[[], Policy]) -> None:
    base = System("s", good(), route, serve_by_priority=True)
    alone = run(base, agents(GROUP, 3), 4)
    snapshots: list[tuple[str, str]] = []
    system = System("s", good(), route, lambda: Rehearsing(Rehearsal(base, steps=1), snapshots), serve_by_priority=True)
    assert run(system, agents(GROUP, 3), 4) == alone
    assert len(snapshots) == 3 and all(before == after for before, after in snapshots)
    assert len({before for before, _ in snapshots}) == 3  # it has something to notice


def test_a_plainly_worse_plan_takes_longer() -> None:
    rehearse = Rehearsal(System("s", good(), LeastLoaded))
    rehearse.prepare(finished(), (), LeastLoaded())
    one, other, again = rehearse([good(), bad(), good()], mean_context(finished()))
    assert other > 1.5 * one > 0
    assert one == again
    assert rehearse([bad()], mean_context(finished())) == [other]  # nothing is carried from one call to the next


def test_trajectories_are_as_long_as_they_are_said_to_be() -> None:
    """Half of a context are prompts, which stay as they are."""
    made: list[rehearsal._Grown] = []

    class Noted(rehearsal._Grown):
        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

    recent = [it for number in range(40) for it in agents(GROUP, 7).group(number, 0)]
    recent = [replace(it, prompt_tokens=500) for it in recent]
    rehearse = Rehearsal(System("s", good(), LeastLoaded), steps=1)
    rehearse.prepare(recent, (), LeastLoaded())
    mean = mean_context(recent)
    with patch.object(rehearsal, "_Grown", Noted):
        for factor in (0.8, 1.0, 1.5):
            rehearse([good()], factor * mean)
    for factor, grown in zip((0.8, 1.0, 1.5), made, strict=True):
        lengths = [it.final_context for number in range(400) for it in grown.group(number, 0)]
        assert sum(lengths) / len(lengths) == pytest.approx(factor * mean, rel=0.02)  # of drawing, and of rounding up
    rehearse = replace(rehearse, steps=6)
    shorter, longer = (rehearse([good()], factor * mean)[0] for factor in (0.7, 3.0))
    assert 2 * shorter < longer


def test_all_plans_get_the_same_groups() -> None:
    drawn: list[list[tuple[int, tuple[Trajectory, ...]]]] = []

    class Noted(rehearsal._Grown):
        def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
            made = super().group(number, version)
            drawn[-1].append((number, tuple(it.turns for it in made)))  # type: ignore[arg-type]
            return made

    simulate: Any = rehearsal.simulate_posttraining

    def noting(*args: Any) -> Any:
        drawn.append([])
        return simulate(*args)

    rehearse = Rehearsal(System("s", good(), LeastLoaded), steps=2)
    rehearse.prepare(finished(), (), LeastLoaded())
    with patch.object(rehearsal, "_Grown", Noted), patch.object(rehearsal, "simulate_posttraining", noting):
        rehearse([good(), bad()], 1.3 * mean_context(finished()))
    assert drawn[0] == drawn[1]
    assert [number for number, _ in drawn[0]] == list(range((1 + 1 + 2) * 8))  # ahead, and measured
    assert STEPS == 4


def test_what_it_knows_and_no_more_goes_into_it() -> None:
    """The router's copy has let go of what runs, learns nothing, and knows what the router had learned."""
    policy = CMLFQ()
    for trajectory in finished():
        policy.finished(trajectory)
    running = [trajectory for trajectory in agents(GROUP, 1).group(500, 0)]
    made = []
    original = CMLFQ.restore.__func__  # type: ignore[attr-defined]

    def restoring(cls: type[CMLFQ], snapshot: dict[str, Any]) -> CMLFQ:
        made.append(original(cls, snapshot))
        return made[-1]

    rehearse = Rehearsal(System("s", good(), CMLFQ), steps=1)
    rehearse.prepare(finished(), running, policy)
    with patch.object(CMLFQ, "restore", classmethod(restoring)):
        rehearse([good(), bad()], mean_context(finished()))
    assert len(made) == 2
    known = policy.snapshot()
    assert not known["live"]
    for copy in made:
        assert not copy.snapshot()["live"]


def test_without_anything_to_rehearse_with_it_says_so() -> None:
    rehearse = Rehearsal(System("s", good(), LeastLoaded))
    for prepared in (False, True):
        if prepared:
            rehearse.prepare((), (), LeastLoaded())
        with pytest.raises(ValueError, match="there is nothing to rehearse with: call prepare"):
            rehearse([good()], 500.0)
    rehearse.prepare(finished(), (), LeastLoaded())
    rehearse.prepare((), (), LeastLoaded())  # what finished before still counts
    assert rehearse([good()], 500.0)[0] > 0


def test_growth_is_that_of_turns_up_to_the_longest_context() -> None:
    drawn = Resampled(tuple(it for number in range(12) for it in agents(GROUP, 7).group(number, 0)), GROUP, LONGEST, 0)
    for factor in (0.5, 1.0, 3.0, 40.0):
        grown = rehearsal._Grown(drawn, factor)
        for number in range(8):
            for before, after in zip(drawn.group(number, 2), grown.group(number, 2), strict=True):
                assert (before.id, before.prompt_tokens, after.policy_version) == (after.id, after.prompt_tokens, 2)
                assert after.peak_context <= LONGEST
                if factor == 1.0:
                    assert after == before
                if before.peak_context * factor + 2 * len(before.turns) <= LONGEST:
                    assert len(after.turns) == len(before.turns)
                    for one, other in zip(before.turns, after.turns, strict=True):
                        assert 0 <= other.generated_tokens - factor * one.generated_tokens < 1
                        assert 0 <= other.returned_tokens - factor * one.returned_tokens < 1
                        assert (other.tool, other.tool_seconds) == (one.tool, one.tool_seconds)


# The replanner in a run


@pytest.mark.parametrize("checked", [False, True])
def test_the_librarys_replanner_leads_away_from_a_bad_plan(checked: bool) -> None:
    planner = Planner(ONE_NODE, QWEN_06B, RECIPE)
    base = System("s", bad(), LeastLoaded)
    switch = SwitchCost(engine_start=1.0, trainer_join=1.0, weight_load=0.0)
    made: list[Replanner] = []

    def replan() -> Replanning:
        check = Rehearsal(base, steps=2) if checked else None
        made.append(Replanner(planner, bad(), period=2, switch=switch, check=check))
        return Replanning(made[-1], 2, check)

    stays = run(base, long_prompts(), 8)
    system = System("s", bad(), LeastLoaded, replan, switch=switch)
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
    alone = run(System("s", good(), LeastLoaded), agents(GROUP), 4)
    again = run(System("s", good(), LeastLoaded, lambda: Timetable({2: good()})), agents(GROUP), 4)
    assert again.steps == alone.steps and again.seconds == alone.seconds
    assert [(it.stopped, it.started) for it in again.changes] == [(0, 0)]
