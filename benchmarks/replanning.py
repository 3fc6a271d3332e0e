"""Worth of replanning where the lengths of trajectories drift.

Invariant: every policy is charged for the same true work, by the price of what it holds under the true distribution of
each period, and for every change by the same rule. Policies see sampled trajectories only, and the replanner what its
steps took; hindsight sees the truth.

    python -m benchmarks.replanning [--quick] [--json FILE]

48 A800 train Qwen3-14B with 512 trajectories a step for 200 steps; every 5 steps the plan may change. Final contexts
are log-normal, their mean follows the scenario. `never` keeps the first plan, `always` adopts each new one, `replanner`
is `libra.plan.replanner`, and `hindsight` the least total time of all sequences of the allocations that anyone had or
that are best in some period, by dynamic programming. All begin at no cost; hindsight may choose where.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, median

from benchmarks.rows import Row, report
from libra.config.recipe import Recipe
from libra.cost.engine_memory import BLOCK
from libra.hardware.cluster_file import load_cluster
from libra.hardware.model_file import load_model
from libra.lengths import LengthTracker
from libra.plan.allocation import Allocation
from libra.plan.decision import cluster_seconds, live_refill, switch_cost
from libra.plan.model.horizon import PoolSizes, pool_sizes, shortest_path
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest, sharing_layouts
from libra.plan.options.price import infeasibility, price
from libra.plan.plan import Plan
from libra.plan.planner import CLASSES, Planner, rooflines, what_runs
from libra.plan.problem import Problem
from libra.plan.replanner import REPLANNER_HALF_LIFE_STEPS, Replanner
from libra.plan.transition import group_transition
from libra.trajectory import Trajectory, Turn

PERIOD = 5  # steps between two decisions
HINDSIGHT = 0.05  # relative: a policy is to lose no more than this to hindsight

_CLUSTER = Path(__file__).parent.parent / "examples" / "cluster_48_a800.yaml"
_RECIPE = Recipe(batch=512, samples_per_prompt=16, max_length=40_960)
_SPREAD = 0.8  # standard deviation of the logarithm of the final context
_PROMPT, _TURN, _RETURN, _TOOL_SECONDS = 256, 512, 256, 2.0  # tokens, but for the last
_TRUE_CLASSES = 100  # finer than a plan's, so that a bucket's limit that is a little off costs a little
_TRUE_QUANTILES = 1000
_WARM_UP = 4  # steps that have been seen before the first plan

Seconds = dict[str, float]  # by policy


def growth(step: float) -> float:
    return 2500 + 9000 * min(1.0, step / 200)


def jump(step: float) -> float:
    return 2500 if step < 97 else 8000  # in the middle of a period


def oscillation(step: float) -> float:
    return 5000 * 2 ** math.sin(2 * math.pi * step / 80)


def still(step: float) -> float:
    return 5000


SCENARIOS: dict[str, Callable[[float], float]] = {
    "steady growth": growth,
    "jump": jump,
    "oscillation": oscillation,
    "no drift": still,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replanning", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="one seed, half of the steps: a first look, not a verdict")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for name, mean in SCENARIOS.items():
        runs = [run(mean, seed, 100 if options.quick else 200) for seed in range(1 if options.quick else 3)]
        rows += rows_of(name, runs)
    report(rows, options.json)
    return 0


@dataclass(frozen=True, slots=True)
class Run:
    """One seed of one scenario."""

    seconds: Seconds
    changes: dict[str, int]
    pool: PoolSizes  # that hindsight asks for


def run(mean: Callable[[float], float], seed: int, steps: int) -> Run:
    planner = _planner()
    starts = range(0, steps, PERIOD)
    held = _followed(planner, mean, seed, starts)
    layouts = {(_pool(plan), plan.layout) for policy in held.values() for plan in policy if plan.layout is not None}
    followed = tuple(sorted(layouts, key=lambda each: (each[0], each[1].name)))
    means = [mean(start + PERIOD / 2) for start in starts]
    once = sorted(set(means))
    coarse = sharing_layouts([replace(_truth(each, CLASSES), held=followed) for each in once])
    best = [solve(request.menu().problem).allocation for request in coarse]
    fine = [replace(_truth(each, _TRUE_CLASSES), held=coarse[0].held) for each in once]
    menus = {each: request.menu() for each, request in zip(once, sharing_layouts(fine), strict=True)}
    allocations = {name: [plan.allocation for plan in policy] for name, policy in held.items()}
    return _charged(
        allocations, best, [_truth(each, _TRUE_CLASSES) for each in means], [menus[each].problem for each in means]
    )


def _pool(plan: Plan) -> str:
    return next(group.pool for group in plan.placement if group.role == "train")


def rows_of(case: str, runs: Sequence[Run]) -> list[Row]:
    def ratios(policy: str) -> list[float]:
        return [run.seconds[policy] / run.seconds["hindsight"] for run in runs]

    rows = [Row(case, "hindsight: all steps and changes", median(run.seconds["hindsight"] for run in runs), "s")]
    for policy in ("never", "always"):
        rows.append(Row(case, f"{policy}: over hindsight", 100 * (median(ratios(policy)) - 1), "%"))
    ours = [100 * (ratio - 1) for ratio in ratios("replanner")]
    bar = 100 * HINDSIGHT
    rows.append(Row(case, "replanner: over hindsight", median(ours), "%", f"at most {bar:g} %", median(ours) <= bar))
    rows.append(Row(case, "replanner: worst of the seeds", max(ours), "%", f"at most {bar:g} %", max(ours) <= bar))
    beyond = [100 * (run.seconds["replanner"] / min(run.seconds["never"], run.seconds["always"]) - 1) for run in runs]
    rows.append(Row(case, "replanner: over the better", max(beyond), "%", "at most 0 %", max(beyond) <= 1e-9))
    for policy in ("always", "replanner", "hindsight"):
        rows.append(Row(case, f"{policy}: changes", median(run.changes[policy] for run in runs), ""))
    for role in ("core", "hybrid", "rollout"):
        sizes = [getattr(run.pool, role) for run in runs]
        rows.append(Row(case, f"hindsight: {role} devices", median(sizes), ""))
    return rows


def _followed(
    planner: Planner, mean: Callable[[float], float], seed: int, starts: Sequence[int]
) -> dict[str, list[Plan]]:
    """Plans that each policy holds, by period, from the trajectories of one seed."""
    rng = random.Random(seed)
    tracker = LengthTracker(REPLANNER_HALF_LIFE_STEPS * _RECIPE.batch, block_tokens=BLOCK)
    tracker.observe_running(())
    replanner = Replanner(planner, period=PERIOD, tracker=tracker)
    held: dict[str, list[Plan]] = {"never": [], "always": [], "replanner": []}
    late: list[Trajectory] = []  # were running when the last period ended
    seen = -_WARM_UP
    for start in starts:
        finished, late, running = late, [], []
        for version in range(seen, start):
            for number in range(_RECIPE.batch):
                trajectory = _trajectory(_length(rng.random(), mean(version)), f"{version}.{number}", version)
                # Of the newest version, some are still on their way: they have come to between nothing and 10,000.
                come_to = 10_000 * rng.random() if version == start - 1 else math.inf
                if trajectory.peak_context <= come_to:
                    finished.append(trajectory)
                else:
                    late.append(trajectory)
                    running.append(_so_far(trajectory, come_to))
        seen = start
        replanner.step(finished, running)
        adopted = replanner.plan
        assert adopted is not None  # the first step starts one
        held["replanner"].append(adopted)
        known = planner.request(_known(mean(start + PERIOD / 2)).classes(CLASSES), *what_runs(adopted))
        replanner.realised(price(known.menu().problem, adopted.allocation).step)
        held["never"].append((held["never"] or [adopted])[0])
        if held["always"]:
            forecast = tracker.forecast(PERIOD / 2, CLASSES, _RECIPE.max_length)
            held["always"].append(planner.plan(forecast.classes, held["always"][-1]))
        else:
            held["always"].append(adopted)
    return held


def _charged(
    held: dict[str, list[Allocation]],
    best: Sequence[Allocation],
    truths: Sequence[ClusterRequest],
    problems: Sequence[Problem],
) -> Run:
    """The true seconds of every policy, and of the best sequence there is."""
    anyones = [allocation for policy in held.values() for allocation in policy]
    candidates = list(dict.fromkeys([*anyones, *best]))
    index = {allocation: position for position, allocation in enumerate(candidates)}
    prices = {
        id(problem): [
            price(problem, each).step if infeasibility(problem, each) is None else math.inf for each in candidates
        ]
        for problem in problems
    }
    cost = [[PERIOD * step for step in prices[id(problem)]] for problem in problems]
    switch = switch_cost(truths[0])
    refills = [live_refill(truth) for truth in truths]

    @cache
    def parts(a: int, b: int) -> tuple[float, float]:
        """Seconds of the starts, and those of each second of refill."""
        change = problems[0], group_transition(candidates[a], candidates[b]), switch
        return cluster_seconds(*change), cluster_seconds(*change, refill=1.0) - cluster_seconds(*change)

    def lost(period: int, a: int, b: int) -> float:
        starts, per_refill = parts(a, b)
        return starts + refills[period] * per_refill

    paths = {name: [index[allocation] for allocation in policy] for name, policy in held.items()}
    paths["hindsight"] = list(shortest_path(cost, lost, None))
    seconds, changes = {}, {}
    for name, path in paths.items():
        moved = [(p, a, b) for p, (a, b) in enumerate(pairwise(path), start=1) if a != b]
        steps = math.fsum(cost[p][b] for p, b in enumerate(path))
        seconds[name] = steps + math.fsum(lost(*move) for move in moved)
        changes[name] = len(moved)
    (pool,) = pool_sizes(problems, [candidates[b] for b in paths["hindsight"]])
    return Run(seconds, changes, pool)


@cache
def _planner() -> Planner:
    cluster, model = load_cluster(_CLUSTER), load_model("Qwen/Qwen3-14B")
    return Planner(cluster, model, _RECIPE, rooflines(cluster, model, _RECIPE))


@cache
def _known(mean: float) -> LengthTracker:
    """A tracker that knows the true distribution."""
    tracker = LengthTracker(half_life=1e12, bins_per_octave=48, block_tokens=BLOCK)
    tracker.observe_running(())
    for number in range(_TRUE_QUANTILES):
        tracker.observe(_trajectory(_length((number + 0.5) / _TRUE_QUANTILES, mean), str(number), 0))
    return tracker


def _truth(mean: float, classes: int) -> ClusterRequest:
    return _planner().request(_known(mean).classes(classes))


def _length(quantile: float, mean: float) -> int:
    """A final context of the log-normal distribution, within what the recipe allows."""
    normal = NormalDist(math.log(mean) - _SPREAD**2 / 2, _SPREAD)
    return round(min(_RECIPE.max_length, max(_PROMPT + 1, math.exp(normal.inv_cdf(max(quantile, 1e-9))))))


@cache
def _calls(many: int) -> tuple[Turn, ...]:
    return (Turn(_TURN, "tool", "ok", _RETURN, _TOOL_SECONDS),) * many


def _trajectory(length: int, name: str, version: int) -> Trajectory:
    """A trajectory of the most turns with a tool return that fit, and a last one that fills up the length."""
    calls = (length - _PROMPT - 1) // (_TURN + _RETURN)
    last = length - _PROMPT - calls * (_TURN + _RETURN)
    return Trajectory(name, name, "made", _PROMPT, (*_calls(calls), Turn(last, None, None, 0)), None, version, True)


def _so_far(trajectory: Trajectory, come_to: float) -> Trajectory:
    calls = min(len(trajectory.turns) - 1, int(max(0.0, come_to - _PROMPT)) // (_TURN + _RETURN))
    return replace(trajectory, turns=_calls(calls), finished=False)


if __name__ == "__main__":
    sys.exit(main())
