"""Measured profiles, kept from one run to the next.

Invariant: a kept profile is used only where nothing has changed that its numbers depend on: machine, model, layout of
the run, libraries, and the code that was timed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import libra
from libra.backends.machine import COMPUTING, versions
from libra.backends.transport.messages import Precision
from libra.config.cache import cache_directory
from libra.config.run import RunConfig
from libra.cost.device import DeviceProfile
from libra.cost.sources.profile_file import load_profile, save_profile
from libra.records.disk import writing

_LAID_OUT = {"launcher", "slots_per_node", "slots", "core", "hybrid", "rollout", "share"}  # of the cluster
_TRAINED = {"micro_batch_tokens", "processes", "sharding"}
_CODE = ("backends/**/*.py", "cost/**/*.py", "loop/measure.py")  # of workers and of their measurement


def profile_key(
    config: RunConfig,
    hardware: str,
    precision: Precision,
    model_config: Mapping[str, Any],
    code: Path = Path(libra.__file__).parent,
) -> str:
    """What a measured profile depends on. `hardware` as a launcher names it; `code`: the directory of this library."""
    parts = {
        "hardware": hardware,
        "precision": precision,
        "model": dict(model_config),
        "cluster": config.cluster.model_dump(include=_LAID_OUT),
        "start": config.start.model_dump(),  # which workers are measured side by side
        "engines": {name: shape.model_dump() for name, shape in config.engines.items()},
        "training": config.training.model_dump(include=_TRAINED),
        "trajectories": config.training.trajectories,
        "versions": versions(COMPUTING),
        "code": _digest_of(code),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _digest_of(code: Path) -> str:
    sources = sorted(path for pattern in _CODE for path in code.glob(pattern))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.relative_to(code)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def profile_path(key: str) -> Path:
    return cache_directory() / "profiles" / f"{key}.json"


def kept_profile(key: str) -> DeviceProfile | None:
    """None where none was kept."""
    path = profile_path(key)
    return load_profile(path) if path.is_file() else None


def keep_profile(key: str, profile: DeviceProfile) -> None:
    """Raises `DiskError`."""
    path = profile_path(key)
    with writing(path):
        save_profile(path, profile)
