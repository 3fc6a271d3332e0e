"""An explanation as one HTML page: the same for the same explanation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from libra.plan.explain.explanation import Explanation, PlanView
from libra.report.explain_figures import bucket_figure, split_figures
from libra.report.explain_table import LEAST_LOSS, fewer_nodes_words, headline, loss, roles, routing_sentence
from libra.report.page import Tile, render
from libra.report.words import duration, percent, plural

MOST_REJECTED = 50  # of one kind: there may be thousands


class _Row(NamedTuple):
    """Of a table that compares: `part` is the length of the bar before `change`."""

    name: str
    part: float
    change: str
    step: str
    roles: str = ""


def explain_page(explanation: Explanation, title: str, classes: Sequence[tuple[int, float]] = ()) -> str:
    """The page. `title` names what was planned; `classes` are (longest context in tokens, share of trajectories),
    shortest first, for the distribution above the buckets."""
    runners_up = [_plan(f"no. {place}", plan) for place, plan in enumerate(explanation.runners_up, start=2)]
    otherwise = [_plan(other.decision, other.plan) for other in explanation.otherwise]
    reliefs = [
        _Row(relief.change, relief.gain, percent(relief.gain), duration(relief.step))
        if relief.binds
        else _Row(relief.change, 0.0, "nothing", "-")
        for relief in explanation.reliefs
    ]
    return render(
        "explain.html",
        title,
        headline=headline(explanation),
        notices=(),
        tiles=list(_tiles(explanation)),
        splits=split_figures(explanation),
        buckets=(bucket_figure(explanation, classes),),
        runners_up=runners_up,
        otherwise=otherwise,
        widest_loss=max((row.part for row in (*runners_up, *otherwise)), default=0.0),  # so that both tables compare
        routing=routing_sentence(explanation),
        reliefs=reliefs,
        widest_gain=max((row.part for row in reliefs), default=0.0),
        fewer_nodes=_fewer_nodes(explanation),
        rejected=explanation.rejected,
        shown=MOST_REJECTED,
    )


def _fewer_nodes(explanation: Explanation) -> list[tuple[str, ...]]:
    step = explanation.plan.predicted.step
    rows = [tuple(fewer_nodes_words(smaller, step)) for smaller in explanation.fewer_nodes]
    if rows and explanation.smallest is not None:
        left, back, change = fewer_nodes_words(explanation.smallest, step)
        rows.append((f"the fewest: {left}", back, change))
    return rows


def _plan(name: str, plan: PlanView | None) -> _Row:
    if plan is None:
        return _Row(name, 0.0, "-", "-", "no plan")
    part = plan.loss if plan.loss >= LEAST_LOSS else 0.0
    return _Row(name, part, loss(plan), duration(plan.predicted.step), roles(plan))


def _tiles(explanation: Explanation) -> Iterator[Tile]:
    plan = explanation.plan
    yield Tile("Step", duration(plan.predicted.step), f"gap to the proven bound {percent(explanation.proof.gap, 2)}")
    training = f"{plural(plan.training_devices, 'device')} of {plan.training_pool}"
    yield Tile("Training", training, f"{plan.layout}, {plural(plan.replicas, 'replica')}")
    engines = sum(count for _, count in plan.engines)
    generating = sum(pool.generating for pool in explanation.pools)
    yield Tile(
        "Generation", plural(generating, "device"), f"{plural(engines, 'engine')}, {plural(plan.buckets, 'bucket')}"
    )
    idle = ", ".join(
        f"{pool.idle:,} of {pool.devices:,} {pool.name}" + (f" ({pool.why_idle})" if pool.why_idle else "")
        for pool in explanation.pools
    )
    yield Tile("Idle", plural(sum(pool.idle for pool in explanation.pools), "device"), idle)
