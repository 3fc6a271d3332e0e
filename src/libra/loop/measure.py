"""Measures this machine's engines and trainers, for the planner's profile.

Invariant: every number is measured on the workers that the run will use, at their device's share and with all other
devices busy, as in the run. After a failure no worker is still measuring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Any

from libra.backends.transport.engine_messages import (
    EngineMeasured,
    Generate,
    HandoverMeasured,
    KVTransfer,
    MeasureEngine,
    MeasureHandover,
)
from libra.backends.transport.trainer_messages import MeasureTraining, TrainingMeasured
from libra.backends.vllm.kv_handover import KVHandover
from libra.config.run import ShapeConfig
from libra.cost.device import DeviceProfile, EngineCost, HandoverCost, SwitchCost, TrainCost
from libra.cost.engine_memory import BLOCK_TOKENS
from libra.cost.lines import LinearFit, fit_linear
from libra.exec.protocols import WorkerFailedError, WorkerLostError
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.process_controller import RunExecutor

_REPEATS = 3
_GONE_SECONDS = 10.0  # time in which the process of a lost engine ends
_LOOK_SECONDS = 0.05
_FEWER = "a worker was lost while the others were measured"
_TURNS = 60  # of one closed-loop run: several for each place in the batch
_TURN_TOKENS = (
    2,
    10,
)  # fewest and most generated tokens of a turn; lengths differ so that turns start and end in every iteration
_CONTEXTS = (16, 48)  # prompt tokens of a turn, one closed-loop run each
_SAMPLE_LENGTHS = (14, 22, 31, 40, 52, 68, 90, 120)  # tokens, with the spread of agent trajectories


async def measure(
    executor: RunExecutor, engines: Mapping[str, ShapeConfig], trajectories: int, hardware: str, model: str
) -> DeviceProfile:
    """Measure all workers at the same time, with samples for steps of `trajectories` trajectories. This takes seconds
    on the examples' tiny models. Raises `WorkerLostError`, `WorkerFailedError` or `TimeoutError` when a worker is
    lost."""
    workers = executor.allocation()
    switch = await _switch_cost(executor, engines, trajectories)
    replicas, fit = await _side_by_side(executor, engines, trajectories)
    handover = await _handover_cost(executor)
    if executor.allocation() != workers:
        raise WorkerLostError(_FEWER)
    batches = [batch for measured in replicas for batch in measured.batches]
    per_step, per_token = fit_linear([(1.0, tokens) for tokens, _ in batches], [s for _, s in batches]).coefficients
    return DeviceProfile(
        hardware=hardware,
        model=model,
        engine=EngineCost(*fit.coefficients),
        train=TrainCost(
            step=per_step + fmean(measured.step_seconds for measured in replicas),
            per_token=per_token,
            exchange=fmean(measured.exchange_seconds for measured in replicas),
        ),
        switch=switch,
        heldout_error=fit.heldout_error,
        handover=handover,
    )


async def measure_plain(
    executor: RunExecutor, engines: Mapping[str, ShapeConfig], trajectories: int, profile: DeviceProfile
) -> DeviceProfile:
    """`profile` with the costs of engines without support for KV transfers. Restarts the engines without this support.
    Raises the errors of `measure`.
    """
    workers = executor.allocation()
    await _restart(executor, [entry.handle.name for entry in _engines(executor)])
    _, fit = await _side_by_side(executor, engines, trajectories)
    if executor.allocation() != workers:
        raise WorkerLostError(_FEWER)
    return replace(profile, engine=EngineCost(*fit.coefficients), heldout_error=fit.heldout_error)


async def try_loans(fleet: ServingFleet, size: ShapeConfig) -> None:
    """Keep every lent engine busy with turns whose results are discarded, until cancelled. All have shape `size`. A run
    relies on these grants before its first step."""

    async def busy(entry: ServingEngine) -> None:
        with suppress(WorkerLostError):
            for number in count():
                while entry.handle.version < 0 or entry.handle.away:
                    await fleet.changed()
                await _closed_loop(entry, size.max_num_seqs, _CONTEXTS[0], f"loan-{number}")

    await asyncio.gather(*(busy(entry) for entry in fleet.instances() if entry.handle.lent))


def profile_words(profile: DeviceProfile) -> str:
    """The main numbers of a profile, in one line."""
    return (
        f"iteration {profile.engine.step * 1e3:.1f} ms + {profile.engine.per_sequence * 1e3:.2f} ms a sequence,"
        f" training {1 / profile.train.per_token:.0f} tokens/s a replica, engine start"
        f" {profile.switch.engine_start:.1f} s, held-out error {100 * profile.heldout_error:.0f} %"
    )


async def _side_by_side(
    executor: RunExecutor, shapes: Mapping[str, ShapeConfig], trajectories: int
) -> tuple[list[TrainingMeasured], LinearFit]:
    """Measure every replica, and fit over all engines, with all workers busy."""
    replicas: list[TrainingMeasured]
    replicas, *engines = await _all(
        executor.processes.trainers.measure(_training_points(trajectories)),
        *(_engine_rows(entry, shapes[entry.shape]) for entry in _engines(executor)),
    )
    rows: list[_Row] = [row for rows in engines for row in rows]
    return replicas, fit_linear([features for features, _ in rows], [seconds for _, seconds in rows])


async def _switch_cost(executor: RunExecutor, shapes: Mapping[str, ShapeConfig], trajectories: int) -> SwitchCost:
    """Seconds for which a device is out of service while it becomes an engine or a replica. These are restarts of
    running workers, since first starts on a new machine include cold disk caches. All other workers are kept busy
    meanwhile."""
    loads = await executor.processes.reload()
    engine, *others = _engines(executor)
    joins: list[float]
    joins, *_ = await _all(
        _restart(executor, executor.processes.trainers.hybrids()),
        *(_engine_rows(entry, shapes[entry.shape]) for entry in (engine, *others)),
    )
    starts: list[float]
    starts, *_ = await _all(
        _restart(executor, [engine.handle.name]),
        executor.processes.trainers.measure(_training_points(trajectories)),
        *(_engine_rows(entry, shapes[entry.shape]) for entry in others),
    )
    return SwitchCost(fmean(starts), trainer_join=fmean(joins or starts), weight_load=fmean(loads))


async def _restart(executor: RunExecutor, workers: Sequence[str]) -> list[float]:
    return [await executor.restart(name) for name in workers]


def _engines(executor: RunExecutor) -> tuple[ServingEngine, ...]:
    """The engines in service on the run's own devices, in the order of their names. Lent engines are excluded, since
    measuring them would delay serving. Raises `WorkerLostError` if no engine is left."""
    own = [entry for entry in executor.processes.fleet.instances() if not entry.handle.lent]
    engines = tuple(sorted(own, key=lambda entry: entry.handle.name))
    if not engines:
        raise WorkerLostError("no engine is left to be measured")
    return engines


async def _all(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results of all `work`. Raises an error only after all have ended, since a worker that is still measuring would
    keep other workers waiting.
    """
    tasks = [asyncio.create_task(each) for each in work]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


