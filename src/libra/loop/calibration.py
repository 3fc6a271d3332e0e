"""Costs of a run's workers, measured once and cached for later runs.

Invariant: a cached profile is used only if machine, model, layout of the run, libraries and the timed code are
unchanged.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import libra
from libra.backends.machine import COMPUTING, versions
from libra.backends.transport.messages import Precision
from libra.config.cache import cache_directory, cache_key
from libra.config.input_file import read_input
from libra.config.run import RunConfig
from libra.cost.device import DeviceProfile
from libra.cost.sources.files import load_profile, save_profile
from libra.exec.recovery import Recovery
from libra.loop.measure import measure, measure_plain, profile_words
from libra.loop.process_controller import RunExecutor
from libra.records.files import writing

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
    """Key over all inputs of a measured profile. `hardware`: description by the launcher; `code`: directory of
    libra."""
    parts = {
        "hardware": hardware,
        "precision": precision,
        "model": dict(model_config),
        "cluster": config.cluster.model_dump(include=_LAID_OUT),
        "start": config.start.model_dump(),  # decides which workers are measured at the same time
        "engines": {name: shape.model_dump() for name, shape in config.engines.items()},
        "servers": 0 if config.lending is None else config.lending.servers,
        "training": config.training.model_dump(include=_TRAINED),
        "trajectories": config.training.trajectories,
        "versions": versions(COMPUTING),
        "code": _digest_of(code),
    }
    return cache_key(parts)


def _digest_of(code: Path) -> str:
    sources = sorted(path for pattern in _CODE for path in code.glob(pattern))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.relative_to(code)}\n".encode())
        digest.update(hashlib.sha256(read_input(path)).digest())
    return digest.hexdigest()


def profile_path(key: str) -> Path:
    return cache_directory() / "profiles" / f"{key}.json"


def known_profile(calibration: Path | None, key: str, say: Callable[[str], None]) -> DeviceProfile | None:
    """Costs of this machine's workers, from the user's file or the cache; None if neither has them."""
    if calibration is not None:
        return load_profile(calibration)
    path = profile_path(key)
    if not path.is_file():
        return None
    say(f"costs measured earlier on this hardware are used ({path})")
    return load_profile(path)


async def measured_profile(
    key: str, config: RunConfig, hardware: str, executor: RunExecutor, recovery: Recovery, say: Callable[[str], None]
) -> DeviceProfile:
    """Measure the workers under the run's conditions, and cache the costs. After the measurement, engines transfer KV
    only if a transfer can pay. Raises `DiskError`.
    """
    engines, trajectories = config.engines, config.training.trajectories
    fleet, began = executor.processes.fleet, time.monotonic()
    profile = await recovery.attempts("measuring", lambda: measure(executor, engines, trajectories, hardware, key))
    handover = fleet.handover
    if handover is not None:
        handover.price_by(profile)
        prepared = any(handover.place(entry.handle) is not None for entry in fleet.instances())
        if prepared and not handover.may_pay(executor.longest_context):
            # Engines that start from here on cannot transfer KV, so a later measurement cannot change this decision.
            measured = profile
            profile = await recovery.attempts(
                "measuring engines that hand no KV over",
                lambda: measure_plain(executor, engines, trajectories, measured),
            )
    own = [worker for worker in executor.pool.healthy() if worker.lent is None]
    if len(own) == config.cluster.slots:  # otherwise the costs are of fewer workers than the key says
        path = profile_path(key)
        with writing(path):
            save_profile(path, profile)
    say(f"measured in {time.monotonic() - began:.1f} s: {profile_words(profile)}")
    return profile
