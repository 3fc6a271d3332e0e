"""Figures for pages: bars, lines and points, each a whole SVG file drawn by Vega-Lite.

Invariant: a file loads nothing and runs nothing, says what it shows in `<title>` and `<desc>`, and tells series apart
by more than colour. A figure of the same numbers is the same text.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

import altair as alt
import vl_convert

from benchmarks.evaluation.estimates import Estimate

# Okabe and Ito 2008, "Color Universal Design", without yellow, which a light background swallows. Neighbours differ in
# lightness, too, so that they stay apart in print.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#CC79A7", "#000000")
# Systems that figures show keep their colour from figure to figure.
SYSTEMS = ("colocated", "even", "greedy", "static", "published", "ours", "oracle")
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-left")
PAPER, MUTED = "#ffffff", "#59636e"
WIDTH, HEIGHT = 620, 300  # px of the plot
_LETTER = 7.2  # px of a letter, on the generous side of the mean
_MARKS = 30  # of a line, at most: more would hide it


class Figure(Protocol):
    def svg(self) -> str:
        """A whole file."""
        ...


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar in each group; None: nothing is known. `like` is the number of the series, counted from 0, whose colour
    it has; not given, its own. A hollow series shows numbers of others beside ours."""

    name: str
    values: Sequence[Estimate | float | None]
    hollow: bool = False
    like: int | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined in their order, with the ends of a band at each, or none; `hollow` and `like` as of `Bars`."""

    name: str
    points: Sequence[tuple[float, Estimate | float]]
    hollow: bool = False
    like: int | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis whose label has the unit. `doubling`: logarithmic, with a tick wherever the lowest value has doubled."""

    label: str
    logarithmic: bool = False
    doubling: bool = False


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars side by side in each group, with their values above them."""

    title: str
    description: str
    groups: Sequence[str]
    series: Sequence[Bars]
    y_label: str
    x_label: str = ""
    decimals: int = 0

    def svg(self) -> str:
        """Raises ValueError where a series lacks a value for a group, and where there is none or one below 0."""
        rows = list(self._rows())
        if not rows or min(row["value"] for row in rows) < 0:
            raise ValueError(f"{self.title}: bars start at 0; draw lines of values below it, and no figure of none")
        names = [_wrapped(group, WIDTH / len(self.groups)) for group in self.groups]
        upright = len(rows) > 24
        x = alt.X("group:N", sort=names, title=self.x_label or None, axis=_lines_of_labels(labelAngle=0))
        offset = alt.XOffset("series:N", sort=[bars.name for bars in self.series])
        y = alt.Y("value:Q", title=self.y_label, scale=alt.Scale(zero=True))
        chart = alt.Chart(alt.InlineData(values=rows))
        placed = chart.encode(x=x, xOffset=offset)
        above = {"angle": 270, "align": "left", "dx": 5, "dy": 0} if upright else {"dy": -6}
        layers = [
            placed.mark_bar(strokeWidth=1).encode(y=y, **_colours(self.series)),
            placed.mark_rule(color="#1f2328").encode(y="low:Q", y2="high:Q"),
            placed.mark_text(fontSize=11, **above).encode(y=alt.Y("top:Q"), text="said:N"),
        ]
        return _file(alt.layer(*layers), self.title, self.description)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for bars in self.series:
            for group, value in zip(self.groups, bars.values, strict=True):
                if value is None:
                    continue
                one = _estimate(value)
                low, high = one.ends or (one.value, one.value)
                yield {
                    "group": _wrapped(group, WIDTH / len(self.groups)),
                    "series": bars.name,
                    "value": one.value,
                    "low": max(0.0, low),
                    "high": high,
                    "top": max(high, one.value),
                    "said": f"{one.value:,.{self.decimals}f}",
                }


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines with a mark at each point, or at every few of many, in front of their bands."""

    title: str
    description: str
    series: Sequence[Line]
    x: Axis
    y: Axis

    def svg(self) -> str:
        """Raises ValueError for a line without points, and for values that have no place on a logarithmic axis."""
        rows = list(self._rows())
        for axis, values in ((self.x, [row["x"] for row in rows]), (self.y, [row["low"] for row in rows])):
            if (axis.logarithmic or axis.doubling) and min(values) <= 0:
                raise ValueError(f"{self.title}: {axis.label} has values of 0 or less; a logarithm needs positive ones")
        x, y = _scaled("x", self.x, [row["x"] for row in rows]), _scaled("y", self.y, [row["y"] for row in rows])
        chart = alt.Chart(alt.InlineData(values=rows)).encode(x=x)
        colours = _colours(self.series)
        layers = [
            chart.mark_area(fillOpacity=0.18, strokeOpacity=0).encode(y="low:Q", y2="high:Q", fill=colours["fill"]),
            chart.mark_line(strokeWidth=2.2).encode(
                y=y, stroke=colours["stroke"], strokeDash=_dashed(self.series), order="number:Q"
            ),
            chart.mark_point(size=45, filled=True, opacity=1)
            .encode(y=y, shape=_shapes(self.series), **colours)
            .transform_filter("datum.marked"),
        ]
        return _file(alt.layer(*layers), self.title, self.description)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for line in self.series:
            if not line.points:
                raise ValueError(f"{line.name}: there are no points; give one or more")
            every = -(-len(line.points) // _MARKS)
            for number, (x, value) in enumerate(line.points):
                one = _estimate(value)
                low, high = one.ends or (one.value, one.value)
                yield {
                    "series": line.name,
                    "number": number,
                    "x": x,
                    "y": one.value,
                    "low": low,
                    "high": high,
                    "marked": number % every == 0,
                }


@dataclass(frozen=True, slots=True)
class PointChart:
    """Points on two equal logarithmic axes, and the line on which both values are equal."""

    title: str
    description: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    x_label: str
    y_label: str

    def svg(self) -> str:
        rows = [{"series": name, "x": x, "y": y} for name, points in self.series.items() for x, y in points]
        both = [number for points in self.series.values() for point in points for number in point]
        ends = (min(both), max(both))
        x, y = _scaled("x", Axis(self.x_label, True), ends), _scaled("y", Axis(self.y_label, True), ends)
        series = [Line(name, points) for name, points in self.series.items()]
        equal = alt.Chart(alt.InlineData(values=[{"x": end, "y": end} for end in ends]))
        marks = alt.Chart(alt.InlineData(values=rows)).mark_point(size=40, filled=True, opacity=0.8)
        layers = [
            equal.mark_line(color=MUTED, strokeWidth=1).encode(x=x, y=y),
            marks.encode(x=x, y=y, shape=_shapes(series), **_colours(series)),
        ]
        return _file(alt.layer(*layers), self.title, self.description)


def number_of(system: str) -> int:
    """Number of the colour that `system`, one of `SYSTEMS`, has."""
    return SYSTEMS.index(system)


def _estimate(value: Estimate | float) -> Estimate:
    return value if isinstance(value, Estimate) else Estimate(value)


def _colours(series: Sequence[Bars | Line]) -> dict[str, Any]:
    """The colour of each series, with a legend. Raises IndexError where there are more than colours."""
    names = [one.name for one in series]
    colours = [PALETTE[number] for number in _numbers(series)]
    fills = [_pale(colour) if one.hollow else colour for one, colour in zip(series, colours, strict=True)]
    return {
        "fill": alt.Fill("series:N", scale=alt.Scale(domain=names, range=fills), legend=_legend()),
        "stroke": alt.Stroke("series:N", scale=alt.Scale(domain=names, range=colours), legend=_legend()),
    }


def _pale(colour: str) -> str:
    """The colour, mixed with 85 % of white."""
    return "#" + "".join(f"{255 - round(0.15 * (255 - int(colour[at : at + 2], 16))):02x}" for at in (1, 3, 5))


def _dashed(series: Sequence[Line]) -> alt.StrokeDash:
    scale = alt.Scale(domain=[one.name for one in series], range=[[5, 4] if one.hollow else [1, 0] for one in series])
    return alt.StrokeDash("series:N", scale=scale, legend=None)


def _shapes(series: Sequence[Line]) -> alt.Shape:
    scale = alt.Scale(domain=[one.name for one in series], range=[SHAPES[number] for number in _numbers(series)])
    return alt.Shape("series:N", scale=scale, legend=_legend(symbolOpacity=1))


def _numbers(series: Sequence[Bars | Line]) -> list[int]:
    """The number of the colour and shape of each series."""
    return [number if one.like is None else one.like for number, one in enumerate(series)]


def _legend(**more: Any) -> alt.Legend:
    return alt.Legend(orient="top", title=None, columns=4, labelLimit=0, **more)


def _scaled(channel: str, axis: Axis, values: Sequence[float]) -> Any:
    kind: Any = alt.X if channel == "x" else alt.Y
    shown: dict[str, Any] = {"grid": channel == "y"}
    scale = alt.Scale(type="log" if axis.logarithmic or axis.doubling else "linear", nice=not axis.doubling)
    if axis.doubling:
        low = min(values)
        ticks = [low * 2**power for power in range(int(math.log2(max(values) / low)) + 1)]
        short = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'K' : format(datum.value, ',')"
        shown |= {"values": ticks, "labelExpr": short}
        scale = alt.Scale(type="log", base=2, domain=[min(values), max(values)])
    return kind(f"{channel}:Q", title=axis.label, scale=scale, axis=alt.Axis(**shown))


def _lines_of_labels(**more: Any) -> alt.Axis:
    return alt.Axis(labelExpr="split(datum.label, '\\n')", labelLimit=0, **more)


def _wrapped(label: str, width: float) -> str:
    """The label in lines of at most `width` px, as far as its words are short enough."""
    return "\n".join(textwrap.wrap(label, max(4, int(width / _LETTER)), break_long_words=False))


def _file(chart: Any, title: str, description: str) -> str:
    styled = chart.properties(
        width=WIDTH, height=HEIGHT, title=alt.Title(title, anchor="start", fontSize=15)
    ).configure(background=PAPER, padding=12, font="sans-serif", view=alt.ViewConfig(stroke=None))
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    drawn = vl_convert.vegalite_to_svg(styled.to_dict(validate=False), vl_version=version)
    words = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return re.sub(r"<svg[^>]*>", lambda opened: opened[0] + words, drawn, count=1) + "\n"
