"""Rollouts whose longest trajectory decides: tools with long tails, and recorded logs by halves.

Invariant: what is planned from and what is simulated are different draws, except where a row says the same half.

A few batches say little of a mean with a long tail. Each batch has a control variate, the longest of its trajectories
at 50 tokens/s. Its expectation is known from many more trajectories than are simulated; the simulated mean is corrected
by how much longer than that its batches were (Lavenberg & Welch 1981).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from benchmarks.rollout_price_cases import HEAVY, OBSERVED_NUMBER, Case, logged_cases, logged_trajectories, make_case
from benchmarks.rollout_price_fit import priced_seconds
from benchmarks.rollout_price_plan import plan_case
from benchmarks.rollout_price_simulation import roll_out
from benchmarks.rows import Row
from libra.plan.problem import InfeasiblePlanError
from libra.trajectory import Trajectory

MEAN_GOAL, LARGEST_GOAL = 8.0, 20.0  # percent
CASES, FEW_CASES = 12, 1  # of each family

_FIRST_SEED = 2_000
_EXPECTED_FROM = 65_536  # trajectories
_TOKENS_PER_SECOND = 50.0
_HALVES = ("even", "odd")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and its standard error relative to it."""

    mean: float
    error: float


def heavy_rows(cases: int, batches: int) -> Iterator[Row]:
    """Each family's error, and that of all of them against the goal."""
    found: list[float] = []
    for family in HEAVY:
        errors, noise = [], []
        for seed in range(_FIRST_SEED, _FIRST_SEED + cases):
            case = make_case(family, seed)
            try:
                error, simulated = _error(case, batches, _expected(case))
            except InfeasiblePlanError:
                continue
            errors.append(error)
            noise.append(100 * simulated.error)
        found += errors
        yield Row(family, "mean error", fmean(errors), "%")
        yield from _against_goals(family, errors)
        yield Row(family, "standard error of a simulated mean", fmean(noise), "%")
    yield from _against_goals("long tails", found)


def half_rows(batches: int) -> Iterator[Row]:
    """Recorded logs: planned from a half as it is, simulated with draws from the same half, or from the other."""
    same: list[float] = []
    for case in logged_cases():
        log = logged_trajectories(case)
        halves = {name: log[first::2] for first, name in enumerate(_HALVES)}
        for known, observed in halves.items():
            for met, drawn in halves.items():
                make = _from_halves(observed, drawn)
                error, _ = _error(replace(case, make=make), batches, _of_draws(drawn, case.recipe.batch))
                same += [error] if known == met else []
                yield Row(case.name, f"{known} half to the {'same' if known == met else 'other'}", error, "%")
    if same:
        yield from _against_goals("logs, to the same half", same)


def _against_goals(name: str, errors: Sequence[float]) -> Iterator[Row]:
    mean, largest = fmean(map(abs, errors)), max(map(abs, errors))
    yield Row(name, "mean |error|", mean, "%", f"at most {MEAN_GOAL:g} %", mean <= MEAN_GOAL)
    yield Row(name, "largest |error|", largest, "%", f"at most {LARGEST_GOAL:g} %", largest <= LARGEST_GOAL)


def _error(case: Case, batches: int, expected: float) -> tuple[float, Estimate]:
    """Percent by which the price exceeds the simulated mean; raises `InfeasiblePlanError`."""
    plan, menu = plan_case(case)
    drawn = [case.batch(number) for number in range(batches)]
    seconds = [roll_out(plan, batch).seconds for batch in drawn]
    simulated = corrected(seconds, [max(map(_alone, batch)) for batch in drawn], expected)
    return 100 * (priced_seconds(menu.problem, plan.allocation) / simulated.mean - 1), simulated


def corrected(values: Sequence[float], controls: Sequence[float], expected: float) -> Estimate:
    """The mean of `values` where `controls`, which go with them, have their `expected` mean."""
    value, control = np.array(values), np.array(controls)
    variance = float(control.var())
    slope = float(np.cov(value, control, bias=True)[0, 1]) / variance if variance else 0.0
    left = value - slope * (control - expected)
    freedom = max(1, len(values) - 2)
    mean = float(left.mean())
    return Estimate(mean, math.sqrt(float(((left - mean) ** 2).sum()) / freedom / len(values)) / mean)


def _alone(trajectory: Trajectory) -> float:
    tools = sum(turn.tool_seconds or 0.0 for turn in trajectory.turns)
    return tools + trajectory.generated_tokens / _TOKENS_PER_SECOND


def _expected(case: Case) -> float:
    """The control variate's expectation, from further draws. Samples of a prompt come together."""
    samples = case.recipe.samples_per_prompt
    further = case.make(_EXPECTED_FROM // samples, 5_000, samples)
    prompts = [max(map(_alone, further[at : at + samples])) for at in range(0, len(further), samples)]
    return _mean_largest(prompts, case.recipe.prompts)


def _of_draws(drawn: Sequence[Trajectory], batch: int) -> float:
    return _mean_largest([_alone(it) for it in drawn], batch)


def _mean_largest(values: Sequence[float], draws: int) -> float:
    """The largest of `draws` draws with replacement, expected."""
    ordered = np.sort(np.array(values))
    upto = (np.arange(len(values) + 1) / len(values)) ** draws
    return float(ordered @ np.diff(upto))


def _from_halves(
    observed: Sequence[Trajectory], drawn: Sequence[Trajectory]
) -> Callable[[int, int, int], tuple[Trajectory, ...]]:
    """`Case.make` that observes one half as it is and draws batches from another."""

    def make(prompts: int, number: int, samples: int) -> tuple[Trajectory, ...]:
        if number == OBSERVED_NUMBER:
            return tuple(observed)
        chosen = random.Random(number).choices(drawn, k=prompts * samples)
        return tuple(replace(it, id=f"{it.id} {copy}") for copy, it in enumerate(chosen))

    return make
