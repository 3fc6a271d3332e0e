"""Bar charts for pages, each a whole SVG file drawn by Vega-Lite.

Invariant: a file loads nothing and runs nothing, and says what it shows in `<title>` and `<desc>`. A figure of the same
numbers is the same text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import altair as alt
import vl_convert

from benchmarks.evaluation.estimates import Estimate

# Okabe and Ito 2008, "Color Universal Design", without yellow, which a light background swallows. Neighbours differ in
# lightness, too, so that they stay apart in print.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#CC79A7", "#000000")
# Systems that figures show keep their colour from figure to figure.
SYSTEMS = ("colocated", "even", "greedy", "static", "published", "ours", "oracle")
PAPER = "#ffffff"
WIDTH, HEIGHT = 620, 300  # px of the plot
_LETTER = 7.2  # px of a letter, on the generous side of the mean


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar in each group; None: nothing is known. `like` is the number of the series, counted from 0, whose colour
    it has; not given, its own. A hollow series shows numbers of others beside ours."""

    name: str
    values: Sequence[Estimate | float | None]
    hollow: bool = False
    like: int | None = None


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars side by side in each group, with their values above them."""

    title: str
    description: str
    groups: Sequence[str]
    series: Sequence[Bars]
    y_label: str
    decimals: int = 0

    def svg(self) -> str:
        """Raises ValueError where a series lacks a value for a group, and where there is none or one below 0."""
        rows = list(self._rows())
        if not rows or min(row["value"] for row in rows) < 0:
            raise ValueError(f"{self.title}: bars start at 0; draw none of values below it, and no figure of none")
        names = [_wrapped(group, WIDTH / len(self.groups)) for group in self.groups]
        upright = len(rows) > 24
        lines = alt.Axis(labelExpr="split(datum.label, '\\n')", labelLimit=0, labelAngle=0)
        x = alt.X("group:N", sort=names, title=None, axis=lines)
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
                one = value if isinstance(value, Estimate) else Estimate(value)
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


def _colours(series: Sequence[Bars]) -> dict[str, Any]:
    """The colour of each series, with a legend. Raises IndexError where there are more than colours."""
    names = [one.name for one in series]
    colours = [PALETTE[number if one.like is None else one.like] for number, one in enumerate(series)]
    fills = [_pale(colour) if one.hollow else colour for one, colour in zip(series, colours, strict=True)]
    return {
        "fill": alt.Fill("series:N", scale=alt.Scale(domain=names, range=fills), legend=_legend()),
        "stroke": alt.Stroke("series:N", scale=alt.Scale(domain=names, range=colours), legend=_legend()),
    }


def _pale(colour: str) -> str:
    """The colour, mixed with 85 % of white."""
    return "#" + "".join(f"{255 - round(0.15 * (255 - int(colour[at : at + 2], 16))):02x}" for at in (1, 3, 5))


def _legend() -> alt.Legend:
    return alt.Legend(orient="top", title=None, columns=4, labelLimit=0)


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
