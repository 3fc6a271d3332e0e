"""Engines beside what was published of them: KV tokens as their logs say, the KV memory of a sweep, and milliseconds a
token.

Invariant: a case is a file of engines, read as `libra simulate` reads it, once as it is and once with keys that its
source gives besides (`engines.yaml`), or with another host. Hosts of the sources are not known: the pace is priced with
the host that a file names, and beside it, with `fast`, a host of 0.8 of that time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.public.case import CaseGroup, PublicCase
from libra import Replay, load_engines, load_model, metrics_of, read_trajectories, simulate
from libra.config.yaml_file import ConfigError
from libra.cost.engine_memory import Profiling, held_bytes
from libra.cost.quantization import Quantization
from libra.sim.deployment import Deployment

_KNOWN: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("engines.yaml").read_text(encoding="utf-8"))
LARGEST, MEAN = 0.10, 0.04  # error of a case of memory, and of all in the mean
LARGEST_PACE, MEAN_PACE = 0.20, 0.10
_SWEPT = 79.19 * 0.95  # GiB


def memory_groups(folder: Path) -> list[CaseGroup]:
    """The cases of `expected.json`, and the files `NAMEb_*` that repeat a case as it ran."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    published = {path: expected[path.stem] for path in sorted(folder.glob("*.yaml")) if path.stem in expected}
    by_number = {name.partition("_")[0]: tokens for name, tokens in expected.items()}
    for path in sorted(folder.glob("*b_*.yaml")):
        tokens = by_number.get(path.stem.partition("_")[0].removesuffix("b"))
        if tokens is not None:
            published[path] = tokens
    groups = [
        CaseGroup(name, "tokens", [_held(path, published[path], said) for path in sorted(published)], MEAN)
        for name, said in (("KV cache", False), ("KV cache, with the log's version", True))
    ]
    return [*groups, CaseGroup("KV memory, a sweep on H100", "GiB", [_swept(*row) for row in _KNOWN["sweep"]], MEAN)]


def pace_groups(folder: Path) -> list[CaseGroup]:
    """The runs with the host of their files, and with a faster one."""
    return [
        CaseGroup(name, "ms a token", [_paced(folder, keys, **run) for run in _KNOWN["pace"]], MEAN_PACE)
        for name, keys in (("pace of engines", {}), ("pace of engines, fast host", {"host": "fast"}))
    ]


def _engines_with(path: Path, **keys: object) -> Deployment:
    """The engines of a file, each with these keys besides its own. Raises `ConfigError`."""
    described = yaml.safe_load(path.read_text(encoding="utf-8"))
    for engine in described["engines"]:
        engine |= keys
    with TemporaryDirectory() as made:
        changed = Path(made) / path.name
        changed.write_text(yaml.safe_dump(described), encoding="utf-8")
        return load_engines(changed)


def _held(path: Path, published: int, said: bool) -> PublicCase:
    number = path.stem.partition("_")[0]
    keys = _KNOWN["said"].get(number, {}) if said else {}
    try:
        config = _engines_with(path, **keys).engines[0].config
    except ConfigError as error:
        return PublicCase(path.stem, published, None, LARGEST, str(error).partition(": ")[2])
    apart = [_KNOWN["apart"][number]] if number in _KNOWN["apart"] else []
    note = "; ".join((*apart, *(f"{key} {value}" for key, value in keys.items())))
    return PublicCase(path.stem, published, config.kv_blocks * config.block_size, LARGEST, note)


def _swept(name: str, version: str, tp: int, quantization: str | None, published: float) -> PublicCase:
    stored, profiling = Quantization(quantization), Profiling.of(version)
    held = held_bytes(load_model(name), tp, batched_tokens=8192, quantization=stored, profiling=profiling)
    own = f"{name.rpartition('/')[2]}{'' if quantization is None else f' {quantization}'}"
    return PublicCase(f"{own}, tp {tp}, vLLM {version}", published, _SWEPT - held / 2**30, LARGEST)


def _paced(
    folder: Path,
    keys: Mapping[str, str],
    *,
    name: str,
    engines: str,
    log: str,
    concurrency: int,
    published: float,
    fitted: bool = False,
) -> PublicCase:
    deployment = _engines_with(folder / f"{engines}.yaml", **keys)
    workload = Replay(list(read_trajectories(folder / f"{log}.jsonl")), concurrency=concurrency)
    found = metrics_of(simulate(deployment.engines, workload, deployment.route)).tpot
    assert found is not None
    return PublicCase(name, published, 1e3 * found.mean, LARGEST_PACE, "fitted to" if keys and fitted else "")
