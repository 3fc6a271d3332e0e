"""Time that the simulator takes, and what it leaves out to be that fast.

Invariant: a case's time is the CPU time of one process that makes the workload and runs it, with the engines' profiles
made beforehand, so that neighbours on the machine count little; memory is that process's peak. Events are what the
simulator visited, iterations what the engines did: a case whose events are few is fast because most iterations follow
from others, not because it is small.

    python -m benchmarks.simulation [--quick] [--json FILE] [--repeats N] [--case NAME]
    PYTHONPATH=build/compiled python -m benchmarks.simulation ...     # of the compiled core: its rows say so

Each case runs in a process of its own, several times. CPU time is not free of neighbours, which share caches, memory
and a core's other thread: a plain loop, timed just before each case, tells how fast the machine was. The last rows say
how the time grows with requests, engines and tokens per request; it should not grow with the last.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from statistics import median

from benchmarks.command import apart, command_line, peak_mib, show
from benchmarks.rows import Row, at_most, below
from libra import EngineConfig, EngineSpec, Replay, load_model
from libra.cost.engine_memory import kv_tokens
from libra.cost.sources.roofline import roofline
from libra.hardware.cluster import GPUS
from libra.route.baselines import LeastLoaded, RoundRobin, TwoChoices
from libra.route.policy import Policy
from libra.sim import cluster as cluster_module
from libra.sim.cluster import SimCluster
from libra.sim.engine.grid_cost import GridCost
from libra.sim.workload.distributions import AtOnce, Constant, LogNormal, LongTail, Poisson
from libra.sim.workload.generated import Agent, Tool, agent_trajectories, generated_requests
from libra.sim.workload.request_file import read_azure_requests
from libra.sim.workload.requests import Workload, recorded_requests
from libra.trajectory import read_trajectories, truncate

DATA = Path(__file__).parents[1] / "../shared/data"
AZURE = DATA / "serving/azure_2023_conv.csv"
SESSIONS = DATA / "trajectories/claude_code_sessions.jsonl"

PROMPT, OUTPUT = 512, 128
MIXED = LogNormal(400, 1.0, 8000), LongTail(150, 0.8, 0.02, 1000, 1.5, 4000)  # prompts and outputs


@dataclass(frozen=True, slots=True)
class Figures:
    """Costs and counts of one run of a case."""

    cpu_seconds: float
    peak_mib: float
    engines: int
    requests: int
    finished: int
    events: int
    iterations: int
    preemptions: int
    cached_share: float  # of prompt tokens
    transfers: int  # of KV, and gigabytes
    moved: float
    simulated_seconds: float
    loop_seconds: float  # of a million turns of a plain Python loop, just before: how fast the machine was
    load: float  # processes that wanted a core, mean of the minute before


@dataclass(frozen=True, slots=True)
class Case:
    make: Callable[[], SimCluster]
    seconds: float | None = None  # goals
    mib: float | None = None
    events_per_engine: float | None = None
    times: tuple[str, float] | None = None  # another case, and how many times its CPU time are allowed


@cache
def engine(model: str, gpu: str, tp: int, max_model_len: int, max_num_seqs: int = 256) -> EngineSpec:
    """An engine with all the memory that vLLM would take, and the times of the GPU's roofline."""
    spec, device = load_model(model), GPUS[gpu]
    config = EngineConfig(
        max_model_len=max_model_len,
        kv_blocks=kv_tokens(spec, device.usable, 0.9, tp, batched_tokens=8192) // 16,
        max_num_seqs=max_num_seqs,
    )
    return EngineSpec("0", config, GridCost(roofline(device, spec, [tp]).grid(tp), config))


def cluster(spec: EngineSpec, count: int, workload: Workload, route: Policy | None) -> SimCluster:
    return SimCluster([replace(spec, name=str(number)) for number in range(count)], workload, route)


def static(engines: int, requests: int) -> SimCluster:
    """All requests at once, dealt out in turn."""
    workload = generated_requests(requests, AtOnce(), Constant(PROMPT), Constant(OUTPUT), seed=0)
    return cluster(engine("meta-llama/Llama-2-7b-hf", "A100", 1, 4096), engines, workload, RoundRobin())


