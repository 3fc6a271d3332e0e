"""Time of `libra search`, share of the menu that its bound rules out, and whether its winners last.

Invariant: rows name the question and the measure; times are CPU times of all processes that took part.

    python -m benchmarks.search [--jobs N] [--json FILE] [--quick]
    python -m benchmarks.search --peer [apart]

"menu" is the question of the goal: 2,000 requests, three objectives, 1,000 candidates. "sixteen" is about
all deployments of a 32B model on 16 GPUs. "windows" runs the winners of 20 searches on other requests of the same
traffic: of Azure's trace, where it is there. "plan" mixes 1,024 GPUs of three types. "published" repeats Frontier's
(arXiv 2605.21312) questions on prefill and decode apart, and on mixed GPUs, with a model, requests and GPUs of our own.
--peer puts the same question to the sweep of aiconfigurator-core, with the same tables; "apart" to that of the package
aiconfigurator, which has to be installed in addition.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.command import command_line, processor_seconds
from benchmarks.rows import Row, at_least, at_most, report
from libra.config.recipe import Recipe
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.plan.problem import InfeasiblePlanError
from libra.serving.candidate import ServingCandidate
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.mix import plan_mix, single_engines
from libra.serving.mix_problem import ServingOption, ServingProblem, solve_serving
from libra.serving.objective import parse_objectives
from libra.serving.question import SizingQuestion
from libra.serving.search import answer
from libra.serving.trial import trial
from libra.sim.clock import ticks
from libra.sim.workload.request_file import read_requests
from libra.sim.workload.requests import RecordedRequest

MODEL = "Qwen/Qwen3-14B"
THREE = "ttft_p99=2,tpot_p99=0.05,latency_p99=40"
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-4B")
LIMITS = ("ttft_p99=1s,tpot_p99=50ms", "ttft_p99=2s,tpot_p99=30ms", "ttft_p95=1s,tpot_p95=40ms", "ttft_p99=3s")
AZURE = Path(__file__).parents[1] / "../shared/data/serving/azure_2023_conv.csv"
WINDOWS = 20
MENU_SECONDS, SIXTEEN_SECONDS, OUT, PLAN_SECONDS = 240.0, 60.0, 0.6, 2.0  # goals

T = TypeVar("T")


def cluster(h100: int, a100: int, l40s: int = 0) -> Cluster:
    """A cluster with the given numbers of nodes, each with eight GPUs of one type."""
    kinds = [it for it in (("H100", h100), ("A100", a100), ("L40S", l40s)) if it[1]]
    return Cluster(tuple(NodeClass(gpu.lower(), count, 8, GPUS[gpu], GPUS[gpu].link, 50e9) for gpu, count in kinds))


def requests(count: int, seed: int = 0) -> tuple[RecordedRequest, ...]:
    """Poisson arrivals; prompts of 1,100 and answers of 250 tokens in the mean, both with long tails."""
    generator = np.random.default_rng(seed)
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

    def cpu() -> float:
        return processor_seconds() + processor_seconds(resource.RUSAGE_CHILDREN)

    before, began = cpu(), time.monotonic()
    done = work()
    return done, cpu() - before, time.monotonic() - began


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


def published_rows(jobs: int, quick: bool) -> Iterator[Row]:
    """Output tokens/s, from what single engines serve in each role."""
    menu = ServingMenu(MenuFile(max_num_seqs=(256,)))
    count = 100 if quick else 500
    for ttft, told in ((3.0, 137.4 / 27.7), (0.5, None)):
        asked = question(cluster(64, 64), count, f"ttft_p99={ttft:g},tpot_p99=0.02")
        options, _ = single_engines(asked, menu, jobs)
        output = sum(it.output_tokens for it in asked.requests) / len(asked.requests)
        case = f"TTFT {ttft:g} s, 50 tokens/s a user, {MODEL}"
        for gpu in ("h100", "a100"):
            colocated, apart = (
                output * most_requests([it for it in options if it.nodes == gpu and (it.role == "colocated") == alone])
                for alone in (True, False)
            )
            yield Row(case, f"512 {gpu}, colocated", colocated, "tokens/s")
            yield Row(case, f"512 {gpu}, prefill and decode apart", apart, "tokens/s")
            if colocated:
                yield Row(case, f"{gpu}: apart over colocated", apart / colocated, "")
        if told is not None:
            yield Row(case, "published: apart over colocated", told, "")
        of = {gpu: [it for it in options if it.nodes == gpu] for gpu in ("h100", "a100")}
        separate = sum(most_requests(its) for its in of.values())
        mixed = most_requests([it for its in of.values() for it in its])
        yield Row(case, "512 h100 + 512 a100: roles mixed over each type by itself", mixed / separate, "")
        if told is not None:
            yield Row(case, "published: 1,024 mixed GPUs", 1.33, "")


def most_requests(options: list[ServingOption]) -> float:
    """Requests/s that 512 GPUs of each class serve at most, to a thousandth."""
    there = {it.nodes: 512 for it in options}
    low, high = 0.0, 1e5
    while high - low > 1e-3 * high and high > 1e-3:
        rate = (low + high) / 2
        try:
            solve_serving(ServingProblem(rate, tuple(options), there))
        except InfeasiblePlanError:
            high = rate
        else:
            low = rate
    return low


_PARTS: dict[str, Callable[[int, bool], Iterator[Row]]] = {
    "menu": menu_rows,
    "sixteen": sixteen_rows,
    "windows": windows_rows,
    "plan": plan_rows,
    "published": published_rows,
}


def main() -> None:
    parser = command_line("search", __doc__, quick="a tenth of everything: whether it runs")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--peer",
        nargs="?",
        const="colocated",
        choices=("colocated", "apart"),
        help="the sweep of aiconfigurator-core instead; or that of aiconfigurator, with prefill and decode apart",
    )
    parser.add_argument("--only", choices=_PARTS)
    given = parser.parse_args()
    if given.peer:
        from benchmarks.search_peer import apart_rows, peer_rows

        report(list(peer_rows() if given.peer == "colocated" else apart_rows()), given.json)
        return
    kept = [make for name, make in _PARTS.items() if given.only in (None, name)]
    report([row for make in kept for row in make(given.jobs, given.quick)], given.json)


if __name__ == "__main__":
    main()
