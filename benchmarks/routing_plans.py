"""Routers on the engines of plans: equal engines, and the two or three sizes that the planner chooses.

Invariant: all routers get the same trajectories in the same order. Plan and router know one half of the prompts, and
the other half is served; only the oracle knows each trajectory's end.

    python -m benchmarks.routing_plans [--quick] [--runs] [--first-seed N] [--seeds N] [--json FILE]

Ratios are to sticky least-loaded routing, means over seeds. One batch gives its makespan and the mean time of its
trajectories; `--runs` adds the mean step of a post-training run of 8 steps. Logs of real agents are left out where
they are not in the folder `LIBRA_DATA`.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.command import command_line, show
from benchmarks.evaluation.setting import a800_nodes, profiles_of
from benchmarks.rows import Row, at_most
from libra import (
    Plan,
    Planner,
    Recipe,
    Resampled,
    System,
    Trajectory,
    load_model,
    metrics_of,
    read_trajectories,
    simulate_posttraining,
)
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.sim.of_plan import simulate_plan, teach
from tests.oracles.oracle_policy import Oracle
from tests.oracles.random_clusters import TESTED, make_case

OURS, ORACLE, LEAST_LOADED = "cmlfq", "oracle", "least-loaded"
MOST = 1.01  # of least-loaded's time that `OURS` may take
SEARCH = Path(__file__).parents[1] / "examples" / "search_agent.jsonl"

_MODEL = "Qwen/Qwen3-14B"
_DATA = Path(os.environ.get("LIBRA_DATA", Path(__file__).parents[1] / "../shared/data/trajectories"))
_AGENTS = {  # by name: the file of a log, and the tokens that a trajectory is cut at
    "airline": ("tau_bench_airline.jsonl", 8192),
    "claude-code": ("claude_code_sessions.jsonl", 40_960),
}
_USER = "user"  # who is asked, in these logs, as a tool is
_SIZES = (1, 2, 3)  # buckets that a plan may have
_STEPS = 8
_PROMPTS = 192  # of a random log's halves
Halves = tuple[Sequence[Trajectory], Sequence[Trajectory]]


@dataclass(frozen=True, slots=True)
class Question:
    """A plan that was made for the trajectories `known`, to serve trajectories drawn from `judged`."""

    name: str
    plan: Plan
    known: tuple[Trajectory, ...] = field(repr=False)
    judged: tuple[Trajectory, ...] = field(repr=False)
    recipe: Recipe

    def episodes(self, seed: int) -> Resampled:
        return Resampled(self.judged, self.recipe.samples_per_prompt, self.recipe.max_length, seed)

    def batch(self, seed: int) -> list[Trajectory]:
        episodes = self.episodes(seed)
        return [it for group in range(self.recipe.prompts) for it in episodes.group(group, 0)]


def question(name: str, logs: Halves, planner: Planner) -> Question:
    """The planner's own plan for the first log, whose groups are drawn like those of a run. Raises
    `InfeasiblePlanError`."""
    (known, judged), recipe = logs, planner.recipe
    episodes = Resampled(tuple(known), recipe.samples_per_prompt, recipe.max_length, seed=0)
    before = tuple(it for group in range(recipe.prompts) for it in episodes.group(group, 0))
    plan = planner.plan(planner.tracker(before, half_life_steps=1e6))  # all of them count
    engines = ", ".join(f"{it.shape} x {it.engines}" for it in plan.allocation.buckets)
    return Question(f"{name}: {engines}", plan, before, tuple(judged), recipe)


def questions(seed: int, families: Sequence[str] = TESTED) -> Iterator[Question]:
    """Logs of agents, as many as are at hand, and random ones; each with one size, two and three. Of questions whose
    plans are equal, one."""
    cluster, model = a800_nodes(6), load_model(_MODEL)
    for name, logs, longest in _logs(seed):
        recipe = Recipe(batch=512, samples_per_prompt=16, max_length=longest, mode="async", staleness=1)
        yield from _sizes(name, logs, Planner(cluster, model, recipe, profiles_of(cluster, model, recipe)))
    for family in families:
        case = make_case(family, seed, staleness=1)
        known, judged = (case.make(_PROMPTS, number, case.recipe.samples_per_prompt) for number in (0, 1))
        planner = Planner(case.cluster, case.model, case.recipe, case.profiles)
        yield from _sizes(f"{family} {seed}", (known, judged), planner)


def _logs(seed: int) -> Iterator[tuple[str, Halves, int]]:
    yield "search", halves([it for it in read_trajectories(SEARCH) if it.finished], seed), 40_960
    for log, (file, longest) in _AGENTS.items():
        if (_DATA / file).is_file():
            finished = [without_waits(it) for it in read_trajectories(_DATA / file) if it.finished]
            yield log, halves(finished, seed), longest


def without_waits(trajectory: Trajectory) -> Trajectory:
    """The trajectory as if it were not known how long a person took to answer: in training none is asked."""
    turns = (replace(turn, tool_seconds=None) if turn.tool == _USER else turn for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def halves(log: Sequence[Trajectory], seed: int) -> tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]:
    """The trajectories of a random half of the prompts, and those of the others."""
    prompts = list(dict.fromkeys(trajectory.prompt_id for trajectory in log))
    if len(prompts) < 2:
        raise ValueError(f"the log has {len(prompts)} prompts; two halves need 2 or more")
    order = np.random.default_rng(seed).permutation(len(prompts))
    chosen = {prompts[number] for number in order[: len(prompts) // 2].tolist()}
    return tuple(it for it in log if it.prompt_id in chosen), tuple(it for it in log if it.prompt_id not in chosen)


def _sizes(name: str, logs: Halves, planner: Planner) -> Iterator[Question]:
    seen = set()
    for size in _SIZES:
        its = planner.recipe.model_copy(update={"max_buckets": size})
        found = question(name, logs, replace(planner, recipe=its))
        if found.plan.allocation not in seen:
            seen.add(found.plan.allocation)
            yield found


def batch_seconds(asked: Question, batch: Sequence[Trajectory], route: str, seed: int = 0) -> tuple[float, float]:
    """Simulated makespan, and mean time of the trajectories of a batch that start together, in seconds."""
    policy: Policy = Oracle({it.id: it for it in batch}) if route == ORACLE else policy_named(route, seed=seed)
    metrics = metrics_of(simulate_plan(asked.plan, batch, policy, learned=asked.known, seed=seed))
    assert metrics.trajectory_latency is not None
    return metrics.makespan, metrics.trajectory_latency.mean


def whole_run(asked: Question, route: str, seed: int) -> dict[str, float]:
    """Mean seconds of a step of a post-training run."""
    episodes = asked.episodes(seed)

    def policy() -> Policy:
        if route == ORACLE:
            groups = _STEPS * asked.recipe.prompts
            return Oracle({it.id: it for group in range(groups) for it in episodes.group(group, 0)})
        made = policy_named(route, seed=seed)
        teach(made, asked.known)
        return made

    run = simulate_posttraining(System(route, asked.plan, policy), episodes, _STEPS)
    return {f"mean of {_STEPS} steps": run.step_seconds}


def ratios(
    asked: Question, seeds: Sequence[int], runs: bool, routes: Sequence[str] = (OURS, ORACLE)
) -> dict[str, dict[str, float]]:
    """By measure and router: seconds as a multiple of least-loaded's, means over seeds; and its own seconds."""
    sums: dict[str, dict[str, float]] = {}
    for seed in seeds:
        for route in (LEAST_LOADED, *routes):
            both = batch_seconds(asked, asked.batch(seed), route, seed)
            measured = dict(zip(("makespan", "mean of trajectories"), both, strict=True))
            if runs:
                measured |= whole_run(asked, route, seed)
            for measure, seconds in measured.items():
                of_measure = sums.setdefault(measure, {})
                of_measure[route] = of_measure.get(route, 0.0) + seconds / len(seeds)
    return {
        measure: {LEAST_LOADED: its[LEAST_LOADED], **{route: its[route] / its[LEAST_LOADED] for route in routes}}
        for measure, its in sums.items()
    }


def rows_of(asked: Question, found: Mapping[str, Mapping[str, float]]) -> Iterator[Row]:
    for measure, its in found.items():
        yield Row(asked.name, f"{measure}: {LEAST_LOADED}", its[LEAST_LOADED], "s")
        for route in (OURS, ORACLE):
            most = MOST if route == OURS else None
            yield at_most(asked.name, f"{measure}: {route} / {LEAST_LOADED}", its[route], "x", most)


def rows(options: Namespace) -> Iterator[Row]:
    first = options.first_seed
    seeds = range(first, first + (1 if options.quick else options.seeds))
    for asked in questions(first, () if options.quick else TESTED):
        yield from rows_of(asked, ratios(asked, seeds, options.runs))


if __name__ == "__main__":
    parser = command_line("routing_plans", __doc__, quick="logs of agents only, one seed")
    parser.add_argument("--runs", action="store_true", help="simulate post-training runs, too")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="of logs, halves and draws (default: 0)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="draws of each question (default: 3)")
    show(parser, rows)
