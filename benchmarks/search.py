"""Time of `libra search`, share of the menu that its bound rules out, and whether its winners last.

Invariant: rows name the question and the measure; times are CPU times of all processes that took part.

    python -m benchmarks.search [--jobs N] [--json FILE] [--quick]
    python -m benchmarks.search --only peer

"menu" is the question of the goal: 2,000 requests, three objectives, 1,000 candidates. "sixteen" is about
all deployments of a 32B model on 16 GPUs. "windows" runs the winners of 20 searches on other requests of the same
traffic: of Azure's trace, where it is there. "plan" mixes 1,024 GPUs of three types.
"peer" puts one question to the sweep of aiconfigurator-core, too: both have the same kernel tables, no host and no
prefix cache. The sweep takes a steady state of equal batches; here requests come at random.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.command import command_line, processor_seconds, show
from benchmarks.rows import Row, at_least, at_most
from libra import Recipe, engine_profiles, load_model, read_requests
from libra.cost.sources.tables import _configuration
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.serving.candidate import EnginePool, EngineSetup, ServingCandidate
from libra.serving.ladder import highest_rate
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.mix import plan_mix
from libra.serving.objective import parse_objectives
from libra.serving.question import SizingQuestion
from libra.serving.search import answer
from libra.serving.trial import trial
from libra.sim.clock import ticks
from libra.sim.workload.requests import RecordedRequest

MODEL = "Qwen/Qwen3-14B"
THREE = "ttft_p99=2,tpot_p99=0.05,latency_p99=40"
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-4B")
LIMITS = ("ttft_p99=1s,tpot_p99=50ms", "ttft_p99=2s,tpot_p99=30ms", "ttft_p95=1s,tpot_p95=40ms", "ttft_p99=3s")
AZURE = Path(__file__).parents[1] / "../shared/data/serving/azure_2023_conv.csv"
WINDOWS = 20
PEER_TOKENS = (1024, 256)  # of a prompt and its answer
MENU_SECONDS, SIXTEEN_SECONDS, OUT, PLAN_SECONDS = 240.0, 60.0, 0.6, 2.0  # goals

T = TypeVar("T")


def cluster(h100: int, a100: int, l40s: int = 0) -> Cluster:
    """A cluster with the given numbers of nodes, each with eight GPUs of one type."""
    kinds = [it for it in (("H100", h100), ("A100", a100), ("L40S", l40s)) if it[1]]
    return Cluster(tuple(NodeClass(gpu.lower(), count, 8, GPUS[gpu], GPUS[gpu].link, 50e9) for gpu, count in kinds))


def requests(count: int) -> tuple[RecordedRequest, ...]:
    """Poisson arrivals; prompts of 1,100 and answers of 250 tokens in the mean, both with long tails."""
    generator = np.random.default_rng(0)
    arrivals = np.cumsum(generator.exponential(1.0, count)).tolist()
    prompts = np.clip(generator.lognormal(6.5, 1.0, count), 16, 8000).astype(int).tolist()
    outputs = np.clip(generator.lognormal(5.3, 0.7, count), 2, 1500).astype(int).tolist()
    return tuple(RecordedRequest(ticks(at), p, o) for at, p, o in zip(arrivals, prompts, outputs, strict=True))


def question(there: Cluster, count: int, objectives: str, model: str = MODEL, **settings: float) -> SizingQuestion:
    shape = load_model(model)
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=shape.max_context)
    profiles = engine_profiles(there, shape, recipe, host="default")
    return SizingQuestion(there, shape, profiles, requests(count), parse_objectives(objectives), **settings)  # type: ignore[arg-type]


def measured(work: Callable[[], T]) -> tuple[T, float, float]:
    """Result of `work`, and seconds: CPU time, and wall clock."""
    all_of_them = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    before, began = processor_seconds(*all_of_them), time.monotonic()
    done = work()
    return done, processor_seconds(*all_of_them) - before, time.monotonic() - began


class Listed(ServingMenu):
    """A menu of given candidates."""

    _listed: tuple[ServingCandidate, ...]

    def __init__(self, listed: list[ServingCandidate]) -> None:
        super().__init__()
        object.__setattr__(self, "_listed", tuple(listed))  # a menu is frozen

    def candidates(self, question: SizingQuestion) -> Iterator[ServingCandidate]:
        yield from self._listed


def spread(candidates: list[ServingCandidate], count: int) -> list[ServingCandidate]:
    """`count` of the candidates at even distances, or all if there are fewer."""
    return [candidates[index * len(candidates) // count] for index in range(min(count, len(candidates)))]


def menu_rows(jobs: int, quick: bool) -> Iterator[Row]:
    asked = question(cluster(8, 8, 8), 200 if quick else 2000, THREE, gpus=8, rate=40.0)
    listed = spread(list(ServingMenu().candidates(asked)), 100 if quick else 1000)
    found, cpu, clock = measured(lambda: answer(asked, Listed(listed), jobs=jobs))
    case = f"menu of {found.candidates:,}, {len(asked.requests):,} requests, 40 requests/s"
    yield at_most(case, "CPU time", cpu, "s", 2 * MENU_SECONDS)  # of two cores
    yield at_most(case, f"clock, {jobs} processes", clock, "s", MENU_SECONDS)
    yield at_least(case, "out by bound", found.out_by_bound / found.candidates, "of them", OUT)
    yield Row(case, "simulations", found.runs, "")
    yield Row(case, "Pareto set", len(found.points), "points")


def sixteen_rows(jobs: int, quick: bool) -> Iterator[Row]:
    """Goodput of every deployment of a 32B model on 16 GPUs, by requests of Azure's trace, where it is there."""
    traffic, count = read_requests(AZURE) if AZURE.exists() else requests(6000), 300 if quick else 6000
    asked = question(cluster(2, 0), 2, LIMITS[0], model="Qwen/Qwen3-32B")
    asked = replace(asked, requests=window(traffic, 0, count))
    found, cpu, _ = measured(lambda: answer(asked, ServingMenu(), jobs=jobs))
    source = "Azure 2023" if AZURE.exists() else "Poisson"
    case = f"{found.candidates:,} candidates, no rate, {count:,} requests of {source}, 16 H100"
    yield at_most(case, "CPU time", cpu, "s", SIXTEEN_SECONDS)
    yield Row(case, "simulations", found.runs, "")
    yield Row(case, "Pareto set", len(found.points), "points")


