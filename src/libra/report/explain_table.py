"""Terminal tables of an explanation, and the sentence that opens them.

Invariant: tables show the numbers of their `Explanation` and compute none of their own, up to units and shares; they
are legible in 100 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.table import Table

from libra.plan.explain.explanation import Bound, Explanation, PlanView, SmallerCluster, Split
from libra.plan.explain.what_if import SAME_STEP
from libra.report.words import BOTTLENECK_WORDS, cell, duration, percent, signed_percent

LEAST_LOSS = 5e-4  # what the solver trades for moves and devices, rounded up
MOST_SPLITS = 8  # rows of the table of splits
MOST_KINDS = 4  # of reasons why something is no option
_BOUND = {
    "rollout": "Rollout-bound",
    "training": "Training-bound",
    "latency": "Latency-bound",
    "publication": "Publication-bound",
}


def headline(explanation: Explanation) -> str:
    """What the step consists of, and what is proven, in two sentences."""
    bound = explanation.bound
    return f"{_BOUND[bound.by]}: {parts_sentence(bound, explanation.plan.predicted.step)}. {_proven(explanation)}"


def explain_tables(explanation: Explanation) -> tuple[Table, ...]:
    """What bounds the plan, what else could be done, and what would help; ready for a rich console."""
    tables = [
        _buckets(explanation),
        _pools(explanation),
        _alternatives(explanation),
        _reliefs(explanation),
        _splits(explanation),
    ]
    if explanation.fewer_nodes:
        tables.insert(4, _fewer_nodes(explanation))
    return (*tables, _rejected(explanation)) if explanation.rejected else tuple(tables)


def routing_sentence(explanation: Explanation) -> str:
    """What it costs that nobody knows lengths beforehand."""
    routing = explanation.routing
    saved = routing.step - routing.best_plan
    if abs(saved) < 1e-3 * routing.step:
        return "A router that knew all lengths beforehand would not change the step."
    change = "save" if saved > 0 else "cost"
    share = percent(abs(saved) / routing.step)
    return f"A router that knew all lengths beforehand would {change} {duration(abs(saved))} a step ({share})."


def roles(plan: PlanView) -> str:
    """Who trains and who generates: `16 of a800 train, 4 a800-tp2 + 1 a800-tp8 generate`."""
    engines = " + ".join(f"{count:,} {shape}" for shape, count in plan.engines)
    return f"{plan.training_devices:,} of {plan.training_pool} train, {engines} generate"


def loss(plan: PlanView) -> str:
    """The plan's loss; what the solver does not tell apart is none."""
    return "none" if abs(plan.loss) < LEAST_LOSS else signed_percent(plan.loss, 1)


def crossing(splits: Sequence[Split]) -> tuple[int, int] | None:
    """The neighbouring numbers of training devices of one pool between which training becomes the faster side."""
    for fewer, more in pairwise(splits):
        if fewer.training >= fewer.generation and more.training <= more.generation:
            return fewer.devices, more.devices
    return None


def parts_sentence(bound: Bound, step: float) -> str:
    """What the seconds of a step go to; they add up to it."""
    if len(bound.parts) == 1:
        slack = f", and the rest would allow one {percent(bound.slack)} shorter" if bound.slack else ""
        return f"a step is as long as {BOTTLENECK_WORDS[bound.by]}, {duration(step)}{slack}"
    named = [f"{duration(seconds)} {BOTTLENECK_WORDS[name]}" for name, seconds in bound.parts if seconds > 0]
    divided = (
        f" (each divided by {bound.batches}: with staleness {bound.batches - 1}, {bound.batches} batches are under way)"
        if bound.batches > 1
        else ""
    )
    return f"a step of {duration(step)} is {', '.join(named[:-1])} and {named[-1]}{divided}"


def _proven(explanation: Explanation) -> str:
    proof = explanation.proof
    if proof.status == "optimal":
        return f"No plan is shorter by more than {percent(proof.gap, 2)}."
    return f"The search ended early: a plan may be up to {percent(proof.gap, 1)} shorter."


def _buckets(explanation: Explanation) -> Table:
    table = Table(title="Buckets: work, longest trajectory, share of the step")
    table.add_column("final context", justify="right")
    table.add_column("engines")
    for column in ("max_num_seqs", "work", "longest", "share"):
        table.add_column(column, justify="right")
    for bucket in explanation.buckets:
        table.add_row(
            f"{bucket.above + 1:,} to {bucket.up_to:,}",
            f"{bucket.engines:,} {cell(bucket.shape)}",
            f"{bucket.max_num_seqs:,}",
            duration(bucket.load),
            duration(bucket.residence),
            percent(bucket.share),
        )
    return table


