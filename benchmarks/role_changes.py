"""Time of a worker from one role to the other and back, next to the restart that this replaces.

Invariant: a change is timed from the order until the worker is of use in its new role, while the others go on: training
steps are made all the time, and every engine has turns under way that move elsewhere.

    python -m benchmarks.role_changes [--quick] [--json FILE]

The workers, engines and model of the example (`examples/calculator.yaml`), barely trained. Over and over its
hybrid worker becomes an engine and then a training replica again. A launcher that keeps no imported process to fork
would start Python and import torch and vLLM before each: those seconds are measured beside the same load, and come on
top in a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.command import command_line, quiet_machine
from benchmarks.rows import Row, below, report
from libra.backends.launch.launcher import LocalLauncher
from libra.backends.machine import choose, served_dtype
from libra.backends.tiny_model import kv_bytes_per_token
from libra.backends.transport.engine_messages import Generate
from libra.backends.transport.trainer_messages import Sample
from libra.config.run import RunConfig, load_config
from libra.environments.registry import load_environment
from libra.exec.journal import Journal
from libra.exec.pool import Worker, make_pool
from libra.exec.protocols import MoveOutcome, WorkerLostError
from libra.loop.fleet import ServingFleet
from libra.loop.process_controller import RunExecutor, SlotProcesses, WorkerSettings, begin_session
from libra.loop.warmup import warm_model
from libra.plan.allocation import Allocation, Bucket
from libra.route.catalogue import policy_named

GOAL = 5.0  # seconds, each way
_EXAMPLE = Path(__file__).parents[1] / "examples" / "calculator.yaml"
_TURNS = 8  # under way on every engine


@dataclass(slots=True)
class Measured:
    to_engine: list[float] = field(default_factory=list)
    to_trainer: list[float] = field(default_factory=list)
    imports: list[float] = field(default_factory=list)  # of a process that was not forked from one that has them
    steps: int = 0  # during the changes
    turns: int = 0  # during the changes


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line(
        "role_changes", __doc__, quick="two changes each way: a first look, not a verdict"
    ).parse_args(arguments)
    with quiet_machine(), tempfile.TemporaryDirectory() as directory:
        measured = asyncio.run(measure(2 if options.quick else 12, Path(directory)))
        report(rows_of(measured), options.json)
    return 0


def rows_of(measured: Measured) -> list[Row]:
    case = f"{len(measured.to_engine)} changes each way, {measured.steps} steps and {measured.turns} turns meanwhile"
    return [
        *_times(case, "training to rollout", measured.to_engine, GOAL),
        *_times(case, "rollout to training", measured.to_trainer, GOAL),
        *_times(case, "start of Python and imports, saved each time", measured.imports, None),
    ]


def _times(case: str, what: str, seconds: Sequence[float], goal: float | None) -> Iterator[Row]:
    yield below(case, f"{what}, median", median(seconds), "s", goal)
    yield below(case, f"{what}, worst", max(seconds), "s", goal)


async def measure(changes: int, directory: Path) -> Measured:
    config = load_config(_EXAMPLE, {"warm_up.steps": 1})
    measured = Measured()
    async with _executor(config, directory) as (executor, training, generating):
        load = asyncio.gather(_keep_training(executor, measured), _keep_generating(executor, measured))
        try:
            for _ in range(changes):
                measured.to_engine += [moved.seconds for moved in await _apply(executor, generating)]
                measured.to_trainer += [moved.seconds for moved in await _apply(executor, training)]
                measured.imports.append(await _import_seconds(directory))
        finally:
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
    return measured


async def _apply(executor: RunExecutor, wanted: Allocation) -> tuple[MoveOutcome, ...]:
    return (await executor.apply(executor.transition(wanted))).moves


@contextlib.asynccontextmanager
async def _executor(config: RunConfig, directory: Path) -> AsyncIterator[tuple[RunExecutor, Allocation, Allocation]]:
    """The example's workers, brought up; the allocation in which the hybrid trains, and one in which it generates."""
    first, last = config.start.buckets
    short, long = Bucket(first.shape, 1, 0, first.up_to), Bucket(last.shape, 1, first.up_to, last.up_to)
    training = Allocation(2, (short, long))
    generating = Allocation(1, (short, replace(long, engines=2)))
    async with LocalLauncher.open(directory / "logs") as launcher:
        await launcher.ready()
        precision = choose("auto", launcher.bf16).precision
        environment = load_environment(config.environment, _EXAMPLE.parent)
        model = await warm_model(config, environment, launcher, precision, _say_nothing)
        executor = begin_session(
            SlotProcesses(
                launcher,
                make_pool(config.cluster.core, config.cluster.hybrid, config.cluster.rollout),
                ServingFleet(policy_named("least-loaded", seed=0), training),
                WorkerSettings(
                    config.training,
                    config.engines,
                    config.cluster.share,
                    config.cluster.port,
                    config.seed,
                    model,
                    precision,
                    partial(kv_bytes_per_token, model, served_dtype(precision)),
                    version=0,
                    checkpoint=None,
                ),
                Journal(directory / "journal.jsonl"),
                _Silent(),
            )
        )
        try:
            await executor.start(training)
            yield executor, training, generating
        finally:
            await executor.stop()


