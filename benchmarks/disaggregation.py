"""CPU time to simulate prefill and decode engines, ranks that divide experts, and an engine that drafts.

Invariant: cases are measured as those of `benchmarks.simulation`.

    python -m benchmarks.disaggregation [--quick] [--repeats N] [--case NAME] [--json FILE]

"AFD" has attention and experts of DeepSeek-V3 on 768 and 256 H800, in three micro-batches; attention ranks decide each
for itself, and begin their iterations together.

"contended" has links of 1 GB/s, of which a decode engine's is busy most of the time. The engine with drafts proposes
three with EAGLE, and accepts 1.7 of them in the mean; it serves the same requests as the engine without drafts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from benchmarks.simulation import MIXED, Case, engine, main
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
from libra.sim.workload.distributions import AtOnce, Constant, Poisson
from libra.sim.workload.generated import generated_requests
from libra.sim.workload.requests import Workload

MODEL = "meta-llama/Llama-3.1-8B"
PAIRS = 512
RANKS = 64
MOST_MIB = 1024
APART = AttentionFFN(768, 256, 50e9, 5e-6, 3)
EAGLE = Speculative("eagle3", 3, (0.8, 0.55, 0.35))


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
    workload = generated_requests(25_000, Poisson(PAIRS * 1.6), *MIXED, seed=0, samples_per_prompt=4)
    return cluster(workload, 1e9, push=push)


def one_engine(drafts: Speculative | None) -> SimCluster:
    """100,000 requests of mixed lengths for one engine."""
    spec = engine(MODEL, "A100", 1, 16384)
    config = replace(spec.config, speculative=drafts)
    grid = roofline(GPUS["A100"], load_model(MODEL), [1]).grid(1)
    drafter = None if drafts is None else grid.slowed(1 / load_model(MODEL).layers)
    cost = GridCost(grid, config, drafter=drafter)
    workload = generated_requests(100_000, Poisson(5.0), *MIXED, seed=0)
    return SimCluster([replace(spec, config=config, cost=cost)], workload)


@cache
def stages() -> StageGrid:
    model = load_model("deepseek-ai/DeepSeek-V3")
    return stage_roofline(GPUS["H800"], model, 1, APART.ffn, quantization=Quantization("fp8"))


def stages_apart() -> SimCluster:
    """16,384 requests of mixed lengths for one group of attention ranks."""
    config = EngineConfig(max_model_len=16384, kv_blocks=40_000, max_num_seqs=128)
    cost = AfdCost(stages(), config, APART)
    ranks = attention_ranks(EngineSpec("afd", config, cost.own), cost)
    return SimCluster(ranks, generated_requests(16_384, Poisson(1000.0), *MIXED, seed=0), RoundRobin())


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
    return SimCluster(specs, generated_requests(16_384, Poisson(400), *MIXED, seed=0), RoundRobin())


CASES = {
    "512 + 512, 1,024 requests": Case(at_once, 0.5),
    "512 + 512, 100,000 mixed requests, contended": Case(mixed, 15, MOST_MIB),
    "512 + 512, 100,000 mixed requests, contended, pushed": Case(lambda: mixed(push=True), 15, MOST_MIB),
    "AFD, 768 attention + 256 FFN, 16,384 requests": Case(stages_apart, 10),
    "EP 64 with DP 64, 16,384 requests": Case(expert_ranks, 10),
    "1 engine, 100,000 requests": Case(lambda: one_engine(None)),
    "1 engine, 100,000 requests, drafts": Case(lambda: one_engine(EAGLE), times=("1 engine, 100,000 requests", 3.0)),
}


if __name__ == "__main__":
    main("disaggregation", __doc__)
