"""The charts of a simulation: distributions of latencies, and the load of engines over time.

Notes mention values that do not fit on a chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.report.charts import MAX_POINTS, Figure, Series, line_figure, time_unit
from libra.report.simulation_view import SimulationView
from libra.report.vega import Axis, Marker
from libra.report.words import count, fine_duration
from libra.sim.clock import TICKS, seconds
from libra.sim.outcome.metrics import Durations, Spread, durations, spread
from libra.sim.outcome.over_time import mean_present_by

Rows = NDArray[np.float64]  # [engine, bin]

COLOURS = ("var(--blue)", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MOST_LINES = len(COLOURS)  # engines with a line each; more engines get lines for mean and extremes
_MOST_MARKERS = 12
_NEUTRAL = "#8a949e"
_LONG = 2.5  # times P99: a longer maximum would flatten the curve

_SHARES = Axis("share within this time (%)", (0.0, 100.0))


def latency_figures(view: SimulationView) -> tuple[Figure, ...]:
    """A cumulative distribution for each latency that the result has."""
    took = durations(view.result.requests)
    first = [("TTFT", took["ttft"]), ("queueing", took["queueing"])]
    if view.metrics.ttft != view.metrics.ttft_prefill:
        first.insert(1, ("TTFT at prefill end", took["ttft_prefill"]))
    shown: list[tuple[str, Sequence[tuple[str, Durations]]]] = [
        ("Time to first token", first),
        ("Time per output token", [("TPOT", took["tpot"])]),
        ("End to end", [("end to end", took["latency"])]),
    ]
    if view.metrics.trajectories:
        shown.append(("Trajectories", [("first arrival to last finish", took["trajectory_latency"])]))
    drawn = [(title, curves) for title, curves in shown if len(curves[0][1])]
    # Two figures share a row; the last of an odd number has a row to itself.
    wide = len(drawn) if len(drawn) % 2 else 0
    return tuple(
        _distribution(title, curves, wide=place == wide) for place, (title, curves) in enumerate(drawn, start=1)
    )


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """A time axis of equal intervals, from the first arrival to the last end."""

    edges: NDArray[np.int64]  # ticks
    since: NDArray[np.float64]  # time of each edge since the first arrival, in the unit of the axis
    axis: Axis
    markers: Sequence[Marker]  # engines stop for new weights

    @property
    def middles(self) -> NDArray[np.float64]:
        return (self.since[:-1] + self.since[1:]) / 2

    def points(self, values: NDArray[np.float64]) -> list[tuple[float, float]]:
        """Points at the middles of the intervals, with a value for each."""
        return list(zip(self.middles.tolist(), values.tolist(), strict=True))

    def lines(self, title: str, label: str, names: Sequence[str], values: Rows, of: str, more: str = "") -> Figure:
        """A figure with a line for each of `names`; with many names, lines for extremes and mean."""
        intervals = f"means over {count(len(self.middles))} equal intervals."
        if len(names) <= _MOST_LINES:
            lines, note = dict(zip(names, values, strict=True)), intervals.capitalize()
        else:
            lines = {"largest": values.max(axis=0), "mean": values.mean(axis=0), "smallest": values.min(axis=0)}
            note = f"Largest, mean and smallest of {count(len(names))} {of}; {intervals}"
        note += more + (" Dashed: engines stopped for new weights." if self.markers else "")
        series = [
            Series(name, colour, self.points(line))
            for (name, line), colour in zip(lines.items(), COLOURS, strict=False)
        ]
        return line_figure(title, note, series, self.axis, Axis(label), self.markers)


def time_axis(view: SimulationView) -> TimeAxis | None:
    """The time axis; None if everything happened at one instant."""
    result = view.result
    if not result.makespan:
        return None
    edges = np.unique(
        np.linspace(result.start, result.start + result.makespan, MAX_POINTS + 1).round().astype(np.int64)
    )
    scale, unit = time_unit(seconds(result.makespan))
    axis = Axis(f"time since the first arrival ({unit})", (0.0, seconds(result.makespan) / scale))
    return TimeAxis(edges, (edges - result.start) / (TICKS * scale), axis, _pauses(view, scale))


def time_figures(view: SimulationView) -> tuple[Figure, ...]:
    """Figures over time: arrivals and ends, and, if recorded, running requests and held KV."""
    time = time_axis(view)
    if time is None:
        return (Figure("Over time", "Everything happened at one instant."),)
    result = view.result
    names = [engine.name for engine in result.engines]

    def of_engines(title: str, label: str, values: Rows, more: str = "") -> Figure:
        return time.lines(title, label, names, values, "engines", more)

    waiting = _waiting(view, time.edges)
    figures = [
        _flow_figure(view, time),
        of_engines("Waiting requests", "requests not yet in a batch", waiting, " Preempted ones are not counted."),
    ]
    if result.series:
        running, held = np.array([series.over(time.edges) for series in result.series]).swapaxes(0, 1)
        blocks = np.array([[engine.config.kv_blocks] for engine in result.engines])
        figures.append(of_engines("Running requests", "requests in the batch", running))
        figures.append(of_engines("KV held", "KV blocks held (%)", 100 * held / blocks))
    else:
        why = "This simulation did not record the load of its engines."
        figures.append(Figure("Requests and KV of the engines", why))
    return tuple(figures)


def _waiting(view: SimulationView, edges: NDArray[np.int64]) -> Rows:
    """[engine, bin] mean number of requests between arrival and first iteration, or end without an iteration. Requests
    that change engines wait for their prefill engine, then for their pull.
    """
    requests, result, transfers = view.result.requests, view.result, view.result.transfers
    ended = np.where(requests.finish < 0, result.end, requests.finish)
    until = np.where(requests.scheduled < 0, ended, requests.scheduled)
    where, begins, ends = [requests.engine.copy()], [requests.arrival], [until]
    if transfers is not None:
        where[0][transfers.row] = transfers.source
        rows = transfers.row
        reserved = np.where(transfers.reserved < 0, ended[rows], transfers.reserved)
        where.append(transfers.target)
        ends.append(reserved)
        if transfers.network.push:
            begins.append(requests.arrival[rows])
            begins[0] = requests.arrival.copy()
            begins[0][rows] = reserved
        else:
            begins.append(transfers.computed)
    engine, since, till = (np.concatenate(columns) for columns in (where, begins, ends))
    return mean_present_by(engine, len(result.engines), since, till, edges)


def _distribution(title: str, curves: Sequence[tuple[str, Durations]], *, wide: bool) -> Figure:
    found: Spread | None = spread(curves[0][1])
    assert found is not None
    limit = found.max if found.max <= _LONG * found.p99 else found.p99 * _LONG
    scale, unit = fine_unit(limit)
    series = [
        Series(name, colour, [(x / scale, y) for x, y in _cumulative(values) if x <= limit])
        for (name, values), colour in zip(curves, COLOURS, strict=False)
    ]
    longest = max((x for one in series for x, _ in one.points), default=0.0)
    x_axis = Axis(f"time ({unit})", (0.0, 1.02 * longest or 1.0))
    markers = [
        Marker(value / scale, name, f"{name}: {fine_duration(value)}")
        for name, value in (("P50", found.p50), ("P99", found.p99))
    ]
    beyond = "" if limit == found.max else f" Up to {fine_duration(found.max)}, beyond the chart."
    note = f"Mean {fine_duration(found.mean)}, P50 {fine_duration(found.p50)}, P99 {fine_duration(found.p99)}.{beyond}"
    return line_figure(title, note, series, x_axis, _SHARES, markers, wide)


def _cumulative(values: Durations) -> list[tuple[float, float]]:
    """Cumulative distribution: (seconds, percent of values up to it), in rising order, with at most `MAX_POINTS`
    points.
    """
    ordered = np.sort(values)
    total = len(ordered)
    ranks = np.unique(np.linspace(1, total, min(total, MAX_POINTS - 1)).round().astype(np.int64))
    times = (ordered[ranks - 1] / TICKS).tolist()
    return [(times[0], 0.0), *zip(times, (100 * ranks / total).tolist(), strict=True)]


def fine_unit(longest: float) -> tuple[float, str]:
    if longest < 1e-3:
        return 1e-6, "µs"
    return (1e-3, "ms") if longest < 1 else time_unit(longest)


def _flow_figure(view: SimulationView, time: TimeAxis) -> Figure:
    requests = view.result.requests
    series = []
    for name, colour, ticks in (
        ("arrived", _NEUTRAL, np.sort(requests.arrival)),
        ("finished", COLOURS[0], np.sort(requests.finish[requests.ended("finished")])),
    ):
        so_far = np.searchsorted(ticks, time.edges[1:], "right")
        series.append(Series(name, colour, list(zip(time.since[1:].tolist(), so_far.tolist(), strict=True))))
    note = "Between the lines: requests that queue, run, or never finish."
    if view.tail is not None and not view.result.partial:
        last = fine_duration(view.tail * view.metrics.makespan)
        note += f" The last tenth of the finished ones takes {last}."
    return line_figure("Arrived and finished", note, series, time.axis, Axis("requests so far"))


def _pauses(view: SimulationView, scale: float) -> list[Marker]:
    """The moments at which engines paused for new weights, one for each interval; empty if there are too many to
    distinguish.
    """
    result = view.result
    stretch = result.makespan / MAX_POINTS
    moments: list[int] = []
    for start in sorted({start for series in result.series for start, _ in series.pauses if start >= result.start}):
        if not moments or start - moments[-1] > stretch:
            moments.append(start)
    if len(moments) > _MOST_MARKERS:
        return []
    since = [seconds(moment - result.start) for moment in moments]
    return [Marker(it / scale, "", f"new weights after {fine_duration(it)}") for it in since]
