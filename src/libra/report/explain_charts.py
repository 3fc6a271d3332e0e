"""The charts of an explanation: time against the split of devices, and buckets over the lengths that they serve.

Invariant: as for all charts, what is drawn is all there is to see; what does not fit on a chart is said in its note.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from libra.plan.explain.explanation import BucketView, Explanation
from libra.plan.explain.splits import Split
from libra.records.roles import Role
from libra.report.axes import Axis, measured_axis, running_axis, time_unit
from libra.report.charts import Series, legend, line_chart
from libra.report.colours import ROLES, ink
from libra.report.explain_table import crossing
from libra.report.figures import Figure
from libra.report.markup import NOTHING, Markup, join, tag, text
from libra.report.paper import Marker, Paper, draw_label, draw_rect, draw_sheet, text_width
from libra.report.words import duration, percent, plain

_GENERATION, _STEP, _PLAN = "#3a9bd9", "#8a949e", "#d6408b"
_BUSY, _BOUNDING = "#56b4e9", ROLES[Role.FAILED]
_TALLEST = 2.0  # steps; what takes longer would flatten the crossing
_LANE = 30.0  # px
_DENSITY = 96.0  # px


def split_figures(explanation: Explanation) -> tuple[Figure, ...]:
    """One figure for each pool that could train; the plan's own pool comes first."""
    own = explanation.plan.training_pool
    pools = dict.fromkeys((own, *(split.pool for split in explanation.splits)))
    by_pool = ((pool, [split for split in explanation.splits if split.pool == pool]) for pool in pools)
    return tuple(_split_figure(explanation, pool, splits) for pool, splits in by_pool if splits)


def _split_figure(explanation: Explanation, pool: str, splits: Sequence[Split]) -> Figure:
    plan = explanation.plan
    limit = _TALLEST * plan.predicted.step
    scale, unit = time_unit(limit)
    curves = [
        ("training", ROLES[Role.TRAIN], [(split.devices, split.training) for split in splits]),
        ("generation on the other devices", _GENERATION, [(split.devices, split.generation) for split in splits]),
    ]
    if explanation.synchronous:
        curves.append(("step: their sum, with publication", _STEP, [(split.devices, split.step) for split in splits]))
    series = [
        Series(name, colour, tuple((x, y / scale) for x, y in below(points, limit))) for name, colour, points in curves
    ]
    x_axis = running_axis(f"devices of {pool} that train", splits[0].devices, splits[-1].devices, whole=True)
    y_axis = measured_axis(f"time of a step ({unit})", [y for one in series for _, y in one.points])
    markers = []
    if pool == plan.training_pool:
        label = f"this plan: {plan.training_devices:,} train"
        markers.append(Marker(plan.training_devices, label, f"a step of {duration(plan.predicted.step)}", _PLAN))
    drawn = line_chart([one for one in series if one.points], x_axis, y_axis, markers, Paper(1120, 330))
    note = _sides(splits)
    hidden = any(y > limit for _, _, points in curves for _, y in points)
    note += " Generation is the engines' work or the longest trajectory, whichever bounds it."
    note += f" Above {duration(limit)} nothing is drawn." if hidden else ""
    shown = legend((name, colour) for name, colour, _ in curves)
    return Figure(f"Time against the split, training on {pool}", note, join(shown, drawn), wide=True)


def _sides(splits: Sequence[Split]) -> str:
    between = crossing(splits)
    if between is None:
        always = splits[0].training < splits[0].generation
        return f"Training is {'always' if always else 'never'} the faster side."
    fewer, more = between
    return f"From {fewer:,} to {more:,} training devices the slower side changes from training to generation."


def below(points: Sequence[tuple[float, float]], limit: float) -> tuple[tuple[float, float], ...]:
    """The stretch of a curve from where it first falls below the limit to where it last rises above it."""
    inside = [k for k, (_, y) in enumerate(points) if y <= limit]
    if not inside:
        return ()
    first, last = inside[0], inside[-1]
    kept = list(points[first : last + 1])
    if first > 0:
        kept.insert(0, _cut(points[first - 1], points[first], limit))
    if last + 1 < len(points):
        kept.append(_cut(points[last + 1], points[last], limit))
    return tuple(kept)


def _cut(above: tuple[float, float], under: tuple[float, float], limit: float) -> tuple[float, float]:
    part = (limit - under[1]) / (above[1] - under[1])
    return under[0] + part * (above[0] - under[0]), limit


