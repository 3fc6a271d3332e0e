"""Figures of lending, from the histories of devices of a run or of a simulation. The bins of a figure divide the time
from the first recorded step to the last evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.lend.records.loan_history import LoanHistory, MissedRequest, RecallSpan
from libra.plan.transition import Role
from libra.report.charts import Figure, Series, line_figure, time_unit
from libra.report.lanes import Lane, LaneSpan, lane_figure
from libra.report.page import ROLES
from libra.report.vega import ALARM, Axis, Marker
from libra.report.words import count, duration, fine_duration, percent, plural

BINS = 120  # of a figure as wide as the page, eight pixels each; half as many in a half-width one
MOST_LANES = 16  # devices with a lane of their own
_SHADES = ("#1f83c030", "#1f83c060", "#1f83c098", "#1f83c0cc", "#1f83c0ff")  # one for each fifth of the time
_RECALLED = ROLES[Role.DRAINING]
_LENT, _GRANTED, _SERVING = "var(--blue)", "#9fd0ee", "#e69f00"
_EARLY = 10  # paces: the margin of a token is drawn up to this
_MARGINS = (  # quantile, name, colour
    (0.0, "minimum", "var(--deep)"),
    (0.1, "p10: one in ten is below", "#56b4e9"),
)
Spans = Sequence[tuple[float, float]]


def extent(histories: Sequence[LoanHistory]) -> tuple[float, float] | None:
    """Times of the first and the last recorded step of any device; None if no step is recorded."""
    times = [at for it in histories for spans in _spans(it) if spans for at in (spans[0][0], spans[-1][1])]
    return (min(times), max(times)) if times else None


def lending_figures(
    histories: Sequence[LoanHistory], since: str, markers: Sequence[tuple[float, str, str]] = (), seen: str = ""
) -> tuple[Figure, ...]:
    """Figures of the histories; none if nothing was lent. `since` names the origin of the time axis, `seen` says which
    steps of serving are recorded; `markers` are (moment, label, title)."""
    found = extent(histories)
    if found is None:
        return ()
    low, high = found
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    scale, unit = time_unit(edges[-1] - edges[0])
    x = Axis(f"time since {since} ({unit})", (edges[0] / scale, edges[-1] / scale))
    return (
        _devices(histories, edges, scale, x, [Marker(at / scale, label, title) for at, label, title in markers]),
        _shares(histories, edges[::2], scale, x, seen),
        _load(histories, edges[::2], scale, x),
        _margins(histories, edges[::2], scale, x),
        _requests(histories, edges[::2], scale, x),
    )


def versions_behind(points: Sequence[tuple[int, Sequence[int]]], x: Axis) -> Figure:
    """`points` are (step, versions that the weights of each lent engine are behind at the end of the step)."""
    title, note = (
        "Weights of lent engines",
        "No step waits for them: a turn goes to an engine whose weights are fresh enough for it.",
    )
    if not any(any(behind) for _, behind in points):
        return Figure(title, f"{note} At the end of every step all had the newest version.")
    series = [
        Series("furthest behind", "var(--deep)", [(step, max(behind)) for step, behind in points if behind]),
        Series("mean", "var(--blue)", [(step, sum(behind) / len(behind)) for step, behind in points if behind]),
    ]
    return line_figure(title, note, series, x, Axis("versions behind as a step ends"))


def covered(spans: Spans, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of each bin that is in one of the spans, which do not overlap.

    >>> covered([(0.5, 1.0), (1.5, 3.0)], np.array([0.0, 1.0, 2.0, 4.0])).tolist()
    [0.5, 0.5, 0.5]
    """
    if not spans:
        return np.zeros(len(edges) - 1)
    ends = np.array(spans, dtype=float).ravel()
    lengths = np.cumsum(ends[1::2] - ends[::2])
    known = np.empty(len(ends))
    known[::2], known[1::2] = np.concatenate(([0.0], lengths[:-1])), lengths
    shares: NDArray[np.float64] = np.diff(np.interp(edges, ends, known)) / np.diff(edges)
    return shares


