"""Vega-Lite charts as SVG elements of a page: axes, markers and the drawing itself, without a browser or a network.

A chart loads no script, font or other file, and each mark has a `<title>`. Text and lines take the colours of the page
(`var(--ink)`), so charts are dark on a dark page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert
from altair.utils.schemapi import debug_mode
from markupsafe import Markup

HALF, FULL = 540, 1120  # px: widths of a chart next to another one, and of one as wide as the page
SIDES = 76  # px, about, of a chart's width outside its plot
LETTER = 7.2  # px: width of a letter of the charts' 13 px text, a little above the mean
NEUTRAL, ALARM = "var(--marker)", "var(--alarm)"

unchecked = debug_mode(False)  # checking a chart against the schema takes longer than drawing it

Layers = alt.LayerChart | alt.FacetChart  # the return types that `alt.layer` declares


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis; its label has the unit. Without `ends` it includes zero and the values, and ends at round numbers."""

    label: str
    ends: tuple[float, float] | None = None
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Marker:
    """A moment marked by a vertical line: a decision, an evaluation, a loss."""

    x: float
    label: str
    title: str
    colour: str = NEUTRAL


def ends(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis that begins and ends at its values; a single value gets a length of 1."""
    return (low, high) if low < high else (low - 0.5, low + 0.5)


def draw(chart: Layers, y_label: str, width: int, height: int, marked: bool = False) -> Markup:
    """Draw a chart as an SVG element; `height` is the height of the plot."""
    titled = (
        {"title": alt.Title(y_label, anchor="start", frame="bounds", offset=8 if marked else 14)} if y_label else {}
    )
    return _svg(chart.properties(width=width, height=height, **titled))


def _svg(chart: Layers) -> Markup:
    """The chart as an element of a page, without fonts and ARIA roles, and with coordinates rounded to two decimals."""
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


def marker_layers(markers: Sequence[Marker], x: Axis, width: int) -> list[alt.Chart]:
    """Vertical lines with labels above the plot, in two rows; a label without room is only in the line's title."""
    if not markers:
        return []
    assert x.ends is not None
    low, high = x.ends
    px = (width - SIDES) / ((high - low) or 1.0)
    rows, labels, free_from = [], [], [-math.inf, -math.inf]
    for marker in sorted(markers, key=lambda marker: marker.x):
        at = min(max(marker.x, low), high)
        rows.append({"x": at, "color": marker.colour, "description": marker.title})
        half = len(marker.label) * LETTER * 1.2 / 2  # labels are bold
        row = next((row for row in (0, 1) if at * px - half >= free_from[row]), None)
        if row is not None:
            labels.append({"x": at, "row": row, "text": marker.label, "color": marker.colour})
            free_from[row] = at * px + half + 4
    lines = layer("rule", rows, x, strokeDash=[4, 3], aria=False)
    to_point_at = layer("rule", rows, x, strokeWidth=9, opacity=0)
    words = []
    for row, y in enumerate((-10, -26)):
        its = [label for label in labels if label["row"] == row]
        words.append(layer("text", its, x, y=y, fontWeight=600, fontSize=13, aria=False))
    return [lines, to_point_at, *words]


_CHANNELS = {
    "x2": "x2:Q",
    "y2": "y2:Q",
    "color": alt.Color("color:N", scale=None, legend=None),
    "opacity": alt.Opacity("opacity:Q", scale=None, legend=None),
    "text": "text:N",
    "description": "description:N",
}


def layer(
    mark: str, rows: Sequence[Mapping[str, Any]], x: Axis | alt.X, y: Axis | alt.Y | int | None = None, **look: Any
) -> alt.Chart:
    """A layer with a mark for each row, at its `x` and `y` (or with all marks at `y` px), and with the `_CHANNELS` of
    the rows. The description is shown under the pointer.
    """
    channels: dict[str, Any] = {name: _CHANNELS[name] for name in _CHANNELS if rows and name in rows[0]}
    channels["x"] = _x(x) if isinstance(x, Axis) else x
    if y is not None:
        channels["y"] = alt.value(y) if isinstance(y, int) else _y(y) if isinstance(y, Axis) else y
    chart = alt.Chart(alt.InlineData(values=list(rows)))
    drawn: alt.Chart = getattr(chart, f"mark_{mark}")(**look).encode(**channels)
    return drawn


def _x(axis: Axis) -> alt.X:
    kind: dict[str, Any] = {"type": "log", "base": 2} if axis.logarithmic else {}
    shown = alt.Axis(grid=False, tickCount=6, labelOverlap="greedy", labelFlush=False, **_format(axis))
    return alt.X("x:Q", title=axis.label, axis=shown, scale=alt.Scale(**kind, **_ends(axis)))


def _y(axis: Axis) -> alt.Y:
    """The y axis without a title: the chart's title is the label, which is horizontal text."""
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


def number_on(value: float, axis: Axis) -> float:
    """The position of a value on its axis: log2 of the value on a logarithmic axis, else the value."""
    return math.log2(value) if axis.logarithmic else value