def bucket_figure(explanation: Explanation, classes: Sequence[tuple[int, float]]) -> Figure:
    """Buckets as ranges of final context, one lane each; `classes` are (longest context, share of trajectories)."""
    buckets = explanation.buckets
    shortest = min([bucket.up_to for bucket in buckets] + [peak for peak, _ in classes])
    axis = _length_axis(shortest / 2, buckets[-1].up_to)
    top = 12 + (_DENSITY + 26 if classes else 0.0)
    paper = Paper(1120, top + _LANE * len(buckets) + 48, left=16, right=16, top=top, bottom=48)
    lanes = join(*(_lane(bucket, lane, axis, paper) for lane, bucket in enumerate(buckets)))
    shown = legend([("bounds the step", _BOUNDING), ("has time left", _BUSY)])
    note = "Above: how trajectories distribute over length. " if classes else ""
    note += "A lane each: the lengths that a bucket serves, and its engines."
    density = _density(classes, axis, paper) if classes else NOTHING
    return Figure("Buckets", note, join(shown, draw_sheet(paper, _ticks(axis, paper), density, lanes)), wide=True)


def _length_axis(low: float, high: float) -> Axis:
    """Tokens on a logarithmic axis, with a tick at every power of two, or at every second or third one."""
    start, end = math.log2(low), math.log2(high)
    every = math.ceil((end - start) / 8)
    ticks = tuple(float(power) for power in range(math.ceil(start), math.floor(end) + 1, every))
    return Axis("final context, tokens (logarithmic)", start, end, ticks)


def _place(tokens: float, axis: Axis, paper: Paper) -> float:
    return axis.place(max(axis.low, math.log2(tokens)) if tokens > 0 else axis.low, paper.left, paper.x_end)


def _ticks(axis: Axis, paper: Paper) -> Markup:
    pieces = [draw_label((paper.left + paper.x_end) / 2, paper.height - 8, axis.label, "middle", "unit")]
    for tick in axis.ticks:
        x = axis.place(tick, paper.left, paper.x_end)
        pieces.append(tag("line", x1=x, x2=x, y1=8, y2=paper.y_end + 4, class_="grid"))
        tokens = 2**tick
        label = f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"
        pieces.append(draw_label(x, paper.y_end + 20, label, "middle"))
    return join(*pieces)


def _density(classes: Sequence[tuple[int, float]], axis: Axis, paper: Paper) -> Markup:
    """Columns whose area, not height, is the share: classes are not equally wide."""
    columns, start = [], 0.0
    for peak, share in classes:
        left, right = _place(start, axis, paper), _place(peak, axis, paper)
        if right > left:
            columns.append((left, right, share / (right - left), f"up to {peak:,} tokens: {percent(share)}"))
        start = peak
    tallest = max((height for _, _, height, _ in columns), default=0.0) or 1.0
    base = 12 + _DENSITY
    drawn = []
    for left, right, height, title in columns:
        tall = height / tallest * _DENSITY
        column = draw_rect(left, base - tall, max(1.0, right - left - 1), tall, fill=_STEP, opacity=0.45)
        drawn.append(tag("g", tag("title", text(title)), column))
    return join(*drawn)


def _lane(bucket: BucketView, lane: int, axis: Axis, paper: Paper) -> Markup:
    y = paper.top + lane * _LANE
    left, right = _place(bucket.above, axis, paper), _place(bucket.up_to, axis, paper)
    bounding = bucket.share > 1 - 1e-9
    words = f"{bucket.engines:,} × {bucket.shape} · {bucket.devices:,} devices · {percent(bucket.share, 0)} of the step"
    # Beside the bar, where there is more room: names are longer than most bars.
    fits_right = right + 8 + text_width(words) <= paper.x_end
    label = (right + 8, "start") if fits_right else (left - 8, "end")
    title = (
        f"{bucket.above + 1:,} to {bucket.up_to:,} tokens: each engine works {duration(bucket.load)}, "
        f"the longest trajectory takes {duration(bucket.residence)}, {plain(bucket.seats)} seats"
    )
    bar = draw_rect(left, y + 5, right - left, _LANE - 10, fill=_BOUNDING if bounding else _BUSY, rx=3)
    if not fits_right and left - 8 - text_width(words) < paper.left:
        inside = draw_label((left + right) / 2, y + _LANE / 2 + 5, words, "middle", "lane", ink(ROLES[Role.ROLLOUT]))
        return tag("g", tag("title", text(title)), bar, inside)
    return tag("g", tag("title", text(title)), bar, draw_label(label[0], y + _LANE / 2 + 5, words, label[1], "lane"))