def binned(
    points: Iterable[tuple[float, float]], edges: NDArray[np.float64], summary: Callable[[NDArray[np.float64]], Any]
) -> list[tuple[float, float]]:
    """(middle of a bin, summary of its values) for each bin with values.

    >>> binned([(0.1, 3.0), (0.2, 5.0), (2.5, 1.0)], np.array([0.0, 1.0, 2.0, 3.0]), np.max)
    [(0.5, 5.0), (2.5, 1.0)]
    """
    rows = np.array([(at, value) for at, value in points if edges[0] <= at <= edges[-1]], dtype=float).reshape(-1, 2)
    where = np.minimum(np.searchsorted(edges, rows[:, 0], side="right") - 1, len(edges) - 2)
    found = []
    for index in np.unique(where):
        middle = float(edges[index] + edges[index + 1]) / 2
        found.append((middle, float(summary(rows[where == index, 1]))))
    return found


def _pieces(
    name: str, colour: str, points: Sequence[tuple[float, float]], edges: NDArray[np.float64], scale: float
) -> list[Series]:
    """A line, broken at bins without values: the values in between are not known."""
    apart = 1.5 * (edges[1] - edges[0])
    pieces: list[list[tuple[float, float]]] = []
    last = -math.inf
    for at, value in points:
        if at - last > apart:
            pieces.append([])
        pieces[-1].append((at / scale, value))
        last = at
    return [Series(name, colour, piece) for piece in pieces]


def _middles(values: NDArray[np.float64], edges: NDArray[np.float64], scale: float) -> list[tuple[float, float]]:
    return list(zip(((edges[:-1] + edges[1:]) / 2 / scale).tolist(), values.tolist(), strict=True))


def _level(name: str, value: float, x: Axis) -> Series:
    assert x.ends is not None
    return Series(name, ALARM, [(x.ends[0], value), (x.ends[1], value)])


def _spans(it: LoanHistory) -> tuple[Spans, Spans]:
    return [(span.start, span.end) for span in it.grants], [(span.start, span.end) for span in it.serving]


def _devices(
    histories: Sequence[LoanHistory], edges: NDArray[np.float64], scale: float, x: Axis, markers: Sequence[Marker]
) -> Figure:
    lanes, (low, high) = [], (float(edges[0]), float(edges[-1]))
    for it in histories[:MOST_LANES]:
        spans = list(_shaded(it, covered(_spans(it)[0], edges), edges / scale))
        spans += [
            LaneSpan(
                max(span.start, low) / scale, min(span.end, high) / scale, span.why, _recall_words(it, span), _RECALLED
            )
            for span in it.recalls
            if max(span.start, low) < min(span.end, high)
        ]
        crosses = [(at / scale, _miss_words(miss)) for miss in it.missed() if low <= (at := miss.request.came) <= high]
        lanes.append(Lane(it.name, spans, crosses))
    legend = [(f"up to {20 * (number + 1)} %", colour) for number, colour in enumerate(_SHADES)]
    note = "Share of the time in which rollout computed; empty: none." + (
        " Crosses: a user's request missed its SLO." if any(lane.crosses for lane in lanes) else ""
    )
    if len(histories) > MOST_LANES:
        note += f" The first {MOST_LANES} of {plural(len(histories), 'device')} are shown."
    return lane_figure("Device by device", note, lanes, x, (*legend, ("recalled", _RECALLED)), markers)


def _shaded(it: LoanHistory, lent: NDArray[np.float64], edges: NDArray[np.float64]) -> Iterator[LaneSpan]:
    """Spans of consecutive bins with one shade."""
    shades = [min(len(_SHADES) - 1, math.ceil(share * len(_SHADES)) - 1) for share in lent]
    first = 0
    for index in range(1, len(shades) + 1):
        if index == len(shades) or shades[index] != shades[first]:
            if shades[first] >= 0:
                share = percent(float(lent[first:index].mean()), 0)
                yield LaneSpan(edges[first], edges[index], "", f"{it.name}: {share} lent", _SHADES[shades[first]])
            first = index


