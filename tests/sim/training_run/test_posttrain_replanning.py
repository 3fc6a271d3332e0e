"""Plans that change during a simulated run: by the library's replanner, and by a timetable."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from oracles.small_cluster import QWEN_06B
from posttrain_cases import LONGEST, ONE_NODE, Ruled, Timetable, agents, layout_of, plan_of, recipe_of, run

from libra.cost.device import SwitchCost
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.plan.replanner import Replanner
from libra.route.baselines import LeastLoaded
from libra.sim.training_run.system import Replanning, System
from libra.trajectory import Turn

GROUP = 4
RECIPE = recipe_of(32, GROUP, staleness=1)


@cache
def good() -> Plan:
    return plan_of(RECIPE, layout_of(4), [(1, 2, 1000), (2, 1, LONGEST)])


@cache
def bad() -> Plan:
    """A single GPU does all the training."""
    return plan_of(RECIPE, layout_of(1), [(1, 2, 1000), (2, 1, LONGEST)])


def long_prompts() -> Ruled:
    """There is little to generate and much to train on."""

    def rule(number: int, sample: int) -> tuple[int, tuple[Turn, ...]]:
        made = 20 + (7 * number + 3 * sample) % 40
        return 3000 + 100 * (number % 9), (Turn(made, "search", "ok", 500, 0.1), Turn(made, None, None, 0))

    return Ruled(GROUP, rule)


def test_the_librarys_replanner_leads_away_from_a_bad_plan() -> None:
    planner = Planner(ONE_NODE, QWEN_06B, RECIPE)
    switch = SwitchCost(engine_start=1.0, trainer_join=1.0, weight_load=0.0)
    made: list[Replanner] = []

    def replan() -> Replanning:
        made.append(Replanner(planner, bad(), period=2, switch=switch))
        return Replanning(made[-1], 2)

    stays = run(System("s", bad(), LeastLoaded), long_prompts(), 8)
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
