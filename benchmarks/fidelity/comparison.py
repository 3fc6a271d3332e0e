"""Measured and predicted side by side, and what is promised of their difference.

Invariant: prices come from the calibration alone, one list for all workloads; every workload counts as much as any
other, and none is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.fidelity.fit import FittedCost, Prices, Residual, fit_prices, residuals
from benchmarks.fidelity.measured import Measured, Run
from benchmarks.fidelity.prediction import predict, replay_difference
from benchmarks.fidelity.summary import Summary, errors, mean, repeat_error, summarize
from benchmarks.fidelity.workloads import Workload
from benchmarks.rows import Row
from libra.sim.clock import seconds

THROUGHPUT_GOAL = 0.04  # mean absolute relative error, unless the engine repeats itself less well than that
LATENCY_GOAL = 0.06  # the same, of the mean end-to-end latency

ErrorOf = Callable[[Summary], float]


@dataclass(frozen=True, slots=True)
class Compared:
    """One workload. Errors are relative."""

    workload: Workload
    measured: Summary  # mean over the repeats
    predicted: Summary
    repeat: Summary  # error of the engine as a prediction of itself
    priced: float  # error of the prices on the steps that were measured, all together
    difference: str | None  # between a replay of measured times and the measurement; the first one

    @property
    def errors(self) -> Summary:
        return errors(self.predicted, self.measured)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model on one machine."""

    model: str
    hardware: str
    software: str
    prices: Prices
    rounds: int  # of the calibration
    residuals: tuple[Residual, ...]  # of its steps
    repeats: int  # of each workload
    steps: int  # of all of them
    workloads: tuple[Compared, ...]

    @property
    def difference(self) -> str | None:
        """The first one between replayed and measured steps."""
        return next((one.difference for one in self.workloads if one.difference is not None), None)

    def error(self, of: ErrorOf) -> float:
        """Mean size over the workloads."""
        return fmean(abs(of(one.errors)) for one in self.workloads)

    def repeat(self, of: ErrorOf) -> float:
        """Mean repeat error over the workloads."""
        return fmean(of(one.repeat) for one in self.workloads)


def compare(measured: Measured) -> Comparison:
    """Raises ValueError where a workload was run only once."""
    prices = fit_prices(measured.calibration)
    cost = FittedCost(prices)
    return Comparison(
        model=measured.model,
        hardware=measured.hardware,
        software=measured.software,
        prices=prices,
        rounds=len(measured.calibration),
        residuals=residuals(prices, [step for steps in measured.calibration for step in steps]),
        repeats=min(len(runs) for _, runs in measured.runs),
        steps=sum(len(run.steps) for _, runs in measured.runs for run in runs),
        workloads=tuple(_compare(workload, runs, prices, cost) for workload, runs in measured.runs),
    )


def rows(comparison: Comparison) -> list[Row]:
    """In percent; what is promised comes first."""
    whole = f"{comparison.model} model, {len(comparison.workloads)} workloads"
    equal = sum(one.difference is None for one in comparison.workloads)
    every = equal == len(comparison.workloads)
    made = [Row(whole, "workloads with equal steps at measured times", equal, "", "all", every)]
    for name, goal, of in (
        ("throughput", THROUGHPUT_GOAL, _throughput),
        ("mean latency", LATENCY_GOAL, _latency),
    ):
        error, repeat = comparison.error(of), comparison.repeat(of)
        most = max(goal, repeat)
        made += [
            Row(whole, f"error of {name}", 100 * error, "%", f"at most {100 * most:.1f} %", error <= most),
            Row(whole, f"repeat error of {name}", 100 * repeat, "%"),
        ]
    for one in comparison.workloads:
        case = f"{comparison.model} model, {one.workload.name}"
        made += [
            Row(case, "error of throughput", 100 * one.errors.throughput, "%"),
            Row(case, "repeat error of throughput", 100 * one.repeat.throughput, "%"),
            Row(case, "error of mean latency", 100 * one.errors.latency_mean, "%"),
            Row(case, "repeat error of mean latency", 100 * one.repeat.latency_mean, "%"),
        ]
    return made


def _compare(workload: Workload, runs: Sequence[Run], prices: Prices, cost: FittedCost) -> Compared:
    repeats = [summarize(run.outcomes) for run in runs]
    steps = [step for run in runs for step in run.steps]
    taken = sum(seconds(step.adding + step.duration) for step in steps)
    differences = (replay_difference(workload, run) for run in runs)
    return Compared(
        workload=workload,
        measured=mean(repeats),
        predicted=summarize(predict(workload, cost)),
        repeat=repeat_error(repeats),
        priced=sum(prices.step(step) for step in steps) / taken - 1,
        difference=next((found for found in differences if found is not None), None),
    )


def _throughput(summary: Summary) -> float:
    return summary.throughput


def _latency(summary: Summary) -> float:
    return summary.latency_mean
