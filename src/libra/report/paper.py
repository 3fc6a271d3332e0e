"""The sheet that a chart is drawn on: its plot area, axes, markers and the few shapes that all charts share.

Invariant: labels stay on the sheet and do not cover each other; one that would is left to the `<title>` of its mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra.report.axes import Axis
from libra.report.markup import Markup, join, tag, text

_LETTER = 7.2  # px, of a letter of the charts' 13 px text, on the generous side of the mean
_BOLD = 1.2  # of its width


@dataclass(frozen=True, slots=True)
class Paper:
    """The sheet a chart is drawn on, and the plot area in it, in px."""

    width: float = 540
    height: float = 278
    left: float = 56
    right: float = 16
    top: float = 58  # the y label, and two rows of marker labels
    bottom: float = 46

    @property
    def x_end(self) -> float:
        return self.width - self.right

    @property
    def y_end(self) -> float:
        return self.height - self.bottom


HALF, FULL = Paper(), Paper(width=1120, height=284)


@dataclass(frozen=True, slots=True)
class Marker:
    """A moment worth a vertical line: a decision, an evaluation, a loss."""

    x: float
    label: str
    title: str
    colour: str


def draw_markers(markers: Sequence[Marker], x_axis: Axis, paper: Paper) -> Markup:
    """Vertical lines with their labels above the plot, in two rows; where both are taken, the title must do."""
    drawn, free_from = [], [float("-inf"), float("-inf")]
    for marker in sorted(markers, key=lambda marker: marker.x):
        x = min(max(x_axis.place(marker.x, paper.left, paper.x_end), paper.left), paper.x_end)
        half = text_width(marker.label) * _BOLD / 2
        centre = min(x, paper.width - half)
        pieces = [
            tag("title", text(marker.title)),
            tag("line", x1=x, x2=x, y1=paper.top - 4, y2=paper.y_end, stroke=marker.colour, stroke_dasharray="4 3"),
            tag("line", x1=x, x2=x, y1=paper.top, y2=paper.y_end, stroke="transparent", stroke_width=9),
        ]
        row = next((row for row in (0, 1) if centre - half >= free_from[row]), None)
        if row is not None:
            pieces.append(
                draw_label(centre, paper.top - 12 - 16 * row, marker.label, "middle", "marker", marker.colour)
            )
            free_from[row] = centre + half + 4
        drawn.append(tag("g", *pieces))
    return join(*drawn)


def draw_y_grid(axis: Axis, paper: Paper) -> Markup:
    pieces = [draw_label(4, 12, axis.label, "start", "unit")]
    for tick, label in zip(axis.ticks, axis.tick_labels(), strict=True):
        y = axis.place(tick, paper.y_end, paper.top)
        pieces.append(tag("line", x1=paper.left, x2=paper.x_end, y1=y, y2=y, class_="zero" if tick == 0 else "grid"))
        pieces.append(draw_label(paper.left - 7, y + 4, label, "end"))
    return join(*pieces)


def draw_x_ticks(axis: Axis, paper: Paper) -> Markup:
    pieces = [draw_label((paper.left + paper.x_end) / 2, paper.height - 8, axis.label, "middle", "unit")]
    for tick, label in zip(axis.ticks, axis.tick_labels(), strict=True):
        x = axis.place(tick, paper.left, paper.x_end)
        pieces.append(tag("line", x1=x, x2=x, y1=paper.y_end, y2=paper.y_end + 4, class_="zero"))
        pieces.append(draw_label(x, paper.y_end + 18, label, "middle"))
    return join(*pieces)


def text_width(words: str) -> float:
    """Px that a label takes, as near as one can know without the reader's font."""
    return len(words) * _LETTER


def draw_label(x: float, y: float, words: str, anchor: str, kind: str = "tick", colour: str | None = None) -> Markup:
    # The page's style gives labels their usual colour, and would win over a `fill` attribute.
    own = {} if colour is None else {"style": f"fill:{colour}"}
    return tag("text", text(words), x=x, y=y, text_anchor=anchor, class_=kind, **own)


def draw_rect(x: float, y: float, width: float, height: float, **attributes: str | float) -> Markup:
    return tag("rect", x=x, y=y, width=width, height=max(0.0, height), **attributes)


def draw_sheet(paper: Paper, *pieces: Markup) -> Markup:
    return tag("svg", *pieces, viewBox=f"0 0 {paper.width:g} {paper.height:g}", role="img", class_="chart")
