"""Code that depends on vLLM's version and on the device: arguments of an engine, and batches in flight.

Invariant: an engine's arguments depend on the order alone. An engine that schedules ahead is drained before its weights
change, so that a token has the version that its forward pass read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from libra.backends.transport.engine_messages import StartEngine
from libra.cost.engine_memory import BLOCK_TOKENS

Made = TypeVar("Made")
_FREE = 0.9  # of the share that an engine gets


def engine_arguments(start: StartEngine) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`, except classes and configurations."""
    found: dict[str, Any] = {
        "model": start.model_directory,
        "skip_tokenizer_init": True,
        "max_model_len": start.max_model_len,
        "max_num_seqs": start.max_num_seqs,
        "kv_cache_memory_bytes": start.kv_cache_bytes,
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",  # under the sampling distribution: logits divided by the temperature
        "dtype": start.dtype,
        "enforce_eager": not start.graphs,
        "disable_log_stats": True,
        "async_scheduling": start.asynchronous,
        "seed": start.seed,
    }
    if start.max_num_batched_tokens is not None:
        found["max_num_batched_tokens"] = start.max_num_batched_tokens
    if start.sleeps:
        found["enable_sleep_mode"] = True
    if start.gpus > 1:
        found["tensor_parallel_size"] = start.gpus
    if start.device == "cuda":
        # vLLM requires this share of the GPU to be free, even if the bytes of KV are given. The whole GPU is never
        # free, since CUDA contexts, including vLLM's own, take some memory.
        found["gpu_memory_utilization"] = _FREE * start.memory
        if start.layout and start.loan is None:
            found["load_format"] = "dummy"  # weights come from the trainer before the first turn
    return found


def drained(core: Any, step: Callable[[], Made]) -> Iterator[Made]:
    """Finish the batches in flight in vLLM's `EngineCore` without scheduling more, and yield the results of these
    steps. Requests keep their places in the queue."""
    if not core.batch_queue:  # None if the engine does not schedule ahead
        return
    from vllm.v1.core.sched.interface import PauseState

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while core.batch_queue:
            yield step()
    finally:
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