async def _keep_training(executor: RunExecutor, measured: Measured) -> None:
    batch = [_sample(number) for number in range(24)]
    tokens = sum(sum(sample.generated) for sample in batch)
    for version in itertools.count(1):
        made = await executor.processes.trainers.step(version, batch, len(batch), tokens)
        await executor.processes.publish(made.version, made.buffer, made.checksum)
        measured.steps += 1


def _sample(number: int) -> Sample:
    tokens = [4 + (7 * number + 3 * place) % 14 for place in range(48)]
    own = [place >= 16 for place in range(48)]
    return Sample(str(number), tokens, own, [-2.5] * 48, [0] * 48, 1.0 if number % 2 else -1.0)


async def _keep_generating(executor: RunExecutor, measured: Measured) -> None:
    """Keep the engines full of turns; one whose engine goes away is made again by another."""
    await asyncio.gather(*(_agent(executor, number, measured) for number in range(2 * _TURNS)))


async def _agent(executor: RunExecutor, number: int, measured: Measured) -> None:
    for turn in itertools.count():
        engines = [entry.handle for entry in executor.processes.fleet.instances()]
        if not engines:
            await asyncio.sleep(0.01)
            continue
        engine = min(engines, key=lambda engine: engine.load_tokens)
        prompt = [4 + (number + 5 * place) % 14 for place in range(16)]
        with contextlib.suppress(WorkerLostError):
            await engine.generate(Generate(f"{number}-{turn}", prompt, 16, 1.0, -1, turn), lambda piece: None)
            measured.turns += 1


async def _import_seconds(directory: Path) -> float:
    began = time.monotonic()
    async with LocalLauncher.open(directory / "other-logs") as launcher:
        await launcher.ready()
        return time.monotonic() - began


def _say_nothing(step: int, steps: int, loss: float) -> None: ...


class _Silent:
    """A watcher that ignores moves, and raises an error for a loss."""

    def role(self, worker: Worker) -> None: ...
    def moved(self, moved: MoveOutcome) -> None: ...
    def load(self, worker: str) -> None: ...
    def recalled(self, worker: str, why: str) -> None: ...
    def weights(self, worker: str, version: int, seconds: float) -> None: ...
    def joined(self, worker: str, seconds: float, held_seconds: float) -> None: ...
    def node_back(self, worker: str) -> None: ...

    def lost(self, worker: str, why: str, retired: bool) -> None:
        raise RuntimeError(f"worker {worker} is lost: {why}")


if __name__ == "__main__":
    sys.exit(main())
