"""What was published of attention and FFN apart, beside the same questions asked here.

Invariant: rows say what was asked of which GPUs; a published number is a row of its own, and nothing is scaled to it.

    python -m benchmarks.attention_ffn [--only frontier|afd-plugin] [--quick] [--json FILE]

"frontier" is Frontier's comparison of colocated engines, prefill and decode apart, and attention and FFN apart (arXiv
2605.21312), by the search's best deployment of each kind on 64 GPUs: model, requests, GPUs and links are our own.
"afd-plugin" is that of afd-plugin for vLLM 0.26 on Ascend: tokens/s of a die with EP 64 and with 48 or 64 attention and
16 FFN ranks, DeepSeek-V3.2. Here DeepSeek-V3 (its attention is not sparse) decodes as many contexts as KV memory holds,
in two micro-batches: on H200 in bf16, and on a die of CloudMatrix384 by its data sheet with 8 bits a weight. Batches,
links and quantisation of the original are not known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import Row, report
from benchmarks.search import requests
from libra.config.recipe import Recipe
from libra.cost.collectives import AllToAll
from libra.cost.engine_memory import kv_tokens
from libra.cost.experts import power_law
from libra.cost.quantization import UNQUANTIZED, Quantization
from libra.cost.sources.expert_grids import expert_grid
from libra.cost.sources.profiles import engine_profiles
from libra.cost.sources.roofline import stage_roofline
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.sim.clock import TICKS
from libra.sim.engine.afd import AfdCost, AttentionFFN
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.expert_cost import ExpertCost, ExpertLoad
from libra.sim.engine.group_cost import Graph, GroupCost
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sizing.candidate import Architecture
from libra.sizing.menu import AfdMenu, MenuFile, ServingMenu
from libra.sizing.objective import parse_objectives
from libra.sizing.question import SizingQuestion
from libra.sizing.search import answer

MODEL = "Qwen/Qwen3-235B-A22B"
NODES = 8  # of eight H200 with eight links of 50 GB/s
LINKS = (50e9, 196e9)  # bytes/s of a GPU: 400 Gb/s networks; a die of CloudMatrix384 (arXiv 2506.12708)
DIE = GPU("Ascend 910C die", memory=64e9, bandwidth=1.6e12, flops=376e12, link=LINKS[1], source="arXiv 2506.12708")
FRONTIER: dict[float, dict[Architecture, float | None]] = {  # K tokens/s, by TTFT
    3.0: {"colocated": 27.7, "prefill-decode": 137.4, "attention-ffn": 116.2},
    0.5: {"colocated": None, "prefill-decode": 100.7, "attention-ffn": 116.2},
}
PLUGIN = {  # tokens/s of a die, by context: EP 64, 48A16F, 64A16F
    16384: (232.6, 220.3, 258.9),
    32768: (168.2, 151.4, 183.3),
}


def frontier_rows(quick: bool) -> Iterator[Row]:
    gpu, model = GPUS["H200"], load_model(MODEL)
    there = Cluster((NodeClass("h200", NODES, 8, gpu, gpu.link, 8 * 50e9),))
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=model.max_context)
    profiles = engine_profiles(there, model, recipe, "roofline")
    recorded = requests(100 if quick else 1000)
    output = sum(it.output_tokens for it in recorded) / len(recorded)
    for ttft, published in FRONTIER.items():
        objectives = parse_objectives(f"ttft_p99={ttft:g},tpot_p99=0.02")
        asked = SizingQuestion(there, model, profiles, recorded, objectives)
        for architecture, told in published.items():
            menu = MenuFile(
                architectures=(architecture,),
                tensor_parallel_size=(1, 8),
                max_num_seqs=(256,),
                max_num_batched_tokens=(8192,),
                engines=(1, 2, 3, 4, 6, 8),
                afd=AfdMenu(attention=(16, 32), ffn=(8, 16), micro_batches=(2,)),
            )
            found = answer(asked, ServingMenu(menu)).points
            case = f"TTFT {ttft:g} s, 50 tokens/s a user, {architecture}"
            best = max(found, key=lambda it: it.trial.rate, default=None)
            rate = 0.0 if best is None else output * best.trial.rate
            yield Row(
                case if best is None else f"{case}: {best.candidate}", f"{NODES * 8} H200", rate / 1e3, "K tokens/s"
            )
            if told is not None:
                yield Row(case, "published", told, "K tokens/s")


def plugin_rows(gpu: GPU, link: float, stored: Quantization) -> Iterator[Row]:
    model = load_model("deepseek-ai/DeepSeek-V3")
    assert model.experts is not None
    nodes = NodeClass("node", 8, 8, gpu, gpu.link, 8 * link)
    config = EngineConfig(max_model_len=40_000, kv_blocks=200_000, max_num_seqs=512)
    shares = power_law(model.experts.count, model.experts.active, 0.0, model.sparse_layers, seed=0)
    way: AllToAll = "deepep_low_latency"
    grid = expert_grid(gpu, model, 1, 64, way, fabric(nodes), source="roofline", quantization=stored)
    together = ExpertCost(grid, config, ExpertLoad(lambda _: shares, model.experts.active))
    kinds: dict[str, tuple[GroupCost, int, int]] = {"EP 64": (together, 64, 64)}
    for attention in (48, 64):
        stages = stage_roofline(gpu, model, 1, 16, quantization=stored)
        apart = AfdCost(stages, config, AttentionFFN(attention, 16, link, 5e-6))
        kinds[f"{attention}A16F"] = apart, attention, attention + 16
    for context, published in PLUGIN.items():
        for (name, (cost, ranks, gpus)), told in zip(kinds.items(), published, strict=True):
            experts = stored.expert_bytes * model.routed_parameters / gpus if gpus == ranks else 0.0
            held = kv_tokens(
                *(model, gpu.memory, 0.9, 1),
                batched_tokens=512,
                quantization=stored,
                taken=experts,
                routed=False,
            )
            batch = held // context
            seconds = iteration_seconds(cost, batch, context, ranks)
            case = f"{context // 1024}K contexts, links of {link / 1e9:g} GB/s, {name}"
            yield Row(case, gpu.name, ranks * batch / gpus / seconds, "tokens/s/GPU")
            yield Row(case, "requests of a rank", batch, "")
            yield Row(case, "iteration", seconds, "s")
            yield Row(case, "published, Ascend", told, "tokens/s/die")


def iteration_seconds(cost: GroupCost, batch: int, context: int, ranks: int) -> float:
    """Of ranks that all decode as many requests."""
    graph = Graph("NONE")
    base, slope, _ = cost.rank(graph).line(DecodeBatch(batch), batch * context)
    own = base + slope * batch * context
    together = cost.together(graph, batch * ranks, batch, cost.host.seconds(batch), 0)
    return max(factor * own + more for factor, more in together.lines) / TICKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_ffn")
    parser.add_argument("--only", choices=("frontier", "afd-plugin"))
    parser.add_argument("--quick", action="store_true", help="100 requests instead of 1,000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, a JSON line each")
    options = parser.parse_args()
    rows: list[Row] = []
    if options.only != "frontier":
        rows += [row for link in LINKS for row in plugin_rows(GPUS["H200"], link, UNQUANTIZED)]
        rows += plugin_rows(DIE, DIE.link, Quantization("fp8"))
    if options.only != "afd-plugin":
        rows += frontier_rows(options.quick)
    report(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
