"""Engines that ran on GPUs, beside what they are predicted to do: at prices by kernels alone, by default, and fitted.

Invariant: a model is predicted from its own grid and from defaults; no workload goes into a fit, and no model into
another's. Of what was measured the simulator knows only the arrivals that nothing in the workload brings about: those
of an open loop, and the first of a closed one.

Requests of a group have one prompt. Turns of a session extend the prompt of the turn before, not what was generated;
sessions share what all their first prompts had cached. A session's next turn comes when the one before has ended, and
where a session ends the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.fidelity.gpu_data import CaseRequest, EngineRun, documents, read_grid, read_run
from benchmarks.rows import Row, at_most
from libra.config.yaml_file import ConfigError, refusal
from libra.cost.grid import EngineProfile
from libra.cost.host import default_host
from libra.cost.kernels import default_terms
from libra.cost.sources.engine_fit import EngineFit, fit_engine
from libra.cost.sources.expert_tables import routed_evenly
from libra.cost.sources.files import save_fit
from libra.cost.sources.roofline import roofline
from libra.cost.sources.tables import NoTablesError, tables
from libra.hardware.cluster import GPU
from libra.hardware.model_file import load_model
from libra.sim.clock import seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.request import Chain, Request
from libra.sim.workload.requests import Requests

_WAITS = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "latency_mean", "latency_p99")
METRICS = ("makespan", *_WAITS)
MAKESPAN, WAITS, MEAN = 4.0, 8.0, 5.0  # percent of a fit: of each workload, and mean over them
PLAIN = {"makespan": 8.0, "latency_mean": 12.0}  # percent of defaults

Times = tuple[float, float, float, int]  # seconds of arrival, first token and end, and tokens generated


def gpu_rows(folder: Path, save: Path | None) -> tuple[list[Row], list[ConfigError], GPU | None]:
    """Errors of every engine of a folder, in percent, above 0 predicted too large; why others could not be predicted;
    and the GPU of the first. Fits are kept in `save`."""
    rows, refused, gpus = list[Row](), list[ConfigError](), list[GPU]()
    for path, document in documents(folder):
        if isinstance(document, dict) and {"facts", "cases"} <= set(document):
            try:
                run = read_run(path, document)
                fit, prices = _prices(path, run)
            except ConfigError as error:
                refused.append(error)
                continue
            if save is not None:
                save_fit(save / f"{path.stem}.host.json", fit)
            gpus.append(run.gpu)
            rows.append(Row(f"{path.stem}, fit", "held-out error of grid iterations", 100 * fit.heldout_error, "%"))
            rows += _rows(path.stem, run, prices)
    return rows, refused, gpus[0] if gpus else None


def _prices(path: Path, run: EngineRun) -> tuple[EngineFit, dict[str, EngineProfile]]:
    """Kernels are of tables where there are any, else of the roofline. Weights of these runs are random: all experts
    are asked for alike."""
    model, tp, stored = load_model(run.facts.model), run.facts.tensor_parallel_size, run.facts.stored()
    try:
        kernels = routed_evenly(run.gpu, model, tables(run.gpu, model, [tp], quantization=stored), stored)
    except NoTablesError:
        kernels = roofline(run.gpu, model, [tp], quantization=stored)
    grid, intake = read_grid(path, run)
    host = replace(default_host(model.layers), overlapped=run.config.async_scheduling)
    terms, experts = default_terms(model.layers), model.experts is not None
    source = f"measured: {path.stem} on {run.gpu.name}, vLLM {run.facts.vllm}, torch {run.facts.torch}"
    try:
        fit = fit_engine(kernels.grid(tp), run.config.capture_sizes, grid, host, terms, source, experts=experts)
    except ValueError as error:
        raise refusal(path, str(error)) from None
    if intake is not None:
        fitted = replace(fit.host, admission=fit.host.admission + intake[0], context_token=intake[1])
        fit = replace(fit, host=fitted)
    prices = {"kernels alone": kernels, "default": kernels.beside(host, terms)}
    return fit, prices | {"fitted": kernels.beside(fit.host, fit.terms)}


def _rows(name: str, run: EngineRun, prices: Mapping[str, EngineProfile]) -> Iterator[Row]:
    sums: dict[str, dict[str, list[float]]] = {price: {metric: [] for metric in METRICS} for price in prices}
    for workload, case in run.cases.items():
        measured = summary((it.arrival, it.first, it.end, it.out) for it in case.requests)
        for price, profile in prices.items():
            # Graphs belong to the host's part: kernels alone are not padded.
            config = run.config if profile.host.priced else replace(run.config, capture_sizes=())
            cost = GridCost(profile.grid(run.facts.tensor_parallel_size), config)
            found = summary(served(case.requests, EngineSpec("engine", config, cost)))
            for metric in METRICS:
                error = 100 * (found[metric] / measured[metric] - 1)
                sums[price][metric].append(abs(error))
                bars = {"fitted": WAITS if metric in _WAITS else MAKESPAN, "default": PLAIN.get(metric)}
                limit = bars.get(price)
                yield replace(
                    at_most(f"{name}, {workload}, {price}", f"error of {metric}", abs(error), "%", limit), value=error
                )
    for price, metrics in sums.items():
        for metric, its in metrics.items():
            if its:
                limit = MEAN if price == "fitted" else None
                yield at_most(f"{name}, {price}", f"mean error of {metric}", fmean(its), "%", limit)


def summary(requests: Iterable[Times]) -> dict[str, float]:
    arrival, first, end, tokens = np.array(list(requests)).T
    many = tokens > 1
    between = ((end - first) / np.maximum(1, tokens - 1))[many] if many.any() else np.zeros(1)
    waits = {"ttft": first - arrival, "tpot": between, "latency": end - arrival}
    found = {f"{name}_mean": float(values.mean()) for name, values in waits.items()}
    for name, values in waits.items():  # the least value that 99 % do not exceed
        found[f"{name}_p99"] = float(np.percentile(values, 99, method="inverted_cdf"))
    return found | {"makespan": float(end.max() - arrival.min())}


def served(case: Sequence[CaseRequest], engine: EngineSpec) -> list[Times]:
    """Times of the requests on the simulated engine."""
    closed = Sessions(case) if case[0].session is not None else None
    opened = Requests(lambda: sorted(requests(case), key=lambda it: (it.arrival, it.number)), {})
    cluster = SimCluster([engine], closed or opened)
    cluster.run()
    found = []
    for it in sorted(cluster.requests, key=lambda it: it.number):
        assert it.first_token is not None and it.finish is not None
        # The first of a closed loop were there when they came, though the engine began with all of them.
        early = closed is not None and it.number in closed.first
        arrival = ticks(case[it.number].arrival) if early else it.arrival
        found.append((seconds(arrival), seconds(it.first_token), seconds(it.finish), it.output_tokens))
    return found


def requests(case: Sequence[CaseRequest]) -> list[Request]:
    """The requests in their order, each on a chain that begins as those do with which it shares a prompt."""
    shared = Chain("shared")
    common = min((it.cached for it in case if it.session is not None and it.turn == 0 and it.cached), default=0)
    prompts: dict[object, tuple[Chain, int]] = {}  # of a group or a session: the last prompt, and its tokens
    found = []
    for number, it in enumerate(case):
        chain: Chain | None = None
        if it.group is not None:
            whole, _ = prompts.setdefault(it.group, (Chain(f"group {it.group}"), it.prompt))
            chain = Chain(f"{whole.name}, {number}", whole, it.prompt)
        elif it.session is not None:
            before, fork = prompts.get(it.session, (shared, min(common, it.prompt)))
            chain = Chain(f"{it.session}, turn {it.turn}", before, fork)
            prompts[it.session] = (chain, it.prompt)
        found.append(Request(number, ticks(it.arrival), it.prompt, it.out, chain=chain))
    return found


class Sessions:
    """`Workload` of sessions. The number that run at a time is that of sessions begun before the first one ended."""

    def __init__(self, case: Sequence[CaseRequest]) -> None:
        self._case = case
        turns: dict[object, list[int]] = {}
        for number, it in sorted(enumerate(case), key=lambda entry: entry[1].arrival):
            turns.setdefault(it.session, []).append(number)
        self._turns = list(turns.values())
        ended = min(case[numbers[-1]].end for numbers in self._turns)
        self._together = sum(case[numbers[0]].arrival < ended for numbers in self._turns)
        self.first = frozenset(numbers[0] for numbers in self._turns[: self._together])
        self._follows = {before: after for numbers in self._turns for before, after in pairwise(numbers)}

    def start(self) -> Iterator[Request]:
        self._requests = requests(self._case)
        self._begun = self._together
        opening = [self._requests[number] for number in sorted(self.first)]
        at = max(request.arrival for request in opening)  # the engine begins once all of them are there
        for request in opening:
            request.arrival = at
        return iter(opening)

    def finished(self, request: Request, now: int) -> Request | None:
        number = self._follows.get(request.number)
        if number is None:
            if self._begun == len(self._turns):
                return None
            number = self._turns[self._begun][0]
            self._begun += 1
        follower = self._requests[number]
        follower.arrival = now
        return follower

    def describe(self) -> dict[str, Any]:
        return {"name": "sessions", "sessions": len(self._turns), "together": self._together}
