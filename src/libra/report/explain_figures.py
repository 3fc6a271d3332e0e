"""The charts of an explanation: time against the split of devices, and buckets over the lengths that they serve."""

from __future__ import annotations

from collections.abc import Sequence

from libra.plan.explain.explanation import BucketView, Explanation, Split
from libra.plan.transition import Role
from libra.report.charts import Series, line_chart, time_unit
from libra.report.colours import ROLES, ink
from libra.report.explain_table import LEAST_LOSS, crossing
from libra.report.lanes import Bar, Density, Lane, lane_chart
from libra.report.page import Figure
from libra.report.vega import FULL, Axis, Marker, ends
from libra.report.words import duration, percent, plain

_GENERATION, _STEP, _PLAN = "#3a9bd9", "#8a949e", "#d6408b"
_BUSY, _BOUNDING = ROLES[Role.ROLLOUT], ROLES[Role.FAILED]
_TALLEST = 2.0  # steps; what takes longer would flatten the crossing
_FOLLOWED = "generation on the other devices, and what follows it"


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
        (
            "generation on the other devices" if explanation.synchronous else _FOLLOWED,
            _GENERATION,
            [(split.devices, split.generation) for split in splits],
        ),
    ]
    if explanation.synchronous:
        curves.append(("step: their sum, with publication", _STEP, [(split.devices, split.step) for split in splits]))
    series = [
        Series(name, colour, [(x, y / scale) for x, y in below(points, limit)]) for name, colour, points in curves
    ]
    hidden = any(y > limit for _, _, points in curves for _, y in points)
    x_axis = Axis(f"devices of {pool} that train", ends(splits[0].devices, splits[-1].devices))
    markers = []
    if pool == plan.training_pool:
        label = f"this plan: {plan.training_devices:,} train"
        markers.append(Marker(plan.training_devices, label, f"a step of {duration(plan.predicted.step)}", _PLAN))
    drawn = line_chart(
        [one for one in series if one.points], x_axis, Axis(f"time of a step ({unit})"), markers, FULL, 230
    )
    note = "" if explanation.synchronous else _sides(splits)
    note += " Generation is the engines' work or the longest trajectory, whichever bounds it" + (
        ", without what follows it."
        if explanation.synchronous
        else ", and training and publication as far as they follow it."
    )
    note += f" Above {duration(limit)} nothing is drawn." if hidden else ""
    legend = tuple((name, colour) for name, colour, _ in curves)
    return Figure(f"Time against the split, training on {pool}", note, drawn, legend, wide=True)


def _sides(splits: Sequence[Split]) -> str:
    between = crossing(splits)
    if between is None:
        by_itself = splits[0].training > splits[0].generation
        setting = "training by itself" if by_itself else "generation, with what follows it,"
        return f"Whatever the split, {setting} sets the step."
    fewer, more = between
    return (
        f"Up to {fewer:,} training devices, training by itself sets the step;"
        f" from {more:,}, generation with what follows it does."
    )


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
    low = max(1.0, shortest / 2)
    lanes = [Lane("", [_span(bucket, low)]) for bucket in buckets]
    note = "Above: how trajectories distribute over length. " if classes else ""
    note += "A lane each: the lengths that a bucket serves, and its engines."
    starts = [low, *(float(peak) for peak, _ in classes[:-1])]
    density = [
        Density(max(low, start), peak, share, f"up to {peak:,} tokens: {percent(share)}")
        for start, (peak, share) in zip(starts, classes, strict=False)
    ]
    axis = Axis("final context, tokens (logarithmic)", (low, float(buckets[-1].up_to)), logarithmic=True)
    legend = (("bounds the step", _BOUNDING), ("has time left", _BUSY))
    return Figure("Buckets", note, lane_chart(lanes, axis, density=density), legend, wide=True)


def _span(bucket: BucketView, low: float) -> Bar:
    bounding = bucket.share > 1 - LEAST_LOSS
    colour = _BOUNDING if bounding else _BUSY
    share = "the whole step" if bounding else f"{percent(bucket.share)} of the step"
    words = f"{bucket.engines:,} × {bucket.shape} · {bucket.devices:,} devices · {share}"
    title = (
        f"{bucket.above + 1:,} to {bucket.up_to:,} tokens: each engine works {duration(bucket.load)}, "
        f"the longest trajectory takes {duration(bucket.residence)}, max_num_seqs {plain(bucket.max_num_seqs)}"
    )
    return Bar(max(low, float(bucket.above)), float(bucket.up_to), words, title, colour, ink(colour))