async def _handover_cost(executor: RunExecutor) -> HandoverCost | None:
    """Cost of a context's KV transfer; None if no engine supports transfers, or none has room for two blocks."""
    handover = executor.processes.fleet.handover
    if handover is None:
        return None
    rows: list[tuple[int, float]] = []
    for entry in _engines(executor):  # one after the other: each may need most of the frames
        rows += await _handover_rows(entry, handover)
    if not rows:
        return None
    return HandoverCost(*fit_linear([(1.0, tokens) for tokens, _ in rows], [s for _, s in rows]).coefficients)


async def _handover_rows(entry: ServingEngine, handover: KVHandover) -> list[tuple[int, float]]:
    """Pairs of a context's tokens, and the seconds to save and fetch its KV."""
    most = entry.capacity_tokens // BLOCK_TOKENS if handover.place(entry.handle) is not None else 0
    if most < 2:
        return []
    transfer = await _frames(handover, most)
    contexts = sorted({BLOCK_TOKENS + 1, most * BLOCK_TOKENS // 2 + 1, (most - 1) * BLOCK_TOKENS + 1})
    measured: HandoverMeasured | None = None
    try:
        measured = await entry.handle.ask(MeasureHandover(contexts, _REPEATS, transfer), HandoverMeasured)
        return measured.contexts
    except WorkerFailedError as error:
        entry.handle.declare_lost(str(error))  # an engine that fails at this would also fail at real turns
        raise
    finally:
        if measured is not None:
            handover.leases.release(transfer)
        else:
            handover.leases.release_after(entry.handle.link.pid, transfer)


async def _frames(handover: KVHandover, blocks: int) -> KVTransfer:
    """Lease `blocks` frames; waits until the process of a lost engine with some of them has ended."""
    for _ in range(int(_GONE_SECONDS / _LOOK_SECONDS)):
        if (transfer := handover.leases.lease(blocks)) is not None:
            return transfer
        await asyncio.sleep(_LOOK_SECONDS)
    raise TimeoutError(f"{blocks} frames for KV were not free within {_GONE_SECONDS:.0f} s: a lost engine holds them")


_Row = tuple[tuple[float, float, float, float, float], float]
"""Features of one iteration (1, sequences, context tokens, prefilled tokens, finished turns), and its seconds."""


async def _engine_rows(entry: ServingEngine, size: ShapeConfig) -> list[_Row]:
    """Rows of iterations inside the engine, and of turns measured from message to message."""
    contexts = (16, max(24, (size.max_model_len - 16) * 3 // 4))
    batches = sorted({1, max(1, size.max_num_seqs // 2), size.max_num_seqs})
    points = [(b, c) for b in batches for c in contexts if b * (c + 16) <= size.kv_tokens]
    try:
        measured = await entry.handle.ask(MeasureEngine(points, _REPEATS), EngineMeasured)
    except WorkerFailedError as error:
        entry.handle.declare_lost(str(error))  # an engine that fails at this would also fail at real turns
        raise
    rows: list[_Row] = [((1.0, b, s, p, 0.0), seconds) for b, s, p, seconds in measured.iterations]
    for repeat in range(_REPEATS + 1):
        for context in _CONTEXTS:
            if context + _TURN_TOKENS[1] <= size.max_model_len:
                row = await _closed_loop(entry, size.max_num_seqs, context, f"loop-{repeat}-{context}")
                if repeat > 0:  # the first repeat includes the set-up of kernels
                    rows.append(row)
    return rows


async def _closed_loop(entry: ServingEngine, sequences: int, context: int, tag: str) -> _Row:
    """Measure short turns that start and end while the engine is full."""
    handle = entry.handle
    waiting = asyncio.Semaphore(2 * sequences)  # half of them run, the other half wait inside the engine
    fewest, most = _TURN_TOKENS

    async def turn(number: int) -> int:
        async with waiting:
            prompt = [4 + (number + 5 * position) % 16 for position in range(context)]
            tokens = fewest + (7 * number) % (most - fewest + 1)
            made: list[int] = []
            await handle.generate(
                Generate(f"{tag}-{number}", prompt, tokens, 1.0, -1, number, salt=f"{tag}-{number}"),
                lambda piece: made.extend(piece.tokens),
            )
            return len(made)

    await turn(_TURNS)  # the counters arrive with a finished turn: begin with up-to-date ones
    busy, iterations = handle.busy_seconds, handle.iterations
    lengths = await asyncio.gather(*(turn(number) for number in range(_TURNS)))
    rounds, tokens = handle.iterations - iterations, sum(lengths)
    context_sum = sum(length * context + length * (length + 1) / 2 for length in lengths)
    features = (1.0, tokens / rounds, context_sum / rounds, _TURNS * context / rounds, _TURNS / rounds)
    return features, (handle.busy_seconds - busy) / rounds


def _training_points(trajectories: int) -> MeasureTraining:
    """Points at a quarter, a half and all of one replica's tokens when two replicas share a step, in uneven samples."""
    most = max(4, trajectories // 2)
    return MeasureTraining([_sample_lengths(max(1, most // part)) for part in (4, 2, 1)], 2 * _REPEATS)


def _sample_lengths(count: int) -> list[int]:
    """Uneven lengths, short ones more often: length i of n is the i/n quantile of a falling distribution."""
    last = len(_SAMPLE_LENGTHS) - 1
    return [_SAMPLE_LENGTHS[int(last * (index / max(count - 1, 1)) ** 1.7)] for index in range(count)]
