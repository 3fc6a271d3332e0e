"""What a measured profile is good for: a digest of all that costs depend on.

Invariant: two runs with one key cost the same. The code that is timed, and that times it, is a part of the key, so a
profile never outlives the way in which it was measured; a change there that costs nothing only measures again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import libra
from libra.backends.transport.messages import Precision
from libra.backends.versions import COMPUTING, versions
from libra.config.run import RunConfig

_LAID_OUT = {"launcher", "slots_per_node", "slots", "core", "hybrid", "rollout", "share"}  # of the cluster
_TRAINED = {"micro_batch_tokens", "processes", "sharding"}
_CODE = ("exec", "cost")  # packages of workers and of their measurement


def profile_key(
    config: RunConfig,
    hardware: str,
    precision: Precision,
    model_config: Mapping[str, Any],
    code: Path = Path(libra.__file__).parent,
) -> str:
    """`hardware` as a launcher names it; `code`: the directory of this library."""
    parts = {
        "hardware": hardware,
        "precision": precision,
        "model": dict(model_config),
        "cluster": config.cluster.model_dump(include=_LAID_OUT),
        "start": config.start.model_dump(),  # who is measured beside whom
        "engines": {name: shape.model_dump() for name, shape in config.engines.items()},
        "training": config.training.model_dump(include=_TRAINED),
        "trajectories": config.training.trajectories,
        "versions": versions(COMPUTING),
        "code": _digest_of(code),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _digest_of(code: Path) -> str:
    sources = sorted(path for package in _CODE for path in (code / package).rglob("*.py"))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.relative_to(code)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
