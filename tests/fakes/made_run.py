"""A made-up run with everything a report can have to show: periods, decisions of both kinds, a lost worker."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from libra.records.causes import Cause, total
from libra.records.run_log import prediction_error
from libra.records.schema import (
    DecisionRecord,
    Evaluation,
    EventRecord,
    MovedContexts,
    PeriodRecord,
    Record,
    RunSummary,
    StepRecord,
)

PERIOD = 20
FIRST, SECOND, THIRD = "train 2 | short 2", "train 1 | short 2 | long 1", "train 1 | short 1 | long 1"
ROLES = {
    FIRST: {"w0": "train", "w1": "train", "w2": "rollout:short", "w3": "rollout:short"},
    SECOND: {"w0": "train", "w1": "rollout:long", "w2": "rollout:short", "w3": "rollout:short"},
    THIRD: {"w0": "train", "w1": "rollout:long", "w2": "rollout:short"},
}
BASE_SECONDS = {FIRST: 2.6, SECOND: 2.0, THIRD: 2.3}


def _allocation(step: int) -> str:
    return FIRST if step <= 40 else SECOND if step <= 90 else THIRD


def _wave(step: int) -> float:
    """A noise that is the same on every machine."""
    return math.sin(step * 12.9898) * 0.6 + math.sin(step * 4.1414) * 0.4


def device_seconds(role: str, seconds: float, train: float, wave: float) -> dict[Cause, float]:
    """What a worker's step went to, by its role."""
    if role in ("draining", "joining"):
        return {Cause.MOVING: seconds}
    if role == "train":
        work = {Cause.COMPUTING: train - 0.08, Cause.EXCHANGING: 0.08, Cause.PUBLISHING: 0.05}
        return {**work, Cause.ROLLOUT_BOUND: seconds - sum(work.values())}
    waits = (0.10 + 0.05 * wave) * seconds
    engine = {Cause.LOADING: 0.02, Cause.TOOL_BOUND: waits / 2, Cause.TRAINING_BOUND: waits, Cause.NO_WORK: waits / 3}
    return {**engine, Cause.GENERATING: seconds - sum(engine.values())}


def make_step(step: int, ended: float) -> StepRecord:
    allocation, progress, wave = _allocation(step), step / 120, _wave(step)
    seconds = BASE_SECONDS[allocation] * (1 + 0.25 * progress + 0.06 * wave)
    train = 0.9 * (2 if allocation != FIRST else 1) * (1 + 0.1 * progress)
    exchange = 0.08 if allocation == FIRST else 0.0
    roles = dict(ROLES[allocation])
    if step in (41, 42):
        roles["w1"] = "draining"
    if step == 43:
        roles["w1"] = "joining"
    return StepRecord(
        step=step,
        time=ended + seconds,
        version=step,
        step_seconds=seconds,
        generate_seconds=seconds * (0.97 if allocation == FIRST else 0.88),
        train_seconds=min(train, seconds - 0.2),
        exchange_seconds=exchange,
        publish_seconds=0.05,
        load_seconds=0.021,
        checkpoint_seconds=0.04 if step % 50 == 1 else 0.0,
        held_seconds=0.01 if step == 44 else 0.0,
        redone_seconds=0.3 if step == 91 else 0.0,
        wait_seconds=max(0.0, seconds - min(train, seconds - 0.2) - exchange - 0.1),
        reward_mean=0.38 + 0.45 * (1 - math.exp(-2.5 * progress)) + 0.04 * wave,
        groups=16,
        groups_without_signal=3 + step % 3,
        trajectories=128,
        generated_tokens=round(9000 * (1 + 0.4 * progress) * (1 + 0.05 * wave)),
        trained_tokens=round(14000 * (1 + 0.4 * progress)),
        staleness_mean=0.6 + 0.1 * wave,
        staleness_max=2,
        staleness=(50, 70, 8),
        behaviour_weight_mean=0.98,
        prox_gap_mean=0.04,
        clip_share=0.012,
        grad_norm=0.8 + 0.1 * wave,
        context_p50=110 + 60 * progress,
        context_p90=190 + 160 * progress,
        context_p99=260 + 420 * progress + 15 * wave,
        turns_mean=2.1 + 0.8 * progress,
        predicted_seconds=BASE_SECONDS[allocation] * (1 + 0.25 * progress),
        allocation=allocation,
        roles=roles,
        device_seconds={
            worker: device_seconds(role, seconds, min(train, seconds - 0.2), wave) for worker, role in roles.items()
        },
    )


def make_steps(number: int) -> list[StepRecord]:
    steps: list[StepRecord] = []
    for step in range(1, number + 1):
        steps.append(make_step(step, steps[-1].time if steps else 0.0))
    return steps


def make_periods(steps: list[StepRecord]) -> list[PeriodRecord]:
    periods = []
    for number, start in enumerate(range(0, len(steps) - PERIOD + 1, PERIOD)):
        rows = steps[start : start + PERIOD]
        periods.append(
            PeriodRecord(
                period=number,
                first_step=rows[0].step,
                last_step=rows[-1].step,
                allocation=rows[0].allocation,
                predicted_seconds=2.5 if number < 2 else 2.2,
                measured_seconds=sum(row.step_seconds for row in rows) / PERIOD,
                predicted_bottleneck="rollout" if number < 2 else "training",
                switching=number in (2, 4),
            )
        )
    return periods


