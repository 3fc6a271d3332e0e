"""KV tokens of engines beside what their logs say.

Invariant: a case is a file of engines, read as `libra simulate` reads it, once as it is and once with keys that its
source gives besides. A source that gives none is read as it is both times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.public.case import CaseGroup, PublicCase, engines_with
from libra.config.yaml_file import ConfigError

# Keys by the sources: logs of 0.15 and 0.29 say their version, other versions are the newest on the day of the source.
_SAID: Mapping[str, Mapping[str, object]] = {
    "m01": {"vllm_version": "0.15.1"},
    "m03": {"vllm_version": "0.29.0", "gpu_memory_utilization": 0.92},
    "m04": {"vllm_version": "0.29.0", "gpu_memory_utilization": 0.92},
    "m05": {"vllm_version": "0.29.0"},
    "m08": {"vllm_version": "0.9.2"},  # vllm#21348, 22 July 2025
    "m09": {"vllm_version": "0.10.0"},  # Ray Serve LLM's course, a log of 19 August 2025
    "m12": {"vllm_version": "0.7.2"},  # vllm#13061, 11 February 2025
    "m14": {"vllm_version": "0.13.0"},  # a log of 2 January 2026
}
_APART = {  # what is not as an engine file can describe it
    "m07": "vLLM of January 2025, which took 256 sequences on H100",
    "m08": "beside a KV connector",
}
LARGEST, MEAN = 0.10, 0.04  # error of a case, and of all in the mean


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
    return [
        CaseGroup(name, "tokens", [_case(path, published[path], said) for path in sorted(published)], MEAN)
        for name, said in named
    ]


def _case(path: Path, published: int, said: bool) -> PublicCase:
    number = path.stem.partition("_")[0]
    keys = _SAID.get(number, {}) if said else {}
    try:
        config = engines_with(path, **keys).engines[0].config
    except ConfigError as error:
        return PublicCase(path.stem, published, None, LARGEST, str(error).partition(": ")[2])
    note = "; ".join((*filter(None, [_APART.get(number)]), *(f"{key} {value}" for key, value in keys.items())))
    return PublicCase(path.stem, published, config.kv_blocks * config.block_size, LARGEST, note)
