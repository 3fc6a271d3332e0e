"""Error of the planner's price of a synchronous rollout against the simulated one; the table that corrects prices.

Invariant: families of trajectories and seeds that the table of corrections was fitted to are not those of any verdict.

    python -m benchmarks.rollout_price [--quick] [--json FILE] [--fit]

A case is a random cluster (GPUs, nodes, tensor-parallel degrees), model, recipe and distribution of trajectories. The
planner observes 4,096 trajectories and plans synchronous training; then batches drawn anew are rolled out by the
simulator on the plan's engines, all at once, with every trajectory sent to its bucket. Predicted seconds are an
expectation, so they are compared with the mean of as many batches as it takes to know that. `--fit` makes the table
anew from other families, and writes it to `src/libra/cost/corrections.py`: from such rollouts, and from the steps of
whole runs with staleness. The verdict on steps is the experiment `step-price` of `benchmarks.evaluation`.
"""

from __future__ import annotations

import math
import random
import re
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import command_line, show
from benchmarks.rows import Row, at_most
from libra.config.recipe import Recipe
from libra.cost.corrections import BATCH, UNCORRECTED, BatchFactors
from libra.cost.grid import EngineProfile
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.plan.allocation import Allocation
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.engines import engine_options
from libra.plan.options.price import bucket_prices, price
from libra.plan.plan import Plan
from libra.plan.problem import EngineOption, InfeasiblePlanError, Problem
from libra.trajectory import Trajectory, read_trajectories, truncate
from tests.oracles.random_clusters import (
    FITTED,
    TESTED,
    Case,
    Make,
    make_case,
    plan_case,
    roll_out,
    roofline_profiles,
    simulate_steps,
)

Floats = NDArray[np.float64]

TABLE = Path(__file__).parents[1] / "src/libra/cost/corrections.py"
_LOGS = Path(__file__).parents[1] / "../shared/data/trajectories"
MEAN_GOAL, LARGEST_GOAL = 6.0, 15.0  # percent

_CASES = 100
_FIT_SEEDS = 20  # of each family
_OVERLAP_PART = 3  # seeds for one sample, where each sample is a run of many steps
_STALENESS = (1, 2, 4)  # in turn
# Batches of a case are simulated until the standard error of their mean is known to be small, or there are many.
_BATCHES = (4, 32)
_FEW_BATCHES = (3, 8)
_STANDARD_ERROR = 0.02  # of the mean
_FIRST_OVERLAP_SEED = 500
_FIRST_TEST_SEED = 1000  # those of the fits are below
# Of the fit
_ROUNDS = 6
_STEP = 0.02  # of a factor, to see how the price follows
_TRUST = 0.3  # a factor changes by no more in a round
_RANGE = (0.05, 2.0)
_PARTS = ("decode", "prefill", "eviction", "memory", "generation")
_PRIOR = 0.05  # weight of 1 for each factor, in mean squared logarithms: what the samples say little of stays there


@dataclass(frozen=True)
class Sample:
    """One allocation, and how long it was simulated to take: see `priced_seconds`."""

    request: ClusterRequest
    problem: Problem
    allocation: Allocation
    seconds: float

    def price(self, factors: BatchFactors) -> float:
        return priced_seconds(replace(self.problem, engines=self._options(factors)), self.allocation)

    def _options(self, factors: BatchFactors) -> tuple[EngineOption, ...]:
        request = self.request
        found: list[EngineOption] = []
        for nodes, profile in self._profiles:
            options, _ = engine_options(
                request.model, nodes, request.recipe, request.classes, profile, request.recipe.max_length, factors
            )
            found += options
        return tuple(found)

    @cached_property
    def _profiles(self) -> list[tuple[NodeClass, EngineProfile]]:
        """Profiles with only the engine sizes that the allocation has: no others need a price."""
        shapes = {bucket.shape for bucket in self.allocation.buckets}
        found = []
        for nodes, profile in zip(self.request.cluster.nodes, self.request.profiles, strict=True):
            grids = tuple(grid for grid in profile.engines if f"{nodes.name}/tp{grid.tp}" in shapes)
            if grids:
                found.append((nodes, replace(profile, engines=grids)))
        return found


