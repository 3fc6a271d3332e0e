"""CPU time to simulate prefill and decode engines, ranks that divide experts, and an engine that drafts.

Invariant: a case's time is the CPU time of a process of its own that makes the workload and runs it, with the engines'
profiles made beforehand; memory is that process's peak.

    python -m benchmarks.disaggregation [--repeats N] [--json FILE]

"AFD" has attention and experts of DeepSeek-V3 on 768 and 256 H800, in three micro-batches; attention ranks decide each
for itself, and begin their iterations together.

"contended" has links of 1 GB/s, of which a decode engine's is busy most of the time. The engine with drafts proposes
three with EAGLE, and accepts 1.7 of them in the mean; it serves the same requests as the engine without drafts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, median

from benchmarks.command import apart, command_line, peak_mib
from benchmarks.rows import Row, below, report
from benchmarks.simulation import engine
from libra.cost.afd import StageGrid
from libra.cost.experts import Balancing, power_law
from libra.cost.graphs import capture_sizes
from libra.cost.host import default_host
from libra.cost.quantization import Quantization
from libra.cost.sources.expert_grids import expert_grid
from libra.cost.sources.roofline import roofline, stage_roofline
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPUS, NodeClass
from libra.hardware.model_file import load_model
from libra.route.baselines import RoundRobin, TwoChoices
from libra.sim.cluster import SimCluster
from libra.sim.engine.afd import AfdCost, AttentionFFN, attention_ranks
from libra.sim.engine.config import DECODE, PREFILL, EngineConfig, EngineSpec
from libra.sim.engine.expert_cost import ExpertCost, ExpertLoad
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.group_cost import Graph, GroupSpec
from libra.sim.engine.speculative import Speculative
from libra.sim.kv_network import RESERVED_DECODE_TOKENS, KVNetwork
from libra.sim.workload.distributions import AtOnce, Constant, LogNormal, LongTail, Poisson
from libra.sim.workload.generated import generated_requests
from libra.sim.workload.requests import Workload

MODEL = "meta-llama/Llama-3.1-8B"
PAIRS = 512
RANKS = 64
MOST_MIB = 1024
APART = AttentionFFN(768, 256, 50e9, 5e-6, 3)
EAGLE = Speculative("eagle3", 3, (0.8, 0.55, 0.35))


@dataclass(frozen=True, slots=True)
class Figures:
    cpu_seconds: float
    peak_mib: float
    finished: int
    events: int
    iterations: int
    transfers: int
    gigabytes: float  # moved
    simulated_seconds: float
    transfer_seconds: float  # mean, from the prompt's end to the first token


@dataclass(frozen=True, slots=True)
class Case:
    make: Callable[[], SimCluster]
    seconds: float | None = None  # goal
    mib: float | None = None
    than: str | None = None  # `seconds` is times this case's


def cluster(workload: Workload, bandwidth: float, *, push: bool = False) -> SimCluster:
    """Engines of one A100 each, half of them for prompts."""
    spec = replace(engine(MODEL, "A100", 1, 16384), kv_bytes=load_model(MODEL).kv_bytes_per_token(2))
    specs = [replace(spec, name=f"prefill-{number}", role=PREFILL) for number in range(PAIRS)]
    reserving = replace(spec.config, num_reserved_decode_tokens=RESERVED_DECODE_TOKENS if push else 0)
    specs += [replace(spec, name=f"decode-{number}", role=DECODE, config=reserving) for number in range(PAIRS)]
    transfer = KVNetwork(bandwidth, push=push)
    return SimCluster(specs, workload, RoundRobin(), kv_transfer=transfer, decode_route=TwoChoices(seed=0))


def at_once() -> SimCluster:
    """1,024 requests, all at the beginning."""
    return cluster(generated_requests(1024, AtOnce(), Constant(2048), Constant(256), seed=0), 50e9)


def mixed(*, push: bool = False) -> SimCluster:
    """100,000 requests of mixed lengths in groups of four samples of a prompt, and links that have much to do."""
    prompts, outputs = LogNormal(400, 1.0, 8000), LongTail(150, 0.8, 0.02, 1000, 1.5, 4000)
    workload = generated_requests(25_000, Poisson(PAIRS * 1.6), prompts, outputs, seed=0, samples_per_prompt=4)
    return cluster(workload, 1e9, push=push)


def one_engine(drafts: Speculative | None) -> SimCluster:
    """100,000 requests of mixed lengths for one engine."""
    prompts, outputs = LogNormal(400, 1.0, 8000), LongTail(150, 0.8, 0.02, 1000, 1.5, 4000)
    spec = engine(MODEL, "A100", 1, 16384)
    config = replace(spec.config, speculative=drafts)
    grid = roofline(GPUS["A100"], load_model(MODEL), [1]).grid(1)
    drafter = None if drafts is None else grid.slowed(1 / load_model(MODEL).layers)
    cost = GridCost(grid, config, drafter=drafter)
    workload = generated_requests(100_000, Poisson(5.0), prompts, outputs, seed=0)
    return SimCluster([replace(spec, config=config, cost=cost)], workload)


@cache
def stages() -> StageGrid:
    model = load_model("deepseek-ai/DeepSeek-V3")
    return stage_roofline(GPUS["H800"], model, 1, APART.ffn, quantization=Quantization("fp8"))


def stages_apart() -> SimCluster:
    """16,384 requests of mixed lengths for one group of attention ranks."""
    prompts, outputs = LogNormal(400, 1.0, 8000), LongTail(150, 0.8, 0.02, 1000, 1.5, 4000)
    config = EngineConfig(max_model_len=16384, kv_blocks=40_000, max_num_seqs=128)
    cost = AfdCost(stages(), config, APART)
    ranks = attention_ranks(EngineSpec("afd", config, cost.own), cost)
    return SimCluster(ranks, generated_requests(16_384, Poisson(1000.0), prompts, outputs, seed=0), RoundRobin())


def expert_ranks() -> SimCluster:
    """16,384 requests of mixed lengths for DeepSeek-V3 on 64 ranks of one H200 each, which divide its experts. The
    load of experts follows a power law, and is balanced."""
    model, gpu = load_model("deepseek-ai/DeepSeek-V3"), GPUS["H200"]
    sizes = capture_sizes(256, 8192)
    config = EngineConfig(max_model_len=16384, kv_blocks=20_000, max_num_seqs=256, capture_sizes=sizes)
    nodes = NodeClass("node", 8, 8, gpu, intra_bandwidth=gpu.link, inter_bandwidth=8 * 50e9)
    stored = Quantization("bf16")
    links = fabric(nodes)
    grid = expert_grid(gpu, model, 1, RANKS, "deepep_low_latency", links, source="roofline", quantization=stored)
    shares = power_law(256, 8, 0.8, model.sparse_layers, seed=0)
    cost = ExpertCost(grid, config, ExpertLoad(lambda _: shares, 8), Balancing(64), default_host(model.layers))
    group = GroupSpec("group", cost)
    specs = [EngineSpec(f"rank-{rank}", config, cost.rank(Graph("NONE")), group=group) for rank in range(RANKS)]
    prompts, outputs = LogNormal(400, 1.0, 8000), LongTail(150, 0.8, 0.02, 1000, 1.5, 4000)
    return SimCluster(specs, generated_requests(16_384, Poisson(400), prompts, outputs, seed=0), RoundRobin())


CASES = {
    "512 + 512, 1,024 requests": Case(at_once, 0.5),
    "512 + 512, 100,000 mixed requests, contended": Case(mixed, 15, MOST_MIB),
    "512 + 512, 100,000 mixed requests, contended, pushed": Case(lambda: mixed(push=True), 15, MOST_MIB),
    "AFD, 768 attention + 256 FFN, 16,384 requests": Case(stages_apart, 10),
    "EP 64 with DP 64, 16,384 requests": Case(expert_ranks, 10),
    "1 engine, 100,000 requests": Case(lambda: one_engine(None)),
    "1 engine, 100,000 requests, drafts": Case(lambda: one_engine(EAGLE), 3, than="1 engine, 100,000 requests"),
}


def figures(name: str) -> Figures:
    """Run a case in this process."""
    engine(MODEL, "A100", 1, 16384)
    stages()
    began = time.process_time()
    run = CASES[name].make()
    run.run()
    took = time.process_time() - began
    waits = [
        it.first_token - it.prefill_end
        for it in run.requests
        if it.first_token is not None and it.prefill_end is not None
    ]
    return Figures(
        cpu_seconds=took,
        peak_mib=peak_mib(),
        finished=sum(request.status == "finished" for request in run.requests),
        events=sum(it.events for it in run.engines),
        iterations=sum(it.iterations for it in run.engines),
        transfers=0 if run.pairs is None else run.pairs.transfers,
        gigabytes=0 if run.pairs is None else run.pairs.transferred_bytes / 1e9,
        simulated_seconds=run.now / 1e12,
        transfer_seconds=fmean(waits) / 1e12 if waits else 0.0,
    )


def main() -> int:
    parser = command_line("disaggregation", __doc__)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="processes for each case (3)")
    options = parser.parse_args()
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for name, case in CASES.items():
        runs = [apart(figures, name) for _ in range(options.repeats)]
        took = seconds[name] = median(run.cpu_seconds for run in runs)
        rows.append(below(name, "CPU time", took, "s", case.seconds if case.than is None else None))
        if case.than is not None:
            rows.append(below(name, "CPU time, times without", took / seconds[case.than], "", case.seconds))
        rows.append(below(name, "peak memory", max(run.peak_mib for run in runs), "MiB", case.mib))
        rows += [Row(name, what.replace("_", " "), getattr(runs[0], what), unit) for what, unit in _COUNTED.items()]
    report(rows, options.json)
    return int(any(row.met is False for row in rows))


_COUNTED = {
    "finished": "",
    "events": "",
    "iterations": "",
    "transfers": "",
    "gigabytes": "GB",
    "simulated_seconds": "s",
    "transfer_seconds": "s",
}


if __name__ == "__main__":
    sys.exit(main())
