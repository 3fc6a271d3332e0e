"""Published results on attention and FFN apart, next to Libra's results for the same questions.

Invariant: rows name the question and the GPUs; a published number is a row of its own, and nothing is scaled to it.

    python -m benchmarks.attention_ffn [--only frontier|afd-plugin] [--quick] [--json FILE]

"frontier" is Frontier's comparison of colocated engines, prefill and decode apart, and attention and FFN apart (arXiv
2605.21312), by the search's best deployment of each kind on 64 GPUs: model, requests, GPUs and links are our own.
"afd-plugin" is its recipe for DeepSeek-V3.2 on Ascend (recipe/npu/CAMP2pAFDConnector/deepseek_v3_2 of
github.com/vllm-project/afd-plugin): tokens/s of a die with EP 64 and with 48 or 64 attention and 16 FFN ranks, at the
recipe's batches, in two micro-batches, with weights of 8 bits, on a die of CloudMatrix384 by its data sheet. The recipe
forces tokens to four experts of each FFN rank, as in a deployment of four times as many dies; the same is simulated
without that. DeepSeek-V3 stands for V3.2: once all of a context is read, and once as much as sparse attention reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.command import command_line
from benchmarks.rows import Row, report
from benchmarks.search import requests
from libra.config.recipe import Recipe
from libra.cost.collectives import AllToAll
from libra.cost.experts import power_law
from libra.cost.quantization import Quantization
from libra.cost.sources.expert_grids import expert_grid
from libra.cost.sources.profiles import engine_profiles
from libra.cost.sources.roofline import stage_roofline
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.serving.bound import Bounds
from libra.serving.candidate import Architecture, EngineSetup, ServingCandidate
from libra.serving.ladder import lasting_rate, lasting_trial, rate_of
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.objective import parse_objectives
from libra.serving.question import SizingQuestion
from libra.serving.trial import Trial
from libra.sim.clock import TICKS
from libra.sim.engine.afd import AfdCost, AttentionFFN
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.expert_cost import ExpertCost, ExpertLoad
from libra.sim.engine.group_cost import Graph, GroupCost
from libra.sim.engine.iteration_cost import DecodeBatch

MODEL = "Qwen/Qwen3-235B-A22B"
NODES = 8  # of eight H200 with eight links of 50 GB/s
DIE = GPU("Ascend 910C die", memory=64e9, bandwidth=1.6e12, flops=376e12, link=196e9, source="arXiv 2506.12708")
FRONTIER: dict[float, dict[Architecture, float | None]] = {  # K tokens/s, by TTFT
    3.0: {"colocated": 27.7, "prefill-decode": 137.4, "attention-ffn": 116.2},
    0.5: {"colocated": None, "prefill-decode": 100.7, "attention-ffn": 116.2},
}
FFN, FORCED = 16, 4  # ranks; as many times more would have as few experts each as tokens are forced to
PLUGIN = {  # by context and attention ranks (0: EP 64): requests of a rank, tokens/s of a die
    16384: {0: (16, 232.6), 48: (28, 220.3), 64: (28, 258.9)},
    32768: {0: (8, 168.2), 48: (14, 151.4), 64: (14, 183.3)},
}
MEAN_OUTPUT = 1024
SPARSE_TOKENS, INDEX_SHARE = 2048, 128 / 576  # that attention reads; an index key over a latent one (DeepSeek-V3.2)


# Engines of every kind and role: one of eight GPUs, eight ranks or 32; a group apart has 16 to 48 GPUs.
MENU = MenuFile(
    architectures=("colocated", "prefill-decode", "attention-ffn"),
    tensor_parallel_size=(1, 8),
    data_parallel_size=(1, 8, 32),
    all2all_backend=("deepep_low_latency",),
    max_num_seqs=(256,),
    max_num_batched_tokens=(8192,),
    engines=tuple(range(1, 9)),
)


def frontier_rows(quick: bool) -> Iterator[Row]:
    for ttft, published in FRONTIER.items():
        asked = frontier_question(ttft, quick)
        output = sum(it.output_tokens for it in asked.requests) / len(asked.requests)
        for architecture, told in published.items():
            case = f"TTFT {ttft:g} s, 50 tokens/s a user, {architecture}"
            if told is not None:
                yield Row(case, "published", told, "K tokens/s")
            for candidate, served in frontier_best(asked, architecture):
                its = f"{case}: {candidate}"
                yield Row(its, f"{NODES * 8} H200", output * served.rate / 1e3, "K tokens/s")
                yield Row(its, "p99 TTFT", served.ttft, "s")
                yield Row(its, "p99 TPOT", 1e3 * served.tpot, "ms")
                for pool, use in zip(candidate.pools, served.pools, strict=True):
                    yield Row(its, f"{pool.role} engines busy", 100 * use.busy, "%")


def frontier_question(ttft: float, quick: bool = False) -> SizingQuestion:
    gpu, model = GPUS["H200"], load_model(MODEL)
    there = Cluster((NodeClass("h200", NODES, 8, gpu, gpu.link, 8 * 50e9),))
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=model.max_context)
    profiles = engine_profiles(there, model, recipe, "roofline")
    objectives = parse_objectives(f"ttft_p99={ttft:g},tpot_p99=0.02")
    return SizingQuestion(there, model, profiles, requests(100 if quick else 4000), objectives)


def frontier_best(asked: SizingQuestion, architecture: Architecture) -> list[tuple[ServingCandidate, Trial]]:
    """The deployment with the highest lasting rate, for each division of the engines that generate; the best first."""
    menu, bounds = ServingMenu(MENU.model_copy(update={"architectures": (architecture,)})), Bounds(asked)
    bounded = {it: bounds.of(it).rate for it in menu.candidates(asked)}
    best: dict[EngineSetup, tuple[ServingCandidate, Trial]] = {}
    for candidate in sorted(bounded, key=lambda it: -bounded[it]):
        shape = replace(candidate.pools[-1].shape, apart=None)  # groups apart among themselves
        if shape in best:
            more = best[shape][1].rate * rate_of(1)
            if bounded[candidate] < more or not lasting_trial(asked, candidate, more).passed:
                continue
        served = lasting_rate(asked, candidate, bounded[candidate])
        if served is not None:
            best[shape] = candidate, served
    return sorted(best.values(), key=lambda it: -it[1].rate)


def plugin_rows() -> Iterator[Row]:
    for context, shapes in PLUGIN.items():
        mean = context + MEAN_OUTPUT // 2
        reads = {"all of it read": mean, "sparse": round(SPARSE_TOKENS + INDEX_SHARE * mean)}
        for attention, (batch, told) in shapes.items():
            name = f"{attention}A{FFN}F" if attention else "EP 64"
            case = f"{context // 1024}K contexts, {name}"
            yield Row(case, "published, Ascend", told, "tokens/s/die")
            yield Row(case, "requests of a rank", batch, "")
            share = attention / (attention + FFN) if attention else 1.0  # of dies that have requests
            yield Row(case, "iteration, published", 1e3 * share * batch / told, "ms")
            for read, tokens in reads.items():
                for more in (FORCED, 1) if attention else (1,):
                    cost = plugin_cost(attention * more, FFN * more)
                    seconds = iteration_seconds(cost, batch, tokens, attention * more or 64)
                    which = f"{DIE.name}, {read}"
                    if attention and more == 1:
                        which += ", tokens to all experts"
                    yield Row(case, which, share * batch / seconds, "tokens/s/die")
                    yield Row(case, f"iteration, {which}", 1e3 * seconds, "ms")


def plugin_cost(attention: int, ffn: int) -> GroupCost:
    """Cost of `attention` and `ffn` ranks; without attention ranks, of 64 ranks that do both."""
    model, stored = load_model("deepseek-ai/DeepSeek-V3"), Quantization("fp8")
    assert model.experts is not None
    config = EngineConfig(max_model_len=40_000, kv_blocks=200_000, max_num_seqs=512)
    if attention:
        stages = stage_roofline(DIE, model, 1, ffn, quantization=stored)
        return AfdCost(stages, config, AttentionFFN(attention, ffn, DIE.link, 5e-6))
    shares = power_law(model.experts.count, model.experts.active, 0.0, model.sparse_layers, seed=0)
    nodes = NodeClass("node", 8, 8, DIE, DIE.link, 8 * DIE.link)
    way: AllToAll = "deepep_low_latency"
    grid = expert_grid(DIE, model, 1, 64, way, fabric(nodes), source="roofline", quantization=stored)
    return ExpertCost(grid, config, ExpertLoad(lambda _: shares, model.experts.active))


def iteration_seconds(cost: GroupCost, batch: int, context: int, ranks: int) -> float:
    """Seconds of an iteration of `ranks` ranks that each decode `batch` requests."""
    graph = Graph("NONE")
    base, slope, _ = cost.rank(graph).line(DecodeBatch(batch), batch * context)
    own = base + slope * batch * context
    together = cost.together(graph, batch * ranks, batch, cost.host.seconds(batch), 0)
    return max(factor * own + more for factor, more in together.lines) / TICKS


def main() -> int:
    parser = command_line("attention_ffn", __doc__, quick="100 requests instead of 4,000")
    parser.add_argument("--only", choices=("frontier", "afd-plugin"))
    options = parser.parse_args()
    rows: list[Row] = []
    if options.only != "frontier":
        rows += plugin_rows()
    if options.only != "afd-plugin":
        rows += frontier_rows(options.quick)
    report(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
