"""A swim-lane chart: who did what over time.

Invariant: a lane shows a span exactly where one was recorded; where a worker had no role the lane stays empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra.report.axes import Axis
from libra.report.markup import Markup, tag, text
from libra.report.paper import Marker, Paper, draw_label, draw_markers, draw_rect, draw_sheet, draw_x_ticks, text_width


@dataclass(frozen=True, slots=True)
class Span:
    start: float  # in the unit of the x axis, as is `end`
    end: float
    label: str
    title: str
    colour: str
    ink: str


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    spans: tuple[Span, ...]
    crosses: tuple[tuple[float, str], ...]  # moments at which the worker was lost, with what is known of it


_CROSS = "#b3261e"
_ARM = 6  # px, of a cross


def lane_chart(lanes: Sequence[Lane], x_axis: Axis, markers: Sequence[Marker] = ()) -> Markup:
    height = 28 if len(lanes) <= 16 else 16
    left = min(190.0, max(text_width(lane.name) for lane in lanes) + 20)
    top = 40 if markers else 6  # room for the labels of markers
    paper = Paper(width=1120, height=top + height * len(lanes) + 50, left=left, top=top, bottom=50)
    pieces = []
    for index, lane in enumerate(lanes):
        pieces.append(_lane(lane, paper.top + index * height, height, x_axis, paper))
    return draw_sheet(paper, *pieces, draw_markers(markers, x_axis, paper), draw_x_ticks(x_axis, paper))


def _lane(lane: Lane, y: float, height: float, x_axis: Axis, paper: Paper) -> Markup:
    bar = height - 6
    pieces = [
        tag("title", text(lane.name)),
        draw_label(paper.left - 8, y + height / 2 + 4, _shortened(lane.name, paper.left - 16), "end", "lane"),
        draw_rect(paper.left, y + 3, paper.x_end - paper.left, bar, class_="empty"),
    ]
    for span in lane.spans:
        start, end = (x_axis.place(x, paper.left, paper.x_end) for x in (span.start, span.end))
        inner = [tag("title", text(span.title)), draw_rect(start, y + 3, max(1.0, end - start), bar, fill=span.colour)]
        if end - start > text_width(span.label) + 8 and height > 20:
            inner.append(draw_label(start + 6, y + height / 2 + 4.5, span.label, "start", "span", span.ink))
        pieces.append(tag("g", *inner, class_="role"))
    for moment, title in lane.crosses:
        pieces.append(_cross(title, x_axis.place(moment, paper.left, paper.x_end), y + height / 2))
    return tag("g", *pieces)


def _cross(title: str, x: float, y: float) -> Markup:
    path = f"M{x - _ARM:.1f} {y - _ARM:.1f} l{2 * _ARM} {2 * _ARM} m0 {-2 * _ARM} l{-2 * _ARM} {2 * _ARM}"
    return tag(
        "g",
        tag("title", text(title)),
        tag("path", d=path, stroke="#ffffff", stroke_width=7, fill="none"),
        tag("path", d=path, stroke=_CROSS, stroke_width=3.4, fill="none"),
        class_="cross",
    )


def _shortened(name: str, width: float) -> str:
    """The name, or its end where it is too long: workers of one host differ there."""
    while text_width(name) > width:
        name = "…" + name.lstrip("…")[1:]
    return name
