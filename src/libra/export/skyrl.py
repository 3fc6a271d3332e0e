"""Overrides of SkyRL's fully asynchronous trainer.

Keys: SkyRL 0.4.0, `skyrl/train/config/config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from libra.export.shell import array, megatron_degrees, megatron_recompute, overrides
from libra.export.split import DeviceSplit

Setting = tuple[str, object]


def emit(split: DeviceSplit) -> str:
    """A bash array of overrides."""
    start = '# give "${PLAN_ARGS[@]}" to your entry point, as examples/train/fully_async does\n'
    return array("PLAN_ARGS", overrides(_settings(split))) + start


def _settings(split: DeviceSplit) -> Iterator[Setting]:
    recipe, layout = split.recipe, split.layout
    nodes, gpus = split.train_shape
    yield "trainer.placement.colocate_all", False
    for role in ("policy", *(("ref",) if recipe.reference != "none" else ())):
        yield f"trainer.placement.{role}_num_nodes", nodes
        yield f"trainer.placement.{role}_num_gpus_per_node", gpus
    yield "trainer.policy.model.path", split.model
    yield "trainer.strategy", split.family.lower()
    if split.family == "Megatron":
        yield from ((f"trainer.policy.megatron_config.{key}", value) for key, value in megatron_degrees(layout))
        for key, value in megatron_recompute(layout):
            listed = f"[{value}]" if key == "recompute_modules" else value
            yield f"trainer.policy.megatron_config.transformer_config_kwargs.{key}", listed
    else:
        yield "trainer.policy.sequence_parallel_size", layout.cp
        yield "trainer.policy.fsdp_config.reshard_after_forward", layout.sharding == "zero3"
        yield "trainer.gradient_checkpointing", layout.recompute != "none"
    yield "trainer.max_tokens_per_microbatch", layout.micro_tokens
    yield "trainer.train_batch_size", recipe.prompts
    yield "trainer.policy_mini_batch_size", recipe.prompts
    yield "generator.n_samples_per_prompt", recipe.samples_per_prompt
    yield from ((f"generator.inference_engine.{key}", value) for key, value in _engines(split))
    yield "trainer.fully_async.enabled", split.asynchronous
    yield "trainer.fully_async.max_staleness_steps", recipe.staleness
    # Groups in generation at once: SkyRL needs at least one batch, and at most what the bound on staleness admits.
    most = recipe.prompts * (1 + recipe.staleness)
    groups = most if recipe.concurrency is None else recipe.concurrency // recipe.samples_per_prompt
    yield "trainer.fully_async.num_parallel_generation_workers", min(most, max(recipe.prompts, groups))


def _engines(split: DeviceSplit) -> Iterator[Setting]:
    recipe = split.recipe
    yield "num_engines", split.engine_count
    yield "tensor_parallel_size", split.tp
    yield "max_num_seqs", split.engines[0].max_num_seqs
    yield "max_num_batched_tokens", recipe.max_batched_tokens
    yield "gpu_memory_utilization", recipe.gpu_memory_utilization