def _pools(explanation: Explanation) -> Table:
    table = Table(title="Devices")
    table.add_column("pool")
    for column in ("devices", "train", "generate", "idle"):
        table.add_column(column, justify="right")
    if any(pool.idle for pool in explanation.pools):
        table.add_column("why idle")
    for pool in explanation.pools:
        counts = (pool.devices, pool.training, pool.generating, pool.idle)
        table.add_row(
            cell(pool.name), *(f"{count:,}" for count in counts), *([cell(pool.why_idle)] * (len(table.columns) > 5))
        )
    return table


def _alternatives(explanation: Explanation) -> Table:
    table = Table(title="Next best plans, and the best that decide otherwise")
    table.add_column("plan")
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("devices and engines")
    for place, plan in enumerate(explanation.runners_up, start=2):
        table.add_row(f"no. {place}", loss(plan), duration(plan.predicted.step), cell(roles(plan)))
    table.add_section()
    for other in explanation.otherwise:
        if other.plan is None:
            table.add_row(cell(other.decision), "-", "-", "no plan")
        else:
            step = duration(other.plan.predicted.step)
            table.add_row(cell(other.decision), loss(other.plan), step, cell(roles(other.plan)))
    return table


def _reliefs(explanation: Explanation) -> Table:
    table = Table(title="What would shorten the step")
    table.add_column("change")
    table.add_column("saves", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for relief in explanation.reliefs:
        saved = (duration(relief.seconds), percent(relief.gain)) if relief.binds else ("nothing", "")
        table.add_row(cell(relief.change), *saved)
    return table


def fewer_nodes_words(smaller: SmallerCluster, step: float) -> tuple[str, str, str]:
    """Which nodes are left, what is given back, and what that does to the step."""
    left = " + ".join(f"{kept:,} of {count:,} {name}" for name, kept, count in smaller.nodes if kept < count)
    if smaller.seconds is None:
        return left, f"{smaller.devices:,}", "no plan"
    longer = smaller.seconds / step if step > 0 else 0.0
    change = "the same step" if abs(longer) < SAME_STEP else f"{duration(smaller.seconds)} longer ({percent(longer)})"
    return left, f"{smaller.devices:,}", change


def _fewer_nodes(explanation: Explanation) -> Table:
    table = Table(title="What could be given back")
    table.add_column("nodes left")
    table.add_column("devices back", justify="right")
    table.add_column("step")
    step = explanation.plan.predicted.step
    for smaller in explanation.fewer_nodes:
        table.add_row(*map(cell, fewer_nodes_words(smaller, step)))
    table.add_section()
    if explanation.smallest is None:
        table.add_row("no smaller cluster", "", "has the same step")
    else:
        left, back, change = fewer_nodes_words(explanation.smallest, step)
        table.add_row(cell(f"the fewest: {left}"), back, change)
    return table


def _splits(explanation: Explanation) -> Table:
    plan = explanation.plan
    here = [split for split in explanation.splits if split.pool == plan.training_pool]
    table = Table(title=f"Splits, training on {cell(plan.training_pool)}")
    for column in ("devices that train", "training", "generation", "step"):
        table.add_column(column, justify="right")
    for split in _around(here, plan.training_devices):
        chosen = split.devices == plan.training_devices
        seconds = (duration(part) for part in (split.training, split.generation, split.step))
        table.add_row(f"{split.devices:,}", *seconds, style="bold" if chosen else None)
    return table


def _around(splits: Sequence[Split], devices: int) -> Sequence[Split]:
    """The splits nearest to the plan's own."""
    below = sum(split.devices < devices for split in splits)
    start = max(0, min(below - MOST_SPLITS // 2, len(splits) - MOST_SPLITS))
    return splits[start : start + MOST_SPLITS]


def _rejected(explanation: Explanation) -> Table:
    table = Table(title="What is no option (why each: --json, --html)")
    table.add_column("options", justify="right")
    table.add_column("why, for instance")
    for rejected in explanation.rejected[:MOST_KINDS]:
        table.add_row(f"{len(rejected.options):,}", cell(rejected.options[0][1].partition(";")[0]))
    left = sum(len(rejected.options) for rejected in explanation.rejected[MOST_KINDS:])
    if left:
        table.add_row(f"{left:,}", "other reasons")
    return table
