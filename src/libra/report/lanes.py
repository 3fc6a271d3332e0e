"""Charts of lanes: who did what over time, or what serves which lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
from markupsafe import Markup

from libra.report.vega import (
    ALARM,
    FULL,
    LETTER,
    Axis,
    Marker,
    chart_of,
    draw,
    marker_layers,
    number_on,
    own_colour,
    rects,
    unchecked,
    x_axis,
)

_DENSITY = "#8a949e80"


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of a lane: `label` is written in it if there is room, or beside it."""

    start: float
    end: float
    label: str
    title: str
    colour: str
    ink: str


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    spans: Sequence[Bar]
    crosses: Sequence[tuple[float, str]] = ()  # (moment, what was lost then)


@dataclass(frozen=True, slots=True)
class Density:
    """A share of something between two places on the x axis."""

    start: float
    end: float
    share: float
    title: str


@unchecked
def lane_chart(
    lanes: Sequence[Lane], x: Axis, markers: Sequence[Marker] = (), density: Sequence[Density] = ()
) -> Markup:
    """Who did what over time, or what serves which lengths: where nothing was recorded, a lane stays empty. Lanes
    without names write the labels of their spans beside them where there is no room inside. A density is drawn above.
    """
    assert x.ends is not None
    named = any(lane.name for lane in lanes)
    room = 3.4 if density else 0.0  # lanes above the first one
    y = _lane_axis(lanes, room)
    empty = [
        {"x": x.ends[0], "x2": x.ends[1], "y": n + 0.12, "y2": n + 0.88, "t": it.name} for n, it in enumerate(lanes)
    ]
    spans = [
        {"x": span.start, "x2": span.end, "y": n + 0.12, "y2": n + 0.88, "c": span.colour, "t": span.title}
        for n, lane in enumerate(lanes)
        for span in lane.spans
    ]
    crosses = [{"x": at, "y": n + 0.5, "t": title} for n, lane in enumerate(lanes) for at, title in lane.crosses]
    layers = [
        rects(empty, x, y, color="var(--empty)").encode(description="t:N"),
        rects(spans, x, y).encode(color=own_colour(), description="t:N"),
        *_span_labels(lanes, x, y, beside=not named),
        chart_of(crosses)
        .mark_text(text="✕", fontSize=18, fontWeight="bold", color=ALARM)
        .encode(x=x_axis(x), y=y, description="t:N"),
        *_density(density, x, y),
    ]
    height = (28 if len(lanes) <= 16 else 16) * (len(lanes) + room)
    return draw(alt.layer(*layers, *marker_layers(markers, x, FULL)), "", FULL, round(height))


def _lane_axis(lanes: Sequence[Lane], room: float) -> alt.Y:
    """Lane n from n to n + 1, downwards."""
    scale = alt.Scale(domain=[-room, len(lanes)], reverse=True, nice=False, zero=False)
    if not any(lane.name for lane in lanes):
        return alt.Y("y:Q", scale=scale, axis=None)
    # The end of a long name is what tells workers of one host apart.
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
    """In the spans where there is room, else beside them or nowhere; the titles have them all."""
    if len(lanes) > 16:
        return []
    assert x.ends is not None
    start, end = (number_on(value, x) for value in x.ends)
    px = (FULL - (20 if beside else 190)) / (end - start)  # of one on the axis
    places: dict[str, list[dict[str, Any]]] = {"inside": [], "right": [], "left": []}
    for number, lane in enumerate(lanes):
        for span in lane.spans:
            width = (len(span.label) * LETTER + 8) / px
            row = {"y": number + 0.5, "label": span.label, "c": "var(--ink)"}
            if number_on(span.end, x) - number_on(span.start, x) > width:
                places["inside"].append({**row, "x": span.start, "c": span.ink})
            elif beside and number_on(span.end, x) + width <= end:
                places["right"].append({**row, "x": span.end})
            elif beside:
                places["left"].append({**row, "x": span.start})
    return [
        chart_of(rows)
        .mark_text(
            align="right" if place == "left" else "left", dx=-6 if place == "left" else 6, fontSize=13, aria=False
        )
        .encode(x=x_axis(x), y=y, text="label:N", color=own_colour())
        for place, rows in places.items()
        if rows
    ]


def _density(columns: Sequence[Density], x: Axis, y: alt.Y) -> list[alt.Chart]:
    """Columns whose area, not height, is the share: they are not equally wide."""
    heights = [
        it.share / (number_on(it.end, x) - number_on(it.start, x)) if it.end > it.start else 0.0 for it in columns
    ]
    rows = [
        {"x": it.start, "x2": it.end, "y": -0.3, "y2": -0.3 - 3 * height / max(heights), "t": it.title}
        for it, height in zip(columns, heights, strict=True)
        if height
    ]
    return [rects(rows, x, y, color=_DENSITY, stroke="var(--paper)").encode(description="t:N")] if rows else []
