"""An explanation as one HTML page; equal explanations give equal pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libra.config.rooms import offered
from libra.plan.allocation import ONE_DEVICE
from libra.plan.explain.explanation import BucketView, Explanation, PlanView, Split
from libra.plan.transition import Role
from libra.report.charts import Figure, Series, line_figure, time_unit
from libra.report.explain_table import (
    LEAST_LOSS,
    alternation,
    crossing,
    fewer_nodes_rows,
    headline,
    loss,
    roles,
    routing_sentence,
)
from libra.report.lanes import Density, Lane, LaneSpan, lane_figure
from libra.report.page import ROLES, Bar, Tile, render
from libra.report.vega import Axis, Marker, ends
from libra.report.words import duration, percent, plain, plural

MOST_REJECTED = 50  # of one kind: there may be thousands
_GENERATION, _STEP, _PLAN = "#3a9bd9", "#8a949e", "#d6408b"
_BUSY, _BOUNDING = ROLES[Role.ROLLOUT], ROLES[Role.FAILED]
_TALLEST = 2.0  # in steps; longer times would flatten the crossing


def explain_page(
    explanation: Explanation,
    title: str,
    classes: Sequence[tuple[int, float]] = (),
    answer: Sequence[str] = (),
    alarms: Sequence[str] = (),
    finalists: Sequence[tuple[str, str, str, str]] = (),
) -> str:
    """The page of an explanation. `title` names what was planned.

    `classes` are (longest context in tokens, share of trajectories), shortest first, for the distribution above the
    buckets. `answer` has the sentences at the top of the page, `alarms` its warnings, and `finalists` the rows of
    simulated plans (see `plan_headline`).
    """
    plans = [(f"no. {place}", plan) for place, plan in enumerate(explanation.runners_up, start=2)]
    otherwise = [(other.decision, other.plan) for other in explanation.otherwise]
    # The widest of both tables, so that they compare.
    widest = max((plan.loss for _, plan in (*plans, *otherwise) if plan is not None), default=0.0)
    most = max((relief.gain for relief in explanation.reliefs if relief.binds), default=0.0)
    reliefs = [
        (it.change, Bar(percent(it.gain), it.gain / most if most > 0 else 0.0), duration(it.step))
        if it.binds
        else (it.change, "nothing", "-")
        for it in explanation.reliefs
    ]
    return render(
        "explain.html",
        title,
        headline=" ".join(answer[:2]) or headline(explanation),
        notices=[
            *alarms,
            *([f"{alternate}."] if (alternate := alternation(explanation.plan.predicted)) else ()),
        ],
        facts=[*answer[2:], *([headline(explanation)] if answer else ())],
        finalists=finalists,
        tiles=list(_tiles(explanation)),
        splits=split_figures(explanation),
        buckets=(bucket_figure(explanation, classes),),
        runners_up=[_plan(name, plan, widest) for name, plan in plans],
        otherwise=[_plan(name, plan, widest) for name, plan in otherwise],
        routing=routing_sentence(explanation),
        chapters=[made(explanation) for made in offered("explanation page")],
        reliefs=reliefs,
        fewer_nodes=fewer_nodes_rows(explanation) if explanation.fewer_nodes else (),
        rejected=explanation.rejected,
        shown=MOST_REJECTED,
    )


def _plan(name: str, plan: PlanView | None, widest: float) -> tuple[str | Bar, ...]:
    if plan is None:
        return name, "-", "-", "no plan"
    part = plan.loss / widest if plan.loss >= LEAST_LOSS else 0.0
    return name, Bar(loss(plan), part), duration(plan.predicted.step), roles(plan)


def _tiles(explanation: Explanation) -> Iterator[Tile]:
    plan = explanation.plan
    yield Tile(
        "Predicted step", duration(plan.predicted.step), f"gap to the proven bound {percent(explanation.proof.gap, 2)}"
    )
    training = f"{plural(plan.training_devices, 'device')} of {plan.training_pool}"
    ranks = plural(plan.replicas, "replica" if plan.layout == ONE_DEVICE else "data-parallel rank")
    yield Tile("Training", training, f"{plan.layout}, {ranks}")
    engines = sum(count for _, count in plan.engines)
    generating = sum(pool.generating for pool in explanation.pools)
    yield Tile(
        "Generation", plural(generating, "device"), f"{plural(engines, 'engine')}, {plural(plan.buckets, 'bucket')}"
    )
    own = [pool for pool in explanation.pools if not pool.serves]
    idle = ", ".join(
        f"{pool.idle:,} of {pool.devices:,} {pool.name}" + (f" ({pool.why_idle})" if pool.why_idle else "")
        for pool in own
    )
    yield Tile("Idle", plural(sum(pool.idle for pool in own), "device"), idle)
    if len(own) < len(explanation.pools):
        lent = sum(view.engines for view in explanation.lenders)
        pools = ", ".join(f"{view.engines:,} of {view.pool}" for view in explanation.lenders)
        yield Tile("Borrowed", plural(lent, "engine"), pools)


def split_figures(explanation: Explanation) -> tuple[Figure, ...]:
    """One figure for each pool that could train; the plan's own pool comes first."""
    own = explanation.plan.training_pool
    pools = dict.fromkeys((own, *(split.pool for split in explanation.splits)))
    by_pool = ((pool, [split for split in explanation.splits if split.pool == pool]) for pool in pools)
    return tuple(_split_figure(explanation, pool, splits) for pool, splits in by_pool if splits)


