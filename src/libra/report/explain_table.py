"""Terminal tables of an explanation, and the sentence above them.

Invariant: tables show the numbers of their `Explanation`, and convert only units and shares. They are legible in 100
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.table import Table

from libra.plan.explain.against import Against, SplitStep
from libra.plan.explain.explanation import Bound, Explanation, PlanView, Split
from libra.plan.explain.what_if import SAME_STEP
from libra.plan.solution import Prediction, Proof
from libra.report.tables import number, whole
from libra.report.words import BOTTLENECK_WORDS, PART_WORDS, cell, duration, percent, plural, signed_percent

LEAST_LOSS = 5e-4  # relative loss that the solver accepts to save moves and devices, rounded up
MOST_SPLITS = 8  # rows of the table of splits
MOST_KINDS = 4  # kinds of rejections that are shown


def headline(explanation: Explanation) -> str:
    """Sentences on the bottleneck of the step, its parts, and the proof."""
    bound = explanation.bound
    by = _bound(bound, explanation.plan.predicted.step)
    return f"{bound.by.capitalize()}-bound: {by}. {_parts(bound)}{_proven(explanation.proof)}"


def against_sentences(found: Against) -> tuple[str, ...]:
    """Sentences that compare a split with the plan, and name the side that waits in each."""
    own, plan = found.split, found.plan
    compared = "as long as" if abs(found.longer) < LEAST_LOSS else f"{signed_percent(found.longer, 1)} against"
    idle = f" No engine uses {plural(found.idle, 'GPU')} of the split." if found.idle else ""
    steps = f"a step of {duration(own.step)}, {compared} the plan's {duration(plan.step)} ({_split(plan)})"
    return (
        f"{_split(own)}: {steps}.{idle}",
        f"With the split {_waits(own)}; with the plan {_waits(plan)}.",
    )


def _split(step: SplitStep) -> str:
    return f"train {step.train:,}, generate {step.generate:,}"


def _waits(step: SplitStep) -> str:
    return (
        f"trainers wait {percent(step.trainers_wait)} of a step and the busiest engines {percent(step.engines_wait)}"
        f" ({step.bottleneck}-bound)"
    )


def alternation(predicted: Prediction) -> str:
    """A sentence on the two durations between which steps alternate, and the remedy; empty if steps do not
    alternate.
    """
    if predicted.step_range is None:
        return ""
    short, long = map(duration, predicted.step_range)
    return (
        f"{duration(predicted.step)} is the mean of alternating steps: a batch waits for the longest episodes of "
        f"the previous batch, so steps may take from {short} to {long}; a limit on the seconds of an episode, or "
        f"more staleness, shortens them"
    )


def explain_tables(explanation: Explanation) -> tuple[Table, ...]:
    """Tables of the plan's bottleneck, alternatives and improvements, for a rich console."""
    return (
        _buckets(explanation),
        _pools(explanation),
        _alternatives(explanation),
        _reliefs(explanation),
        *([_fewer_nodes(explanation)] if explanation.fewer_nodes else ()),
        _splits(explanation),
        *([_rejected(explanation)] if explanation.rejected else ()),
    )


def routing_sentence(explanation: Explanation) -> str:
    """A sentence on the gain of a router that knows all lengths in advance."""
    routing = explanation.routing
    saved = routing.step - routing.best_plan
    if abs(saved) < 1e-3 * routing.step:
        return "A router that knew all lengths in advance would not change the step."
    change = "save" if saved > 0 else "cost"
    share = percent(abs(saved) / routing.step)
    return f"A router that knew all lengths in advance would {change} {duration(abs(saved))} a step ({share})."


def roles(plan: PlanView) -> str:
    """Devices that train and engines that generate: `16 of a800 train, 4 a800-tp2 + 1 a800-tp8 generate`."""
    engines = " + ".join(f"{count:,} {shape}" for shape, count in plan.engines)
    return f"{plan.training_devices:,} of {plan.training_pool} train, {engines} generate"


def loss(plan: PlanView) -> str:
    """The plan's loss; "none" if below the solver's tolerance."""
    return "none" if abs(plan.loss) < LEAST_LOSS else signed_percent(plan.loss, 1)


def crossing(splits: Sequence[Split]) -> tuple[int, int] | None:
    """The two adjacent numbers of training devices of a pool between which training becomes faster than generation."""
    for fewer, more in pairwise(splits):
        if fewer.training >= fewer.generation and more.training <= more.generation:
            return fewer.devices, more.devices
    return None


def _bound(bound: Bound, step: float) -> str:
    slack = f"; without this bottleneck, a step could be {percent(bound.slack)} shorter" if bound.slack else ""
    return f"a step is as long as {BOTTLENECK_WORDS[bound.by]}, {duration(step)}{slack}"


