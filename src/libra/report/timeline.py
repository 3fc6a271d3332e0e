"""The run as a Chrome trace: who had which role when, what each did, how many turns ran.

Invariant: the file is readable at any moment, also after a kill, and on every lane slices follow each other without
overlap. Memory holds the open role and the last end of each lane and nothing else; the file holds at most
`max_events` events, a note where it had to stop, and the names of lanes and the last role of each besides.

Open the file in https://ui.perfetto.dev or chrome://tracing. Groups, top to bottom: `roles` (one lane a worker, and
the trainer's steps), `moves` (from one role to another, as a whole; one lane a worker), `where the time goes` (its
cause; one lane a worker), `work` (batches, weight loads, joins; one lane a worker), `running turns` (one counter a
worker: hundreds of turns overlap in an engine, and their number is what can be read), `staleness` (of the trajectories
of each step).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from libra.report.causes import CAUSES, Cause
from libra.report.roles import check_role, role_styles

MAX_EVENTS = 500_000  # about 60 MB of JSON, which the viewers still open

_ROLES, _MOVES, _CAUSES, _WORK, _TURNS, _STEPS = 1, 2, 3, 4, 5, 6
_GROUPS = {
    _ROLES: "roles",
    _MOVES: "moves",
    _CAUSES: "where the time goes",
    _WORK: "work",
    _TURNS: "running turns",
    _STEPS: "staleness",
}
_STEPS_LANE = "training steps"

JsonValue = str | int | float


@dataclass(slots=True)
class _Lane:
    tid: int
    end: float = float("-inf")  # of its last slice


@dataclass(slots=True)
class _OpenRole:
    role: str
    since: float


class Timeline:
    """Writes trace events to `path` as they come. Times are seconds of one clock, called from one thread.

    Usable as a context manager. `close` ends the roles still open, at the latest time that the timeline has seen.
    """

    def __init__(self, path: Path, max_events: int = MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError("max_events must be >= 1")
        self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives until close()
        self._file.write("[")
        self._room = max_events
        self._first = True
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._open: dict[str, _OpenRole] = {}
        self._turns: dict[str, int] = {}
        self._seen_roles: dict[str, None] = {}
        self._latest = 0.0
        for pid, name in _GROUPS.items():
            self._metadata("process_name", pid, 0, {"name": name})
            self._metadata("process_sort_index", pid, 0, {"sort_index": pid})

    def role(self, worker: str, role: str, at: float) -> None:
        """The worker takes on `role` and keeps it until the next call."""
        check_role(role)
        self._seen_roles.setdefault(role)
        previous = self._open.get(worker)
        if previous is not None and previous.role == role:
            return
        self._lane(_ROLES, worker)
        self._end_role(worker, at)
        self._open[worker] = _OpenRole(role, at)
        self._see(at)

    def work(
        self, worker: str, name: str, start: float, end: float, details: Mapping[str, JsonValue] | None = None
    ) -> None:
        """One batch, weight load or other piece of work of a worker.

        A start before the end of the work before it is moved there, since a viewer drops slices that overlap; clocks
        of two processes never agree to the last microsecond.
        """
        self._slice(_WORK, worker, name, start, end, details or {})

    def move(
        self, worker: str, name: str, start: float, end: float, details: Mapping[str, JsonValue] | None = None
    ) -> None:
        """The worker changed, or tried to change, from one role to another."""
        self._slice(_MOVES, worker, name, start, end, details or {})

    def step(self, step: int, start: float, end: float, details: Mapping[str, JsonValue] | None = None) -> None:
        """One optimiser step."""
        self._slice(_ROLES, _STEPS_LANE, f"step {step}", start, end, details or {})

    def weights(self, worker: str, version: int, at: float) -> None:
        """An engine serves a new version of the weights from now on."""
        self._instant(_ROLES, worker, f"weights v{version}", at, "t", {"version": version})

    def cause(self, worker: str, cause: Cause, start: float, end: float) -> None:
        """What the worker's time went to."""
        style = CAUSES[cause]
        self._slice(_CAUSES, worker, style.words, start, end, {}, style.chrome)

    def staleness(self, mean: float, largest: int, at: float) -> None:
        """Of the trajectories of a step that ends now, in versions."""
        self._see(at)
        self._write(_counter(_STEPS, "staleness", at, {"mean": mean, "max": largest}))

    def lost(self, worker: str, at: float, text: str) -> None:
        """The worker is gone: its role is `failed`, and the moment is marked across all lanes."""
        self.role(worker, "failed", at)
        self._instant(_ROLES, worker, f"lost: {text}", at, "g", {})

    def turns(self, worker: str, running: int, at: float) -> None:
        """Turns that run in an engine from now on; unchanged numbers are not written."""
        if running < 0:
            raise ValueError(f"turns of {worker}: {running} cannot run")
        if self._turns.get(worker) == running:
            return
        self._turns[worker] = running
        self._see(at)
        self._write(_counter(_TURNS, worker, at, {"turns": running}))

    def close(self) -> None:
        """End what is open and finish the file; closing twice does nothing."""
        if self._file.closed:
            return
        self._room = max(self._room, len(self._open))  # what a worker did last is kept even in a full file
        for worker in list(self._open):
            self._end_role(worker, self._latest)
        self._file.write("\n]\n")
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_role(self, worker: str, at: float) -> None:
        ended = self._open.pop(worker, None)
        if ended is None:
            return
        style = role_styles(self._seen_roles)[ended.role]
        self._slice(_ROLES, worker, ended.role, ended.since, at, {}, style.chrome)

    def _slice(
        self,
        pid: int,
        lane_name: str,
        name: str,
        start: float,
        end: float,
        details: Mapping[str, JsonValue],
        chrome_colour: str | None = None,
    ) -> None:
        if end < start:
            raise ValueError(f"{name} of {lane_name} ends at {end} s, before its start at {start} s")
        lane = self._lane(pid, lane_name)
        begin = max(start, lane.end)
        finish = max(end, begin)
        lane.end = finish
        self._see(finish)
        shifted = {"reported_start": start} if begin > start else {}
        event: dict[str, Any] = {
            "ph": "X",
            "pid": pid,
            "tid": lane.tid,
            "name": name,
            "ts": _microseconds(begin),
            "dur": _microseconds(finish) - _microseconds(begin),
            "args": {**details, **shifted},
        }
        if chrome_colour is not None:
            event["cname"] = chrome_colour
        self._write(event)

    def _instant(
        self, pid: int, lane_name: str, name: str, at: float, scope: str, details: Mapping[str, JsonValue]
    ) -> None:
        tid = self._lane(pid, lane_name).tid
        self._see(at)
        self._write(
            {
                "ph": "i",
                "s": scope,
                "pid": pid,
                "tid": tid,
                "name": name,
                "ts": _microseconds(at),
                "args": dict(details),
            }
        )

    def _lane(self, pid: int, name: str) -> _Lane:
        if (pid, name) not in self._lanes:
            lane = _Lane(tid=len(self._lanes) + 1)
            self._lanes[pid, name] = lane
            order = 0 if name == _STEPS_LANE else lane.tid
            self._metadata("thread_name", pid, lane.tid, {"name": name})
            self._metadata("thread_sort_index", pid, lane.tid, {"sort_index": order})
        return self._lanes[pid, name]

    def _metadata(self, name: str, pid: int, tid: int, args: Mapping[str, JsonValue]) -> None:
        # Names of lanes are few and everything else is unreadable without them: they do not count against the bound.
        self._append({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": dict(args)})

    def _see(self, at: float) -> None:
        self._latest = max(self._latest, at)

    def _write(self, event: dict[str, Any]) -> None:
        if self._room > 0:
            self._append(event)
        elif self._room == 0:
            full = {"ph": "i", "s": "g", "pid": _ROLES, "tid": 0, "name": "timeline full: later events are not kept"}
            self._append({**full, "ts": event["ts"], "args": {}})
        self._room -= 1

    def _append(self, event: dict[str, Any]) -> None:
        if self._file.closed:
            raise ValueError("the timeline is closed; nothing can be added to it")
        separator = "\n" if self._first else ",\n"
        self._first = False
        self._file.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False))


def _counter(pid: int, name: str, at: float, values: Mapping[str, JsonValue]) -> dict[str, Any]:
    return {"ph": "C", "pid": pid, "name": name, "ts": _microseconds(at), "args": dict(values)}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