def _split_figure(explanation: Explanation, pool: str, splits: Sequence[Split]) -> Figure:
    plan, synchronous = explanation.plan, explanation.synchronous
    limit = _TALLEST * plan.predicted.step
    scale, unit = time_unit(limit)
    generation = "generation on the other devices" + ("" if synchronous else ", with what follows it")
    curves = {
        ("training", ROLES[Role.TRAIN]): [(split.devices, split.training) for split in splits],
        (generation, _GENERATION): [(split.devices, split.generation) for split in splits],
    }
    if synchronous:
        curves["step: their sum, with publication", _STEP] = [(split.devices, split.step) for split in splits]
    series = [Series(*name, [(x, y / scale) for x, y in below(points, limit)]) for name, points in curves.items()]
    markers = []
    if pool == plan.training_pool:
        label = f"this plan: {plan.training_devices:,} train"
        markers.append(Marker(plan.training_devices, label, f"a step of {duration(plan.predicted.step)}", _PLAN))
    note = "" if synchronous else _sides(splits)
    note += " Generation: the engines' work or the longest trajectory, whichever is longer" + (
        "." if synchronous else ", with the training and publication that follow it."
    )
    if any(y > limit for points in curves.values() for _, y in points):
        note += f" Above {duration(limit)} nothing is drawn."
    x = Axis(f"devices of {pool} that train", ends(splits[0].devices, splits[-1].devices))
    title, y = f"Time against the split, training on {pool}", Axis(f"time of a step ({unit})")
    return line_figure(title, note, series, x, y, markers, wide=True, height=230)


def _sides(splits: Sequence[Split]) -> str:
    between = crossing(splits)
    if between is None:
        by_itself = splits[0].training > splits[0].generation
        setting = "training by itself" if by_itself else "generation, with what follows it,"
        return f"With every split, {setting} determines the step."
    fewer, more = between
    return (
        f"Up to {fewer:,} training devices, training alone determines the step; from {more:,} on, generation and "
        f"the phases after it do."
    )


def below(points: Sequence[tuple[float, float]], limit: float) -> tuple[tuple[float, float], ...]:
    """The part of a curve between its first fall below the limit and its last rise above it."""
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
    note = "Above: the distribution of trajectories over length. " if classes else ""
    note += "Each lane is a bucket: the lengths that it serves, and its engines."
    starts = [low, *(float(peak) for peak, _ in classes[:-1])]
    density = [
        Density(max(low, start), peak, share, f"up to {peak:,} tokens: {percent(share)}")
        for start, (peak, share) in zip(starts, classes, strict=False)
    ]
    axis = Axis("final context, tokens (logarithmic)", (low, float(buckets[-1].up_to)), logarithmic=True)
    legend = (("bounds the step", _BOUNDING), ("has time left", _BUSY))
    return lane_figure("Buckets", note, lanes, axis, legend, density=density)


def _span(bucket: BucketView, low: float) -> LaneSpan:
    bounding = bucket.share > 1 - LEAST_LOSS
    colour = _BOUNDING if bounding else _BUSY
    share = "the whole step" if bounding else f"{percent(bucket.share)} of the step"
    words = f"{bucket.engines:,} × {bucket.shape} · {bucket.devices:,} devices · {share}"
    title = (
        f"{bucket.above + 1:,} to {bucket.up_to:,} tokens: each engine works {duration(bucket.load)}, "
        f"the longest trajectory takes {duration(bucket.residence)}, max_num_seqs {plain(bucket.max_num_seqs)}"
    )
    return LaneSpan(max(low, float(bucket.above)), float(bucket.up_to), words, title, colour)
