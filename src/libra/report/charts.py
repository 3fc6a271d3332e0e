"""Charts as SVG, drawn by Vega-Lite without a browser or a network; they know nothing of runs.

What is drawn is all there is to see: no script, font or address is loaded, and each mark explains itself in a
`<title>`. A chart of many points shows means of consecutive ones instead of dropping any. Text and lines take the
colours of the page (`var(--ink)`), so that charts are dark where the page is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert
from altair.utils.schemapi import debug_mode
from markupsafe import Markup

from libra.report.words import plain

HALF, FULL = 540, 1120  # px: widths of a chart beside another one, and of one that has the page for itself
MAX_POINTS = 240  # of one line: two pixels each at the width of a chart
MAX_COLUMNS = 110

NEUTRAL, ALARM = "var(--marker)", "var(--alarm)"
_unchecked = debug_mode(False)  # checking a chart against the schema takes longer than drawing it

_Layers = alt.LayerChart | alt.FacetChart  # what `alt.layer` says it returns

_DENSITY = "#8a949e80"
_LETTER = 7.2  # px, of a letter of the charts' 13 px text, on the generous side of the mean
_SIDES = 76  # px of a chart's width that its plot has not, about


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows, with its unit. Without `ends` it holds zero and the values, and ends at round numbers."""

    label: str
    ends: tuple[float, float] | None = None
    logarithmic: bool = False


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


@dataclass(frozen=True, slots=True)
class Marker:
    """A moment worth a vertical line: a decision, an evaluation, a loss."""

    x: float
    label: str
    title: str
    colour: str = NEUTRAL


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


def ends(low: float, high: float) -> tuple[float, float]:
    """Of an axis that ends where its values do, and has a length also where there is only one."""
    return (low, high) if low < high else (low - 0.5, low + 0.5)


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """Seconds in the unit in which a time axis of this length is best read, and the unit's name."""
    if longest_seconds <= 180:
        return 1.0, "s"
    return (60.0, "min") if longest_seconds <= 3 * 3600 else (3600.0, "h")


@_unchecked
def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, markers: Sequence[Marker] = (), width: int = HALF, height: int = 175
) -> Markup:
    layers = [layer for one in series for layer in _series(one, x, y)]
    return _draw(alt.layer(*layers, *_markers(markers, x, width)), y.label, width, height, bool(markers))


@_unchecked
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
    bars = _rects(rows, x, _y(y)).encode(color=_own_colour(), description="t:N")
    over = [] if overlay is None else _series(overlay, x, y)
    return _draw(alt.layer(bars, *_markers(markers, x, width), *over), y.label, width, 175, bool(markers))


@_unchecked
def paired_bars(pairs: Sequence[Pair], colours: tuple[str, str], x_label: str, y: Axis) -> Markup:
    rows, notes = [], []
    for number, pair in enumerate(pairs):
        for side, value in enumerate((pair.left, pair.right)):
            faded = 0.4 if pair.faded else 1.0
            rows.append({"n": number, "side": side, "y": value, "c": colours[side], "o": faded, "t": pair.title})
        notes.append({"n": number, "y": max(pair.left, pair.right), "note": pair.note})
    named = f"{json.dumps([pair.label for pair in pairs])}[datum.value]"
    between = max(0.2, 1 - 54 * len(pairs) / (FULL - _SIDES))  # so that no bar is wider than 27 px
    x = alt.X(
        "n:O",
        title=x_label,
        axis=alt.Axis(labelAngle=0, labelExpr=named, labelOverlap="greedy"),
        scale=alt.Scale(paddingInner=between, paddingOuter=between / 2),
    )
    bars = (
        _chart(rows)
        .mark_bar()
        .encode(
            x=x,
            xOffset=alt.XOffset("side:O", scale=alt.Scale(padding=0.04)),
            y=_y(y),
            color=_own_colour(),
            opacity=alt.Opacity("o:Q", scale=None, legend=None),
            description="t:N",
        )
    )
    layers = [bars]
    if notes_fit(pairs):
        layers.append(
            _chart(notes)
            .mark_text(dy=-9, fontSize=13, color="var(--soft)", aria=False)
            .encode(x=x, y="y:Q", text="note:N")
        )
    return _draw(alt.layer(*layers), y.label, FULL, 175)


