"""Overrides of verl's fully asynchronous trainer.

Keys: verl 0.9.1, `verl/experimental/fully_async_policy/config` and its files of `verl/trainer/config`. verl bounds
staleness by a share: `(1 + staleness_threshold)` batches may be generated between two updates
(`fully_async_rollouter.py:set_max_required_samples`). With one batch per update, the share is a whole number of
versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from libra.export.shell import array, megatron_degrees, megatron_recompute, overrides
from libra.export.split import DeviceSplit

Setting = tuple[str, object]


def emit(split: DeviceSplit) -> str:
    """A bash array of overrides, and the command that uses them."""
    config = "fully_async_ppo_megatron_trainer" if split.family == "Megatron" else "fully_async_ppo_trainer"
    arguments = [f"--config-name={config}", *overrides(_settings(split))]
    start = (
        '# python3 -m verl.experimental.fully_async_policy.fully_async_main "${PLAN_ARGS[@]}"'
        " with your model's, data's and reward's overrides\n"
    )
    return array("PLAN_ARGS", arguments) + start


def _settings(split: DeviceSplit) -> Iterator[Setting]:
    recipe = split.recipe
    for role, (nodes, gpus) in (("trainer", split.train_shape), ("rollout", split.rollout_shape)):
        yield f"{role}.nnodes", nodes
        yield f"{role}.n_gpus_per_node", gpus
    yield "rollout.n", recipe.samples_per_prompt
    yield "data.train_batch_size", 0
    yield "data.gen_batch_size", 1
    yield "actor_rollout_ref.hybrid_engine", False
    yield "actor_rollout_ref.model.path", split.model
    yield "actor_rollout_ref.model.enable_gradient_checkpointing", split.layout.recompute != "none"
    yield from ((f"actor_rollout_ref.rollout.{key}", value) for key, value in _rollout(split))
    yield from ((f"actor_rollout_ref.actor.{key}", value) for key, value in _actor(split))
    yield "async_training.staleness_threshold", float(recipe.staleness)
    yield "async_training.trigger_parameter_sync_step", 1
    yield "async_training.require_batches", 1
    yield "async_training.partial_rollout", split.asynchronous


def _rollout(split: DeviceSplit) -> Iterator[Setting]:
    recipe = split.recipe
    yield "tensor_model_parallel_size", split.tp
    yield "n", recipe.samples_per_prompt
    yield "gpu_memory_utilization", recipe.gpu_memory_utilization
    yield "max_num_seqs", split.engines[0].max_num_seqs
    yield "max_num_batched_tokens", recipe.max_batched_tokens
    yield "max_model_len", recipe.max_length


def _actor(split: DeviceSplit) -> Iterator[Setting]:
    recipe, layout = split.recipe, split.layout
    yield "ppo_mini_batch_size", recipe.prompts
    yield "use_dynamic_bsz", True
    # verl refuses longer trajectories, so the limit is at least the longest trajectory.
    longest = max(layout.micro_tokens, recipe.max_length)
    yield "ppo_max_token_len_per_gpu", math.ceil(longest / layout.cp)
    if split.family == "Megatron":
        yield from ((f"megatron.{key}", value) for key, value in megatron_degrees(layout))
        for key, value in megatron_recompute(layout):
            listed = f"[{value}]" if key == "recompute_modules" else value
            yield f"megatron.override_transformer_config.{key}", listed
        yield "megatron.entropy_from_logits_with_chunking", layout.chunked_logits
        return
    yield "strategy", "fsdp2"
    yield "fsdp_config.fsdp_size", -1
    yield "fsdp_config.reshard_after_forward", layout.sharding == "zero3"
    yield "ulysses_sequence_parallel_size", layout.cp
    yield "entropy_from_logits_with_chunking", layout.chunked_logits
