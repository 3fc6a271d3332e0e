"""KV tokens of engines beside what their logs say, and the KV memory of a sweep.

Invariant: a case is a file of engines, read as `libra simulate` reads it, once as it is and once with keys that its
source gives besides. A source that gives none is read as it is both times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.public.case import CaseGroup, PublicCase, engines_with
from libra.config.yaml_file import ConfigError
from libra.cost.engine_memory import Profiling, held_bytes
from libra.cost.quantization import Quantization
from libra.hardware.model_file import load_model

# Keys by the sources: logs of 0.15 and 0.29 say their version, other versions are the newest on the day of the source.
_SAID: Mapping[str, Mapping[str, object]] = {
    "m01": {"vllm_version": "0.15.1"},
    "m03": {"vllm_version": "0.29.0", "gpu_memory_utilization": 0.92},
    "m04": {"vllm_version": "0.29.0", "gpu_memory_utilization": 0.92},
    "m05": {"vllm_version": "0.29.0"},
    "m07": {"vllm_version": "0.6.6", "max_num_seqs": 256},  # vllm#12569, January 2025
    "m08": {"vllm_version": "0.9.2"},  # vllm#21348, 22 July 2025
    "m09": {"vllm_version": "0.10.0"},  # Ray Serve LLM's course, a log of 19 August 2025
    "m12": {"vllm_version": "0.7.2"},  # vllm#13061, 11 February 2025
    "m14": {"vllm_version": "0.13.0"},  # a log of 2 January 2026
}
_APART = {  # what is not as an engine file can describe it
    "m07": "0.6.6 or 0.7.0, which counted less",
    "m08": "beside a KV connector",
}
LARGEST, MEAN = 0.10, 0.04  # error of a case, and of all in the mean

# GiB of KV memory on each H100 at 0.95 of its 79.19 GiB, with 1,024 sequences and 8,192 tokens an iteration, as logged:
# llm-d-planner, accuracy/accuracy_report.md and its logs. Model, version, tp, quantisation.
_SWEEP: Sequence[tuple[str, str, int, str | None, float]] = (
    ("Qwen/Qwen3-14B", "0.15.0", 1, None, 41.94),
    ("Qwen/Qwen3-14B", "0.17.0", 1, None, 45.34),
    ("Qwen/Qwen3-14B", "0.18.0", 1, None, 45.23),
    ("meta-llama/Llama-3.1-8B", "0.19.0", 1, None, 58.11),
    ("meta-llama/Llama-3.1-8B", "0.19.0", 2, None, 63.76),
    ("meta-llama/Llama-3.1-8B", "0.19.0", 4, None, 67.44),
    ("meta-llama/Llama-3.1-8B", "0.19.0", 1, "fp8", 64.61),
    ("Qwen/Qwen2.5-7B", "0.19.0", 1, None, 58.53),
    ("Qwen/Qwen2.5-7B", "0.19.0", 2, None, 63.84),
    ("Qwen/Qwen2.5-7B", "0.19.0", 4, None, 67.34),
    ("Qwen/Qwen2.5-72B", "0.19.0", 2, None, 3.07),
    ("Qwen/Qwen3-30B-A3B", "0.19.0", 1, None, 15.41),
    ("deepseek-ai/DeepSeek-V2-Lite", "0.19.0", 1, None, 43.77),
    ("mistralai/Mixtral-8x7B-v0.1", "0.19.0", 2, None, 28.45),
    ("meta-llama/Llama-3.3-70B-Instruct", "0.19.0", 2, "fp8", 37.33),
    ("meta-llama/Llama-3.3-70B-Instruct", "0.19.0", 4, "fp8", 54.10),
)
_SWEPT = 79.19 * 0.95


def memory_groups(folder: Path) -> list[CaseGroup]:
    """The cases of `expected.json`, and the files `NAMEb_*` that repeat a case as it ran."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    published = {path: expected[path.stem] for path in sorted(folder.glob("*.yaml")) if path.stem in expected}
    by_number = {name.partition("_")[0]: tokens for name, tokens in expected.items()}
    for path in sorted(folder.glob("*b_*.yaml")):
        tokens = by_number.get(path.stem.partition("_")[0].removesuffix("b"))
        if tokens is not None:
            published[path] = tokens
    named = (("KV cache", False), ("KV cache, with the log's version", True))
    groups = [
        CaseGroup(name, "tokens", [_case(path, published[path], said) for path in sorted(published)], MEAN)
        for name, said in named
    ]
    return [*groups, CaseGroup("KV memory, a sweep on H100", "GiB", [_swept(*row) for row in _SWEEP], MEAN)]


def _swept(name: str, version: str, tp: int, quantization: str | None, published: float) -> PublicCase:
    stored = Quantization(quantization)
    held = held_bytes(
        *(load_model(name), tp), batched_tokens=8192, quantization=stored, profiling=Profiling.of(version)
    )
    own = f"{name.rpartition('/')[2]}{'' if quantization is None else f' {quantization}'}"
    return PublicCase(f"{own}, tp {tp}, vLLM {version}", published, _SWEPT - held / 2**30, LARGEST)


def _case(path: Path, published: int, said: bool) -> PublicCase:
    number = path.stem.partition("_")[0]
    keys = _SAID.get(number, {}) if said else {}
    try:
        config = engines_with(path, **keys).engines[0].config
    except ConfigError as error:
        return PublicCase(path.stem, published, None, LARGEST, str(error).partition(": ")[2])
    note = "; ".join((*filter(None, [_APART.get(number)]), *(f"{key} {value}" for key, value in keys.items())))
    return PublicCase(path.stem, published, config.kv_blocks * config.block_size, LARGEST, note)
