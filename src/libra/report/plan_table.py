"""Terminal tables of a plan.

Invariant: a table shows the numbers of its `Plan`, and what it adds to them follows from those alone; what the log
behind the plan could not tell is said in words.
"""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from libra.lengths import TrajectoryClass
from libra.plan.offline import Evidence
from libra.plan.problem import Bottleneck, Plan
from libra.report.verdict import BOTTLENECK_WORDS
from libra.report.words import duration, percent, plain, plural


def plan_tables(plan: Plan) -> tuple[Table, ...]:
    """Who does what, how long a step takes and why, what is proven, and for which work; ready for a rich console."""
    return (_allocation(plan), _step(plan), _proof(plan), _workload(plan))


def log_notes(evidence: Evidence) -> tuple[str, ...]:
    """What a reader must know of the log before believing the plan: one sentence each, none for a complete log."""
    notes = []
    if evidence.unfinished:
        notes.append(
            f"{plural(evidence.unfinished, 'trajectory', 'trajectories')} of"
            f" {evidence.finished + evidence.unfinished:,} in the log left out: unfinished, so the tail may be longer"
        )
    unknown = evidence.tracker.unknown_tool_share
    if unknown > 0:
        notes.append(
            f"tool seconds unknown for {percent(unknown)} of the tool calls: planned as 0 s, so"
            f" {BOTTLENECK_WORDS['latency']} may take longer"
        )
    return tuple(notes)


def _allocation(plan: Plan) -> Table:
    table = Table(title="Allocation")
    table.add_column("role")
    table.add_column("devices", justify="right")
    table.add_column("engine size")
    table.add_column("final context, tokens", justify="right")
    table.add_row("training replicas", f"{plan.allocation.replicas:,}", "-", "-")
    for bucket in plan.allocation.buckets:
        table.add_row(
            "engines", f"{bucket.engines:,}", escape(bucket.shape), f"{bucket.above + 1:,} to {bucket.up_to:,}"
        )
    return table


def _step(plan: Plan) -> Table:
    predicted = plan.predicted
    table = Table(title=f"One optimiser step, predicted: {duration(predicted.step)}")
    table.add_column("bound by")
    table.add_column("seconds", justify="right")
    table.add_column("slack", justify="right")
    parts: tuple[tuple[Bottleneck, float], ...] = (
        ("rollout", predicted.rollout),
        ("training", predicted.training),
        ("latency", predicted.latency),
    )
    for name, seconds in parts:
        # The step is the longest part. A step of no length has no share to spare.
        slack = percent(1 - seconds / predicted.step) if predicted.step > 0 else "-"
        table.add_row(
            BOTTLENECK_WORDS[name], f"{seconds:,.4f}", "bottleneck" if name == predicted.bottleneck else slack
        )
    return table


def _proof(plan: Plan) -> Table:
    table = Table(title="Proof", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("solver status", plan.proof.status)
    table.add_row("no step can be shorter than", f"{plan.proof.bound:,.4f} s")
    table.add_row("gap to that bound", percent(plan.proof.gap, 2))
    return table


def _workload(plan: Plan) -> Table:
    workload = plan.request.workload
    table = Table(title=f"Work of a step: {plural(workload.trajectories, 'trajectory', 'trajectories')}, in classes")
    for column in ("longest, tokens", "share", "generated", "prefilled", "turns", "tool seconds", "engine size"):
        table.add_column(column, justify="left" if column == "engine size" else "right")
    for cls in workload.classes:
        table.add_row(
            f"{cls.peak_context:,}",
            percent(cls.share),
            plain(cls.generated),
            plain(cls.prefill),
            plain(cls.turns),
            plain(cls.tool_seconds),
            escape(_serving_shape(plan, cls)),
        )
    return table


def _serving_shape(plan: Plan, cls: TrajectoryClass) -> str:
    return next(bucket.shape for bucket in plan.allocation.buckets if bucket.above < cls.peak_context <= bucket.up_to)
