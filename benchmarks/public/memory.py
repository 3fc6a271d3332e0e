"""KV tokens of engines beside what their logs say.

Invariant: a case is a file of engines, read as `libra simulate` reads it.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.public.case import CaseGroup, PublicCase
from libra.config.yaml_file import ConfigError
from libra.sim.engines_file import load_engines

_APART = {  # what is not as an engine file can describe it
    "m07": "an old vLLM; cause of the error not known",
    "m08": "beside a KV connector; cause of the error not known",
}
LARGEST, MEAN = 0.10, 0.04  # error of a case, and of all in the mean


def memory_group(folder: Path) -> CaseGroup:
    """The cases of `expected.json`, and the files `NAMEb_*` that repeat a case as it ran."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    published = {path: expected[path.stem] for path in sorted(folder.glob("*.yaml")) if path.stem in expected}
    by_number = {name.partition("_")[0]: tokens for name, tokens in expected.items()}
    for path in sorted(folder.glob("*b_*.yaml")):
        tokens = by_number.get(path.stem.partition("_")[0].removesuffix("b"))
        if tokens is not None:
            published[path] = tokens
    cases = [_case(path, tokens) for path, tokens in sorted(published.items())]
    return CaseGroup("KV cache", "tokens", cases, MEAN)


def _case(path: Path, published: int) -> PublicCase:
    try:
        config = load_engines(path).engines[0].config
    except ConfigError as error:
        return PublicCase(path.stem, published, None, LARGEST, str(error).partition(": ")[2])
    note = _APART.get(path.stem.partition("_")[0], "")
    return PublicCase(path.stem, published, config.kv_blocks * config.block_size, LARGEST, note)