def notes_fit(pairs: Sequence[Pair]) -> bool:
    """Whether `paired_bars` has room to write the notes; where not, the titles must do."""
    return max(len(pair.note) for pair in pairs) * _LETTER * len(pairs) <= FULL - _SIDES


@_unchecked
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
        _rects(empty, x, y, color="var(--empty)").encode(description="t:N"),
        _rects(spans, x, y).encode(color=_own_colour(), description="t:N"),
        *_span_labels(lanes, x, y, beside=not named),
        _chart(crosses)
        .mark_text(text="✕", fontSize=18, fontWeight="bold", color=ALARM)
        .encode(x=_x(x), y=y, description="t:N"),
        *_density(density, x, y),
    ]
    height = (28 if len(lanes) <= 16 else 16) * (len(lanes) + room)
    return _draw(alt.layer(*layers, *_markers(markers, x, FULL)), "", FULL, round(height))


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
    start, end = (_number(value, x) for value in x.ends)
    px = (FULL - (20 if beside else 190)) / (end - start)  # of one on the axis
    places: dict[str, list[dict[str, Any]]] = {"inside": [], "right": [], "left": []}
    for number, lane in enumerate(lanes):
        for span in lane.spans:
            width = (len(span.label) * _LETTER + 8) / px
            row = {"y": number + 0.5, "label": span.label, "c": "var(--ink)"}
            if _number(span.end, x) - _number(span.start, x) > width:
                places["inside"].append({**row, "x": span.start, "c": span.ink})
            elif beside and _number(span.end, x) + width <= end:
                places["right"].append({**row, "x": span.end})
            elif beside:
                places["left"].append({**row, "x": span.start})
    return [
        _chart(rows)
        .mark_text(
            align="right" if place == "left" else "left", dx=-6 if place == "left" else 6, fontSize=13, aria=False
        )
        .encode(x=_x(x), y=y, text="label:N", color=_own_colour())
        for place, rows in places.items()
        if rows
    ]


def _density(columns: Sequence[Density], x: Axis, y: alt.Y) -> list[alt.Chart]:
    """Columns whose area, not height, is the share: they are not equally wide."""
    heights = [it.share / (_number(it.end, x) - _number(it.start, x)) if it.end > it.start else 0.0 for it in columns]
    rows = [
        {"x": it.start, "x2": it.end, "y": -0.3, "y2": -0.3 - 3 * height / max(heights), "t": it.title}
        for it, height in zip(columns, heights, strict=True)
        if height
    ]
    return [_rects(rows, x, y, color=_DENSITY, stroke="var(--paper)").encode(description="t:N")] if rows else []


def _rects(rows: Sequence[dict[str, Any]], x: Axis, y: alt.Y, **look: Any) -> alt.Chart:
    drawn: alt.Chart = _chart(rows).mark_rect(**look).encode(x=_x(x), x2="x2:Q", y=y, y2="y2:Q")
    return drawn


def _number(value: float, axis: Axis) -> float:
    """Where a value is on its axis, in steps of equal length."""
    return math.log2(value) if axis.logarithmic else value


def _series(series: Series, x: Axis, y: Axis) -> list[alt.Chart]:
    points = thin([(float(at), float(value)) for at, value in series.points], MAX_POINTS)
    rows = [
        {"x": at, "y": value, "t": f"{series.name}: {plain(value)} ({x.label}: {plain(at)})"} for at, value in points
    ]
    if series.dots or len(points) == 1:
        dots = _chart(rows).mark_circle(color=series.colour, size=20, opacity=0.5 if series.dots else 1.0)
        return [dots.encode(x=_x(x), y=_y(y), description="t:N")]
    drawn = _chart([{"x": row["x"], "y": row["y"]} for row in rows]).mark_line(
        color=series.colour, strokeWidth=2.2, strokeJoin="round", aria=False
    )
    to_point_at = _chart(rows).mark_square(size=100, opacity=0)
    return [drawn.encode(x=_x(x), y=_y(y)), to_point_at.encode(x=_x(x), y=_y(y), description="t:N")]


