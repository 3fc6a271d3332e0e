"""Figures of lanes: work over time, or engines by the lengths that they serve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from libra.report.charts import Figure, Legend
from libra.report.vega import ALARM, FULL, LETTER, Axis, Marker, draw, layer, marker_layers, number_on, unchecked

MAX_LABELLED = 16  # lanes that are high enough for words
_DENSITY = "#8a949e80"


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """A piece of a lane; `label` is written in it if there is room, otherwise next to it."""

    start: float
    end: float
    label: str
    title: str
    colour: str


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    spans: Sequence[LaneSpan]
    crosses: Sequence[tuple[float, str]] = ()  # (moment, what was lost then)


@dataclass(frozen=True, slots=True)
class Density:
    """A share of a total between two positions on the x axis."""

    start: float
    end: float
    share: float
    title: str


@unchecked
def lane_figure(
    title: str,
    note: str,
    lanes: Sequence[Lane],
    x: Axis,
    legend: Legend,
    markers: Sequence[Marker] = (),
    density: Sequence[Density] = (),
) -> Figure:
    """Lanes of spans over time or over lengths; a lane without spans is empty. If lanes have no names, labels that do
    not fit into their spans are written next to them. An optional density is drawn above.
    """
    assert x.ends is not None
    named = any(lane.name for lane in lanes)
    room = 3.4 if density else 0.0  # for the density, in lanes
    y = _lane_axis(lanes, room)
    empty = [
        {"x": x.ends[0], "x2": x.ends[1], "y": n + 0.12, "y2": n + 0.88, "description": it.name}
        for n, it in enumerate(lanes)
    ]
    spans = [
        {
            "x": span.start,
            "x2": span.end,
            "y": n + 0.12,
            "y2": n + 0.88,
            "color": span.colour,
            "description": span.title,
        }
        for n, lane in enumerate(lanes)
        for span in lane.spans
    ]
    crosses = [
        {"x": at, "y": n + 0.5, "description": title} for n, lane in enumerate(lanes) for at, title in lane.crosses
    ]
    layers = [
        layer("rect", empty, x, y, color="var(--empty)"),
        layer("rect", spans, x, y),
        *_span_labels(lanes, x, y, beside=not named),
        layer("text", crosses, x, y, text="✕", fontSize=18, fontWeight="bold", color=ALARM),
        *_density(density, x, y),
        *marker_layers(markers, x, FULL),
    ]
    height = (28 if len(lanes) <= MAX_LABELLED else 16) * (len(lanes) + room)
    return Figure(title, note, draw(alt.layer(*layers), "", FULL, round(height)), legend, wide=True)


def _lane_axis(lanes: Sequence[Lane], room: float) -> alt.Y:
    """Lane n from n to n + 1, downwards."""
    scale = alt.Scale(domain=[-room, len(lanes)], reverse=True, nice=False, zero=False)
    if not any(lane.name for lane in lanes):
        return alt.Y("y:Q", scale=scale, axis=None)
    # The end of a long name distinguishes the workers of one host.
    names = [lane.name if len(lane.name) < 22 else f"…{lane.name[-20:]}" for lane in lanes]
    axis = alt.Axis(
        domain=False,
        grid=False,
        ticks=False,
        values=[number + 0.5 for number in range(len(lanes))],
        labelExpr=f"{json.dumps(names)}[datum.value - 0.5]",
        labelColor="var(--ink)",
        labelLimit=180,
        labelOverlap=False,
        labelPadding=8,
    )
    return alt.Y("y:Q", title=None, scale=scale, axis=axis)


def _span_labels(lanes: Sequence[Lane], x: Axis, y: alt.Y, beside: bool) -> list[alt.Chart]:
    """Labels in the spans if there is room, else next to them or not at all; the titles have all labels."""
    if len(lanes) > MAX_LABELLED:
        return []
    assert x.ends is not None
    start, end = (number_on(value, x) for value in x.ends)
    px = (FULL - (20 if beside else 190)) / (end - start)  # pixels per unit of the axis
    left: list[dict[str, Any]] = []
    right: list[dict[str, Any]] = []  # of a position; labels inside a span are right of its start
    for number, lane in enumerate(lanes):
        for span in lane.spans:
            width = (len(span.label) * LETTER + 8) / px
            row = {"y": number + 0.5, "text": span.label, "color": "var(--ink)"}
            if number_on(span.end, x) - number_on(span.start, x) > width:
                right.append({**row, "x": span.start, "color": _ink(span.colour)})
            elif beside and number_on(span.end, x) + width <= end:
                right.append({**row, "x": span.end})
            elif beside:
                left.append({**row, "x": span.start})
    return [
        layer("text", rows, x, y, align=align, dx=dx, fontSize=13, aria=False)
        for rows, align, dx in ((right, "left", 6), (left, "right", -6))
        if rows
    ]


def _density(columns: Sequence[Density], x: Axis, y: alt.Y) -> list[alt.Chart]:
    """Columns of different widths; a column's area is its share."""
    heights = [
        it.share / (number_on(it.end, x) - number_on(it.start, x)) if it.end > it.start else 0.0 for it in columns
    ]
    rows = [
        {"x": it.start, "x2": it.end, "y": -0.3, "y2": -0.3 - 3 * height / max(heights), "description": it.title}
        for it, height in zip(columns, heights, strict=True)
        if height
    ]
    return [layer("rect", rows, x, y, color=_DENSITY, stroke="var(--paper)")] if rows else []


def _ink(colour: str) -> str:
    """The text colour that is legible on `colour`, by relative luminance (WCAG 2.2)."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return "#1d2733" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else "#ffffff"