def _parts(bound: Bound) -> str:
    """The parts of a batch's latency, which add up to the step, largest first."""
    if bound.by != "latency":
        return ""
    parts = "; ".join(f"{PART_WORDS[name]} {duration(seconds)}" for name, seconds in bound.parts if seconds > 0)
    under_way = f", each divided by the {bound.batches} batches under way (staleness {bound.batches - 1})"
    return f"Its parts{under_way if bound.batches > 1 else ''}: {parts}. "


def _proven(proof: Proof) -> str:
    if proof.status == "optimal":
        return f"No plan is shorter by more than {percent(proof.gap, 2)}."
    return f"The search ended early: a plan may be up to {percent(proof.gap, 1)} shorter."


def _buckets(explanation: Explanation) -> Table:
    table = Table(
        number("final context"),
        "engines",
        *map(number, ("max_num_seqs", "work", "longest", "share")),
        title="Buckets: work, longest trajectory, share of the step",
    )
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
    table = Table("pool", *map(number, ("devices", "train", "generate", "idle")), title="Devices")
    reasons = any(pool.idle for pool in explanation.pools)
    if reasons:
        table.add_column("why idle")
    for pool in explanation.pools:
        if pool.serves:
            reason = (cell(pool.why_idle),) if reasons else ()
            table.add_row(f"{cell(pool.name)}, serves", f"{pool.devices:,}", "-", f"{pool.generating:,}", "-", *reason)
            continue
        counts = (pool.devices, pool.training, pool.generating, pool.idle)
        table.add_row(cell(pool.name), *(f"{count:,}" for count in counts), *([cell(pool.why_idle)] if reasons else ()))
    return table


def _alternatives(explanation: Explanation) -> Table:
    title = "Next best plans, and the best with another decision"
    table = Table("plan", whole("loss"), whole("step"), "devices and engines", title=title)
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
    table = Table("change", whole("saves"), whole(""), title="Changes that would shorten the step")
    for relief in explanation.reliefs:
        saved = (duration(relief.seconds), percent(relief.gain)) if relief.binds else ("nothing", "")
        table.add_row(cell(relief.change), *saved)
    return table


def fewer_nodes_rows(explanation: Explanation) -> list[tuple[str, str, str]]:
    """(nodes left, devices given back, change of the step) for each smaller cluster, and for the smallest."""
    smallest = () if explanation.smallest is None else (("the fewest: ", explanation.smallest),)
    rows = []
    for which, smaller in (*(("", it) for it in explanation.fewer_nodes), *smallest):
        left = " + ".join(f"{kept:,} of {count:,} {name}" for name, kept, count in smaller.nodes if kept < count)
        change = "no plan"
        if smaller.seconds is not None:
            step = explanation.plan.predicted.step
            longer = smaller.seconds / step if step > 0 else 0.0
            same = abs(longer) < SAME_STEP
            change = "the same step" if same else f"{duration(smaller.seconds)} longer ({percent(longer)})"
        rows.append((which + left, f"{smaller.devices:,}", change))
    return rows


def _fewer_nodes(explanation: Explanation) -> Table:
    table = Table("nodes left", number("devices back"), "step", title="Nodes that could be given back")
    for place, row in enumerate(fewer_nodes_rows(explanation)):
        if place == len(explanation.fewer_nodes):
            table.add_section()
        table.add_row(*map(cell, row))
    if explanation.smallest is None:
        table.add_section()
        table.add_row("no smaller cluster", "", "has the same step")
    return table


def _splits(explanation: Explanation) -> Table:
    plan = explanation.plan
    here = [split for split in explanation.splits if split.pool == plan.training_pool]
    columns = ("devices that train", "training", "generation", "step")
    table = Table(*map(number, columns), title=f"Splits, training on {cell(plan.training_pool)}")
    for split in _around(here, plan.training_devices):
        chosen = split.devices == plan.training_devices
        seconds = (duration(part) for part in (split.training, split.generation, split.step))
        table.add_row(f"{split.devices:,}", *seconds, style="bold" if chosen else None)
    return table


def _around(splits: Sequence[Split], devices: int) -> Sequence[Split]:
    """The splits closest to the plan's split."""
    below = sum(split.devices < devices for split in splits)
    start = max(0, min(below - MOST_SPLITS // 2, len(splits) - MOST_SPLITS))
    return splits[start : start + MOST_SPLITS]


def _rejected(explanation: Explanation) -> Table:
    table = Table(number("options"), "why, for instance", title="Rejected options (reasons: --json, --html)")
    for rejected in explanation.rejected[:MOST_KINDS]:
        table.add_row(f"{len(rejected.options):,}", cell(rejected.options[0][1].partition(";")[0]))
    left = sum(len(rejected.options) for rejected in explanation.rejected[MOST_KINDS:])
    if left:
        table.add_row(f"{left:,}", "other reasons")
    return table
