"""A simulation as a Chrome trace: what each request did on its engine, and how full the engine was.

Invariant: on every row slices follow each other without overlap, rows are as few as requests are there at once, and the
file holds at most `max_events` events besides the names of engines and rows; where requests are too many, every k-th is
drawn, and the trace says so.

Open the file in https://ui.perfetto.dev or chrome://tracing. A group for each engine: its counters, a row of pauses for
new weights, and rows of requests (queued, prefill, KV transfer, decode). Times are to the nanosecond.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from libra.report.timeline import MAX_EVENTS
from libra.sim.clock import TICKS
from libra.sim.engine_series import EngineSeries
from libra.sim.request_columns import ENDS
from libra.sim.result import SimulationResult

_COUNTERS = 0.4  # of the events at most
_OF_A_REQUEST = 4  # slices at most
_NANOSECOND = TICKS // 10**9
_NOWHERE = 0  # group of requests that were sent to no engine; those of engines follow
_PAUSES = 1  # row of a group; those of requests follow
_COLOURS = {
    "queued": "grey",
    "prefill": "rail_response",
    "KV transfer": "yellow",
    "decode": "rail_load",
    "new weights": "thread_state_iowait",
}

Event = dict[str, Any]


def write_simulation_timeline(result: SimulationResult, path: Path | str, max_events: int = MAX_EVENTS) -> None:
    """Write the trace. Counters and pauses are there if somebody watched."""
    with open(path, "w", encoding="utf-8") as file:
        file.write("[")
        for number, event in enumerate(timeline_events(result, max_events)):
            file.write(",\n" if number else "\n")
            file.write(json.dumps(event, separators=(",", ":"), allow_nan=False))
        file.write("\n]\n")


def timeline_events(result: SimulationResult, max_events: int = MAX_EVENTS) -> Iterator[Event]:
    """The events, in no particular order of time: the viewers sort them."""
    if max_events < 1:
        raise ValueError(f"max_events is {max_events}; write 1 or more")
    room = max_events
    for index, (engine, series) in enumerate(_watched(result)):
        yield _name("process_name", index + 1, 0, engine)
        yield {**_name("process_sort_index", index + 1, 0, ""), "args": {"sort_index": index + 1}}
        if series is not None and series.pauses:
            yield _name("thread_name", index + 1, _PAUSES, "weight updates")
    rows = sum(len(series) + 1 for series in result.series)
    merge = -(-2 * rows // max(1, int(_COUNTERS * max_events)))
    for index, (_, series) in enumerate(_watched(result)):
        if series is None:
            continue
        blocks = result.engines[index].config.kv_blocks
        for event in islice(_counters(series.merged(merge), index + 1, blocks), room):
            room -= 1
            yield event
        for start, end in series.pauses[:room]:
            room -= 1
            yield _slice(index + 1, _PAUSES, "new weights", start, end, {})
    yield from _requests(result, room)


def _watched(result: SimulationResult) -> Iterator[tuple[str, EngineSeries | None]]:
    series = result.series or (None,) * len(result.engines)
    return ((engine.name, its) for engine, its in zip(result.engines, series, strict=True))


def _counters(series: EngineSeries, group: int, blocks: int) -> Iterator[Event]:
    if not len(series):
        return
    columns = (series.edges[:-1], series.running, series.waiting, series.held / blocks)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for tick, running, waiting, held in (*rows, (int(series.edges[-1]), 0, 0, 0)):
        at = {"ph": "C", "pid": group, "ts": _microseconds(tick)}
        yield {**at, "name": "requests", "args": {"running": round(running, 3), "waiting": round(waiting, 3)}}
        yield {**at, "name": "KV held", "args": {"share": round(held, 6)}}


def _requests(result: SimulationResult, room: int) -> Iterator[Event]:
    requests = result.requests
    came = np.flatnonzero(requests.arrival <= result.end)
    every = max(1, -(-_OF_A_REQUEST * len(came) // room)) if room else len(came) + 1
    if every > 1:
        drawn = f"every {every}th" if room >= _OF_A_REQUEST else "none"
        note = f"{drawn} of {len(came):,} requests is drawn: all are more than the file may hold"
        yield {"ph": "i", "s": "g", "pid": _NOWHERE, "tid": 0, "name": note, "ts": _microseconds(result.start)}
    free: defaultdict[int, list[int]] = defaultdict(list)  # rows of a group that nobody is on
    taken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # (until, row)
    used: defaultdict[int, int] = defaultdict(int)
    for index in came[::every].tolist():
        group = int(requests.engine[index]) + 1
        status = ENDS[int(requests.status[index])]
        slices = list(_phases(result, index))
        about = _about(result, index, status)
        if not slices:
            at = _microseconds(int(requests.arrival[index]))
            name = f"{status}: {about['request']}"
            yield {"ph": "i", "s": "p", "pid": group, "tid": 0, "name": name, "ts": at, "args": about}
            continue
        start, end = slices[0][1], slices[-1][2]
        while taken[group] and taken[group][0][0] <= start:
            heappush(free[group], heappop(taken[group])[1])
        if not free[group]:
            used[group] += 1
            row = _PAUSES + used[group]
            yield _name("thread_name", group, row, f"requests {used[group]}")
        else:
            row = heappop(free[group])
        heappush(taken[group], (end, row))
        for name, since, until in slices:
            yield _slice(group, row, name, since, until, about)


def _phases(result: SimulationResult, index: int) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of what a request went through, as far as it came; nothing if it was never queued."""
    requests = result.requests
    finish = int(requests.finish[index])
    end = result.end if finish < 0 else finish
    since = int(requests.arrival[index])
    if requests.engine[index] < 0 or requests.ended("refused")[index]:
        return
    for name, column in (
        ("queued", requests.scheduled),
        ("prefill", requests.prefill_end),
        ("KV transfer", requests.first_token),
        ("decode", None),
    ):
        until = end if column is None or column[index] < 0 else min(int(column[index]), end)
        if until > since:
            yield name, since, until
        since = until
        if column is not None and column[index] < 0:
            return


def _about(result: SimulationResult, index: int, status: str) -> dict[str, Any]:
    requests = result.requests
    reason, trajectory = int(requests.reason[index]), int(requests.trajectory[index])
    told: dict[str, Any] = {"request": int(requests.number[index]), "status": status}
    if trajectory >= 0:
        told |= {"trajectory": requests.trajectories[trajectory], "turn": int(requests.turn[index])}
    told |= {
        "prompt_tokens": int(requests.prompt[index]),
        "output_tokens": int(requests.output[index]),
        "cached_tokens": int(requests.cached[index]),
        "preemptions": int(requests.preemptions[index]),
    }
    return told if reason < 0 else {**told, "reason": requests.reasons[reason]}


def _name(kind: str, group: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": group, "tid": row, "args": {"name": name}}


def _slice(group: int, row: int, name: str, start: int, end: int, about: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "pid": group,
        "tid": row,
        "name": name,
        "cname": _COLOURS[name],
        "ts": _microseconds(start),
        "dur": (end // _NANOSECOND - start // _NANOSECOND) / 1000,
        "args": about,
    }


def _microseconds(tick: int) -> float:
    return tick // _NANOSECOND / 1000
