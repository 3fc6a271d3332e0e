"""A run as a trace: role and work of each worker over time, and the number of running turns.

Slices of a lane never overlap. Memory has only the open role and the last end of each lane. A full file still gets the
last role of each worker.

The groups from top to bottom, most of them with one lane per worker:

    - `roles`: roles of workers, and the trainer's steps
    - `moves`: each move from one role to another
    - `where the time goes`: the causes of device time
    - `work`: batches, weight loads, joins
    - `running turns`: one counter per worker, since hundreds of turns overlap in an engine
    - `staleness`: of the trajectories of each step
    - `lent devices`: only if there are any
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from libra.plan.transition import Role
from libra.records.causes import Cause
from libra.records.schema import role_of, styles
from libra.records.trace import MAX_EVENTS, JsonValue, TraceFile

_ROLES, _MOVES, _CAUSES, _WORK, _TURNS, _STEPS = 1, 2, 3, 4, 5, 6
_GROUPS = {
    _ROLES: "roles",
    _MOVES: "moves",
    _CAUSES: "where the time goes",
    _WORK: "work",
    _TURNS: "running turns",
    _STEPS: "staleness",
}
_MORE = 7  # group for drawings of other packages
_STEPS_LANE = "training steps"

# Colour names from the viewers' palette. Waiting is pale there, too.
_ROLE_COLOURS = {
    Role.TRAIN: "thread_state_iowait",
    Role.ROLLOUT: "rail_response",
    Role.JOINING: "yellow",
    Role.DRAINING: "thread_state_uninterruptible",
    Role.IDLE: "grey",
    Role.FAILED: "terrible",
}
_BUCKET_COLOURS = ("rail_response", "rail_load", "rail_animation")
_CAUSE_COLOURS = {
    Cause.GENERATING: "rail_response",
    Cause.COMPUTING: "thread_state_iowait",
    Cause.EXCHANGING: "rail_animation",
    Cause.PUBLISHING: "rail_load",
    Cause.LOADING: "rail_load",
    Cause.CHECKPOINTING: "rail_idle",
    Cause.REDOING: "bad",
    Cause.ROLLOUT_BOUND: "thread_state_sleeping",
    Cause.REPLICA_BOUND: "thread_state_sleeping",
    Cause.TRAINING_BOUND: "thread_state_sleeping",
    Cause.TOOL_BOUND: "thread_state_runnable",
    Cause.NO_WORK: "thread_state_unknown",
    Cause.BOUNDARY: "thread_state_unknown",
    Cause.STARTING: "yellow",
    Cause.MOVING: "thread_state_uninterruptible",
    Cause.FAILED: "terrible",
    Cause.IDLE: "grey",
    Cause.EVALUATING: "grey",
}


@dataclass(slots=True)
class _Lane:
    tid: int
    end: float = float("-inf")  # end of its last slice


class Timeline:
    """Writes trace events to `path` as they arrive. Times are seconds of one clock. All calls come from one thread.

    `close` ends the open roles at the latest time of any event.
    """

    def __init__(self, path: Path, max_events: int = MAX_EVENTS) -> None:
        self._trace = TraceFile(path, max_events)
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._open: dict[str, tuple[str, float]] = {}  # worker -> its role, and the start of the role
        self._turns: dict[str, int] = {}
        self._seen_roles: dict[str, None] = {}
        self._latest = 0.0
        for pid, name in _GROUPS.items():
            self._trace.name_group(pid, name, pid)

    def role(self, worker: str, role: str, at: float) -> None:
        """Set the role of a worker from now on."""
        role_of(role)  # raises for an unknown role
        self._seen_roles.setdefault(role)
        if worker in self._open and self._open[worker][0] == role:
            return
        self._lane(_ROLES, worker)
        self._end_role(worker, at)
        self._open[worker] = role, at
        self._see(at)

    def work(
        self, worker: str, name: str, start: float, end: float, details: Mapping[str, JsonValue] | None = None
    ) -> None:
        """Add one batch, weight load or other piece of work of a worker.

        If it starts before the previous work ends, its start is moved to that end, since a viewer drops overlapping
        slices. Clocks of two processes never agree to the last microsecond.
        """
        self._slice(_WORK, worker, name, start, end, details or {})

    def move(
        self, worker: str, name: str, start: float, end: float, details: Mapping[str, JsonValue] | None = None
    ) -> None:
        """Add a move of a worker from one role to another, made or attempted."""
        self._slice(_MOVES, worker, name, start, end, details or {})

    def step(self, step: int, start: float, end: float, details: Mapping[str, JsonValue] | None = None) -> None:
        """Add one optimiser step."""
        self._slice(_ROLES, _STEPS_LANE, f"step {step}", start, end, details or {})

    def weights(self, worker: str, version: int, at: float) -> None:
        """Mark the time from which an engine serves a new version of the weights."""
        self._instant(worker, f"weights v{version}", at, {"version": version})

    def cause(self, worker: str, cause: Cause, start: float, end: float) -> None:
        """Add a span of a worker's time with its cause."""
        self._slice(_CAUSES, worker, cause.words, start, end, {}, _CAUSE_COLOURS[cause])

    def staleness(self, mean: float, largest: int, at: float) -> None:
        """Add the staleness, in versions, of the trajectories of a step that ends at `at`."""
        self._see(at)
        self._trace.counter(_STEPS, "staleness", _microseconds(at), {"mean": mean, "max": largest})

    def lost(self, worker: str, at: float, text: str) -> None:
        """Set a lost worker's role to `failed`, and mark this time across all lanes."""
        self.role(worker, "failed", at)
        self._instant(worker, f"lost: {text}", at, {}, "g")

    def turns(self, worker: str, running: int, at: float) -> None:
        """Set the number of turns that run in an engine from now on. An unchanged number is not written."""
        if running < 0:
            raise ValueError(f"turns of {worker}: {running} cannot run")
        if self._turns.get(worker) == running:
            return
        self._turns[worker] = running
        self._see(at)
        self._trace.counter(_TURNS, worker, _microseconds(at), {"turns": running})

    def more(self, draw: Callable[[TraceFile, int], None]) -> None:
        """Have another package draw its own group, with times of the timeline. Called once, at the end."""
        draw(self._trace, _MORE)

    def close(self) -> None:
        """End open roles and finish the file. A second call does nothing."""
        if self._trace.closed:
            return
        self._trace.room = max(self._trace.room, len(self._open))
        for worker in list(self._open):
            self._end_role(worker, self._latest)
        self._trace.close()

    def _end_role(self, worker: str, at: float) -> None:
        if worker in self._open:
            role, since = self._open.pop(worker)
            colour = styles(self._seen_roles, _ROLE_COLOURS, _BUCKET_COLOURS)[role]
            self._slice(_ROLES, worker, role, since, at, {}, colour)

    def _slice(
        self,
        pid: int,
        lane_name: str,
        name: str,
        start: float,
        end: float,
        details: Mapping[str, JsonValue],
        colour: str | None = None,
    ) -> None:
        if end < start:
            raise ValueError(f"{name} of {lane_name} ends at {end} s, before its start at {start} s")
        lane = self._lane(pid, lane_name)
        begin = max(start, lane.end)
        finish = max(end, begin)
        lane.end = finish
        self._see(finish)
        shifted = {"reported_start": start} if begin > start else {}
        ts = _microseconds(begin)
        duration = _microseconds(finish) - ts
        self._trace.slice(pid, lane.tid, name, ts, duration, {**details, **shifted}, colour)

    def _instant(
        self, worker: str, name: str, at: float, details: Mapping[str, JsonValue], scope: Literal["t", "g"] = "t"
    ) -> None:
        tid = self._lane(_ROLES, worker).tid
        self._see(at)
        self._trace.instant(_ROLES, tid, name, _microseconds(at), details, scope)

    def _lane(self, pid: int, name: str) -> _Lane:
        if (pid, name) not in self._lanes:
            lane = _Lane(tid=len(self._lanes) + 1)
            self._lanes[pid, name] = lane
            order = 0 if name == _STEPS_LANE else lane.tid
            self._trace.name_lane(pid, lane.tid, name, order)
        return self._lanes[pid, name]

    def _see(self, at: float) -> None:
        self._latest = max(self._latest, at)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
