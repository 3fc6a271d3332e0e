"""What knowing the future, and never waiting, are worth: what foresight looks at, and what the ceiling is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from oracles.enumerate_problems import problems

from benchmarks.evaluation.foresight import Foresight, Foretold
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.whole_runs import Balance, balance, tool_bound
from libra.plan.model.solve import solve
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption
from libra.route.baselines import LeastLoaded
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.system import PUBLISHED_SWITCH, Moment, System
from libra.trajectory import Trajectory

GROUPS, STALENESS, PERIOD = 2, 1, 3
TOOLS = Setting("Qwen/Qwen3-14B", "r2e_gym", nodes=2, groups=GROUPS, steps=8)  # whose tools take minutes
SMALL = Setting("Qwen/Qwen3-14B", "search_r1", nodes=2, groups=GROUPS, steps=8, staleness=STALENESS)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_no_plan_with_engines_of_one_size_is_above_the_ceiling(problem: Problem) -> None:
    assume(len(problem.pools) == 1 and not problem.colocated)
    one_size = replace(
        problem, most_buckets=1, current=None, staleness=max(1, problem.staleness), use_all_devices=False
    )
    best = balance(one_size)
    assert best.seconds <= solve(one_size).predicted.step * (1 + 1e-9)


def test_at_the_ceiling_both_sides_take_as_long() -> None:
    work = ((6.0, 12.0), (3.0, 3.0))
    engines = EngineOption("e", "p", 2, 8, 100, stall=0.0, work=work, refresh=(0.0, 0.0), residence=(99.0, 99.0))
    training = tuple(TrainingOption("t", "p", devices, devices, 12.0 / devices, 0.0) for devices in range(1, 7))
    router = ((1.0, 1.0),)
    problem = Problem((Pool("p", 1, 8),), (engines,), training, (10, 100), (True, True), 100, router, router, 1)
    # Two of the eight train in 6 s; the other six are three engines with 18 s of work between them.
    assert balance(problem) == Balance(6.0, 2, "e")


def _longest_tools(setting: Setting) -> list[float]:
    """By step."""
    steps = [range(step * GROUPS, (step + 1) * GROUPS) for step in range(setting.run_steps)]
    groups = [[trajectory for number in step for trajectory in setting.episodes.group(number, 0)] for step in steps]
    return [max(sum(turn.tool_seconds or 0.0 for turn in it.turns) for it in group) for group in groups]


def test_tools_alone_one_batch_after_the_other() -> None:
    setting = replace(TOOLS, staleness=0)
    assert tool_bound(setting.arguments())["seconds"] == pytest.approx(sum(_longest_tools(setting)))


def test_tools_alone_with_all_batches_at_once() -> None:
    setting = replace(TOOLS, staleness=TOOLS.steps)
    assert tool_bound(setting.arguments())["seconds"] == max(_longest_tools(setting))


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_run_is_faster_than_its_tools(staleness: int) -> None:
    setting = replace(TOOLS, staleness=staleness)
    planner = setting.planner()
    system = System("s", planner.plan(setting.tracker(planner)), LeastLoaded)
    run = simulate_posttraining(system, setting.episodes, setting.run_steps)
    bound = tool_bound(setting.arguments())
    assert run.seconds > bound["seconds"]
    assert run.throughput < bound["throughput"]
    assert run.generated_tokens == pytest.approx(bound["throughput"] * bound["seconds"])


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
