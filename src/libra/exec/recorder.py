"""The run directory: everything a run writes down while it goes.

Invariant: what is written is on its own line and complete; a run that ends anywhere leaves files that can be read.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from libra.exec.pool import Role, Worker
from libra.exec.rollout import Episode, TurnReport
from libra.report.records import (
    DecisionRecord,
    EventRecord,
    PeriodRecord,
    Record,
    RunSummary,
    StepRecord,
    read_records,
)
from libra.report.timeline import JsonValue, Timeline
from libra.trajectory import dump_trajectory

_EPISODE_LANE = "one episode at a time"
_COUNTER_SECONDS = 0.1  # the running-turns counters of the timeline change no faster than this


class Recorder:
    """Writes metrics, periods, decisions, events, trajectories, routing and the timeline.

    The times of records count the seconds of reinforcement learning, over all sittings of a resumed run; the timeline
    counts from the start of this one.
    """

    def __init__(self, directory: Path, seconds_before: float) -> None:
        self.directory = directory
        self._started = time.monotonic()
        self._seconds_before = seconds_before
        self._began: float | None = None
        self._files = {
            name: open(directory / f"{name}.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            for name in ("metrics", "periods", "decisions", "events", "trajectories", "routing")
        }
        self.timeline = Timeline(directory / "timeline.json")
        self.roles: dict[str, str] = {}
        self.lost: list[str] = []
        self.messages: deque[str] = deque(maxlen=4)
        self._counted: dict[str, float] = {}
        self._followed: str | None = None

    def begin(self) -> None:
        """Reinforcement learning begins, or goes on."""
        self._began = time.monotonic()

    def now(self) -> float:
        """Seconds of reinforcement learning so far."""
        return self._seconds_before + (time.monotonic() - self._began if self._began is not None else 0.0)

    def _on_timeline(self) -> float:
        return time.monotonic() - self._started

    def step(self, record: StepRecord) -> None:
        self._write("metrics", record)
        now = self._on_timeline()
        self.timeline.step(record.step, now - record.step_seconds, now, {"reward": record.reward_mean})

    def period(self, record: PeriodRecord) -> None:
        self._write("periods", record)

    def decision(self, record: DecisionRecord) -> None:
        self._write("decisions", record)

    def event(self, kind: str, worker: str | None, text: str) -> None:
        self._write("events", EventRecord(self.now(), kind, worker, text))
        if kind != "weights":
            self.messages.append(f"{worker}: {text}" if worker else text)

    def episode(self, episode: Episode) -> None:
        self._files["trajectories"].write(dump_trajectory(episode.trajectory) + "\n")
        if episode.trajectory.id == self._followed:
            self._followed = None

    def turn(self, report: TurnReport) -> None:
        """A served turn; those that changed engines are written with the reason. The timeline shows all turns of one
        episode at a time: hundreds run at once, and following one shows its queues, tools and moves."""
        if self._began is not None and self._followed is None:
            self._followed = report.trajectory
        if report.trajectory == self._followed:
            now = self._on_timeline()
            name = f"{report.trajectory} on {report.worker}"
            details: dict[str, JsonValue] = {"tokens": report.tokens, "reason": report.placement.reason}
            self.timeline.work(_EPISODE_LANE, name, now - report.seconds, now, details)
        if report.placement.migrated:
            entry = {
                "time": round(self.now(), 4),
                "trajectory": report.trajectory,
                "to": report.worker,
                "bucket": report.placement.bucket,
                "reason": report.placement.reason,
            }
            self._files["routing"].write(json.dumps(entry) + "\n")

    def running_turns(self, worker: str, running: int) -> None:
        """How many turns an engine holds, thinned out for the timeline."""
        now = self._on_timeline()
        if now - self._counted.get(worker, -1.0) >= _COUNTER_SECONDS:
            self._counted[worker] = now
            self.timeline.turns(worker, running, now)

    def role(self, worker: Worker) -> None:
        label = f"rollout:{worker.shape}" if worker.role is Role.ROLLOUT else str(worker.role)
        self.roles[worker.id] = label
        self.timeline.role(worker.id, label, self._on_timeline())
        if worker.role in (Role.ROLLOUT, Role.TRAIN):
            self.event("role_change", worker.id, f"is now {label}")

    def worker_lost(self, worker: str, why: str) -> None:
        self.lost.append(worker)
        self.event("worker_lost", worker, why)
        self.timeline.lost(worker, self._on_timeline(), why)

    def weights(self, worker: str, version: int, seconds: float) -> None:
        now = self._on_timeline()
        self.timeline.work(worker, f"load v{version}", now - seconds, now)
        self.timeline.weights(worker, version, now)

    def summary(self, summary: RunSummary) -> None:
        (self.directory / "summary.json").write_text(summary.to_json() + "\n")

    def close(self) -> None:
        self.timeline.close()
        for file in self._files.values():
            file.close()

    def _write(self, name: str, record: Record) -> None:
        self._files[name].write(record.to_json() + "\n")


def cut_back(directory: Path, step: int) -> None:
    """Drop what a run wrote after the checkpoint of `step`: those steps will be made again."""
    metrics, periods, decisions = (directory / f"{name}.jsonl" for name in ("metrics", "periods", "decisions"))
    _keep(metrics, [record for record in read_records(StepRecord, metrics) if record.step <= step])
    _keep(periods, [record for record in read_records(PeriodRecord, periods) if record.last_step <= step])
    _keep(decisions, [record for record in read_records(DecisionRecord, decisions) if record.step <= step])


def _keep(path: Path, records: Sequence[Record]) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(record.to_json() + "\n" for record in records))
    part.rename(path)
