"""Predictions of engines that ran on GPUs, beside what they did: prices by kernels alone, by default, and fitted.

Invariant: a model is predicted from its own grid and from defaults, or from tables of its layers; no workload goes into
a fit, and no model into another's.

    python -m benchmarks.fidelity --gpu-runs FOLDER [--save FOLDER] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fidelity.gpu_cases import measured_outcomes, predicted_outcomes
from benchmarks.fidelity.gpu_data import EngineRun, document, files, is_run, read_run
from benchmarks.fidelity.layer_tables import LayerCost, RanksCost
from benchmarks.fidelity.summary import Summary, errors, summarize
from benchmarks.rows import Row
from libra.config.yaml_file import ConfigError, refusal
from libra.cost.grid import EngineProfile
from libra.cost.host import default_host
from libra.cost.kernels import default_terms
from libra.cost.sources.engine_fit import EngineFit, fit_engine
from libra.cost.sources.expert_tables import routed_evenly
from libra.cost.sources.roofline import roofline
from libra.cost.sources.tables import NoTablesError, tables
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.group_cost import Graph, GroupCost
from libra.sim.engine.iteration_cost import IterationCost

METRICS = (
    *("throughput", "makespan", "ttft_mean", "ttft_p99"),
    *("tpot_mean", "tpot_p99", "latency_mean", "latency_p99"),
)
_WAITS = METRICS[2:]  # what requests wait for
MAKESPAN, WAITS, MEAN = 0.04, 0.08, 0.05  # of a fit: of each workload, and mean over them
PLAIN_MAKESPAN, PLAIN_LATENCY = 0.08, 0.12  # of defaults
LAYERS = {"makespan": 0.02, "tpot_mean": 0.02, "latency_mean": 0.022}  # of tables of layers: each workload


@dataclass(frozen=True, slots=True)
class Fitted:
    fit: EngineFit
    profile: EngineProfile  # with the fit


@dataclass(frozen=True, slots=True)
class Predicted:
    """One engine's workloads at three prices; errors are relative and signed, above 0 is predicted too large."""

    run: EngineRun
    fitted: Fitted | None  # None: prices are those of tables of layers
    measured: Mapping[str, Summary]  # by workload
    predicted: Mapping[str, Mapping[str, Summary]]  # by price, by workload

    def errors(self, price: str, workload: str) -> Summary:
        return errors(self.predicted[price][workload], self.measured[workload])

    def mean_error(self, price: str, metric: str) -> float:
        return fmean(abs(getattr(self.errors(price, name), metric)) for name in self.measured)


def predict_all(folder: Path) -> tuple[tuple[Predicted, ...], tuple[ConfigError, ...]]:
    """Every engine of a folder, and why others could not be: a file is not of the format, or has too little of a
    grid."""
    predicted, refused = [], []
    for path in files(folder):
        try:
            found = document(path)
            if is_run(found):
                predicted.append(_predict_file(path, found))
        except ConfigError as error:
            refused.append(error)
    return tuple(predicted), tuple(refused)


def _predict_file(path: Path, found: Mapping[str, Any]) -> Predicted:
    run = read_run(path, found)
    try:
        return _predict(run)
    except ValueError as error:
        raise refusal(path, str(error)) from None


def rows(predicted: Sequence[Predicted]) -> list[Row]:
    """In percent; bars are of the fitted and of the default prices, or of those by layers."""
    made = []
    for one in predicted:
        name = one.run.name
        if one.fitted is None:
            for workload in one.measured:
                found = one.errors("layers", workload)
                made += [
                    _row(
                        f"{name}, {workload}, layers", f"error of {metric}", getattr(found, metric), LAYERS.get(metric)
                    )
                    for metric in METRICS[1:]
                ]
            continue
        fit = one.fitted.fit
        made.append(Row(f"{name}, fit", "held-out error of grid iterations", 100 * fit.heldout_error, "%"))
        for metric in METRICS[1:] if one.measured else ():
            error = one.mean_error("fitted", metric)
            made.append(_row(f"{name}, fitted", f"mean error of {metric}", error, MEAN))
        for workload in one.measured:
            found = one.errors("fitted", workload)
            for metric in METRICS[1:]:
                most = WAITS if metric in _WAITS else MAKESPAN
                made.append(_row(f"{name}, {workload}, fitted", f"error of {metric}", getattr(found, metric), most))
            plain = one.errors("default", workload)
            case = f"{name}, {workload}, default"
            made.append(_row(case, "error of makespan", plain.makespan, PLAIN_MAKESPAN))
            made.append(_row(case, "error of latency_mean", plain.latency_mean, PLAIN_LATENCY))
    return made


