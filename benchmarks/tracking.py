"""Error of tracked lengths while the true ones drift, jump, and finish late.

Invariant: the tracker sees what a run would show it: finished trajectories in the order in which they finish, and how
far the others have come. The truth is the distribution that trajectories of the newest version are drawn from.

    python -m benchmarks.tracking [--quick] [--json FILE]

A trajectory takes as long as its final context is. 512 start with every version, and their mean drifts from 2.5K to
11.5K tokens over 200 versions; half of the cases double it at once on the way. The next version comes after the time
that a mean trajectory takes, or a quarter of it, but waits for everything that started 4, or 10, versions before it.
Beside the tracker stands what is often done instead: a window of the last trajectories that have finished, a short
one of what starts with 4 versions and a long one of what starts with 16.

In whole simulated runs (48 A800 train Qwen3-14B; `benchmarks.workloads` without their drift) time is not context: tools
wait, and engines slow down with load. At every optimiser step the tracker gets the input of a replanner. Its error
is the difference to a tracker that knows how each of those trajectories ends; the error of the finished ones alone is
reported next to it.

Recorded logs, where they are at hand, are replayed: each replay draws 128 of their trajectories for each of 24
versions, and is judged at its end, when many still run. Whole simulated runs draw from every other trajectory of a log,
too, and from the others.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.evaluation import systems
from benchmarks.evaluation.setting import Setting
from benchmarks.rollout_price_cases import Case, logged_cases, logged_trajectories
from benchmarks.rows import Row, report
from benchmarks.workloads.definition import read
from libra.cost.engine_memory import BLOCK
from libra.lengths import LengthTracker
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.route.baselines import LeastLoaded
from libra.sim.training_run.drifting_tasks import DriftingTasks
from libra.sim.training_run.episodes import Episodes, Resampled
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.system import Moment, System
from libra.trajectory import Trajectory, Turn, read_trajectories

LOGS = Path(__file__).parents[1] / "../shared/data/trajectories"

_MODEL = "Qwen/Qwen3-14B"
_QUANTILES = np.array([0.5, 0.9, 0.99])
_BARS = np.array([0.1, 0.1, 0.2])  # goals for the relative errors of these quantiles
_PER_VERSION = 512
_VERSIONS = 200
_WARM_UP = 20  # versions
_HALF_LIFE = 2.0  # in what starts with a version
_WINDOWS = (4, 16)  # times what starts with a version
_AHEAD = 10  # versions of a forecast
_SETTLED = 3  # versions in a row within the bar
_WORKLOADS = ("r2e_gym", "search_r1", "dapo_math")
_RUN_STEPS = 24  # of a whole simulated run
_FIRST_STEPS = 4  # of those: not judged
_LOG_BATCH, _LOG_STALENESS = 128, 4  # of runs that draw from recorded logs
_RUN_BAR = 0.03  # goal for the mean relative errors of P50, P90 and the mean in a simulated run

Array = NDArray[np.float64]

# Final contexts before they are scaled to their mean, each with a long tail of its own.
SHAPES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "log-normal 1.0": lambda random, count: random.lognormal(0, 1.0, count),
    "log-normal 0.7": lambda random, count: random.lognormal(0, 0.7, count),
    "two modes": lambda random, count: random.lognormal(0, 0.4, count) * np.where(random.random(count) < 0.12, 5, 1),
    "Pareto tail 3": lambda random, count: 0.1 + random.pareto(3, count),
}
# Versions that may be in flight, and the shortest time between two in those of a mean trajectory.
FLIGHTS = {"4 in flight": (4, 1.0), "10 in flight": (10, 0.25)}


@dataclass(frozen=True, slots=True)
class Followed:
    """[version, quantile] relative errors of one run, and [version] logarithmic errors of the forecast median."""

    errors: dict[str, Array]  # of the tracker and of each window
    forecast: Array
    no_trend: Array


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracking", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed of one shape: a first look, not a verdict")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    options = parser.parse_args(arguments)
    shapes, seeds, replays = (list(SHAPES)[:1], 1, 5) if options.quick else (list(SHAPES), 3, 40)
    rows: list[Row] = []
    for shape in shapes:
        for flight in FLIGHTS:
            for jump in (1.0, 2.0):
                runs = [follow(shape, flight, jump, seed) for seed in range(seeds)]
                rows += rows_of(f"{shape}, {flight}, {'a jump' if jump > 1 else 'no jump'}", runs, jump > 1)
    for workload in _WORKLOADS[:1] if options.quick else _WORKLOADS:
        rows += run_rows(workload, [simulated(workload, seed) for seed in range(seeds)])
    for path in sorted(LOGS.glob("*.jsonl")):
        log = [trajectory for trajectory in read_trajectories(path) if trajectory.finished]
        rows += replay_rows(path.stem, [replay(log, seed) for seed in range(replays)])
    for case in logged_cases():
        for half, words in enumerate(("even half", "odd half")):
            rows += run_rows(f"{case.name}, {words}", [simulated_log(case, half)])
    report(rows, options.json)
    return 0


def follow(shape: str, flight: str, jump: float, seed: int) -> Followed:
    """One run."""
    random = np.random.default_rng(seed)
    unit = SHAPES[shape](np.random.default_rng(2**32), 1_000_000)
    unit_quantiles = np.quantile(unit, _QUANTILES) / unit.mean()
    steady = math.log(11.5 / 2.5 / jump) / (_VERSIONS - 1)
    means = 2500 * np.exp(steady * np.arange(_VERSIONS)) * np.where(np.arange(_VERSIONS) < _VERSIONS // 2, 1, jump)
    tracker, windows = LengthTracker(_HALF_LIFE * _PER_VERSION), make_windows(_PER_VERSION)
    found: dict[str, list[Array]] = {"tracked": [], **{name: [] for name in windows}}
    forecasts = []
    lengths = [np.maximum(1, SHAPES[shape](random, _PER_VERSION) / unit.mean() * mean) for mean in means]
    tracker.observe_running(())  # versions count from the start
    for finished, running in arrivals(lengths, means, *FLIGHTS[flight]):
        for length, version in finished:
            tracker.observe(_trajectory(length, version))
            for window in windows.values():
                window.append(length)
        tracker.observe_running(_trajectory(length, version, finished=False) for length, version in running)
        found["tracked"].append(np.array([tracker.quantile(q) for q in _QUANTILES]))
        for name, window in windows.items():
            found[name].append(np.asarray(np.quantile(window, _QUANTILES)))
        forecasts.append(found["tracked"][-1][0] * tracker.forecast(_AHEAD).scale)
    truth = means[:, None] * unit_quantiles
    later = np.log(truth[_AHEAD:, 0])
    return Followed(
        errors={name: np.array(quantiles) / truth - 1 for name, quantiles in found.items()},
        forecast=np.log(forecasts[:-_AHEAD]) - later,
        no_trend=np.log(np.array(found["tracked"])[:-_AHEAD, 0]) - later,
    )


def make_windows(per_version: int) -> dict[str, deque[float]]:
    return {f"window of {versions}": deque(maxlen=versions * per_version) for versions in _WINDOWS}


def arrivals(
    lengths: Sequence[Array], means: Array, in_flight: int, shortest: float
) -> Iterator[tuple[list[tuple[float, int]], list[tuple[float, int]]]]:
    """For each version, at the time when the next one comes: what has finished since, in order, and what is running,
    both as (context, version). A token takes one unit of time."""
    flying: list[tuple[float, float, int]] = []  # (end, length, version)
    began: list[float] = []
    now = 0.0
    for version, started in enumerate(lengths):
        began.append(now)
        for length in started:
            heapq.heappush(flying, (now + float(length), float(length), version))
        now += shortest * float(means[version])
        if version >= in_flight:
            late = version - in_flight
            now = max(now, began[late] + float(lengths[late].max()))
        finished = []
        while flying and flying[0][0] <= now:
            _, length, of = heapq.heappop(flying)
            finished.append((length, of))
        yield finished, [(max(1.0, now - began[of]), of) for _, _, of in flying]


def rows_of(case: str, runs: Sequence[Followed], jump: bool) -> list[Row]:
    rows = []
    for name in runs[0].errors:
        errors = [run.errors[name] for run in runs]
        after = np.abs(np.concatenate([error[_WARM_UP:] for error in errors]))
        for q, bar, column in zip(_QUANTILES, _BARS, after.T, strict=True):
            typical = float(np.median(column))
            goal = (f"below {bar:.0%}", typical < float(bar)) if name == "tracked" else (None, None)
            rows.append(Row(case, f"{name} P{100 * q:g}, median error", 100 * typical, "%", *goal))
            rows.append(Row(case, f"{name} P{100 * q:g}, largest error", 100 * float(column.max()), "%"))
            if jump:
                lags = [lag(error[_VERSIONS // 2 :, q == _QUANTILES].ravel(), float(bar)) for error in errors]
                rows.append(Row(case, f"{name} P{100 * q:g}, longest lag after the jump", max(lags), "versions"))
    for name, errors in (("", [run.forecast for run in runs]), (" without a trend", [run.no_trend for run in runs])):
        after = np.abs(np.concatenate([error[_WARM_UP:] for error in errors]))
        metric = f"forecast of P50 {_AHEAD} versions ahead{name}, median error"
        rows.append(Row(case, metric, 100 * float(np.median(after)), "%"))
    return rows


def lag(errors: Array, bar: float) -> int:
    """Versions until the error stays within the bar for a few."""
    within = np.abs(errors) < bar
    runs = [bool(within[at : at + _SETTLED].all()) for at in range(len(within) - _SETTLED + 1)]
    return runs.index(True) if True in runs else len(errors)


def replay(log: Sequence[Trajectory], seed: int, versions: int = 24, per_version: int = 128) -> dict[str, Array]:
    """[quantile] relative errors of the tracker and of the windows at the end of a run that draws from the log."""
    random = np.random.default_rng(seed)
    draws = [[log[index] for index in random.integers(len(log), size=per_version)] for _ in range(versions)]
    lengths = [np.array([float(drawn.peak_context) for drawn in drawn_now]) for drawn_now in draws]
    by_length = [{drawn.peak_context: drawn for drawn in drawn_now} for drawn_now in draws]
    truth = np.quantile([trajectory.peak_context for trajectory in log], _QUANTILES)
    means = np.full(versions, float(np.mean([trajectory.peak_context for trajectory in log])))
    tracker, windows = LengthTracker(_HALF_LIFE * per_version), make_windows(per_version)
    tracker.observe_running(())  # versions count from the start
    for finished, running in arrivals(lengths, means, *FLIGHTS["10 in flight"]):
        for length, version in finished:
            tracker.observe(replace(by_length[version][int(length)], policy_version=version))
            for window in windows.values():
                window.append(length)
        tracker.observe_running(_trajectory(length, version, finished=False) for length, version in running)
    found = {"tracked": np.array([tracker.quantile(q) for q in _QUANTILES])}
    found |= {name: np.quantile(window, _QUANTILES) for name, window in windows.items()}
    return {name: quantiles / truth - 1 for name, quantiles in found.items()}


def replay_rows(case: str, replays: Sequence[dict[str, Array]]) -> list[Row]:
    """The mean error, which is bias, and the interval that holds 95 % of the errors (bootstrap percentiles)."""
    rows = []
    for name in replays[0]:
        for q, column in zip(_QUANTILES, np.array([errors[name] for errors in replays]).T, strict=True):
            low, high = np.quantile(column, [0.025, 0.975])
            rows.append(Row(case, f"{name} P{100 * q:g}, mean error", 100 * float(column.mean()), "%"))
            rows.append(Row(case, f"{name} P{100 * q:g}, 2.5 % of errors below", 100 * float(low), "%"))
            rows.append(Row(case, f"{name} P{100 * q:g}, 97.5 % of errors below", 100 * float(high), "%"))
    return rows


@dataclass(frozen=True, slots=True)
class Stationary:
    """`Episodes` of one stage of a drift."""

    tasks: DriftingTasks
    stage: int

    @property
    def samples_per_prompt(self) -> int:
        return self.tasks.samples_per_prompt

    @property
    def max_context(self) -> int:
        return self.tasks.max_context

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        return tuple(replace(each, policy_version=version) for each in self.tasks.group(number, self.stage))


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
    known = planner.tracker()
    for trajectory in log:
        known.observe(trajectory)
    episodes = Resampled(tuple(log), recipe.samples_per_prompt, recipe.max_length, half)
    watching = Watching(episodes, recipe.batch, steps)
    system = System("log", planner.plan(known), LeastLoaded, lambda: watching)
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


def _trajectory(context: float, version: int, *, finished: bool = True) -> Trajectory:
    turn = Turn(int(context), None, None, 0) if finished else Turn(int(context), "tool", "ok", 0)
    return Trajectory("made", "made", "made", 0, (turn,), None, version, finished)


if __name__ == "__main__":
    sys.exit(main())