def _shares(
    histories: Sequence[LoanHistory],
    edges: NDArray[np.float64],
    scale: float,
    x: Axis,
    seen: str,
) -> Figure:
    lent = sum((covered(_spans(it)[0], edges) for it in histories), np.zeros(len(edges) - 1)) / len(histories)
    serving = sum((covered(_spans(it)[1], edges) for it in histories), np.zeros(len(edges) - 1)) / len(histories)
    granted = np.zeros(len(edges) - 1)
    for it in histories:
        starts = [span.start for span in it.grants]
        lengths = [max(span.granted, span.end - span.start) for span in it.grants]
        granted += np.histogram(starts, edges, weights=lengths)[0] / np.diff(edges) / len(histories)
    series = [
        Series("rollout computes", _LENT, _middles(100 * lent, edges, scale)),
        Series("granted to rollout", _GRANTED, _middles(100 * np.minimum(granted, 1.0), edges, scale)),
        Series("serving computes", _SERVING, _middles(100 * serving, edges, scale)),
    ]
    note = f"Means over all devices. {seen}".rstrip()
    return line_figure("Steps on the devices, by owner", note, series, x, Axis("% of the time", (0.0, 100.0)))


def _load(histories: Sequence[LoanHistory], edges: NDArray[np.float64], scale: float, x: Axis) -> Figure:
    title = "Load on serving"
    points = [(at, 100 * used) for it in histories for at, used in it.load]
    if not points:
        return Figure(title, "No load of serving is recorded.")
    series = [
        *_pieces("the most of any device", "var(--blue)", binned(points, edges, np.max), edges, scale),
        *_pieces("mean", "#56b4e9", binned(points, edges, np.mean), edges, scale),
        _level("above: nothing is lent", 100.0, x),
    ]
    note = "The quantity nearest to its limit: arrivals per second, live requests, their tokens, or waiting requests."
    return line_figure(title, note, series, x, Axis("% of the envelope"))


def _margins(histories: Sequence[LoanHistory], edges: NDArray[np.float64], scale: float, x: Axis) -> Figure:
    title = "How early tokens came"
    pace = max(it.pace for it in histories)
    points = [
        (span.end, 1e3 * min(span.margin, _EARLY * pace))
        for it in histories
        for span in it.serving
        if span.margin is not None
    ]
    if not points:
        return Figure(title, "No recorded serving step has a token with a due time.")
    late = sum(margin < 0 for _, margin in points)
    series = [
        piece
        for quantile, name, colour in _MARGINS
        for piece in _pieces(name, colour, binned(points, edges, partial(np.quantile, q=quantile)), edges, scale)
    ]
    note = (
        f"At each of {plural(len(points), 'serving step')}: time left before the earliest due token."
        f" {plural(late, 'was late', 'were late') if late else 'None was late'}."
        f" The pace is {fine_duration(pace)} a token; values above {fine_duration(_EARLY * pace)} are drawn there."
    )
    return line_figure(title, note, [*series, _level("due", 0.0, x)], x, Axis("ms before the due time"))


def _requests(histories: Sequence[LoanHistory], edges: NDArray[np.float64], scale: float, x: Axis) -> Figure:
    title = "Latencies of users' requests"
    known = [(it, it.slo) for it in histories if it.slo is not None]
    came = [(request, slo) for it, slo in known for request in it.requests if edges[0] <= request.came <= edges[-1]]
    first = [(request.came, 100 * request.ttft / slo.ttft) for request, slo in came]
    if not first:
        return Figure(title, "No user request is recorded in this time.")
    later = [(request.came, 100 * request.tpot / slo.tpot) for request, slo in came]
    series = [
        *_pieces("first token (TTFT)", "var(--blue)", binned(first, edges, np.max), edges, scale),
        *_pieces("per later token (TPOT)", "#e69f00", binned(later, edges, np.max), edges, scale),
        _level("above: missed", 100.0, x),
    ]
    requests = sum(len(it.requests) for it, _ in known)
    others = f"; {count(requests - len(first))} others arrived before or after" if requests > len(first) else ""
    note = f"The longest of the requests that arrived in each interval; {count(len(first))} in all{others}."
    return line_figure(title, note, series, x, Axis("% of the SLO"))


def _miss_words(miss: MissedRequest) -> str:
    what = " and ".join(name for name, was in (("first token", miss.ttft), ("pace", miss.tpot)) if was)
    return f"request {miss.request.number:,} missed its SLO: {what}"


def _recall_words(it: LoanHistory, span: RecallSpan) -> str:
    return f"{it.name} is recalled from {duration(span.start)} to {duration(span.end)}: {span.why}"
