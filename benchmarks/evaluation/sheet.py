"""Common parts of all figures: the file, its legend, its grid and its marks.

Invariant: a legend takes as many lines as it needs, and the plot begins below it; nothing is drawn outside the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NewType

from benchmarks.evaluation.palette import GRID, INK, MUTED, PAPER, colour
from benchmarks.evaluation.scale import Axis

Markup = NewType("Markup", str)  # text becomes markup only through `text`, which escapes it

WIDTH, HEIGHT = 720, 400  # px: what a page shows without scaling it
_TITLE, _LEGEND, _LINE = 24, 48, 20  # px: baselines of the title and the legend, and from line to line
_SWATCH = 24  # px
_LETTER = 7.2  # px, of a letter of the figures' 13 px text, on the generous side of the mean

# Fonts by kind alone: a file must not depend on what the reader has installed.
_STYLE = Markup(
    f"text {{ font: 13px sans-serif; fill: {INK}; }} text.heading {{ font: bold 15px sans-serif; }}"
    f" text.unit {{ fill: {MUTED}; }} text.value {{ font-size: 11px; }}"
    f" .grid {{ stroke: {GRID}; }} .zero {{ stroke: {MUTED}; }}"
)

# Corners of the marks of the first series and the following, around 0, for a circle's radius of 1. None: the circle.
_CORNERS: tuple[tuple[tuple[float, float], ...] | None, ...] = (
    None,
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
    ((0, -1.2), (1.15, 0.9), (-1.15, 0.9)),
    ((0, 1.2), (1.15, -0.9), (-1.15, -0.9)),
    ((-1.2, -0.4), (1.2, -0.4), (1.2, 0.4), (-1.2, 0.4)),
    ((-0.4, -1.2), (0.4, -1.2), (0.4, 1.2), (-0.4, 1.2)),
)


@dataclass(frozen=True, slots=True)
class Paper:
    """The sheet a chart is drawn on, and the plot area in it, in px."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    @property
    def x_end(self) -> float:
        return self.width - self.right

    @property
    def y_end(self) -> float:
        return self.height - self.bottom


@dataclass(frozen=True, slots=True)
class Key:
    """Look of one series. `number` gives its colour and mark; a hollow one shows others' numbers next to ours."""

    name: str
    number: int
    hollow: bool


def sheet(legend_lines: int, height: float = HEIGHT, left: float = 64, bottom: float = 46) -> Paper:
    """A sheet whose plot is below a legend of `legend_lines` lines and the label of the y axis."""
    return Paper(WIDTH, height, left, 20, _LEGEND + _LINE * legend_lines + 18, bottom)


def legend(keys: Sequence[Key], boxes: bool) -> tuple[Markup, int]:
    """Swatches with names, and the lines that they take. `boxes` for bars, otherwise pieces of lines."""
    x, line, drawn = 16.0, 0, []
    for key in keys:
        width = _SWATCH + 8 + text_width(key.name) + 18
        if x > 16 and x + width > WIDTH:
            x, line = 16.0, line + 1
        y = _LEGEND + _LINE * line
        if boxes:
            drawn.append(box(x, y - 11, _SWATCH, 12, key))
        else:
            drawn += [stroke([(x, y - 5), (x + _SWATCH, y - 5)], key), mark(x + _SWATCH / 2, y - 5, key, key.name)]
        drawn.append(draw_label(x + _SWATCH + 8, y, key.name, "start"))
        x += width
    return join(*drawn), line + 1


def file(title: str, description: str, paper: Paper, *pieces: Markup) -> str:
    """A whole SVG file. Raises ValueError where it does not say what it shows."""
    if not title.strip() or not description.strip():
        raise ValueError("title or description is empty; say what is shown, for those who cannot see it")
    if text_width(title) * 1.2 > WIDTH - 32:
        raise ValueError(f"title {title!r} is too long for {WIDTH} px: shorten it")
    svg = tag(
        "svg",
        tag("title", text(title), id="title"),
        tag("desc", text(description), id="desc"),
        tag("style", _STYLE),
        draw_rect(0, 0, paper.width, paper.height, fill=PAPER),
        draw_label(16, _TITLE, title, "start", "heading"),
        *pieces,
        xmlns="http://www.w3.org/2000/svg",
        width=paper.width,
        height=paper.height,
        viewBox=f"0 0 {paper.width:g} {paper.height:g}",
        role="img",
        aria_labelledby="title desc",
    )
    return f"{svg}\n"


def y_grid(axis: Axis, paper: Paper) -> Markup:
    pieces = [draw_label(16, paper.top - 14, axis.label, "start", "unit")]
    for tick, label in zip(axis.ticks, axis.tick_labels(), strict=True):
        y = axis.place(tick, paper.y_end, paper.top)
        pieces.append(tag("line", x1=paper.left, x2=paper.x_end, y1=y, y2=y, class_="zero" if tick == 0 else "grid"))
        pieces.append(draw_label(paper.left - 7, y + 4, label, "end"))
    return join(*pieces)


def box(x: float, y: float, width: float, height: float, key: Key, *inside: Markup) -> Markup:
    look: dict[str, str | float] = {"fill": colour(key.number), "stroke": colour(key.number)}
    if key.hollow:
        look |= {"fill_opacity": 0.15, "stroke_dasharray": "3 2"}
    return tag("rect", *inside, x=x, y=y, width=width, height=max(0.0, height), **look)


def stroke(places: Sequence[tuple[float, float]], key: Key) -> Markup:
    dashes: dict[str, str | float] = {"stroke_dasharray": "5 4"} if key.hollow else {}
    return tag("polyline", points=path(places), fill="none", stroke=colour(key.number), stroke_width=2.2, **dashes)


def mark(x: float, y: float, key: Key, words: str, radius: float = 4.5) -> Markup:
    look: dict[str, str | float] = {"fill": colour(key.number), "stroke": colour(key.number), "stroke_width": 1.8}
    if key.hollow:
        look["fill"] = PAPER
    title = tag("title", text(words))
    corners = _CORNERS[key.number]
    if corners is None:
        return tag("circle", title, cx=x, cy=y, r=radius, **look)
    return tag("polygon", title, points=path([(x + radius * dx, y + radius * dy) for dx, dy in corners]), **look)


def path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


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


def text(value: str) -> Markup:
    return Markup(escape(value))


def join(*pieces: Markup) -> Markup:
    return Markup("".join(pieces))


def tag(name: str, *children: Markup, **attributes: str | float) -> Markup:
    """An element. Attribute names take `_` for `-`, and a trailing `_` where Python has the word for itself."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(children)}</{name}>")


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value, quote=True)
    return f"{value:.2f}".rstrip("0").rstrip(".")  # a hundredth of a pixel is enough
