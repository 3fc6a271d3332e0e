"""Trace files for https://ui.perfetto.dev and chrome://tracing (the Trace Event Format, as a JSON array).

The file is readable at any moment, also after a kill. It has at most `max_events` events, plus names. A full file ends
with a note that later events are missing. Times are in microseconds. The caller numbers and names groups and lanes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

MAX_EVENTS = 500_000  # about 60 MB of JSON, which viewers can still open

JsonValue = str | int | float


class TraceFile:
    """Appends events to `path`; `close` may be called twice."""

    def __init__(self, path: Path | str, max_events: int = MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError(f"max_events is {max_events}; write 1 or more")
        self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives until close()
        self._file.write("[")
        self._first = True
        self.room = max_events  # events that still fit

    def name_group(self, group: int, name: str, order: int) -> None:
        self._append({"ph": "M", "name": "process_name", "pid": group, "tid": 0, "args": {"name": name}})
        self._append({"ph": "M", "name": "process_sort_index", "pid": group, "tid": 0, "args": {"sort_index": order}})

    def name_lane(self, group: int, lane: int, name: str, order: int) -> None:
        self._append({"ph": "M", "name": "thread_name", "pid": group, "tid": lane, "args": {"name": name}})
        self._append({"ph": "M", "name": "thread_sort_index", "pid": group, "tid": lane, "args": {"sort_index": order}})

    def slice(
        self,
        group: int,
        lane: int,
        name: str,
        start: float,
        duration: float,
        args: Mapping[str, Any],
        colour: str | None = None,
    ) -> None:
        """Add a span of time. `colour` is a name from the viewers' palette. Viewers drop overlapping slices of a
        lane."""
        where = {"ph": "X", "pid": group, "tid": lane, "name": name, "ts": start, "dur": duration, "args": dict(args)}
        self._write(where if colour is None else {**where, "cname": colour})

    def instant(
        self, group: int, lane: int, name: str, at: float, args: Mapping[str, Any], scope: Literal["t", "p", "g"] = "t"
    ) -> None:
        """Mark a time in a lane ("t"), in a group ("p"), or in the whole trace ("g")."""
        self._write({"ph": "i", "s": scope, "pid": group, "tid": lane, "name": name, "ts": at, "args": dict(args)})

    def counter(self, group: int, name: str, at: float, values: Mapping[str, float]) -> None:
        self._write({"ph": "C", "pid": group, "name": name, "ts": at, "args": dict(values)})

    def close(self) -> None:
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def _write(self, event: dict[str, Any]) -> None:
        if self.room == 0:
            note = "timeline full: later events are not kept"
            event = {"ph": "i", "s": "g", "pid": event["pid"], "tid": 0, "name": note, "ts": event["ts"], "args": {}}
        if self.room >= 0:
            self._append(event)
            self.room -= 1

    def _append(self, event: dict[str, Any]) -> None:
        if self._file.closed:
            raise ValueError("the trace is closed: add events before close")
        self._file.write(("\n" if self._first else ",\n") + json.dumps(event, separators=(",", ":"), allow_nan=False))
        self._first = False
