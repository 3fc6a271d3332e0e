"""The configuration of prime-rl's `rl` command.

Keys: prime-rl at 559b4477 (2026-08-21), `packages/prime-rl-configs/src/prime_rl/configs`: `rl.py` (deployment),
`orchestrator.py`, `trainer.py`, `inference.py`. Several nodes need a `[slurm]` table, which the user adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from libra.export.shell import written
from libra.export.split import DeviceSplit

Table = Mapping[str, object]


def emit(split: DeviceSplit) -> str:
    """The text of a TOML file."""
    tables = "\n".join(f"[{name}]\n{_lines(table)}" for name, table in _tables(split))
    slurm = "# Several nodes are launched by Slurm: add a [slurm] table.\n" if _several(split) else ""
    return f"{slurm}seq_len = {split.recipe.max_length}\n\n{tables}"


def _lines(table: Table) -> str:
    return "".join(
        f'{key} = "{value}"\n' if isinstance(value, str) else f"{key} = {written(value)}\n"
        for key, value in table.items()
    )


def _several(split: DeviceSplit) -> bool:
    return split.nodes > 1


def _tables(split: DeviceSplit) -> Iterator[tuple[str, Table]]:
    recipe, layout = split.recipe, split.layout
    yield "model", {"name": split.model}
    yield "deployment", _deployment(split)
    yield (
        "orchestrator",
        {
            "batch_size": recipe.batch,
            "group_size": recipe.samples_per_prompt,
            "max_off_policy_steps": recipe.staleness,
        },
    )
    yield "orchestrator.concurrency", {"max_inflight": recipe.concurrency or recipe.batch * (1 + recipe.staleness)}
    trainer: dict[str, object] = {"cp": layout.cp, "ep": layout.ep}
    trainer["reshard_after_forward"] = layout.sharding == "zero3"
    trainer["optim_cpu_offload"] = recipe.offload_optimiser  # prime-rl's default is to offload
    trainer["fused_lm_head_token_chunk_size"] = 8192 if layout.chunked_logits else "disabled"
    # Both default to on; the word that prime-rl reads as null turns them off.
    trainer |= {"ac_offloading": "None"} | ({"ac": "None"} if layout.recompute == "none" else {})
    yield "trainer.model", trainer
    if layout.recompute != "none":
        yield "trainer.model.ac", {"mode": layout.recompute}
    yield (
        "inference.vllm",
        {
            "tensor_parallel_size": split.tp,
            "max_num_seqs": split.engines[0].max_num_seqs,
            "max_num_batched_tokens": recipe.max_batched_tokens,
            "max_model_len": recipe.max_length,
            "gpu_memory_utilization": recipe.gpu_memory_utilization,
        },
    )


def _deployment(split: DeviceSplit) -> Table:
    gpus = split.gpus_per_node
    if not _several(split):
        return {
            "type": "single_node",
            "gpus_per_node": gpus,
            "num_train_gpus": split.train_gpus,
            "num_infer_gpus": split.rollout_gpus,
        }
    return {
        "type": "multi_node",
        "gpus_per_node": gpus,
        "num_train_nodes": split.train_gpus // gpus,
        "num_infer_nodes": 1,
        "num_infer_replicas": split.rollout_gpus // gpus,
    }
