"""A simulation as a trace: the phases of each request on its engine, and the load of the engine.

Each engine has a group: counters (also of its network, if KV is transferred), a row of pauses for new weights, and rows
of requests. The phases of a request are queued, prefill and decode; with roles also KV kept, waiting to pull, and KV
transfer. Slices of a row never overlap, and rows are as few as concurrent requests allow. With too many requests for
the file, one in k is drawn, and the trace says so. Times are exact to the nanosecond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.records.trace import MAX_EVENTS, TraceFile
from libra.sim.clock import TICKS
from libra.sim.outcome.occupancy import EngineSeries
from libra.sim.outcome.result import ENDS, SimulationResult
from libra.sim.outcome.transfers import Transfers, link_use

_COUNTERS = 0.4  # largest share of the events
_NANOSECOND = TICKS // 10**9
_NOWHERE = 0  # group of requests that were sent to no engine; groups of engines follow
_PAUSES = 1  # row of pauses in a group; rows of requests follow
_PHASES = ("queued", "prefill", "decode")
_MOST_SLICES = 7  # of a request
_LINK_BINS = 1_000  # of a counter
_COLOURS = {
    "queued": "grey",
    "prefill": "rail_response",
    "KV kept": "rail_idle",
    "waiting to pull": "grey",
    "waiting for decode": "grey",
    "blocks reserved": "rail_load",
    "KV transfer": "yellow",
    "decode": "rail_load",
    "new weights": "thread_state_iowait",
}


def write_simulation_trace(result: SimulationResult, path: Path | str, max_events: int = MAX_EVENTS) -> None:
    """Write the trace. Events are unordered, since viewers sort them. Counters and pauses are drawn if the result has
    series.
    """
    with closing(TraceFile(path, max_events)) as trace:
        for group, engine in enumerate(result.engines, start=1):
            trace.name_group(group, engine.name, group)
        if (result.requests.engine < 0).any():
            trace.name_group(_NOWHERE, "no engine", _NOWHERE)
        rows = sum(len(series) + 1 for series in result.series)
        merge = -(-2 * rows // max(1, int(_COUNTERS * max_events)))
        _network(trace, result, int(_COUNTERS * max_events) // 2)
        for index, series in enumerate(result.series):
            if series.pauses:
                trace.name_lane(index + 1, _PAUSES, "weight updates", _PAUSES)
            _counters(trace, series.merged(merge), index + 1, result.engines[index].config.kv_blocks)
            for start, end in series.pauses[: trace.room]:
                _slice(trace, index + 1, _PAUSES, "new weights", start, end, {})
        _requests(trace, result)


def _counters(trace: TraceFile, series: EngineSeries, group: int, blocks: int) -> None:
    if not len(series):
        return
    columns = (series.edges[:-1], series.running, series.waiting, series.held / blocks)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for tick, running, waiting, held in (*rows, (int(series.edges[-1]), 0, 0, 0)):
        if trace.room < 2:
            return
        at = _microseconds(tick)
        trace.counter(group, "requests", at, {"running": round(running, 3), "waiting": round(waiting, 3)})
        trace.counter(group, "KV held", at, {"share": round(held, 6)})


def _network(trace: TraceFile, result: SimulationResult, most: int) -> None:
    """Draw the KV that each engine sends or receives over time."""
    transfers = result.transfers
    if transfers is None or not len(transfers) or not result.makespan:
        return
    ways = [engine.role for engine in result.engines]
    bins = min(_LINK_BINS, most // sum(role != "colocated" for role in ways))
    if bins < 1:
        return
    edges = np.unique(np.linspace(result.start, result.start + result.makespan, bins + 1).round().astype(np.int64))
    sends, receives = link_use(transfers, edges)
    for engine, role in enumerate(ways):
        use = sends if role == "prefill" else receives
        if role != "colocated":
            for tick, used, sharing in zip(edges.tolist(), use.used[engine], use.sharing[engine], strict=False):
                about = {"used": round(float(used), 6), "transfers": round(float(sharing), 3)}
                trace.counter(engine + 1, "KV out" if role == "prefill" else "KV in", _microseconds(tick), about)


def _requests(trace: TraceFile, result: SimulationResult) -> None:
    came = np.flatnonzero(result.requests.arrival <= result.end)
    slices = len(_PHASES) if result.transfers is None else _MOST_SLICES
    most = trace.room // slices
    every = -(-len(came) // most) if most else 0
    if len(came) and every != 1:
        drawn = f"1 in {every:,}" if every else "none"
        note = f"{drawn} of {len(came):,} requests is drawn: all are more than the file may hold"
        trace.room += 1  # for this note
        trace.instant(_NOWHERE, 0, note, _microseconds(result.start), {}, scope="g")
    rows: defaultdict[int, _Rows] = defaultdict(_Rows)
    stays = _drawn(result, came[::every] if every else came[:0])
    if result.transfers is not None:  # stays on decode engines do not begin in the order of arrival
        stays = iter(sorted(stays, key=lambda stay: stay.slices[0][1] if stay.slices else stay.arrival))
    for stay in stays:
        if not stay.slices:
            name = f"{stay.about['status']}: request {stay.about['request']}"
            trace.instant(stay.group, 0, name, _microseconds(stay.arrival), stay.about, scope="p")
            continue
        row = rows[stay.group].take(stay.slices[0][1], stay.slices[-1][2])
        if row > rows[stay.group].named:
            rows[stay.group].named = row
            trace.name_lane(stay.group, _PAUSES + row, f"requests {row}", _PAUSES + row)
        for name, since, until in stay.slices:
            _slice(trace, stay.group, _PAUSES + row, name, since, until, stay.about)


class _Rows:
    """The rows of a group; each request takes the first free row."""

    def __init__(self) -> None:
        self.named = 0  # rows that have a name already
        self._rows = 0
        self._free: list[int] = []
        self._taken: list[tuple[int, int]] = []  # (until, row)

    def take(self, start: int, end: int) -> int:
        """Take a row from `start` to `end`; `start` never decreases from call to call."""
        while self._taken and self._taken[0][0] <= start:
            heappush(self._free, heappop(self._taken)[1])
        if self._free:
            row = heappop(self._free)
        else:
            self._rows += 1
            row = self._rows
        heappush(self._taken, (end, row))
        return row


@dataclass(frozen=True, slots=True)
class _Stay:
    """The time of a request on one engine."""

    group: int
    arrival: int
    slices: tuple[tuple[str, int, int], ...]  # (name, start, end), each from the end of the one before
    about: dict[str, Any]


def _drawn(result: SimulationResult, indices: NDArray[np.intp]) -> Iterator[_Stay]:
    requests = result.requests
    columns = (
        requests.engine,
        requests.arrival,
        requests.scheduled,
        requests.prefill_end,
        requests.first_token,
        requests.finish,
        requests.status,
        requests.number,
        requests.prompt,
        requests.output,
        requests.cached,
        requests.preemptions,
        requests.reason,
        requests.trajectory,
        requests.turn,
    )
    handed = {} if result.transfers is None else {row: at for at, row in enumerate(result.transfers.row.tolist())}
    for (
        row,
        engine,
        arrival,
        *times,
        code,
        number,
        prompt,
        output,
        cached,
        preemptions,
        reason,
        trajectory,
        turn,
    ) in zip(indices.tolist(), *(column[indices].tolist() for column in columns), strict=True):
        status = ENDS[code]
        about: dict[str, Any] = {
            "request": number,
            "status": status,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "cached_tokens": cached,
            "preemptions": preemptions,
        }
        if trajectory >= 0:
            about |= {"trajectory": requests.trajectories[trajectory], "turn": turn}
        if reason >= 0:
            about["reason"] = requests.reasons[reason]
        queued = engine >= 0 and status != "refused"
        scheduled, prefill_end, _, finish = times
        at = handed.get(row)
        if at is not None and result.transfers is not None:
            yield from _handed_over(result, result.transfers, at, (arrival, scheduled, prefill_end, finish), about)
            continue
        phases = zip(_PHASES, (scheduled, prefill_end, finish), strict=True)
        yield _Stay(engine + 1, arrival, tuple(_slices(arrival, phases, result.end, finish)) if queued else (), about)


def _handed_over(
    result: SimulationResult, transfers: Transfers, at: int, times: tuple[int, int, int, int], about: dict[str, Any]
) -> Iterator[_Stay]:
    """Yield the stays on the engine that computed the prompt, until its KV was released, and on the decode engine."""
    arrival, scheduled, prefill_end, finish = times
    columns = (transfers.source, transfers.target, transfers.sent, transfers.came, transfers.released)
    source, target, sent, came, released = (int(column[at]) for column in columns)
    begun, reserved, computed = (
        int(column[at]) for column in (transfers.begun, transfers.reserved, transfers.computed)
    )
    first = [("queued", scheduled), ("prefill", prefill_end), ("KV kept", released)]
    then = [("KV transfer", sent if came < 0 else came), ("decode", finish)]
    asked, comes = arrival, prefill_end
    if transfers.network.push:
        asked, comes = reserved, arrival
        then = [("waiting for decode", reserved), ("blocks reserved", computed), *then]
    else:
        then = [("waiting to pull", begun), *then]
    if asked >= 0:
        yield _Stay(source + 1, asked, tuple(_slices(asked, first, result.end)), about)
    slices = tuple(_slices(comes, then, result.end, finish))
    if slices:
        yield _Stay(target + 1, comes, slices, about)


def _slices(
    since: int, phases: Iterable[tuple[str, int]], end: int, finish: int = -1
) -> Iterator[tuple[str, int, int]]:
    """Yield the phases of a request until tick `end`, as (name, start, end). `phases` has the tick at which each phase
    ends, or -1 if it does not end. Phases without duration are left out.
    """
    for name, tick in phases:
        until = end if tick < 0 else min(tick, end)
        # The phases of a cancelled request end with it.
        until = min(until, finish) if finish >= 0 else until
        if until > since:
            yield name, since, until
        if tick < 0:
            return
        since = until


def _slice(trace: TraceFile, group: int, row: int, name: str, start: int, end: int, about: dict[str, Any]) -> None:
    duration = (end // _NANOSECOND - start // _NANOSECOND) / 1000
    trace.slice(group, row, name, _microseconds(start), duration, about, _COLOURS[name])


def _microseconds(tick: int) -> float:
    return tick // _NANOSECOND / 1000