@dataclass(frozen=True, slots=True)
class Priced:
    """A case's plan, and the simulated seconds of its batches."""

    case: Case
    plan: Plan
    problem: Problem
    rollouts: tuple[float, ...]

    @property
    def predicted(self) -> float:
        return priced_seconds(self.problem, self.plan.allocation)

    @property
    def simulated(self) -> float:
        return fmean(self.rollouts)

    @property
    def error(self) -> float:
        return self.predicted / self.simulated - 1

    @property
    def sample(self) -> Sample:
        return _sample(self.plan, self.problem, self.simulated)


def rows(options: Namespace) -> list[Row]:
    if options.fit:
        factors = fit_factors(2 if options.quick else _FIT_SEEDS)
        write_table(factors, TABLE)
        return [Row(f"{TABLE}", part, value, "") for part, value in asdict(factors).items()]
    count, batches = (9, _FEW_BATCHES) if options.quick else (_CASES, _BATCHES)
    found = list(price_all(test_cases(count), batches))
    return [*verdict_rows(found), *log_rows(batches)]


def test_cases(count: int) -> list[Case]:
    """The families in turn; a case that has no plan is left out, and another is drawn."""
    return [make_case(TESTED[k % len(TESTED)], _FIRST_TEST_SEED + k // len(TESTED)) for k in range(count)]


def fit_factors(seeds: int) -> BatchFactors:
    """Fit factors to rollouts of single batches and to steps of whole runs. They are fitted twice, as prices that are
    wrong show in plans that were made by them."""
    samples: list[Sample] = []
    factors = UNCORRECTED
    for first in (0, seeds):
        for family in FITTED:
            cases = (make_case(family, seed) for seed in range(first, first + seeds))
            samples += [priced.sample for priced in price_all(cases, _FEW_BATCHES, factors)]
        samples += overlapping_samples(range(_FIRST_OVERLAP_SEED + first, _FIRST_OVERLAP_SEED + first + seeds), factors)
        factors = fit(samples)
    return factors


def overlapping_samples(seeds: range, factors: BatchFactors) -> Iterable[Sample]:
    """One in `_OVERLAP_PART` of the cases that the seeds give, as each is a run of many steps."""
    for turn, (family, seed) in enumerate((f, s) for s in seeds[::_OVERLAP_PART] for f in FITTED):
        case = make_case(family, seed, _STALENESS[(turn + turn // len(FITTED)) % len(_STALENESS)])
        try:
            plan, menu = plan_case(case, factors)
        except InfeasiblePlanError:
            continue
        yield _sample(plan, menu.problem, simulate_steps(case, plan).seconds)


def fit(samples: Sequence[Sample]) -> BatchFactors:
    """Least squares of the logarithms of predicted by simulated seconds, by Gauss and Newton's method."""

    def factors_of(values: Floats) -> BatchFactors:
        return replace(UNCORRECTED, **dict(zip(_PARTS, values.tolist(), strict=True)))

    def errors(values: Floats) -> Floats:
        factors = factors_of(values)
        return np.array([np.log(sample.price(factors) / sample.seconds) for sample in samples])

    before = np.ones(len(_PARTS))
    factors = before
    for _ in range(_ROUNDS):
        now = errors(factors)
        slopes = np.array([(errors(factors + _STEP * unit) - now) / _STEP for unit in np.eye(len(_PARTS))]).T
        # A heavy-tailed batch is no reason to misprice all others.
        weights = 1 / np.sqrt(np.maximum(np.abs(now), 0.05))
        rows = np.vstack([slopes * weights[:, None], _PRIOR * np.sqrt(len(samples)) * np.eye(len(_PARTS))])
        wanted = np.concatenate([-now * weights, _PRIOR * np.sqrt(len(samples)) * (before - factors)])
        change = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        factors = np.clip(factors + np.clip(change, -_TRUST, _TRUST), *_RANGE)
    return factors_of(factors.round(2))


def write_table(factors: BatchFactors, path: Path) -> None:
    """Put the factors where the file has them."""
    lines = "".join(f"    {field}={value!r},\n" for field, value in asdict(factors).items())
    text, found = re.subn(
        r"^BATCH = BatchFactors\(\n.*?^\)$",
        f"BATCH = BatchFactors(\n{lines})",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    if found != 1:
        raise ValueError(f"{path} defines BATCH {found} times; it must be once, from `BATCH = BatchFactors(` to `)`")
    path.write_text(text, encoding="utf-8")


def logged_cases() -> list[Case]:
    """48 A800 that roll out what recorded logs have, where these are at hand; a batch is drawn from a log."""
    model = load_model("Qwen/Qwen3-14B")
    nodes = NodeClass("a800", 6, 8, GPUS["A800"], GPUS["A800"].link, 25e9)
    recipe = Recipe(batch=256, samples_per_prompt=8, max_length=32768, mode="sync")
    cluster = Cluster((nodes,))
    profiles = roofline_profiles(cluster, model, recipe)
    return [
        Case(path.stem, cluster, model, recipe, profiles, _drawn_from(path, recipe.max_length))
        for path in sorted(_LOGS.glob("*.jsonl"))
    ]


def _drawn_from(path: Path, longest: int) -> Make:
    log = [truncate(trajectory, longest) for trajectory in read_trajectories(path) if trajectory.finished]

    def make(prompts: int, number: int, samples_per_prompt: int) -> tuple[Trajectory, ...]:
        drawn = random.Random(number).choices(log, k=prompts * samples_per_prompt)
        return tuple(replace(it, id=f"{it.id} {copy}") for copy, it in enumerate(drawn))

    return make


def _sample(plan: Plan, problem: Problem, seconds: float) -> Sample:
    request = plan.request
    assert request.kind == "cluster"
    return Sample(request, problem, plan.allocation, seconds)


def price_all(cases: Iterable[Case], batches: tuple[int, int], factors: BatchFactors = BATCH) -> Iterable[Priced]:
    """Price the cases that have a plan."""
    for case in cases:
        try:
            yield price_case(case, batches, factors)
        except InfeasiblePlanError:
            continue


def price_case(case: Case, batches: tuple[int, int], factors: BatchFactors = BATCH) -> Priced:
    """Plan for the case and simulate batches, from the fewest to the most. Raises `InfeasiblePlanError`."""
    plan, menu = plan_case(case, factors)
    fewest, most = batches
    rollouts: list[float] = []
    while len(rollouts) < fewest or (len(rollouts) < most and _standard_error(rollouts) > _STANDARD_ERROR):
        rollouts.append(roll_out(plan, case.batch(len(rollouts))))
    return Priced(case, plan, menu.problem, tuple(rollouts))


def _standard_error(seconds: Sequence[float]) -> float:
    """Standard error of the mean, relative to the mean; infinite for fewer than two."""
    return stdev(seconds) / fmean(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else math.inf


def priced_seconds(problem: Problem, allocation: Allocation) -> float:
    """Predicted seconds of a batch's rollout, weights loaded before; where batches overlap, of a step."""
    if problem.staleness:
        return price(problem, allocation).step
    prices = bucket_prices(problem, allocation)
    return max(max(price.load, price.residence) - price.option.stall for price in prices)


def verdict_rows(found: Sequence[Priced]) -> list[Row]:
    errors = [100 * abs(priced.error) for priced in found]
    name = f"{len(found)} clusters and distributions"
    rows = [
        at_most(name, "mean |error|", fmean(errors), "%", MEAN_GOAL),
        at_most(name, "largest |error|", max(errors), "%", LARGEST_GOAL),
        Row(name, "mean error", 100 * fmean(priced.error for priced in found), "%"),
        Row(name, f"cases beyond {LARGEST_GOAL:g} %", sum(error > LARGEST_GOAL for error in errors), ""),
        Row(name, "one batch against the mean of the others", 100 * fmean(map(_repeat_error, found)), "%"),
    ]
    for family in TESTED:
        its = [100 * abs(priced.error) for priced in found if priced.case.name.startswith(f"{family} ")]
        rows += [Row(family, "mean |error|", fmean(its), "%"), Row(family, "largest |error|", max(its), "%")]
    several = [100 * priced.error for priced in found if len(priced.plan.allocation.buckets) > 1]
    if several:
        rows.append(Row("plans with several buckets", "mean error", fmean(several), "%"))
    return rows


def log_rows(batches: tuple[int, int]) -> list[Row]:
    """Recorded trajectories, where they are at hand."""
    return [Row(priced.case.name, "error", 100 * priced.error, "%") for priced in price_all(logged_cases(), batches)]


def _repeat_error(priced: Priced) -> float:
    """Mean |error| of predicting a batch by the mean of the case's others: what no price of expectations goes below."""
    whole, count = sum(priced.rollouts), len(priced.rollouts)
    return fmean(abs((whole - it) / (count - 1) / it - 1) for it in priced.rollouts)


if __name__ == "__main__":
    parser = command_line("rollout_price", __doc__, quick="few cases: a first look, not a verdict")
    parser.add_argument("--fit", action="store_true", help="make the table of corrections anew, and write it")
    show(parser, rows)
