"""Command lines for the engines of a plan, or of a file from `libra search --engines-out`.

Flags: see `libra.export.serve_line`. Keys of the file: `libra.sim.engines_keys`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from libra.config.yaml_file import ConfigError, read_section
from libra.export.serve_line import FIRST_PORT, TRANSFER, Flag, ServeLine, script, serve_lines
from libra.export.split import DeviceSplit
from libra.sim.engines_keys import EngineSection, EnginesFile

_NODE = 8  # GPUs of a node that the file does not describe


def emit(split: DeviceSplit) -> str:
    """A shell line for each engine."""
    return script(serve_lines(split, {}, {}))


def file_lines(path: Path | str) -> tuple[str, list[ServeLine], str]:
    """A comment, a line for each engine of the file, and the file's router. Engines are packed onto nodes in the order
    of the file. Raises `ConfigError` if the file has a key without a flag of vLLM.
    """
    path = Path(path)
    file = read_section(path, EnginesFile, "examples/engines.yaml")
    bucketed = any(section.bucket for section in file.engines)
    lines: list[ServeLine] = []
    for index, section in enumerate(file.engines):
        try:
            lines += _lines(section, len({line.host for line in lines}), bucketed)
        except ValueError as error:
            raise ConfigError(f"{path}: engines[{index}].{error}") from None
    gpus = sum(len(line.gpus) for line in lines)
    return (
        f"# {path.name}: engines on {gpus} GPUs, one per line. Written by libra export --for vllm.\n",
        lines,
        file.route,
    )


def _lines(section: EngineSection, first_node: int, bucketed: bool) -> Iterator[ServeLine]:
    """Lines of the section's engines, on nodes of no other section.

    Raises a ValueError whose message begins with the key.
    """
    if section.afd is not None:
        raise ValueError("afd: vllm serve cannot separate attention from experts; search without attention-ffn")
    if section.kv_tiers:
        raise ValueError(
            "kv_tiers: vllm serve needs your own KV connector for tiers; remove kv_tiers, and add the "
            "connector's flags yourself"
        )
    each = section.tensor_parallel_size * section.pipeline_parallel_size * section.data_parallel_size
    node = section.node.gpus if section.node is not None else max(_NODE, each)
    if each > node:
        raise ValueError(f"count: an engine takes {each} GPUs and a node has {node}; give engines that fit a node")
    flags, fit = _flags(section), node // each
    for number in range(section.count):
        slot = number % fit
        host = f"node-{first_node + number // fit}"
        gpus = range(slot * each, (slot + 1) * each)
        note = section.name + (f", {section.role}" if section.role not in ("colocated", section.name) else "")
        note += f", bucket {section.bucket}" if bucketed else ""
        yield ServeLine(
            *(host, gpus, FIRST_PORT + slot, section.model, flags, note),
            bucket=section.bucket,
            up_to=section.max_model_len,
        )


def _flags(section: EngineSection) -> dict[str, Flag]:
    """Flags and values. A value equal to vLLM's default is written only if the search chose it."""
    flags: dict[str, Flag] = {"tensor-parallel-size": section.tensor_parallel_size}
    if section.max_num_seqs is not None:
        flags["max-num-seqs"] = section.max_num_seqs
    flags["max-num-batched-tokens"] = section.max_num_batched_tokens
    flags["gpu-memory-utilization"] = section.gpu_memory_utilization
    if section.max_model_len is not None:
        flags["max-model-len"] = section.max_model_len
    if section.pipeline_parallel_size > 1:
        flags["pipeline-parallel-size"] = section.pipeline_parallel_size
    if section.data_parallel_size > 1:
        flags["data-parallel-size"] = section.data_parallel_size
    flags["enable-expert-parallel"] = section.enable_expert_parallel
    if section.enable_expert_parallel:
        flags["all2all-backend"] = section.all2all_backend
    flags["enable-eplb"] = section.enable_eplb
    if section.quantization is not None:
        flags["quantization"] = section.quantization
    if section.kv_cache_dtype != "auto":
        flags["kv-cache-dtype"] = section.kv_cache_dtype
    if section.policy != "fcfs":
        flags["scheduling-policy"] = section.policy
    flags["no-enable-prefix-caching"] = not section.enable_prefix_caching
    flags["no-enable-chunked-prefill"] = not section.enable_chunked_prefill
    flags["async-scheduling" if section.async_scheduling else "no-async-scheduling"] = True
    flags["enforce-eager"] = section.enforce_eager
    if section.speculative is not None:
        its = section.speculative
        drafts: dict[str, object] = {"method": its.method, "num_speculative_tokens": its.num_speculative_tokens}
        flags["speculative-config"] = drafts if its.model is None else drafts | {"model": its.model}
    if section.role != "colocated":
        flags["kv-transfer-config"] = TRANSFER
    return flags