def windows_rows(jobs: int, quick: bool) -> Iterator[Row]:
    """The winner of a search on one window of requests, at its rate on the next ones."""
    real = AZURE.exists()
    traffic = read_requests(AZURE) if real else requests(20_000)
    source = "Azure 2023" if real else "Poisson"
    if real:
        for name, lengths in (
            ("prompts", [it.prompt_tokens for it in traffic]),
            ("answers", [it.output_tokens for it in traffic]),
            ("gaps between requests", np.diff([it.arrival for it in traffic])),
        ):
            means = [float(np.mean(lengths[at : at + 300])) for at in range(0, len(lengths) - 299, 300)]
            yield Row(source, f"drift of the mean of 300 {name}", float(np.std(means) / np.mean(lengths)), "share")
    held, count = 0, 2 if quick else WINDOWS
    for number in range(count):
        model, limits = MODELS[number % len(MODELS)], LIMITS[number % len(LIMITS)]
        size = (300, 1000)[number % 2]
        begin = number * (len(traffic) - 5 * size - 1) // count
        asked = question(cluster(*((1, 0), (0, 1))[number // 2 % 2]), 2, limits, model=model, gpus=2)
        asked = replace(asked, requests=window(traffic, begin, size))
        menu = ServingMenu(MenuFile(max_num_seqs=(256,), max_num_batched_tokens=(2048,)))
        best = answer(asked, menu, jobs=jobs).points[0]
        others = [window(traffic, begin + size * it, size) for it in range(1, 5)]
        others.append(window(traffic, min(begin + size, len(traffic) - 5000), 5000))
        shares = [
            max(one.latency[it.name] / it.limit for it in asked.objectives)
            for other in others
            for one in [trial(replace(asked, requests=other), best.candidate, best.trial.rate, to_the_end=True)]
        ]
        held += max(shares) <= 1
        case = f"{source}, {size:,} requests, {model}, {limits}"
        what = f"{best.candidate}: largest share of a limit at {best.trial.rate:.3g}/s"
        yield at_most(case, what, max(shares), "", 1)
    yield Row(source, "winners that hold on 4 other windows and 5,000 requests", held, "", f"{count}", held == count)


def window(traffic: tuple[RecordedRequest, ...], begin: int, size: int) -> tuple[RecordedRequest, ...]:
    part = traffic[begin : begin + size]
    return tuple(replace(it, arrival=it.arrival - part[0].arrival) for it in part)


def plan_rows(jobs: int, quick: bool) -> Iterator[Row]:
    there = cluster(48, 48, 32)
    rate = 300.0 if quick else 4500.0
    asked = replace(
        question(there, 200 if quick else 1000, "ttft_p99=2,tpot_p99=0.05", rate=rate),
        prices={"h100": 2.5, "a100": 1.3, "l40s": 0.8},
    )
    menu = ServingMenu(MenuFile(max_num_seqs=(256,), max_num_batched_tokens=(8192,)))
    found, cpu, _ = measured(lambda: plan_mix(asked, menu, jobs=jobs))
    case = f"plan, {there.devices:,} GPUs of 3 types, {rate:g} requests/s"
    yield at_most(case, "CP-SAT, all plans", found.solver_seconds, "s", PLAN_SECONDS)
    yield Row(case, "proven on the menu", float(found.plan.proven), "", "yes", found.plan.proven)
    yield Row(case, "passes its own simulation", float(found.trial.passed), "", "yes", found.trial.passed)
    yield Row(case, "plans that missed before", len(found.missed), "")
    yield Row(case, "GPUs", found.candidate.devices, "")
    yield Row(case, "cost", found.plan.cost, "an hour")
    yield Row(case, "CPU time with simulations", cpu, "s")


def peer_rows(jobs: int, quick: bool) -> Iterator[Row]:
    """Colocated engines by degree, with a mean TTFT of 1 s and a mean TPOT of 50 ms."""
    profiles = engine_profiles(
        cluster(1, 0), load_model(MODEL), Recipe(batch=1, samples_per_prompt=1, max_length=4096), "tables"
    )
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1.0, 1000)).tolist()
    alike = tuple(RecordedRequest(ticks(at), *PEER_TOKENS) for at in arrivals)
    asked = question(cluster(1, 0), 2, "ttft_mean=1,tpot_mean=0.05")
    asked = replace(asked, profiles=profiles, requests=alike)
    for tp in (1,) if quick else (1, 2, 4, 8):
        case = f"{MODEL}, H100, tp {tp}, {PEER_TOKENS[0]} + {PEER_TOKENS[1]} tokens"
        theirs = _sweep(tp)
        yield Row(case, "aiconfigurator-core", theirs["seq/s"], "requests/s")
        alone = trial(asked, _engine(tp, int(theirs["bs"])), theirs["seq/s"], to_the_end=True)
        yield Row(case, "the same, simulated: mean TTFT", alone.ttft, "s")
        found = [highest_rate(asked, _engine(tp, seqs)) for seqs in (32, 64, 128, 256)]
        yield Row(case, "libra", max(it.rate for it in found if it is not None), "requests/s")


def _engine(tp: int, seqs: int) -> ServingCandidate:
    return ServingCandidate((EnginePool("colocated", EngineSetup("h100", tp, 1, min(seqs, 512), 8192, False), 1),))


def _sweep(tp: int) -> dict[str, Any]:
    """The best row of the sweep."""
    from aiconfigurator_core.sdk import common, config
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_configuration(load_model(MODEL))), encoding="utf-8")
        asked = config.ModelConfig(
            tp_size=tp,
            gemm_quant_mode=common.GEMMQuantMode.bfloat16,
            kvcache_quant_mode=common.KVCacheQuantMode.bfloat16,
            fmha_quant_mode=common.FMHAQuantMode.bfloat16,
            moe_quant_mode=common.MoEQuantMode.bfloat16,
        )
        model, tables = get_model(folder, asked, "vllm"), get_database("h100_sxm", "vllm", "0.24.0")
        limits = config.RuntimeConfig(isl=PEER_TOKENS[0], osl=PEER_TOKENS[1], ttft=1000.0, tpot=50.0)
        # A backend remembers batches without the degree: one for each.
        found = get_backend("vllm").find_best_agg_result_under_constraints(
            model, tables, limits, top_k=1, max_batch_size=512, enable_chunked_prefill=True
        )
        return dict(found.get_summary_df().iloc[0])


_PARTS: dict[str, Callable[[int, bool], Iterator[Row]]] = {
    "menu": menu_rows,
    "sixteen": sixteen_rows,
    "windows": windows_rows,
    "plan": plan_rows,
    "peer": peer_rows,
}


def rows(options: Namespace) -> Iterator[Row]:
    for name, make in _PARTS.items():
        if options.only in (None, name):
            yield from make(options.jobs, options.quick)


if __name__ == "__main__":
    parser = command_line("search", __doc__, quick="a tenth of everything: whether it runs")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=_PARTS)
    show(parser, rows)
