"""Arguments of slime, and the file that describes its engines.

Keys: slime at 624b824a (2026-08-21), `slime/utils/arguments.py` and `slime/backends/sglang_utils/sglang_config.py`;
miles at 31f1ca96 has the same keys. In vime, the top-level key of this file and the flag that passes the file have
`vllm` in place of `sglang` (`vime/backends/vllm_utils`, at 3c06ae51). Degrees and recomputation are arguments of
Megatron-LM. Overrides are SGLang's `ServerArgs` or vLLM's `AsyncEngineArgs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import yaml

from libra.export.shell import array, file, megatron_degrees, megatron_recompute
from libra.export.split import DeviceSplit, Engines


@dataclass(frozen=True, slots=True)
class _Server:
    """Names of arguments and overrides for one inference engine."""

    name: Literal["sglang", "vllm"]
    memory: str  # argument for the share of memory that an engine takes
    sequences: str  # override for the number of sequences that decode together
    context: str  # override for the longest context


_SGLANG = _Server("sglang", "--sglang-mem-fraction-static", "max_running_requests", "context_length")
_VLLM = _Server("vllm", "--vllm-gpu-memory-utilization", "max_num_seqs", "max_model_len")
_WORKER = {"generate": "regular", "prefill": "prefill", "decode": "decode"}


def emit(split: DeviceSplit) -> str:
    """A script of bash that writes the file of engines and sets PLAN_ARGS."""
    server = _VLLM if split.framework.name == "vime" else _SGLANG
    model = {"name": "actor", "update_weights": True, "server_groups": [_group(it, server) for it in split.engines]}
    body = yaml.safe_dump({server.name: [model]}, sort_keys=False, default_flow_style=None, width=120)
    trainer = "train_async.py" if split.asynchronous else "train.py"
    start = f"# python3 {trainer} \"${{PLAN_ARGS[@]}}\" with your model's, data's and optimiser's arguments\n"
    return file(f"{server.name}.yaml", body) + array("PLAN_ARGS", _arguments(split, server)) + start


def _group(engines: Engines, server: _Server) -> dict[str, object]:
    return {
        "worker_type": _WORKER[engines.role],
        "num_gpus": engines.gpus,
        "num_gpus_per_engine": engines.tp,
        "overrides": {server.sequences: engines.max_num_seqs, server.context: engines.up_to},
    }


def _arguments(split: DeviceSplit, server: _Server) -> Iterator[str]:
    recipe, layout = split.recipe, split.layout
    nodes, gpus = split.train_shape
    yield f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {gpus}"
    yield f"--rollout-num-gpus {split.rollout_gpus} --num-gpus-per-node {split.rollout_class.gpus}"
    yield f"--{server.name}-config {server.name}.yaml {server.memory} {recipe.gpu_memory_utilization}"
    yield f"--rollout-batch-size {recipe.prompts} --n-samples-per-prompt {recipe.samples_per_prompt}"
    yield f"--global-batch-size {recipe.batch} --rollout-max-context-len {recipe.max_length}"
    yield " ".join(_flag(*it) for it in megatron_degrees(layout))
    if layout.tp > 1:
        yield "--sequence-parallel"
    yield "--use-distributed-optimizer"
    if recipe.offload_optimiser:
        yield "--optimizer-cpu-offload --use-precision-aware-optimizer"
    yield f"--use-dynamic-batch-size --max-tokens-per-gpu {split.micro_tokens_per_gpu}"
    recompute = megatron_recompute(layout)
    if recompute:
        yield " ".join(_flag(*it) for it in recompute)
    if layout.chunked_logits:
        yield "--log-probs-chunk-size 1024"


def _flag(name: str, value: object) -> str:
    return f"--{name.replace('_', '-')} {value}"
