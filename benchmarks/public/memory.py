"""KV tokens of engines beside what their logs say.

Invariant: a case is a file of engines, read as `libra simulate` reads it, once as it is and once with the version of
vLLM that its source gives. A source that gives none is read as it is both times.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.public.case import CaseGroup, PublicCase, engines_with
from libra.config.yaml_file import ConfigError

# Versions of the logs: those of 0.29 say so, the others are the newest on the day of the source.
_VERSIONS = {
    "m03": "0.29.0",
    "m04": "0.29.0",
    "m05": "0.29.0",
    "m08": "0.9.2",  # vllm#21348, 22 July 2025
    "m09": "0.10.0",  # Ray Serve LLM's course, a log of 19 August 2025
    "m12": "0.7.2",  # vllm#13061, 11 February 2025
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
    version = _VERSIONS.get(number) if said else None
    try:
        config = engines_with(path, **({} if version is None else {"vllm_version": version})).engines[0].config
    except ConfigError as error:
        return PublicCase(path.stem, published, None, LARGEST, str(error).partition(": ")[2])
    note = "; ".join(filter(None, (_APART.get(number), version and f"vLLM {version}")))
    return PublicCase(path.stem, published, config.kv_blocks * config.block_size, LARGEST, note)
