"""Charts of plain numbers; they know nothing of runs.

A chart of many points shows means of consecutive ones instead of dropping any.
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
    chart_of,
    draw,
    marker_layers,
    own_colour,
    rects,
    unchecked,
    x_axis,
    y_axis,
)
from libra.report.words import plain

MAX_POINTS = 240  # of one line: two pixels each at the width of a chart
MAX_COLUMNS = 110


@dataclass(frozen=True, slots=True)
class Series:
    """Named points; dots for noisy measurements, a line for what holds between the points."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One part of every column of a stacked chart."""

    name: str
    colour: str
    values: Sequence[float]


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
    """How many consecutive rows `thin` makes into one."""
    return max(1, math.ceil(rows / limit))


def thin(rows: Sequence[tuple[float, ...]], limit: int) -> list[tuple[float, ...]]:
    """At most `limit` rows, each the column-wise mean of equally many consecutive ones (the last: of those left).

    >>> thin([(0.0, 1.0), (1.0, 3.0), (2.0, 9.0)], 2)
    [(0.5, 2.0), (2.0, 9.0)]
    """
    size = group_size(len(rows), limit)
    groups = (rows[i : i + size] for i in range(0, len(rows), size))
    return [tuple(sum(column) / len(group) for column in zip(*group, strict=True)) for group in groups]


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """Seconds in the unit in which a time axis of this length is best read, and the unit's name."""
    if longest_seconds <= 180:
        return 1.0, "s"
    return (60.0, "min") if longest_seconds <= 3 * 3600 else (3600.0, "h")


@unchecked
def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, markers: Sequence[Marker] = (), width: int = HALF, height: int = 175
) -> Markup:
    layers = [layer for one in series for layer in _series(one, x, y)]
    return draw(alt.layer(*layers, *marker_layers(markers, x, width)), y.label, width, height, bool(markers))


@unchecked
def stacked_chart(
    xs: Sequence[float],
    layers: Sequence[Layer],
    overlay: Series | None,
    x: Axis,
    y: Axis,
    markers: Sequence[Marker] = (),
    width: int = HALF,
) -> Markup:
    """Columns of parts that add up, one for each x (evenly spaced), and a line across them if there is one."""
    columns = thin(
        [(at, *parts) for at, *parts in zip(xs, *(layer.values for layer in layers), strict=True)], MAX_COLUMNS
    )
    step = columns[1][0] - columns[0][0] if len(columns) > 1 else 1.0
    half = step * (0.51 if len(columns) > width / 12 else 0.44)
    rows = []
    for at, *parts in columns:
        below = 0.0
        for layer, part in zip(layers, parts, strict=True):
            title = f"{x.label} {plain(at)}: {layer.name} {plain(part)}"
            if part:
                rows.append(
                    {"x": at - half, "x2": at + half, "y": below, "y2": below + part, "c": layer.colour, "t": title}
                )
            below += part
    bars = rects(rows, x, y_axis(y)).encode(color=own_colour(), description="t:N")
    over = [] if overlay is None else _series(overlay, x, y)
    return draw(alt.layer(bars, *marker_layers(markers, x, width), *over), y.label, width, 175, bool(markers))


@unchecked
def paired_bars(pairs: Sequence[Pair], colours: tuple[str, str], x_label: str, y: Axis) -> Markup:
    rows, notes = [], []
    for number, pair in enumerate(pairs):
        for side, value in enumerate((pair.left, pair.right)):
            faded = 0.4 if pair.faded else 1.0
            rows.append({"n": number, "side": side, "y": value, "c": colours[side], "o": faded, "t": pair.title})
        notes.append({"n": number, "y": max(pair.left, pair.right), "note": pair.note})
    named = f"{json.dumps([pair.label for pair in pairs])}[datum.value]"
    between = max(0.2, 1 - 54 * len(pairs) / (FULL - SIDES))  # so that no bar is wider than 27 px
    x = alt.X(
        "n:O",
        title=x_label,
        axis=alt.Axis(labelAngle=0, labelExpr=named, labelOverlap="greedy"),
        scale=alt.Scale(paddingInner=between, paddingOuter=between / 2),
    )
    bars = (
        chart_of(rows)
        .mark_bar()
        .encode(
            x=x,
            xOffset=alt.XOffset("side:O", scale=alt.Scale(padding=0.04)),
            y=y_axis(y),
            color=own_colour(),
            opacity=alt.Opacity("o:Q", scale=None, legend=None),
            description="t:N",
        )
    )
    layers = [bars]
    if notes_fit(pairs):
        layers.append(
            chart_of(notes)
            .mark_text(dy=-9, fontSize=13, color="var(--soft)", aria=False)
            .encode(x=x, y="y:Q", text="note:N")
        )
    return draw(alt.layer(*layers), y.label, FULL, 175)


def notes_fit(pairs: Sequence[Pair]) -> bool:
    """Whether `paired_bars` has room to write the notes; where not, the titles must do."""
    return max(len(pair.note) for pair in pairs) * LETTER * len(pairs) <= FULL - SIDES


def _series(series: Series, x: Axis, y: Axis) -> list[alt.Chart]:
    points = thin([(float(at), float(value)) for at, value in series.points], MAX_POINTS)
    rows = [
        {"x": at, "y": value, "t": f"{series.name}: {plain(value)} ({x.label}: {plain(at)})"} for at, value in points
    ]
    if series.dots or len(points) == 1:
        dots = chart_of(rows).mark_circle(color=series.colour, size=20, opacity=0.5 if series.dots else 1.0)
        return [dots.encode(x=x_axis(x), y=y_axis(y), description="t:N")]
    drawn = chart_of([{"x": row["x"], "y": row["y"]} for row in rows]).mark_line(
        color=series.colour, strokeWidth=2.2, strokeJoin="round", aria=False
    )
    to_point_at = chart_of(rows).mark_square(size=100, opacity=0)
    return [drawn.encode(x=x_axis(x), y=y_axis(y)), to_point_at.encode(x=x_axis(x), y=y_axis(y), description="t:N")]
