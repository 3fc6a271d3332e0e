"""The run directory: all records of a run, written while it runs.

Invariant: a record is one complete line, so a run that ends at any point leaves readable files. A full disk raises a
`DiskError` with the name of the file.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from libra.backends.protocols import StepResult
from libra.backends.vllm.kv_handover import ContextMoves
from libra.config.rooms import offered
from libra.config.sealed_line import sealed
from libra.exec.pool import Worker
from libra.exec.protocols import MoveOutcome
from libra.loop.episode import Episode
from libra.loop.metrics import Tally
from libra.loop.tracking import Tracking
from libra.loop.turn_maker import TurnReport
from libra.records.causes import Cause
from libra.records.device_time import DeviceTime, Part, Phase, Seconds
from libra.records.files import LineFile, writing
from libra.records.schema import (
    DecisionRecord,
    EventRecord,
    PeriodRecord,
    Record,
    RunSummary,
    StepRecord,
)
from libra.records.timeline import Timeline
from libra.records.trace import JsonValue
from libra.trajectory import dump_trajectory

if TYPE_CHECKING:
    from libra.loop.run_spans import RunSpans  # needs a library of an extra

RECORDS = ("metrics", "periods", "decisions", "events", "trajectories", "routing")
_EPISODE_LANE = "one episode at a time"
_COUNTER_SECONDS = 0.1  # shortest time between two values of a running-turns counter on the timeline
_SPAN_SECONDS = 0.005  # shorter spans of one cause would not be visible on the timeline, and are not drawn


class Recorder:
    """Writes metrics, periods, decisions, events, trajectories, routing and the timeline.

    Times of records count the seconds of reinforcement learning over all sessions of a resumed run. The timeline counts
    from the start of this session.
    """

    def __init__(
        self,
        directory: Path,
        seconds_before: float,
        tracking: Tracking | None = None,
        spans: RunSpans | None = None,
    ) -> None:
        self.directory = directory
        self._tracking, self._spans = tracking, spans
        self._started = time.monotonic()
        self._seconds_before = seconds_before
        self._began: float | None = None
        self._files = {name: LineFile(directory / f"{name}.jsonl") for name in RECORDS}
        self._timeline_path = directory / "timeline.json"
        with writing(self._timeline_path):
            self._timeline = Timeline(self._timeline_path)
        self.roles: dict[str, str] = {}
        self.tally = Tally()
        self._devices = DeviceTime(self._spent)
        self.lost_workers: dict[str, None] = {}  # in the order of their first loss
        self.changes = ContextMoves()
        self.messages: deque[str] = deque(maxlen=4)
        self._counted: dict[str, float] = {}
        self._followed: str | None = None
        self.recalls = 0
        self._recalls = defaultdict[str, list[tuple[float, float, str]]](list)  # (from, to, why), by engine
        self._away: dict[str, tuple[float, str]] = {}  # (time, why) of the recall, by engine whose device is recalled

    def begin(self) -> None:
        """Record that reinforcement learning begins or continues."""
        self._began = time.monotonic()
        what = "continues" if self._seconds_before else "begins"
        self._write(
            "events", EventRecord(self.now(), "began", None, f"reinforcement learning {what}", clock=self._began)
        )

    def now(self) -> float:
        """Seconds of reinforcement learning up to now, in all sessions of the run."""
        return self._seconds_before + (time.monotonic() - self._began if self._began is not None else 0.0)

    def step(self, record: StepRecord) -> None:
        self._write("metrics", record)
        if self._tracking is not None:
            self._tracking.step(record)
        self.tally.step(record)
        with self._drawing() as (timeline, now):
            timeline.step(record.step, now - record.step_seconds, now, {"reward": record.reward_mean})
            timeline.staleness(record.staleness_mean, record.staleness_max, now)

    def period(self, record: PeriodRecord) -> None:
        self._write("periods", record)
        if self._tracking is not None:
            self._tracking.period(record)

    def decision(self, record: DecisionRecord) -> None:
        self._write("decisions", record)
        if self._tracking is not None:
            self._tracking.decision(record)

    def event(
        self,
        kind: str,
        worker: str | None,
        text: str,
        seconds: float | None = None,
        held_seconds: float | None = None,
    ) -> None:
        self._write("events", EventRecord(self.now(), kind, worker, text, seconds, held_seconds))
        self.messages.append(f"{worker}: {text}" if worker else text)

    def episode(self, episode: Episode) -> None:
        self._files["trajectories"].append(sealed(dump_trajectory(episode.trajectory).encode()))
        if self._spans is not None:
            self._spans.episode(episode)
        if self._followed is not None and self._followed.partition("~")[0] == episode.trajectory.id:
            self._followed = None

    def turn(self, report: TurnReport) -> None:
        """Record one engine's part of a turn; if the turn changed engines, also in the routing log, with the reason.
        The timeline draws the turns of one episode at a time: hundreds of episodes run at once, and the turns of one
        episode show its queues, tools and moves."""
        if self._spans is not None:
            self._spans.turn(report)
        if self._began is not None and self._followed is None:
            self._followed = report.trajectory
        if report.trajectory == self._followed:
            name = f"{report.trajectory} on {report.worker}"
            details: dict[str, JsonValue] = {"tokens": report.tokens, "reason": report.placement.reason}
            with self._drawing() as (timeline, now):
                timeline.work(_EPISODE_LANE, name, now - report.seconds, now, details)
        change = report.change
        if change is not None:
            self.changes.add(change)
        if report.placement.migrated or change is not None:
            entry = {
                "time": round(self.now(), 4),
                "trajectory": report.trajectory,
                "to": report.worker,
                "bucket": report.placement.bucket,
                "reason": report.placement.reason,
            }
            if change is not None:
                entry |= {
                    "context": change.context,
                    "kv_tokens": change.handed_tokens,
                    "kv_seconds": round(change.seconds, 6),
                    "kv": change.why,
                }
            self._files["routing"].append(sealed(json.dumps(entry).encode()))

    def turns(self, worker: str, change: int) -> None:
        """Add `change` to the number of turns at an engine."""
        self._count(worker, self._devices.turns(worker, change, self._moment()))

    def tools(self, worker: str, change: int) -> None:
        """Add `change` to the number of episodes that wait for a tool and whose last turn this engine served."""
        self._devices.tools(worker, change, self._moment())

    def meet(self, workers: Iterable[Worker]) -> None:
        """Start accounting for the time of these workers."""
        moment = self._moment()
        for worker in workers:
            self._devices.role(worker.id, worker.role, moment)
            self.role(worker)

    def role(self, worker: Worker) -> None:
        label = str(worker.duty)
        self.roles[worker.id] = label
        self._devices.role(worker.id, worker.role, self._moment())
        with self._drawing() as (timeline, now):
            timeline.role(worker.id, label, now)

    def phase(self, phase: Phase) -> None:
        """Set the phase of the training side."""
        self._devices.phase(phase, self._moment())

    def stepped(self, result: StepResult) -> None:
        """Record that the trainers have made a step and published its weights."""
        self._devices.stepped(step_parts(result), result.publish_seconds, self._moment())

    def hold_back(self, held_back: bool) -> None:
        """Record whether the bound on staleness keeps groups from starting."""
        self._devices.hold_back(held_back, self._moment())

    def device_seconds(self) -> Seconds:
        """Every worker's time in this session, by cause."""
        return self._devices.seconds(self._moment())

    def under_way(self) -> dict[str, tuple[int, int]]:
        """For every engine, the number of its turns, and of running tool calls of episodes whose last turn it
        served."""
        return self._devices.under_way()

    def take_device_seconds(self, until: float) -> Seconds:
        """`device_seconds` since the last call, up to `until`, a time in seconds of reinforcement learning."""
        assert self._began is not None
        return self._devices.take(until - self._seconds_before + self._began - self._started)

    def moved(self, moved: MoveOutcome) -> None:
        """Record a finished move. If the move failed, the event says what the worker does now."""
        move = moved.move
        self.tally.moved(moved)
        if moved.outcome == "done":
            what = f"{move.after} again" if move.before == move.after else str(move)
            self.event("role_change", move.worker, f"{what} in {moved.seconds:.1f} s", moved.seconds)
        else:
            left = f"it is {move.before} again" if moved.outcome == "undone" else "it does nothing"
            text = f"{move} failed after {moved.seconds:.1f} s, {left}: {moved.why}"
            self.event("move_failed", move.worker, text, moved.seconds)
        details: dict[str, JsonValue] = {
            "worker": move.worker,
            "from": str(move.before),
            "to": str(move.after),
            "seconds": round(moved.seconds, 3),
            "outcome": moved.outcome,
        }
        with self._drawing() as (timeline, now):
            timeline.move(move.worker, str(move), max(0.0, now - moved.seconds), now, details)

    def lost(self, worker: str, why: str, retired: bool) -> None:
        """Record the loss of a worker that had a duty."""
        self.lost_workers[worker] = None
        self.tally.lost(worker)
        what_next = "its slot lost too many workers within an hour and stays empty" if retired else "its slot is idle"
        self.event("worker_lost", worker, f"{why}; {what_next}")
        with self._drawing() as (timeline, now):
            timeline.lost(worker, now, why)

    def joined(self, worker: str, seconds: float, held_seconds: float) -> None:
        """Record that a replica has joined training, `seconds` after its start; a step waited `held_seconds` for it."""
        self.tally.joined(seconds, held_seconds)
        waited = f"a step waited {held_seconds:.3f} s" if held_seconds else "no step waited"
        text = f"takes part in training {seconds:.1f} s after its start; {waited} for it"
        self.event("joined", worker, text, seconds, held_seconds)
        with self._drawing() as (timeline, now):
            details: dict[str, JsonValue] = {"seconds": round(seconds, 3), "held_seconds": round(held_seconds, 4)}
            timeline.work(worker, "join training", max(0.0, now - seconds), now, details)

    def recalled(self, worker: str, why: str) -> None:
        """Record that the device of an engine is recalled, with the reason `why`; an empty `why`: it is lent again."""
        kind, text = ("recalled", why) if why else ("lent_again", "its device is lent again")
        self._write("events", EventRecord(self.now(), kind, worker, text))
        self.messages.append(f"the device of {worker} is recalled: {why}" if why else f"{worker}: {text}")
        self.recalls += bool(why)
        self._end_recall(worker)
        if why:
            self._away[worker] = self._moment(), why

    def _end_recall(self, worker: str) -> None:
        since = self._away.pop(worker, None)
        if since is not None:
            self._recalls[worker].append((since[0], self._moment(), since[1]))

    def load(self, worker: str) -> None:
        """Record that an engine was told to load new weights."""
        self._devices.load(worker, self._moment())

    def weights(self, worker: str, version: int, seconds: float) -> None:
        """Record that an engine has loaded new weights, and paused for `seconds`."""
        self._devices.loaded(worker, seconds, self._moment())
        with self._drawing() as (timeline, now):
            timeline.work(worker, f"load v{version}", now - seconds, now)
            timeline.weights(worker, version, now)

    def summary(self, summary: RunSummary) -> None:
        path = self.directory / "summary.json"
        with writing(path):
            path.write_text(summary.to_json() + "\n")

    def close(self) -> None:
        with ExitStack() as stack:
            if self._tracking is not None:
                stack.callback(self._tracking.close)
            for file in self._files.values():
                stack.callback(file.close)
            stack.enter_context(writing(self._timeline_path))
            stack.callback(self._timeline.close)
            stack.callback(self._draw_loans)
            self._devices.take(self._moment())  # draws the spans that are still open

    def _draw_loans(self) -> None:
        """Have lending draw the loans of this session."""
        for worker in list(self._away):
            self._end_recall(worker)

        def moment(clock: float) -> float | None:
            return clock - self._started if clock >= self._started else None

        for draw in offered("timeline"):
            self._timeline.more(partial(draw, directory=self.directory, clock=moment, recalls=self._recalls))

    @contextmanager
    def _drawing(self) -> Iterator[tuple[Timeline, float]]:
        """The timeline, and the current time on it."""
        with writing(self._timeline_path):
            yield self._timeline, self._moment()

    def _moment(self) -> float:
        """Seconds since the start of this session."""
        return time.monotonic() - self._started

    def _spent(self, worker: str, cause: Cause, start: float, end: float) -> None:
        if end - start >= _SPAN_SECONDS:
            with self._drawing() as (timeline, _):
                timeline.cause(worker, cause, start, end)

    def _count(self, worker: str, running: int) -> None:
        """Draw the number of an engine's turns, at most once every `_COUNTER_SECONDS`."""
        with self._drawing() as (timeline, now):
            if now - self._counted.get(worker, -1.0) >= _COUNTER_SECONDS:
                self._counted[worker] = now
                timeline.turns(worker, running, now)

    def _write(self, name: str, record: Record) -> None:
        self._files[name].append(record.to_line())


def step_parts(result: StepResult) -> dict[str, tuple[Part, ...]]:
    """Parts of each replica's time in a step, up to the optimiser's update."""
    before = Part(Cause.BOUNDARY, result.held_seconds), Part(Cause.REDOING, result.redone_seconds)
    # The replicas leave the exchange together, so the longest time in it includes the wait for the slowest replica.
    exchange = min((share.exchange_seconds for share in result.shares), default=0.0)
    return {
        share.replica: (
            *before,
            Part(Cause.COMPUTING, share.compute_seconds),
            Part(Cause.REPLICA_BOUND, share.exchange_seconds - exchange),
            Part(Cause.EXCHANGING, exchange),
        )
        for share in result.shares
    }
