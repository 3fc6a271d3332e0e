"""Overrides of an AReaL experiment.

Keys: AReaL 1.0.4 at 4aef98d8 (2026-05-21), `areal/api/cli_args.py`; the allocations follow the grammar in
`areal/api/alloc_mode.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from libra.export.shell import array, overrides
from libra.export.split import DeviceSplit
from libra.hardware.parallel import ParallelLayout

Setting = tuple[str, object]


def emit(split: DeviceSplit) -> str:
    """A bash array of overrides."""
    start = '# python3 YOUR_SCRIPT.py --config YOUR_CONFIG.yaml "${PLAN_ARGS[@]}"\n'
    return array("PLAN_ARGS", overrides(_settings(split))) + start


def _settings(split: DeviceSplit) -> Iterator[Setting]:
    recipe, layout = split.recipe, split.layout
    yield "cluster.n_nodes", split.nodes
    yield "cluster.n_gpus_per_node", split.gpus_per_node
    yield "rollout.backend", f"sglang:d{split.engine_count}t{split.tp}"
    yield "actor.backend", f"{split.family.lower()}:{_degrees(layout)}"
    yield "rollout.max_head_offpolicyness", recipe.staleness
    yield "train_dataset.batch_size", recipe.prompts
    yield "gconfig.n_samples", recipe.samples_per_prompt
    yield "actor.path", split.model
    yield "actor.ppo_n_minibatches", 1
    yield "actor.mb_spec.max_tokens_per_mb", layout.micro_tokens
    yield "actor.gradient_checkpointing", layout.recompute != "none"
    yield "sglang.context_length", recipe.max_length
    yield "sglang.max_running_requests", split.engines[0].max_num_seqs
    yield "sglang.mem_fraction_static", recipe.gpu_memory_utilization


def _degrees(layout: ParallelLayout) -> str:
    dense = f"d{layout.dp}p{layout.pp}t{layout.tp}c{layout.cp}"
    if layout.ep == 1:
        return dense
    # The same devices, with experts divided among data- and context-parallel ranks, and also among tensor-parallel
    # ranks if each expert stays whole.
    tp = 1 if layout.whole_experts else layout.tp
    data = layout.dp * layout.cp * layout.tp // (layout.ep * tp)
    return f"(attn:{dense}|ffn:d{data}p{layout.pp}t{tp}e{layout.ep})"