DECISIONS = [
    DecisionRecord(
        period=0, step=20, time=53.8, before=FIRST, after="train 1 | short 3", before_seconds=2.50, after_seconds=2.41,
        gain_per_step=0.09, horizon_steps=80, cost=9.5, uncertainty=0.12, taken=False,
        reason="the gain of 0.09 s a step is below the uncertainty of 0.12 s of the prediction",
        solver_status="optimal", solver_gap=0.0, solver_seconds=0.11, moves=("w1: train → rollout short",),
    ),
    DecisionRecord(
        period=1, step=40, time=110.2, before=FIRST, after=SECOND, before_seconds=2.74, after_seconds=2.20,
        gain_per_step=0.54, horizon_steps=80, cost=9.5, uncertainty=0.14, taken=True,
        reason="generation bounds the step; long episodes <grow> & need their own engine",
        solver_status="optimal", solver_gap=0.0, solver_seconds=0.13,
        moves=("w1: leave training", "w1: start engine long"),
    ),
    DecisionRecord(
        period=4, step=90, time=222.4, before="train 1 | short 2 | long 1", after=THIRD, before_seconds=2.9,
        after_seconds=2.65, gain_per_step=0.25, horizon_steps=30, cost=0.4, uncertainty=0.0, taken=True,
        reason="w3 was lost", solver_status="feasible", solver_gap=0.03, solver_seconds=0.30, moves=(),
    ),
]  # fmt: skip
MEASURED = replace(
    DECISIONS[1], measured_before=2.79, measured_after=2.29, measured_cost=11.4, realised_gain_per_step=0.5
)
EVENTS = [
    EventRecord(0.0, "checkpoint", None, "saved before the first step"),
    EventRecord(110.2, "role_change", "w1", "train → rollout long"),
    EventRecord(221.9, "worker_lost", "w3", "engine process ended with signal 9; 14 turns were started again"),
    EventRecord(115.0, "joined", "w1", "takes part in training 4.9 s after its start", 4.9, 0.004),
    EventRecord(240.0, "warning", None, "disk is 91 % full <b>now</b>"),
]
EVALUATIONS = (
    Evaluation("held-out", 0, 256, 0.391, 0.43, 2.1),
    Evaluation("held-out", 60, 256, 0.652, 0.69, 2.5),
    Evaluation("held-out", 120, 256, 0.802, 0.84, 2.9),
)
CONFIG: dict[str, Any] = {
    "model": "tiny-qwen3",
    "train": {"learning_rate": 3e-5, "clip": [0.8, 1.28]},
    "workers": [{"id": "w0", "core": True}, {"id": "w1", "core": False}],
}


def make_summary(steps: list[StepRecord], error: float | None = 0.064) -> RunSummary:
    return RunSummary(
        name="calculator <demo>", seed=7, finished=True, wall_seconds=steps[-1].time + 95.0, steps=len(steps),
        evaluations=EVALUATIONS, prediction_error=error, lost_workers=("w3",), peak_memory_bytes=7_516_192_768,
        trajectories_started=15_500, trajectories_trained=15_360, trajectories_unfinished=140,
        moved_contexts=MovedContexts(24, 9_216, 0.31, 130, 21_870), logprob_gap=0.0013,
        device_seconds=total(row for step in steps for row in step.device_seconds.values()),
        versions={"torch": "2.13.0", "vllm": "0.32.0"}, allocation_mode="adaptive",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MadeRun:
    """A run directory and what was written to it."""

    directory: Path
    steps: list[StepRecord]
    periods: list[PeriodRecord]


def write_lines(path: Path, records: Iterable[Record]) -> None:
    path.write_text("".join(record.to_json() + "\n" for record in records), encoding="utf-8")


def write_run(directory: Path, number_of_steps: int = 120) -> MadeRun:
    directory.mkdir(parents=True, exist_ok=True)
    steps = make_steps(number_of_steps)
    periods = make_periods(steps)
    write_lines(directory / "metrics.jsonl", steps)
    write_lines(directory / "periods.jsonl", periods)
    write_lines(directory / "decisions.jsonl", [*DECISIONS, MEASURED])
    write_lines(directory / "events.jsonl", EVENTS)
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (directory / "summary.json").write_text(make_summary(steps, prediction_error(periods)).to_json(), encoding="utf-8")
    return MadeRun(directory, steps, periods)


@pytest.fixture
def made_run(tmp_path: Path) -> MadeRun:
    return write_run(tmp_path / "run-7")


@pytest.fixture
def example_records() -> Mapping[str, Record]:
    """One record of each kind."""
    steps = make_steps(2)
    return {
        "step": steps[0],
        "period": PeriodRecord(0, 1, 2, FIRST, 2.5, 2.6, "rollout", False),
        "decision": MEASURED,
        "undecided": DECISIONS[0],
        "event": EVENTS[0],
        "evaluation": EVALUATIONS[0],
        "summary": make_summary(steps),
    }
