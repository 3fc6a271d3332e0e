"""SVG charts of plain numbers; they know nothing of runs.

Invariant: what is drawn is all there is to see: no script, no font and no address is loaded, each mark explains itself
in a `<title>`, and a chart of many points shows means of consecutive ones instead of dropping any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from libra.report.axes import Axis
from libra.report.markup import NOTHING, Markup, join, tag, text
from libra.report.paper import (
    FULL,
    HALF,
    Marker,
    Paper,
    draw_label,
    draw_markers,
    draw_rect,
    draw_sheet,
    draw_x_ticks,
    draw_y_grid,
    text_width,
)
from libra.report.words import plain

MAX_POINTS = 240  # of one series: two pixels each at the width of a chart
MAX_COLUMNS = 110  # of a stacked chart


@dataclass(frozen=True, slots=True)
class Series:
    """Named points. `dots` for noisy measurements, `line` for what holds between the points."""

    name: str
    colour: str
    points: tuple[tuple[float, float], ...]
    style: Literal["line", "dots"] = "line"


@dataclass(frozen=True, slots=True)
class Layer:
    """One part of every column of a stacked chart."""

    name: str
    colour: str
    values: tuple[float, ...]


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


def thin(rows: Sequence[tuple[float, ...]], limit: int) -> tuple[tuple[float, ...], ...]:
    """At most `limit` rows, each the column-wise mean of equally many consecutive ones (the last: of those left).

    >>> thin([(0.0, 1.0), (1.0, 3.0), (2.0, 9.0)], 2)
    ((0.5, 2.0), (2.0, 9.0))
    """
    size = group_size(len(rows), limit)
    groups = (rows[i : i + size] for i in range(0, len(rows), size))
    return tuple(tuple(sum(column) / len(group) for column in zip(*group, strict=True)) for group in groups)


def line_chart(
    series: Sequence[Series], x_axis: Axis, y_axis: Axis, markers: Sequence[Marker] = (), paper: Paper = HALF
) -> Markup:
    drawn = join(*(_series(one, x_axis, y_axis, paper) for one in series))
    return draw_sheet(
        paper, draw_y_grid(y_axis, paper), draw_x_ticks(x_axis, paper), draw_markers(markers, x_axis, paper), drawn
    )


def stacked_chart(
    xs: Sequence[float],
    layers: Sequence[Layer],
    overlay: Series | None,
    x_axis: Axis,
    y_axis: Axis,
    markers: Sequence[Marker] = (),
    paper: Paper = HALF,
) -> Markup:
    """Columns of parts that add up, one for each x, and a line across them if there is one."""
    rows = thin([(x, *(layer.values[i] for layer in layers)) for i, x in enumerate(xs)], MAX_COLUMNS)
    width = (paper.x_end - paper.left) / len(rows)
    bar = min(40.0, width if width < 5 else width - 1)
    columns = []
    for x, *parts in rows:
        centre = x_axis.place(x, paper.left, paper.x_end)
        title = f"{x_axis.label} {plain(x)}: " + ", ".join(
            f"{layer.name} {plain(part)}" for layer, part in zip(layers, parts, strict=True)
        )
        rects, below = [], 0.0
        for layer, part in zip(layers, parts, strict=True):
            top, bottom = (y_axis.place(v, paper.y_end, paper.top) for v in (below + part, below))
            rects.append(draw_rect(centre - bar / 2, top, bar, bottom - top, fill=layer.colour))
            below += part
        columns.append(tag("g", tag("title", text(title)), *rects))
    return draw_sheet(
        paper,
        draw_y_grid(y_axis, paper),
        draw_x_ticks(x_axis, paper),
        join(*columns),
        draw_markers(markers, x_axis, paper),
        _series(overlay, x_axis, y_axis, paper) if overlay is not None else NOTHING,
    )


def paired_bars(
    pairs: Sequence[Pair], colours: tuple[str, str], x_label: str, y_axis: Axis, paper: Paper = FULL
) -> Markup:
    slot = (paper.x_end - paper.left) / len(pairs)
    bar = min(26.0, slot * 0.38)
    widest = max(text_width(pair.label) for pair in pairs) + 8
    every = math.ceil(widest / slot)  # every n-th label is written, so that none touches the next
    noted = notes_fit(pairs, paper)
    drawn = []
    for index, pair in enumerate(pairs):
        centre = paper.left + slot * (index + 0.5)
        tops = [y_axis.place(value, paper.y_end, paper.top) for value in (pair.left, pair.right)]
        opacity = 0.4 if pair.faded else 1.0
        pieces = [
            tag("title", text(pair.title)),
            draw_rect(centre - bar, tops[0], bar - 1, paper.y_end - tops[0], fill=colours[0], opacity=opacity),
            draw_rect(centre + 1, tops[1], bar - 1, paper.y_end - tops[1], fill=colours[1], opacity=opacity),
        ]
        if noted:
            pieces.append(draw_label(centre, min(tops) - 6, pair.note, "middle"))
        if index % every == 0:
            pieces.append(draw_label(centre, paper.y_end + 17, pair.label, "middle"))
        drawn.append(tag("g", *pieces, class_="pair"))
    axis_label = draw_label((paper.left + paper.x_end) / 2, paper.height - 8, x_label, "middle", "unit")
    return draw_sheet(paper, draw_y_grid(y_axis, paper), axis_label, *drawn)


def notes_fit(pairs: Sequence[Pair], paper: Paper = FULL) -> bool:
    """Whether `paired_bars` has room to write the notes; where not, the titles must do."""
    return max(text_width(pair.note) for pair in pairs) * len(pairs) <= paper.x_end - paper.left


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Names and colours, as a line of swatches above a chart."""
    items = (tag("li", tag("i", style=f"background:{colour}"), text(name)) for name, colour in entries)
    return tag("ul", *items, class_="legend")


def _series(series: Series, x_axis: Axis, y_axis: Axis, paper: Paper) -> Markup:
    points = [
        (x_axis.place(x, paper.left, paper.x_end), y_axis.place(y, paper.y_end, paper.top), x, y)
        for x, y in thin(series.points, MAX_POINTS)
    ]
    titles = [f"{series.name}: {plain(y)} ({x_axis.label}: {plain(x)})" for _, _, x, y in points]
    dots = series.style == "dots"
    marks = [
        tag(
            "circle",
            tag("title", text(title)),
            cx=px,
            cy=py,
            r=2.2 if dots or len(points) == 1 else 5,
            fill=series.colour if dots or len(points) == 1 else "transparent",
        )
        for (px, py, _, _), title in zip(points, titles, strict=True)
    ]
    if dots:
        return tag("g", *marks, opacity=0.5)
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in points)
    line = tag("polyline", points=path, fill="none", stroke=series.colour, stroke_width=2.2, stroke_linejoin="round")
    return tag("g", line, *marks)
