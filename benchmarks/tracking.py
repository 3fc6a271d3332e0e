"""Error of tracked lengths in whole simulated runs, in which long trajectories finish late.

Invariant: the tracker sees what a run would show it: finished trajectories in the order in which they finish, and how
far the others have come. Its error is the difference to a tracker that knows how each of them ends.

    python -m benchmarks.tracking [--quick] [--json FILE]

48 A800 train Qwen3-14B on `benchmarks.workloads` without their drift. Time is not context: tools wait, and engines slow
down with load. At every optimiser step the tracker gets the input of a replanner; the error of the finished
trajectories alone is reported next to its own. Recorded logs, where they are at hand, are drawn from as well: every
other trajectory of a log, and the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import command_line
from benchmarks.evaluation import systems
from benchmarks.evaluation.setting import Setting
from benchmarks.rollout_price_cases import Case, logged_cases, logged_trajectories
from benchmarks.rows import Row, report
from benchmarks.workloads.definition import read
from benchmarks.workloads.drifting_tasks import Stationary
from libra.cost.engine_memory import BLOCK
from libra.lengths import LengthTracker
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.route.baselines import LeastLoaded
from libra.sim.training_run.episodes import Episodes, Resampled
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.system import Moment, System
from libra.trajectory import Trajectory

_MODEL = "Qwen/Qwen3-14B"
_QUANTILES = (0.5, 0.9, 0.99)
_HALF_LIFE = 2.0  # in what starts with a version
_WORKLOADS = ("r2e_gym", "search_r1", "dapo_math")
_RUN_STEPS = 24
_FIRST_STEPS = 4  # of those: not judged
_LOG_BATCH, _LOG_STALENESS = 128, 4  # of runs that draw from recorded logs
_RUN_BAR = 0.03  # goal for the mean relative errors of P50, P90 and the mean

Array = NDArray[np.float64]


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line("tracking", __doc__, quick="one seed of one workload").parse_args(arguments)
    rows: list[Row] = []
    for workload in _WORKLOADS[:1] if options.quick else _WORKLOADS:
        rows += run_rows(workload, [simulated(workload, seed) for seed in range(1 if options.quick else 3)])
    for case in logged_cases():
        for half, words in enumerate(("even half", "odd half")):
            rows += run_rows(f"{case.name}, {words}", [simulated_log(case, half)])
    report(rows, options.json)
    return 0


class Watching:
    """A `Replan` that keeps the plan, and feeds trackers with its input: `errors` at each step, as [P50, P90, P99,
    mean] relative to the tracker that knows the ends."""

    period = 1

    def __init__(self, episodes: Episodes, batch: int, steps: int) -> None:
        names = ("tracked", "finished only", "all")
        half_life, trajectories = _HALF_LIFE * batch, steps * batch
        self._trackers = {name: LengthTracker(half_life, block_tokens=BLOCK) for name in names}
        for tracker in self._trackers.values():
            tracker.observe_running(())
        self._episodes, self._trajectories = episodes, trajectories
        self._started: set[str] = set()
        self.errors: list[dict[str, Array]] = []

    def decide(self, moment: Moment) -> Plan | None:
        for trajectory in moment.finished:
            for name in ("tracked", "finished only"):
                self._trackers[name].observe(trajectory)
        self._trackers["tracked"].observe_running(moment.running)
        for trajectory in (*moment.finished, *moment.running):
            if trajectory.id not in self._started:
                self._started.add(trajectory.id)
                self._trackers["all"].observe(self._whole(trajectory))
        if len(self._started) < self._trajectories:  # from then on the run winds down
            found = {name: _levels(tracker) for name, tracker in self._trackers.items()}
            self.errors.append({name: found[name] / found["all"] - 1 for name in ("tracked", "finished only")})
        return None

    def _whole(self, trajectory: Trajectory) -> Trajectory:
        group, sample = map(int, trajectory.id.split("/"))
        return self._episodes.group(group, trajectory.policy_version)[sample]


def _levels(tracker: LengthTracker) -> Array:
    mean = sum(cls.share * cls.mean_context for cls in tracker.classes())
    return np.array([*(tracker.quantile(q) for q in _QUANTILES), mean])


def simulated(workload: str, seed: int, steps: int = _RUN_STEPS) -> list[dict[str, Array]]:
    """Errors at each step of a run."""
    setting = Setting(_MODEL, workload, seed=seed)
    source = read(workload)
    tasks = source.episodes("strong", seed=source.seed + seed)
    episodes = Stationary(tasks, tasks.steps // 2)
    watching = Watching(episodes, setting.groups_per_step * episodes.samples_per_prompt, steps)
    system = systems.ours(setting, systems.Parts(replan=False))
    simulate_posttraining(replace(system, replan=lambda: watching), episodes, steps)
    return watching.errors


def simulated_log(case: Case, half: int, steps: int = _RUN_STEPS) -> list[dict[str, Array]]:
    """Errors at each step of a run that draws from every other trajectory of a log: the first, or the second of two."""
    recipe = case.recipe.model_copy(update={"mode": "async", "staleness": _LOG_STALENESS, "batch": _LOG_BATCH})
    log = logged_trajectories(case)[half::2]
    planner = Planner(case.cluster, case.model, recipe, case.profiles)
    episodes = Resampled(tuple(log), recipe.samples_per_prompt, recipe.max_length, half)
    watching = Watching(episodes, recipe.batch, steps)
    system = System("log", planner.plan(planner.tracker(log)), LeastLoaded, lambda: watching)
    simulate_posttraining(system, episodes, steps)
    return watching.errors


def run_rows(workload: str, runs: Sequence[list[dict[str, Array]]]) -> list[Row]:
    """The mean error over all steps, which is bias, and the largest of any step."""
    rows = []
    for name in runs[0][0]:
        errors = np.array([at[name] for run in runs for at in run[_FIRST_STEPS:]])
        for what, column in zip(("P50", "P90", "P99", "mean"), errors.T, strict=True):
            bias = float(column.mean())
            judged = name == "tracked" and what != "P99"
            goal = (f"within {_RUN_BAR:.0%}", abs(bias) < _RUN_BAR) if judged else (None, None)
            case = f"simulated run, {workload}"
            rows.append(Row(case, f"{name} {what}, mean error", 100 * bias, "%", *goal))
            rows.append(Row(case, f"{name} {what}, largest error", 100 * float(np.abs(column).max()), "%"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