def show(predicted: Sequence[Predicted], console: Console) -> None:
    """Print the measured values and the errors of each price, workload by workload."""
    for one in predicted:
        _show_prices(one, console)
        for name in one.run.left_out:
            console.print(f"{name} is left out: it failed")
        if not one.measured:
            continue
        table = Table()
        for column in ("workload", "", *METRICS):
            table.add_column(column, justify="left" if column in ("workload", "") else "right")
        for name, found in one.measured.items():
            table.add_row(name, "measured", *(f"{getattr(found, metric):,.4g}" for metric in METRICS))
            for price in one.predicted:
                wrong = one.errors(price, name)
                table.add_row("", price, *(f"{100 * getattr(wrong, metric):+.1f} %" for metric in METRICS))
        for price in one.predicted:
            means = (f"{100 * one.mean_error(price, metric):.1f} %" for metric in METRICS)
            table.add_row("mean absolute error" if price == next(iter(one.predicted)) else "", price, *means)
        console.print(table)


def _show_prices(one: Predicted, console: Console) -> None:
    run = one.run
    if one.fitted is None:
        console.print(f"[bold]{run.name}[/bold] on {run.device}, {run.software}; kernels: tables of its layers")
        return
    fit, profile = one.fitted.fit, one.fitted.profile
    host, terms = profile.host, profile.terms
    console.print(f"[bold]{run.name}[/bold] on {run.gpu.name}, {run.software}; kernels: {profile.source}")
    console.print(
        f"host: {1e3 * host.iteration:.2f} ms an iteration, {1e6 * host.request:.1f} us a request,"
        f" {1e3 * host.admission:.2f} ms an admission, {1e6 * host.context_token:.3f} us a token of it,"
        f" {1e6 * host.cached_token:.3f} us a cached one; at least {1e3 * host.piecewise:.1f} ms with prefill,"
        f" {1e3 * host.eager:.1f} ms without a graph"
    )
    console.print(
        f"kernels: linear layers with prefill x {terms.linear:.3f}, {1e9 * terms.longest:.0f} ns a token of the"
        f" longest context, shared tokens at {1 - terms.shared:.2f} of their price, spread x {terms.spread:.2f},"
        f" decodes x {terms.decode:.2f};"
        f" error of {len(run.grid)} grid iterations {fit.error:.1%}, held out {fit.heldout_error:.1%}"
    )


def _predict(run: EngineRun) -> Predicted:
    measured = {name: summarize(measured_outcomes(case)) for name, case in run.cases.items()}
    if run.layers is not None:
        ranks = (run.dp, RanksCost(run.layers, run.config)) if run.dp > 1 else None
        cost = LayerCost(run.layers, run.config) if ranks is None else ranks[1].rank(Graph("NONE"))
        return Predicted(run, None, measured, {"layers": _served(run, run.config, cost, ranks)})
    kernels = _kernels(run)
    layers = run.model.layers
    host, terms = replace(default_host(layers), overlapped=run.config.async_scheduling), default_terms(layers)
    source = f"measured: {run.name} on {run.gpu.name}, {run.software}"
    experts = run.model.experts is not None
    fit = fit_engine(kernels.grid(run.tp), run.config.capture_sizes, run.grid, host, terms, source, experts=experts)
    if run.intake is not None:
        admission = fit.host.admission + run.intake.request
        fit = replace(fit, host=replace(fit.host, admission=admission, context_token=run.intake.token))
    profiles = {
        "kernels alone": kernels,
        "default": kernels.beside(host, terms),
        "fitted": kernels.beside(fit.host, fit.terms),
    }
    return Predicted(
        run,
        Fitted(fit, profiles["fitted"]),
        measured,
        {price: _served_by(run, profile) for price, profile in profiles.items()},
    )


def _served_by(run: EngineRun, profile: EngineProfile) -> dict[str, Summary]:
    # Graphs belong to the host's part: kernels alone are not padded.
    config = run.config if profile.host.priced else replace(run.config, capture_sizes=())
    return _served(run, config, GridCost(profile.grid(run.tp), config))


def _served(
    run: EngineRun, config: EngineConfig, cost: IterationCost, ranks: tuple[int, GroupCost] | None = None
) -> dict[str, Summary]:
    return {name: summarize(predicted_outcomes(case, config, cost, ranks)) for name, case in run.cases.items()}


def _kernels(run: EngineRun) -> EngineProfile:
    """Tables where there are any, else the roofline. Weights of these runs are random: all experts are asked for
    alike."""
    try:
        return routed_evenly(
            run.gpu, run.model, tables(run.gpu, run.model, [run.tp], quantization=run.quantization), run.quantization
        )
    except NoTablesError:
        return roofline(run.gpu, run.model, [run.tp], quantization=run.quantization)


def _row(case: str, metric: str, error: float, most: float | None) -> Row:
    if most is None:
        return Row(case, metric, 100 * error, "%")
    return Row(case, metric, 100 * error, "%", f"at most {100 * most:g} %", abs(error) <= most)