@cache
def capacity(output: int = OUTPUT) -> float:
    """Requests a second of one engine that always has enough to do."""
    full = cluster(
        engine("meta-llama/Llama-3.1-8B", "A100", 1, 4096),
        1,
        generated_requests(3000, AtOnce(), Constant(PROMPT), Constant(output), seed=0),
        None,
    )
    full.run()
    return 3000 / (full.now / 1e12)


def poisson(requests: int, output: int = OUTPUT) -> SimCluster:
    """One engine at 80 % of what it can do."""
    workload = generated_requests(requests, Poisson(0.8 * capacity(output)), Constant(PROMPT), Constant(output), seed=0)
    return cluster(engine("meta-llama/Llama-3.1-8B", "A100", 1, 4096), 1, workload, None)


def azure() -> SimCluster:
    workload = recorded_requests(read_azure_requests(AZURE), source={"file": AZURE.name})
    spec = engine("meta-llama/Llama-2-7b-hf", "A100", 1, 16384)
    return cluster(spec, 8, workload, LeastLoaded())


def mixed(engines: int, requests: int) -> SimCluster:
    """Groups of four samples of a prompt, mixed lengths with a long tail, at 80 % of what the engines can do."""
    workload = generated_requests(requests // 4, Poisson(engines * 1.6), *MIXED, seed=0, samples_per_prompt=4)
    spec = engine("meta-llama/Llama-3.1-8B", "A100", 1, 16384)
    return cluster(spec, engines, workload, TwoChoices(seed=0))


def sessions() -> SimCluster:
    """Each session's pauses are cut at a minute: the log has people in it who go for lunch."""
    limit = 131072
    logged = (truncate(trajectory, limit - 1) for trajectory in read_trajectories(SESSIONS))
    hurried = [
        replace(
            trajectory,
            turns=tuple(
                replace(turn, tool_seconds=None if turn.tool_seconds is None else min(turn.tool_seconds, 60.0))
                for turn in trajectory.turns
            ),
        )
        for trajectory in logged
    ]
    spec = engine("Qwen/Qwen3-30B-A3B", "H100", 2, limit)
    return cluster(spec, 16, Replay(hurried, rewrite_keeps="last prompt"), LeastLoaded())


def step() -> SimCluster:
    """512 agent trajectories of 5K tokens on average and 40K at most, on 48 GPUs: one step of RL."""
    agent = Agent(
        LogNormal(600, 0.5, 4000),
        LongTail(110, 0.9, 0.035, 1500, 1.4, 20000),
        9.0,
        (Tool("search", 1.0, LogNormal(180, 0.8, 4000), 1.0, 0.6),),
        40960,
    )
    trajectories = agent_trajectories(agent, 32, seed=0, samples_per_prompt=16)
    spec = engine("Qwen/Qwen3-14B", "A800", 2, 40960, max_num_seqs=128)
    return cluster(spec, 24, Replay(trajectories), LeastLoaded())


CASES: dict[str, Case] = {
    "1,024 engines, 4,096 requests": Case(lambda: static(1024, 4096), 0.1, None, 2.5),
    "1 engine, 100,000 requests at 80 % load": Case(lambda: poisson(100_000), 1.0, 150),
    "1,024 engines, 1,000,000 mixed requests": Case(lambda: mixed(1024, 1_000_000), 40.0, 1536),
    "24 engines (48 GPUs), 512 agent trajectories": Case(step, 0.2),
    "10,000 engines, 40,000 requests": Case(lambda: static(10_000, 40_000), 1.0),
}
if AZURE.exists() and SESSIONS.exists():
    CASES |= {
        "8 engines, azure conversations": Case(azure, 1.0),
        "16 engines, 355 coding sessions": Case(sessions, 5.0),
    }
CASES |= {
    **{f"growth: 1 engine, {n:,} requests at 80 % load": Case(partial(poisson, n)) for n in (12_500, 25_000, 50_000)},
    **{f"growth: {n:,} engines, 32,768 mixed requests": Case(partial(mixed, n, 32_768)) for n in (16, 64, 256)},
    **{
        f"growth: 1 engine, 10,000 requests of {n:,} tokens": Case(partial(poisson, 10_000, n))
        for n in (32, 128, 512, 2048)
    },
}


def measure(module: str, name: str) -> Figures:
    """Run a case of a module of benchmarks in this process."""
    case = cases_of(module)[name]
    case.make()  # makes the engines' profiles and finds what they can do, which is no part of the case
    loop, load = loop_seconds(), os.getloadavg()[0]
    started = time.process_time()
    simulated = case.make()
    simulated.run()
    cpu = time.process_time() - started
    asked = sum(request.prompt_tokens for request in simulated.requests)
    pairs = simulated.pairs
    return Figures(
        cpu_seconds=cpu,
        peak_mib=peak_mib(),
        engines=len(simulated.engines),
        requests=len(simulated.requests),
        finished=sum(request.status == "finished" for request in simulated.requests),
        events=sum(it.events for it in simulated.engines),
        iterations=sum(it.iterations for it in simulated.engines),
        preemptions=sum(it.preemptions for it in simulated.engines),
        cached_share=sum(request.cached_tokens for request in simulated.requests) / asked,
        transfers=0 if pairs is None else pairs.transfers,
        moved=0 if pairs is None else pairs.transferred_bytes / 1e9,
        simulated_seconds=simulated.now / 1e12,
        loop_seconds=loop,
        load=load,
    )


def cases_of(module: str) -> dict[str, Case]:
    found: dict[str, Case] = import_module(f"benchmarks.{module}").CASES
    return found


def loop_seconds() -> float:
    """CPU time of a million turns: the same work wherever and whenever it is done."""
    started = time.process_time()
    total = 0
    for turn in range(1_000_000):
        total += turn * turn % 7
    return time.process_time() - started


def rows_of(name: str, case: Case, runs: list[Figures], others: dict[str, float]) -> Iterator[Row]:
    """`others`: CPU time of other cases."""
    first, typical = runs[0], median(run.cpu_seconds for run in runs)
    if str(cluster_module.__file__).endswith(".so"):
        name += ", compiled"
    every = first.finished == first.requests
    yield below(name, "median CPU time", typical, "s", case.seconds)
    if case.times is not None and case.times[0] in others:
        yield below(name, f"over that of {case.times[0]}", typical / others[case.times[0]], "x", case.times[1])
    yield Row(name, "longest", max(run.cpu_seconds for run in runs), "s")
    yield Row(name, "a million turns of a plain loop, just before", median(run.loop_seconds for run in runs), "s")
    yield Row(name, "load of the machine", median(run.load for run in runs), "")
    yield below(name, "peak memory", max(run.peak_mib for run in runs), "MiB", case.mib)
    yield at_most(name, "events an engine", first.events / first.engines, "", case.events_per_engine)
    yield Row(name, "iterations an event", first.iterations / first.events, "")
    yield Row(name, "CPU time a request", 1e6 * typical / first.requests, "us")
    yield Row(name, "finished requests", first.finished, "", f"all {first.requests:,}", every)
    yield Row(name, "preemptions", first.preemptions, "")
    yield Row(name, "prompt tokens found in the prefix cache", 100 * first.cached_share, "%")
    if first.transfers:
        yield Row(name, "transfers of KV", first.transfers, "")
        yield Row(name, "KV moved", first.moved, "GB")
    yield Row(name, "simulated time", first.simulated_seconds, "s")


def rows(module: str, asked: Namespace) -> Iterator[Row]:
    seconds = dict[str, float]()
    for name, case in cases_of(module).items():
        if asked.case not in (None, name) or (asked.quick and "1,000,000" in name):
            continue
        runs = [apart(measure, module, name)]
        while len(runs) < (1 if asked.quick else asked.repeats) and not (runs[-1].cpu_seconds > 10 and len(runs) == 3):
            runs.append(apart(measure, module, name))
        seconds[name] = median(run.cpu_seconds for run in runs)
        print(f"{name}: {seconds[name]:.3f} s", file=sys.stderr)
        yield from rows_of(name, case, runs, seconds)


def main(module: str, about: str | None) -> None:
    """The command of the module, whose `CASES` are measured."""
    parser = command_line(module, about, quick="each case once, and not the largest ones")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each case (3 of those over 10 s)")
    parser.add_argument("--case", choices=cases_of(module), metavar="NAME", help="only this one")
    show(parser, partial(rows, module))


if __name__ == "__main__":
    main("simulation", __doc__)
