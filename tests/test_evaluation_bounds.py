"""Foresight looks at the groups to come, and no run is faster than its tools."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from benchmarks.evaluation.foresight import Foresight, Foretold
from benchmarks.evaluation.setting import Setting
from libra.route.baselines import LeastLoaded
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.system import PUBLISHED_SWITCH, Moment, System
from libra.trajectory import Trajectory

GROUPS, STALENESS, PERIOD = 2, 1, 3
TOOLS = Setting("Qwen/Qwen3-14B", "r2e_gym", nodes=2, groups=GROUPS, steps=8)  # whose tools take minutes
SMALL = Setting("Qwen/Qwen3-14B", "search_r1", nodes=2, groups=GROUPS, steps=8, staleness=STALENESS)


def _longest_tools(setting: Setting) -> list[float]:
    """By step."""
    steps = [range(step * GROUPS, (step + 1) * GROUPS) for step in range(setting.steps)]
    groups = [[trajectory for number in step for trajectory in setting.episodes.group(number, 0)] for step in steps]
    return [max(sum(turn.tool_seconds or 0.0 for turn in it.turns) for it in group) for group in groups]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_run_is_faster_than_its_tools(staleness: int) -> None:
    """The batch of a step starts when that many steps before have been made, and takes no less than its tools."""
    setting = replace(TOOLS, staleness=staleness)
    planner = setting.planner()
    system = System("s", planner.plan(setting.tracker(planner)), LeastLoaded)
    run = simulate_posttraining(system, setting.episodes, setting.steps)
    longest = _longest_tools(setting)
    assert run.seconds > sum(longest[staleness :: 1 + staleness])


@dataclass
class Recorded(Foretold):
    """Episodes that note which groups they are asked for, and under which version."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        self.asked.append((number, version))
        return self.episodes.group(number, version)


def test_foresight_looks_at_the_groups_that_are_yet_to_start() -> None:
    episodes = Recorded(SMALL.episodes)
    foresight = Foresight(episodes, SMALL.planner(), PUBLISHED_SWITCH, PERIOD)
    plan = foresight.plan(None, 0)
    assert plan is not None
    assert episodes.asked == [(number, 0) for number in range(PERIOD * GROUPS)]
    episodes.asked.clear()
    foresight.plan(plan, 3)
    # Version 3 has been made and version 2 is in use, so that the batches of versions 4 to 3 + STALENESS have started.
    assert episodes.asked == [((3 + STALENESS) * GROUPS + number, 3) for number in range(PERIOD * GROUPS)]


def test_groups_have_started_as_far_as_foresight_takes_them_to() -> None:
    """At every decision of a run, the group after those that have started is the first that is looked at."""
    episodes = Recorded(SMALL.episodes)
    started: list[tuple[int, int]] = []

    @dataclass
    class Noting:
        period: int = 1

        def decide(self, moment: Moment) -> None:
            started.append((moment.version, len(episodes.asked)))

    planner = SMALL.planner()
    system = System("s", planner.plan(SMALL.tracker(planner)), LeastLoaded, Noting)
    simulate_posttraining(system, episodes, 6)
    foreseen = [(version + STALENESS) * GROUPS for version, _ in started]
    assert [groups for _, groups in started[:4]] == foreseen[:4]


@pytest.mark.parametrize("version", [0, 1, 5])
def test_a_step_has_the_same_trajectories_whoever_starts_them(version: int) -> None:
    for number in range(4 * GROUPS):
        drawn = SMALL.episodes.group(number, version)
        assert all(trajectory.policy_version == version for trajectory in drawn)
        fresh = SMALL.episodes.group(number, number // GROUPS)
        assert [it.turns for it in drawn] == [it.turns for it in fresh]
        assert fresh == SMALL._drifting.group(number, number // GROUPS)
