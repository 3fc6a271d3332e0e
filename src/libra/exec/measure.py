"""Time this machine's engines and trainers: the profile that the planner prices with.

Invariant: every number is measured on the workers that the run will use, at their device's pace and with all other
devices busy, because that is how the run will find them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from libra.config import RunConfig
from libra.cost.device import DeviceProfile, EngineCost, SwitchCost, TrainCost
from libra.cost.fit import fit_linear
from libra.exec.fleet import Instance
from libra.exec.messages import Generate, MeasureEngine, MeasureTraining, TrainingMeasured
from libra.exec.trainers import Trainers

_REPEATS = 3
_SHORT_TURNS = 96  # turns that the per-turn cost is averaged over
_SHORT_CONTEXT, _SHORT_TOKENS = 24, 6


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds that the run's own workers took to start, from the order to readiness, all starting at once."""

    engine: float
    trainer: float


async def measure(
    instances: Sequence[Instance],
    trainers: Trainers,
    config: RunConfig,
    starts: StartTimes,
    weight_load: float,
    hardware: str,
    model: str,
) -> DeviceProfile:
    """Measure all workers at once; a few seconds on the tiny models of the examples."""
    training = asyncio.gather(
        *(replica.ask(_training_points(config), TrainingMeasured) for replica in trainers.replicas())
    )
    engines = await asyncio.gather(*(entry.handle.measure(_engine_points(config, entry.shape)) for entry in instances))
    rows = [row for measured in engines for row in measured.iterations]
    fit = fit_linear([(1.0, b, s, p) for b, s, p, _ in rows], [seconds for *_, seconds in rows])
    step, per_sequence, per_context, per_prefill = fit.coefficients
    engine = EngineCost(step, per_sequence, per_context, per_prefill, per_turn=0.0)
    per_turn = fmean(await asyncio.gather(*(_turn_overhead(entry, config, engine) for entry in instances)))
    replicas = await training
    batches = [batch for measured in replicas for batch in measured.batches]
    per_step, per_token = fit_linear([(1.0, tokens) for tokens, _ in batches], [s for _, s in batches]).coefficients
    return DeviceProfile(
        hardware=hardware,
        model=model,
        engine=EngineCost(step, per_sequence, per_context, per_prefill, max(per_turn, 0.0)),
        train=TrainCost(
            step=per_step + fmean(measured.step_seconds for measured in replicas),
            per_token=per_token,
            exchange=fmean(measured.exchange_seconds for measured in replicas),
        ),
        switch=SwitchCost(starts.engine, starts.trainer, weight_load),
        heldout_error=fit.heldout_error,
    )


def _engine_points(config: RunConfig, shape: str) -> MeasureEngine:
    size = config.engines[shape]
    contexts = (16, max(24, (size.max_model_len - 16) * 3 // 4))
    batches = sorted({1, max(1, size.max_num_seqs // 2), size.max_num_seqs})
    points = [(b, c) for b in batches for c in contexts if b * (c + 16) <= size.kv_tokens]
    return MeasureEngine(points, _REPEATS)


def _training_points(config: RunConfig) -> MeasureTraining:
    length = 32
    most = max(2, config.training.trajectories // 2)
    return MeasureTraining([(max(1, most // 4), length), (max(2, most // 2), length), (most, length)], _REPEATS)


async def _turn_overhead(entry: Instance, config: RunConfig, cost: EngineCost) -> float:
    """Seconds that a short turn costs beyond its iterations, on the ordinary path from message to message."""
    handle = entry.handle
    seats = asyncio.Semaphore(config.engines[entry.shape].max_num_seqs)

    async def turn(number: int) -> int:
        async with seats:
            prompt = [4 + (number + 5 * position) % 16 for position in range(_SHORT_CONTEXT)]
            name = f"short-{number}"
            done = await handle.generate(Generate(name, prompt, _SHORT_TOKENS, 1.0, -1, number, salt=name))
            return len(done.tokens)

    await turn(-1)
    busy, iterations = handle.busy_seconds, handle.iterations
    tokens = sum(await asyncio.gather(*(turn(number) for number in range(_SHORT_TURNS))))
    modelled = (
        cost.step * (handle.iterations - iterations)
        + cost.per_sequence * tokens
        + cost.per_context_token * tokens * (_SHORT_CONTEXT + _SHORT_TOKENS / 2)
        + cost.per_prefill_token * _SHORT_TURNS * _SHORT_CONTEXT
    )
    return (handle.busy_seconds - busy - modelled) / _SHORT_TURNS


def hardware_name() -> str:
    """The processor, as the operating system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def profile_key(config: RunConfig, hardware: str, model_config: Mapping[str, Any]) -> str:
    """What a cached profile depends on, as a digest."""
    parts = {
        "hardware": hardware,
        "model": dict(model_config),
        "share": config.cluster.share,
        "slots": config.cluster.slots,
        "engines": {name: shape.model_dump() for name, shape in config.engines.items()},
        "micro_batch_tokens": config.training.micro_batch_tokens,
        "trajectories": config.training.trajectories,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def cache_directory() -> Path:
    """Where measurements and warm starts are kept between runs: `$XDG_CACHE_HOME/libra`, or `~/.cache/libra`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libra"
