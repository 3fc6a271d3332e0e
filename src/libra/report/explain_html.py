"""An explanation as one HTML page.

Invariant: the page is complete in itself (no script, no address, no font to fetch), shows the numbers of its
`Explanation`, and is the same for the same explanation. It follows the reader's choice of light or dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libra.plan.explain.explanation import Explanation, PlanView
from libra.report.explain_charts import bucket_figure, split_figures
from libra.report.explain_table import LEAST_LOSS, fewer_nodes_words, headline, loss, roles, routing_sentence
from libra.report.markup import NOTHING, Markup, join, tag, text
from libra.report.page import bar, cards, page, section, tile_row
from libra.report.tables import table
from libra.report.verdict import Tile
from libra.report.words import duration, percent, plural

MOST_REJECTED = 50  # of one kind: there may be thousands
_OWN_STYLE = """
.compare td { width: auto; }
.compare td:nth-child(2), .compare td:nth-child(3) { white-space: nowrap; font-variant-numeric: tabular-nums; }
"""


def explain_page(explanation: Explanation, title: str, classes: Sequence[tuple[int, float]] = ()) -> str:
    """The page. `title` names what was planned; `classes` are (longest context in tokens, share of trajectories),
    shortest first, for the distribution above the buckets."""
    return page(title, _sections(explanation, title, classes), _OWN_STYLE)


def _sections(explanation: Explanation, title: str, classes: Sequence[tuple[int, float]]) -> Iterator[Markup]:
    yield tag("h1", text(title))
    yield tag("p", text(headline(explanation)), class_="verdict")
    yield tile_row(_tiles(explanation))
    yield tag("h2", text("Why this split"))
    yield cards(split_figures(explanation))
    yield tag("h2", text("Who serves which lengths"))
    yield cards((bucket_figure(explanation, classes),))
    yield tag("h2", text("What else could be done"))
    yield section("The next best plans", _plans(explanation), "Others than this one, not it with devices on top.")
    yield section("Had one thing been decided otherwise", _otherwise(explanation), "The best plan in each case.")
    yield tag("h2", text("What would shorten the step"))
    yield section("One constraint relaxed at a time", _reliefs(explanation), routing_sentence(explanation))
    if explanation.fewer_nodes:
        yield section("What could be given back", _fewer_nodes(explanation), "The best plan for fewer nodes.")
    if explanation.rejected:
        yield _rejected(explanation)


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


def _plans(explanation: Explanation) -> Markup:
    if not explanation.runners_up:
        return tag("p", text("There is no other plan."), class_="missing")
    widest = _widest_loss(explanation)
    rows = [_plan_row(f"no. {place}", plan, widest) for place, plan in enumerate(explanation.runners_up, start=2)]
    return table(("Plan", "Loss", "Step", "Devices and engines"), rows, "compare")


def _otherwise(explanation: Explanation) -> Markup:
    widest = _widest_loss(explanation)
    rows = [
        (text(other.decision), text("-"), text("-"), text("no plan"))
        if other.plan is None
        else _plan_row(other.decision, other.plan, widest)
        for other in explanation.otherwise
    ]
    return table(("Decision", "Loss", "Step", "Devices and engines"), rows, "compare")


def _widest_loss(explanation: Explanation) -> float:
    """Both tables of plans have one scale, so that their bars compare."""
    others = [other.plan for other in explanation.otherwise if other.plan is not None]
    return max((plan.loss for plan in (*explanation.runners_up, *others)), default=0.0)


def _plan_row(name: str, plan: PlanView, widest: float) -> tuple[Markup, ...]:
    loses = join(_part(plan.loss, widest, "#d55e00"), text(loss(plan)))
    return text(name), loses, text(duration(plan.predicted.step)), text(roles(plan))


def _reliefs(explanation: Explanation) -> Markup:
    widest = max((relief.gain for relief in explanation.reliefs if relief.binds), default=0.0)
    rows = []
    for relief in explanation.reliefs:
        saves = (
            join(_part(relief.gain, widest, "#00795a"), text(percent(relief.gain))) if relief.binds else text("nothing")
        )
        rows.append((text(relief.change), saves, text(duration(relief.step) if relief.binds else "-")))
    return table(("Change", "Saves", "Step then"), rows, "compare")


def _fewer_nodes(explanation: Explanation) -> Markup:
    step = explanation.plan.predicted.step
    rows = [tuple(map(text, fewer_nodes_words(smaller, step))) for smaller in explanation.fewer_nodes]
    if explanation.smallest is not None:
        left, back, change = fewer_nodes_words(explanation.smallest, step)
        rows.append((text(f"the fewest: {left}"), text(back), text(change)))
    return table(("Nodes left", "Devices back", "Step"), rows, "compare")


def _part(part: float, widest: float, colour: str) -> Markup:
    return NOTHING if part < LEAST_LOSS else bar(part, widest, colour)


def _rejected(explanation: Explanation) -> Markup:
    kinds = []
    for rejected in explanation.rejected:
        summary = tag("summary", text(f"{len(rejected.options):,} × {rejected.kind}"))
        rows = [(text(name), text(reason)) for name, reason in rejected.options[:MOST_REJECTED]]
        left = len(rejected.options) - len(rows)
        said = (
            tag("p", text(f"and {left:,} more, of which `libra explain --json` tells"), class_="note")
            if left
            else NOTHING
        )
        kinds.append(tag("details", summary, table(("Option", "Why not"), rows), said))
    total = sum(len(rejected.options) for rejected in explanation.rejected)
    summary = tag("summary", text(f"What is no option, and why ({total:,})"))
    return tag("details", summary, section("", join(*kinds)))