def _markers(markers: Sequence[Marker], x: Axis, width: int) -> list[alt.Chart]:
    """Vertical lines with their labels above the plot, in two rows; where both are taken, the title must do."""
    if not markers:
        return []
    assert x.ends is not None
    low, high = x.ends
    px = (width - _SIDES) / ((high - low) or 1.0)
    rows, labels, free_from = [], [], [-math.inf, -math.inf]
    for marker in sorted(markers, key=lambda marker: marker.x):
        at = min(max(marker.x, low), high)
        rows.append({"x": at, "c": marker.colour, "t": marker.title})
        half = len(marker.label) * _LETTER * 1.2 / 2  # they are bold
        row = next((row for row in (0, 1) if at * px - half >= free_from[row]), None)
        if row is not None:
            labels.append({"x": at, "y": -10 - 16 * row, "label": marker.label, "c": marker.colour})
            free_from[row] = at * px + half + 4
    lines = _chart(rows).mark_rule(strokeDash=[4, 3], aria=False).encode(x=_x(x), color=_own_colour())
    to_point_at = _chart(rows).mark_rule(strokeWidth=9, opacity=0).encode(x=_x(x), description="t:N")
    words = [
        _chart([label for label in labels if label["y"] == y])
        .mark_text(fontWeight=600, fontSize=13, aria=False)
        .encode(x=_x(x), y=alt.value(y), text="label:N", color=_own_colour())
        for y in (-10, -26)
    ]
    return [lines, to_point_at, *words]


def _chart(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def _own_colour() -> alt.Color:
    return alt.Color("c:N", scale=None, legend=None)


def _x(axis: Axis) -> alt.X:
    kind: dict[str, Any] = {"type": "log", "base": 2} if axis.logarithmic else {}
    shown = alt.Axis(grid=False, tickCount=6, labelOverlap="greedy", labelFlush=False, **_format(axis))
    return alt.X("x:Q", title=axis.label, axis=shown, scale=alt.Scale(**kind, **_ends(axis)))


def _y(axis: Axis) -> alt.Y:
    """The chart's title is the label: it is read without turning one's head."""
    shown = alt.Axis(domain=False, ticks=False, tickCount=5, labelPadding=6, **_format(axis))
    return alt.Y("y:Q", title=None, axis=shown, scale=alt.Scale(**_ends(axis)), stack=None)


def _ends(axis: Axis) -> dict[str, Any]:
    return {"zero": True, "nice": 5} if axis.ends is None else {"zero": False, "nice": False, "domain": list(axis.ends)}


def _format(axis: Axis) -> dict[str, Any]:
    if not axis.logarithmic:
        return {}
    return {
        "values": [2**power for power in range(64)],
        "labelExpr": "datum.value < 1024 ? datum.value : datum.value / 1024 + 'K'",
    }


def _draw(chart: _Layers, y_label: str, width: int, height: int, marked: bool = False) -> Markup:
    """`height` is that of the plot."""
    titled = (
        {"title": alt.Title(y_label, anchor="start", frame="bounds", offset=8 if marked else 14)} if y_label else {}
    )
    return _svg(chart.properties(width=width, height=height, **titled))


def _svg(chart: _Layers) -> Markup:
    """The chart as an element of a page: without a font and names of its own, numbers to a hundredth of a pixel."""
    words: dict[str, Any] = {"fontSize": 13, "fontWeight": "normal"}
    styled = chart.configure(
        background="transparent",
        padding={"left": 6, "right": 4, "top": 2, "bottom": 2},
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        view=alt.ViewConfig(stroke=None),
        title=alt.TitleConfig(color="var(--ink)", **words),
        axis=alt.AxisConfig(
            labelColor="var(--soft)",
            titleColor="var(--ink)",
            labelFontSize=13,
            titleFontSize=13,
            titleFontWeight="normal",
            gridColor="var(--line)",
            domainColor="var(--axis)",
            tickColor="var(--axis)",
        ),
    )
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    drawn = vl_convert.vegalite_to_svg(styled.to_dict(validate=False), vl_version=version)
    size = re.search(r'viewBox="([^"]*)"', drawn)
    assert size is not None
    drawn = re.sub(r"<svg[^>]*>", f'<svg viewBox="{size[1]}" class="chart" role="img">', drawn, count=1)
    drawn = re.sub(
        r' (?:role="graphics-[a-z]*"|(?:aria-roledescription|font-family|pointer-events)="[^"]*")', "", drawn
    )
    drawn = re.sub(r' (?:d|transform|x2|y2)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), drawn)
    drawn = re.sub(r'<(path|line) aria-label="([^"]*)"([^>]*)/>', r"<\1\3><title>\2</title></\1>", drawn)
    drawn = re.sub(r'<text aria-label="([^"]*)"([^>]*)>', r"<text\2><title>\1</title>", drawn)
    return Markup(drawn)
