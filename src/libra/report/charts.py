"""Figures from plain numbers, independent of runs.

Each kind of chart is one function from values to a `Figure`. A figure with many points shows means of consecutive
points, so that every point counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
from markupsafe import Markup

from libra.report.vega import (
    FULL,
    HALF,
    LETTER,
    SIDES,
    Axis,
    Marker,
    draw,
    layer,
    marker_layers,
    unchecked,
)
from libra.report.words import plain

MAX_POINTS = 240  # of one line; each has two pixels at the width of a figure
MAX_COLUMNS = 110
_HEIGHT = 175  # px, of a plot

NO_CHART = Markup("")
Legend = tuple[tuple[str, str], ...]  # (name, colour)


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart, or a note with the reason why there is no chart."""

    title: str
    note: str
    chart: Markup = NO_CHART
    legend: Legend = ()
    wide: bool = False  # as wide as the page; otherwise two figures share a row


@dataclass(frozen=True, slots=True)
class Series:
    """Named points; dots for noisy measurements, a line for values that hold between the points."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """Two bars side by side, with a note above them."""

    label: str
    left: float
    right: float
    note: str
    title: str
    faded: bool


def group_size(rows: int, limit: int) -> int:
    """Number of consecutive rows that `thin` merges into one."""
    return max(1, math.ceil(rows / limit))


def thin(rows: Sequence[tuple[float, ...]], limit: int) -> list[tuple[float, ...]]:
    """At most `limit` rows. Each is the column-wise mean of `group_size(len(rows), limit)` consecutive rows; the last
    is the mean of the rows that remain.

    >>> thin([(0.0, 1.0), (1.0, 3.0), (2.0, 9.0)], 2)
    [(0.5, 2.0), (2.0, 9.0)]
    """
    size = group_size(len(rows), limit)
    groups = (rows[i : i + size] for i in range(0, len(rows), size))
    return [tuple(sum(column) / len(group) for column in zip(*group, strict=True)) for group in groups]


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """Seconds of the most readable unit for a time axis of this length, and the unit's name."""
    if longest_seconds <= 180:
        return 1.0, "s"
    return (60.0, "min") if longest_seconds <= 3 * 3600 else (3600.0, "h")


@unchecked
def line_figure(
    title: str,
    note: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    markers: Sequence[Marker] = (),
    wide: bool = False,
    height: int = _HEIGHT,
) -> Figure:
    """A figure of lines and dots; series without points are only in the legend."""
    width = FULL if wide else HALF
    layers = [drawn for one in series if one.points for drawn in _series(one, x, y)]
    chart = draw(alt.layer(*layers, *marker_layers(markers, x, width)), y.label, width, height, bool(markers))
    return Figure(title, note, chart, _legend(series), wide)


@unchecked
def column_figure(
    title: str,
    note: str,
    parts: Sequence[Series],
    x: Axis,
    y: Axis,
    markers: Sequence[Marker] = (),
    wide: bool = False,
    overlay: Series | None = None,
) -> Figure:
    """Stacked columns of parts at evenly spaced x, with an optional line across them."""
    width = FULL if wide else HALF
    points = zip(*(part.points for part in parts), strict=True)
    columns = thin([(its[0][0], *(value for _, value in its)) for its in points], MAX_COLUMNS)
    step = columns[1][0] - columns[0][0] if len(columns) > 1 else 1.0
    half = step * (0.51 if len(columns) > width / 12 else 0.44)
    rows = []
    for at, *values in columns:
        below = 0.0
        for part, value in zip(parts, values, strict=True):
            words = f"{x.label} {plain(at)}: {part.name} {plain(value)}"
            place = {"x": at - half, "x2": at + half, "y": below, "y2": below + value}
            if value:
                rows.append({**place, "color": part.colour, "description": words})
            below += value
    bars = layer("rect", rows, x, y)
    over = [] if overlay is None else _series(overlay, x, y)
    chart = draw(alt.layer(bars, *marker_layers(markers, x, width), *over), y.label, width, _HEIGHT, bool(markers))
    return Figure(title, note, chart, _legend(parts if overlay is None else (*parts, overlay)), wide)


@unchecked
def pair_figure(title: str, note: str, pairs: Sequence[Pair], sides: Legend, x_label: str, y: Axis) -> Figure:
    """Pairs of bars across the page. If there is no room for the notes, only the titles contain them."""
    rows, notes = [], []
    for number, pair in enumerate(pairs):
        look = {"opacity": 0.4 if pair.faded else 1.0, "description": pair.title}
        for side, value in enumerate((pair.left, pair.right)):
            rows.append({"n": number, "side": side, "y": value, "color": sides[side][1], **look})
        notes.append({"n": number, "y": max(pair.left, pair.right), "text": pair.note})
    named = f"{json.dumps([pair.label for pair in pairs])}[datum.value]"
    between = max(0.2, 1 - 54 * len(pairs) / (FULL - SIDES))  # so that no bar is wider than 27 px
    x = alt.X(
        "n:O",
        title=x_label,
        axis=alt.Axis(labelAngle=0, labelExpr=named, labelOverlap="greedy"),
        scale=alt.Scale(paddingInner=between, paddingOuter=between / 2),
    )
    bars = layer("bar", rows, x, y).encode(xOffset=alt.XOffset("side:O", scale=alt.Scale(padding=0.04)))
    layers = [bars]
    if max(len(pair.note) for pair in pairs) * LETTER * len(pairs) <= FULL - SIDES:
        layers.append(layer("text", notes, x, alt.Y("y:Q"), dy=-9, fontSize=13, color="var(--soft)", aria=False))
    return Figure(title, note, draw(alt.layer(*layers), y.label, FULL, _HEIGHT), sides, wide=True)


def _legend(series: Sequence[Series]) -> Legend:
    """The legend of several series; empty for a single series. Pieces of one line count once."""
    names = tuple(dict.fromkeys((one.name + (" (dots)" if one.dots else ""), one.colour) for one in series))
    return names if len(names) > 1 else ()


def _series(series: Series, x: Axis, y: Axis) -> list[alt.Chart]:
    points = thin([(float(at), float(value)) for at, value in series.points], MAX_POINTS)
    rows = [
        {"x": at, "y": value, "description": f"{series.name}: {plain(value)} ({x.label}: {plain(at)})"}
        for at, value in points
    ]
    if series.dots or len(points) == 1:
        return [layer("circle", rows, x, y, color=series.colour, size=20, opacity=0.5 if series.dots else 1.0)]
    drawn = [{"x": row["x"], "y": row["y"]} for row in rows]
    return [
        layer("line", drawn, x, y, color=series.colour, strokeWidth=2.2, strokeJoin="round", aria=False),
        layer("square", rows, x, y, size=100, opacity=0),
    ]
