"""Terminal tables of an explanation, and the sentence that opens them.

Invariant: tables show the numbers of their `Explanation` and compute none of their own, up to units and shares; they
are legible in 100 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.markup import escape
from rich.table import Table

from libra.plan.explain.explanation import Bound, Explanation, PlanView
from libra.plan.explain.splits import Split
from libra.report.words import BOTTLENECK_WORDS, duration, percent, signed_percent

LEAST_LOSS = 5e-4  # what the solver trades for moves and devices, rounded up
MOST_SPLITS = 12  # rows of the table of splits
_BOUND = {"rollout": "Rollout-bound", "training": "Training-bound", "latency": "Latency-bound"}


def headline(explanation: Explanation) -> str:
    """What bounds the step and by how much, and what is proven, in two sentences."""
    bound = explanation.bound
    slack = percent(bound.slack, 1 if bound.slack < 0.1 else 0)
    return f"{_BOUND[bound.by]} by {slack}: {_seconds(bound, explanation.plan.predicted.step)}. {_proven(explanation)}"


def explain_tables(explanation: Explanation) -> tuple[Table, ...]:
    """What bounds the plan, what else could be done, and what would help; ready for a rich console."""
    tables = [
        _buckets(explanation),
        _pools(explanation),
        _alternatives(explanation),
        _reliefs(explanation),
        _splits(explanation),
    ]
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


def _seconds(bound: Bound, step: float) -> str:
    whole, by, other = f"a step takes {duration(step)}", BOTTLENECK_WORDS[bound.by], BOTTLENECK_WORDS[bound.next]
    alone = f"{other} alone would need {duration(bound.next_seconds)}"
    if bound.seconds == step:
        return f"{whole}; {alone}"
    part = f"{whole}, {duration(bound.seconds)} of it {by}"
    # Of what adds up to a step only generation and its longest episodes go on side by side.
    return (
        f"{part} and {duration(bound.next_seconds)} {other}"
        if "training" in (bound.by, bound.next)
        else f"{part}; {alone}"
    )


def _proven(explanation: Explanation) -> str:
    proof = explanation.proof
    if proof.status == "optimal":
        return f"No plan is shorter by more than {percent(proof.gap, 2)}."
    return f"The search ended early: a plan may be up to {percent(proof.gap, 1)} shorter."


def _buckets(explanation: Explanation) -> Table:
    table = Table(title="Buckets: work, longest trajectory, share of the step")
    table.add_column("final context", justify="right")
    table.add_column("engines")
    for column in ("seats", "work", "longest", "share"):
        table.add_column(column, justify="right")
    for bucket in explanation.buckets:
        table.add_row(
            f"{bucket.above + 1:,} to {bucket.up_to:,}",
            f"{bucket.engines:,} {escape(bucket.shape)}",
            f"{bucket.seats:,}",
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
    for pool in explanation.pools:
        counts = (pool.devices, pool.training, pool.generating, pool.idle)
        table.add_row(escape(pool.name), *(f"{count:,}" for count in counts))
    return table


def _alternatives(explanation: Explanation) -> Table:
    table = Table(title="Next best plans, and the best that decide otherwise")
    table.add_column("plan")
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("devices and engines")
    for place, plan in enumerate(explanation.runners_up, start=2):
        table.add_row(f"no. {place}", loss(plan), duration(plan.predicted.step), escape(roles(plan)))
    table.add_section()
    for other in explanation.otherwise:
        if other.plan is None:
            table.add_row(escape(other.decision), "-", "-", "no plan")
        else:
            step = duration(other.plan.predicted.step)
            table.add_row(escape(other.decision), loss(other.plan), step, escape(roles(other.plan)))
    return table


def _reliefs(explanation: Explanation) -> Table:
    table = Table(title="What would shorten the step")
    table.add_column("change")
    table.add_column("saves", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for relief in explanation.reliefs:
        saved = (duration(relief.seconds), percent(relief.gain)) if relief.binds else ("nothing", "")
        table.add_row(escape(relief.change), *saved)
    return table


def _splits(explanation: Explanation) -> Table:
    plan = explanation.plan
    here = [split for split in explanation.splits if split.pool == plan.training_pool]
    table = Table(title=f"Splits, training on {escape(plan.training_pool)}")
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
    table = Table(title="What is no option, and why")
    table.add_column("why")
    table.add_column("how many", justify="right")
    table.add_column("such as")
    for rejected in explanation.rejected:
        name, reason = rejected.options[0]
        table.add_row(escape(rejected.kind), f"{len(rejected.options):,}", escape(f"{name}: {reason}"))
    return table
