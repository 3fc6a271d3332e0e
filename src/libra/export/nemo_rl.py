"""A configuration that NeMo-RL merges over one of its own.

Keys: NeMo-RL at 7ea279ab (2026-08-22), `examples/configs/grpo_math_1B.yaml`; `nemo_rl/algorithms/grpo.py:setup` divides
a single node by GPUs, and several nodes as whole nodes.
"""

from __future__ import annotations

from typing import Any

import yaml

from libra.export.shell import megatron_degrees
from libra.export.split import DeviceSplit


def emit(split: DeviceSplit) -> str:
    """The text of a YAML file."""
    hint = "# Name one of NeMo-RL's configurations under `defaults`, such as grpo_math_1B.yaml.\n"
    return hint + yaml.safe_dump(_document(split), sort_keys=False)


def _document(split: DeviceSplit) -> dict[str, Any]:
    recipe = split.recipe
    return {
        "cluster": _cluster(split),
        "grpo": {
            "num_prompts_per_step": recipe.prompts,
            "num_generations_per_prompt": recipe.samples_per_prompt,
            "async_grpo": {
                "enabled": split.asynchronous,
                "max_trajectory_age_steps": max(1, recipe.staleness),
                "in_flight_weight_updates": split.asynchronous,
                "recompute_kv_cache_after_weight_updates": recipe.kv_on_update == "refresh",
            },
        },
        "loss_fn": {"use_importance_sampling_correction": split.asynchronous},
        "policy": {
            "model_name": split.model,
            "train_global_batch_size": recipe.batch,
            "max_total_sequence_length": recipe.max_length,
            **_training(split),
            "generation": _generation(split),
        },
    }


def _cluster(split: DeviceSplit) -> dict[str, int]:
    """Nodes and GPUs of training and rollout together."""
    if split.nodes == 1:
        return {"gpus_per_node": split.train_gpus + split.rollout_gpus, "num_nodes": 1}
    return {"gpus_per_node": split.gpus_per_node, "num_nodes": split.train_shape[0] + split.rollout_shape[0]}


def _training(split: DeviceSplit) -> dict[str, Any]:
    layout = split.layout
    packing = {"enabled": True, "train_mb_tokens": max(layout.micro_tokens, split.recipe.max_length)}
    again = layout.recompute != "none"
    if split.family == "Megatron":
        megatron: dict[str, Any] = {
            "enabled": True,
            **dict(megatron_degrees(layout)),
            "sequence_parallel": layout.tp > 1,
        }
        megatron["activation_checkpointing"] = again
        if again:
            megatron["recompute_granularity"] = layout.recompute
        if layout.recompute == "selective":
            megatron["recompute_modules"] = ["layernorm"]
        return {"megatron_cfg": megatron, "dtensor_cfg": {"enabled": False}, "sequence_packing": packing}
    dtensor = {
        "enabled": True,
        "tensor_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.tp > 1,
        "activation_checkpointing": again,
    }
    return {"dtensor_cfg": dtensor, "megatron_cfg": {"enabled": False}, "sequence_packing": packing}


def _generation(split: DeviceSplit) -> dict[str, Any]:
    recipe, (nodes, gpus) = split.recipe, split.rollout_shape
    return {
        "backend": "vllm",
        "vllm_cfg": {
            "async_engine": split.asynchronous,
            "tensor_parallel_size": split.tp,
            "gpu_memory_utilization": recipe.gpu_memory_utilization,
            "max_model_len": recipe.max_length,
        },
        "vllm_kwargs": {
            "max_num_seqs": split.engines[0].max_num_seqs,
            "max_num_batched_tokens": recipe.max_batched_tokens,
        },
        "colocated": {"enabled": False, "resources": {"gpus_per_node": gpus, "num_nodes": nodes}},
    }
