"""Figures for pages: bars, lines and ranges, each a whole SVG file.

Invariant: a file loads nothing and runs nothing, says what it shows in `<title>` and `<desc>`, and tells series apart
by more than colour. A figure of the same numbers is the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.evaluation.palette import INK, colour
from benchmarks.evaluation.scale import Axis, measured_axis, round_step
from benchmarks.evaluation.sheet import (
    Key,
    Markup,
    Paper,
    box,
    draw_label,
    draw_x_ticks,
    file,
    join,
    legend,
    mark,
    path,
    sheet,
    stroke,
    tag,
    text,
    text_width,
    y_grid,
)

_INSET = 12  # px, between the first and last points and the ends of the grid
_MARKS = 30  # of a line, at most: more would hide it
_VALUE = 6.4  # px, of a letter of a value above a bar


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar in each group (None: nothing is known), each with the ends of its error bar, or none of them with any.

    `like` is the number of the series, counted from 0, whose colour it has; not given, its own. A hollow series shows
    numbers of others beside ours.
    """

    name: str
    values: tuple[float | None, ...]
    intervals: tuple[tuple[float, float] | None, ...] = ()
    hollow: bool = False
    like: int | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined in their order, with the ends of a band at each, or none. `hollow` (dashes, open marks) and `like`
    as of `Bars`."""

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float], ...] = ()
    hollow: bool = False
    like: int | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """A result at the two ends of one setting; `ends` names them, such as ("1 s", "60 s")."""

    label: str
    ends: tuple[str, str]
    values: tuple[float, float]


def grouped_bars(
    title: str,
    description: str,
    groups: Sequence[str],
    series: Sequence[Bars],
    y_label: str,
    x_label: str = "",
    decimals: int = 0,
) -> str:
    """Bars side by side in each group, their values above them. Raises ValueError where a series has not a value, or
    not an interval, for each group, and for values below 0."""
    keys = _keys(title, series)
    for bars in series:
        for what, given in (("values", bars.values), ("intervals", bars.intervals or bars.values)):
            if len(given) != len(groups):
                raise ValueError(f"{bars.name}: there are {len(given)} {what} for {len(groups)} groups; give one each")
    ends = [value for bars in series for value in bars.values if value is not None]
    ends += [end for bars in series for interval in bars.intervals if interval is not None for end in interval]
    if not ends or min(ends) < 0:
        raise ValueError(
            f"{title}: bars start at 0, and values are {sorted(ends)[:1] or 'missing'}; draw lines instead"
        )
    shown = [f"{value:,.{decimals}f}" for bars in series for value in bars.values if value is not None]
    names, lines_taken = legend(keys, boxes=True)
    slot = (sheet(lines_taken).x_end - sheet(lines_taken).left) / len(groups)
    labels = [_wrapped(group, slot) for group in groups]
    paper = sheet(lines_taken, bottom=30 + 16 * max(len(words) for words in labels) + (8 if x_label else -8))
    bar = min(64.0, 0.86 * slot / len(series))
    widest = max(len(value) for value in shown) * _VALUE
    upright = widest > bar and len(series) > 1
    above = (widest if upright else 12) + 8
    axis = measured_axis(y_label, [max(ends) * (1 + above / (paper.y_end - paper.top))])
    pieces = []
    for index, words in enumerate(labels):
        centre = paper.left + slot * (index + 0.5)
        pieces += [draw_label(centre, paper.y_end + 18 + 16 * row, word, "middle") for row, word in enumerate(words)]
        for number, (bars, key) in enumerate(zip(series, keys, strict=True)):
            value = bars.values[index]
            if value is None:
                continue
            left = centre + bar * (number - len(series) / 2)
            interval = bars.intervals[index] if bars.intervals else None
            top = axis.place(value if interval is None else max(value, interval[1]), paper.y_end, paper.top)
            height = paper.y_end - axis.place(value, paper.y_end, paper.top)
            said = f"{value:,.{decimals}f}"
            told = f"{bars.name}, {groups[index]}: {said}"
            if interval is not None:
                told += f" ({interval[0]:,.{decimals}f} to {interval[1]:,.{decimals}f})"
            pieces.append(box(left + 1, paper.y_end - height, bar - 2, height, key, tag("title", text(told))))
            if interval is not None:
                pieces.append(_error_bar(left + bar / 2, interval, axis, paper))
            pieces.append(_value(left + bar / 2, top - 5, said, upright))
    under = draw_label((paper.left + paper.x_end) / 2, paper.height - 8, x_label, "middle", "unit")
    return file(title, description, paper, names, y_grid(axis, paper), *pieces, under)


def lines(title: str, description: str, series: Sequence[Line], x_axis: Axis, y_axis: Axis) -> str:
    """Lines with a mark at each point, or at every few of many, in front of their bands. An axis may be logarithmic:
    `evaluation.scale`.

    Raises ValueError for a line without points, for a point outside the axes, and where a band has not two ends for
    each point.
    """
    keys = _keys(title, series)
    for line in series:
        if not line.points or (line.band and len(line.band) != len(line.points)):
            raise ValueError(
                f"{line.name}: there are {len(line.points)} points and {len(line.band)} ends; give one each"
            )
        _require_inside(line.name, [x for x, _ in line.points], x_axis)
        _require_inside(line.name, heights([line]), y_axis)
    names, lines_taken = legend(keys, boxes=False)
    paper = sheet(lines_taken)
    inner = replace(paper, left=paper.left + _INSET, right=paper.right + _INSET)

    def at(x: float, y: float) -> tuple[float, float]:
        return x_axis.place(x, inner.left, inner.x_end), y_axis.place(y, paper.y_end, paper.top)

    base = tag("line", x1=paper.left, x2=paper.x_end, y1=paper.y_end, y2=paper.y_end, class_="zero")
    bands, drawn = [], []
    for line, key in zip(series, keys, strict=True):
        if line.band:
            ends = list(zip((x for x, _ in line.points), line.band, strict=True))
            around = [at(x, high) for x, (_, high) in ends] + [at(x, low) for x, (low, _) in reversed(ends)]
            bands.append(tag("polygon", points=path(around), fill=colour(key.number), opacity=0.18))
        drawn.append(stroke([at(x, y) for x, y in line.points], key))
        for x, y in line.points[:: -(-len(line.points) // _MARKS)]:
            drawn.append(mark(*at(x, y), key, f"{line.name}: {y:,.6g} ({x_axis.label}: {x:,.6g})"))
    grid = join(y_grid(y_axis, paper), base, draw_x_ticks(x_axis, inner))
    return file(title, description, paper, names, grid, *bands, *drawn)


def heights(series: Sequence[Line]) -> list[float]:
    """All y values, those of bands included: what a y axis must reach."""
    return [y for line in series for y in (*(y for _, y in line.points), *(end for ends in line.band for end in ends))]


def ranges(
    title: str, description: str, rows: Sequence[Range], x_label: str, baseline: float, baseline_name: str
) -> str:
    """A row for each setting, the widest range first: the result at both ends of it, and a line at the baseline."""
    if not rows:
        raise ValueError(f"{title}: there is no row; give one or more")
    widest = max(text_width(row.label) for row in rows)
    if widest > 300:
        raise ValueError(f"{title}: the longest label takes {widest:.0f} px; shorten it to 300 or less")
    keys = [Key("low end of the setting", 0, True), Key("high end of the setting", 4, False)]
    names, lines_taken = legend(keys, boxes=False)
    top = sheet(lines_taken).top
    paper = sheet(lines_taken, height=top + 36 * len(rows) + 46, left=widest + 24)
    axis = _around(x_label, [baseline, *(value for row in rows for value in row.values)])
    pieces = [draw_x_ticks(axis, paper)]
    for tick in axis.ticks:
        x = axis.place(tick, paper.left, paper.x_end)
        pieces.append(tag("line", x1=x, x2=x, y1=paper.top, y2=paper.y_end, class_="grid"))
    x = axis.place(baseline, paper.left, paper.x_end)
    pieces.append(tag("line", x1=x, x2=x, y1=paper.top, y2=paper.y_end, stroke=INK, stroke_dasharray="4 3"))
    pieces.append(draw_label(x, paper.top - 7, f"{baseline_name}: {baseline:,.4g}", "middle", "value"))
    for index, row in enumerate(sorted(rows, key=lambda row: -abs(row.values[1] - row.values[0]))):
        y = paper.top + 36 * (index + 0.5)
        places = [axis.place(value, paper.left, paper.x_end) for value in row.values]
        pieces.append(draw_label(paper.left - 12, y + 4, row.label, "end"))
        pieces.append(tag("line", x1=places[0], x2=places[1], y1=y, y2=y, stroke=colour(0), stroke_width=2.2))
        for place, key, end, value in zip(places, keys, row.ends, row.values, strict=True):
            pieces.append(mark(place, y, key, f"{row.label} {end}: {value:,.6g}"))
            outward = -1 if place < sum(places) / 2 or (places[0] == places[1] and key.hollow) else 1
            pieces.append(draw_label(place + 10 * outward, y + 4, end, "end" if outward < 0 else "start", "value"))
    return file(title, description, paper, names, *pieces)


def _keys(title: str, series: Sequence[Bars | Line]) -> list[Key]:
    if not series:
        raise ValueError(f"{title}: there is no series; give one or more")
    names = [one.name for one in series]
    if len(set(names)) < len(names):
        raise ValueError(f"{title}: series are called {names}; give each its own name")
    return [Key(one.name, number if one.like is None else one.like, one.hollow) for number, one in enumerate(series)]


def _require_inside(name: str, values: Sequence[float], axis: Axis) -> None:
    outside = [value for value in values if not axis.low <= value <= axis.high]
    if outside:
        raise ValueError(
            f"{name}: {outside[0]:g} is not on the axis {axis.label!r}, {axis.low:g} to {axis.high:g}: make it longer"
        )


def _around(label: str, values: Sequence[float]) -> Axis:
    """An axis around the values, with room for a word at both of its ends."""
    low, high = min(values), max(values)
    room = 0.16 * ((high - low) or abs(high) or 1.0)
    low, high = low - room, high + room
    step = round_step(high - low, 6)
    first, last = -int(-low // step), int(high // step)
    return Axis(label, low, high, tuple(float(f"{number * step:.12g}") for number in range(first, last + 1)))


def _error_bar(x: float, interval: tuple[float, float], axis: Axis, paper: Paper) -> Markup:
    low, high = (axis.place(end, paper.y_end, paper.top) for end in interval)
    strokes = [tag("line", x1=x, x2=x, y1=low, y2=high, stroke=INK)]
    strokes += [tag("line", x1=x - 4, x2=x + 4, y1=y, y2=y, stroke=INK) for y in (low, high)]
    return join(*strokes)


def _value(x: float, y: float, words: str, upright: bool) -> Markup:
    if not upright:
        return draw_label(x, y, words, "middle", "value")
    turn = f"rotate(-90 {x:.1f} {y:.1f})"
    return tag("text", text(words), x=x, y=y + 4, text_anchor="start", class_="value", transform=turn)


def _wrapped(label: str, width: float) -> list[str]:
    """The label in lines of at most `width`, as far as its words are short enough."""
    rows = [""]
    for word in label.split():
        longer = f"{rows[-1]} {word}".strip()
        if rows[-1] and text_width(longer) > width:
            rows.append(word)
        else:
            rows[-1] = longer
    return rows
