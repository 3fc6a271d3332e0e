"""Terminal tables of a plan.

Invariant: a table shows numbers of its `Plan`, or numbers computed only from these. Notes name the data that the plan's
log lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table

from libra.plan.explain.explanation import Bound, PoolView
from libra.plan.offline import LogEvidence
from libra.plan.options.request import PlanningRequest
from libra.plan.placement import DeviceGroup
from libra.plan.plan import Plan
from libra.report.explain_table import alternation
from libra.report.plan_headline import finalists_table, proof_sentence
from libra.report.tables import number, whole
from libra.report.words import PART_WORDS, cell, duration, percent, plain, plural

_PAUSE = 600.0  # seconds; longer tool calls probably wait for people


def plan_tables(plan: Plan, bound: Bound, pools: Sequence[PoolView]) -> tuple[Table, ...]:
    """Tables of the allocation, idle devices, loans, finalists, the step and its parts, the proof, and the work."""
    idle = [pool for pool in pools if pool.idle and not pool.serves]
    lenders = [pool for pool in pools if pool.serves]
    tables = (_allocation(plan), *([_idle(idle)] if idle else []), *([_lenders(plan, lenders)] if lenders else []))
    finalists = [finalists_table(plan)] if plan.finalists else []
    return (*tables, *finalists, _step(plan, bound), _proof(plan), _workload(plan))


def log_notes(plan: Plan, bound: Bound, evidence: LogEvidence) -> tuple[str, ...]:
    """Caveats that follow from the plan's log, one sentence each."""
    notes = []
    request: PlanningRequest = plan.request
    if evidence.unfinished:
        notes.append(
            f"{plural(evidence.unfinished, 'trajectory', 'trajectories')} of"
            f" {evidence.finished + evidence.unfinished:,} in the log"
            + (
                " unfinished: their present lengths count as lower bounds"
                if request.counts_unfinished
                else " left out: unfinished, so the tail may be longer"
            )
        )
    unknown = evidence.tracker.unknown_tool_share
    if unknown > 0:
        seconds = request.unknown_tool_seconds
        notes.append(
            f"tool seconds unknown for {percent(unknown)} of the tool calls: {plain(seconds)} s assumed, so "
            f"{PART_WORDS['latency']} may take longer"
        )
    if evidence.cut_tool_calls:
        calls, longest = plural(evidence.cut_tool_calls, "tool call"), duration(evidence.longest_tool_call)
        notes.append(f"{calls} of more than {longest} counted as {longest}")
    elif evidence.longest_tool_call > _PAUSE and bound.parts[0][0] == "latency":
        notes.append(
            f"the longest tool call of the log took {duration(evidence.longest_tool_call)}, and waiting for the "
            f"longest episodes is the largest part of a step: if calls waited for people, shorten them with "
            f"--longest-tool-call SECONDS"
        )
    if alternate := alternation(plan.predicted):
        notes.append(alternate)
    return tuple(notes)


def _allocation(plan: Plan) -> Table:
    table = Table(
        "role",
        number("count"),
        Column("each", overflow="fold"),
        whole("max_num_seqs"),
        number("final context, tokens"),
        *((number("devices"), "where") if plan.placement else ()),
        title="Allocation",
    )

    def add(bucket: int | None, role: str, count: int, each: str, max_num_seqs: str, span: str) -> None:
        groups = [group for group in plan.placement if group.bucket == bucket]
        where = (f"{sum(group.devices for group in groups):,}", cell(_where(groups))) if plan.placement else ()
        table.add_row(role, f"{count:,}", cell(each), max_num_seqs, span, *where)

    ranks, devices = "training replicas", "one device"
    if plan.layout is not None:  # its name is too long for a column of a terminal
        ranks, devices = "training ranks", plural(plan.layout.replica_devices, "device")
        table.caption = f"training, in data-parallel ranks: {plan.layout.family}"
    add(None, ranks, plan.allocation.replicas, devices, "-", "-")
    for index, (bucket, max_num_seqs) in enumerate(zip(plan.allocation.buckets, plan.max_num_seqs, strict=True)):
        span = f"{bucket.above + 1:,} to {bucket.up_to:,}"
        lent = any(loan.shape == bucket.shape for loan in plan.loans)
        paired = any(group.bucket == index and group.role == "prefill" for group in plan.placement)
        kind = "lent engines" if lent else "prefill/decode pairs" if paired else "engines"
        add(index, kind, bucket.engines, bucket.shape, str(max_num_seqs), span)
    return table


def _where(groups: Sequence[DeviceGroup]) -> str:
    """Nodes of each pool, with ranges of adjacent nodes: `a800 0-2, 5`."""
    words = []
    for pool in dict.fromkeys(group.pool for group in groups):
        nodes = sorted({node for group in groups if group.pool == pool for node in group.nodes})
        starts = [node for node in nodes if node - 1 not in nodes]
        ends = [node for node in nodes if node + 1 not in nodes]
        runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
        words.append(f"{pool} {', '.join(runs)}")
    return "; ".join(words)


def _step(plan: Plan, bound: Bound) -> Table:
    """The parts of the step, largest first."""
    step, several = plan.predicted.step, len(bound.parts) > 1
    table = Table(
        Column("spent on", footer="the step"),
        number("seconds", footer=f"{step:,.2f}"),
        number("share"),
        "",
        title=f"One optimiser step, predicted: {duration(step)}, {bound.by}-bound",
        show_footer=several,
    )
    for place, (name, seconds) in enumerate(bound.parts):
        share = percent(seconds / step) if step > 0 else "-"
        table.add_row(PART_WORDS[name], f"{seconds:,.2f}", share, "largest part" if several and not place else "")
    if several and bound.batches > 1:
        staleness = f"with staleness {bound.batches - 1}, {bound.batches} batches are under way"
        table.caption = f"each divided by {bound.batches}: {staleness}"
    return table


def _idle(pools: Sequence[PoolView]) -> Table:
    table = Table("pool", number("devices"), "why", title="Idle devices")
    for pool in pools:
        table.add_row(cell(pool.name), f"{pool.idle:,}", cell(pool.why_idle))
    return table


def _lenders(plan: Plan, pools: Sequence[PoolView]) -> Table:
    """The engines borrowed from each serving pool, or the reason why there are none."""
    table = Table("pool", *map(number, ("engines", "use", "lent", "away")), title="Loans")
    if any(all(loan.pool != pool.name for loan in plan.loans) for pool in pools):
        table.add_column("why none")
    for pool in pools:
        loans = [loan for loan in plan.loans if loan.pool == pool.name]
        for loan in loans:
            of_time = (percent(loan.share), percent(loan.away))
            table.add_row(cell(pool.name), f"{loan.engines:,}", f"{loan.use:g}", *of_time)
        if not loans:
            table.add_row(cell(pool.name), "0", "-", "-", "-", cell(pool.why_idle))
    table.caption = "lent: share of the devices' time; away: probability that no time is lent in the coming period"
    return table


def _proof(plan: Plan) -> Table:
    table = Table("", number(""), title="Proof", show_header=False)
    table.caption = proof_sentence(plan)
    table.add_row("solver status", plan.proof.status)
    table.add_row("no predicted step can be shorter than", f"{plan.proof.bound:,.2f} s")
    table.add_row("gap to that bound", percent(plan.proof.gap, 2))
    request: PlanningRequest = plan.request
    for times, source in request.sources:
        table.add_row(cell(times), cell(source))
    return table


def _workload(plan: Plan) -> Table:
    trajectories, classes = plan.request.trajectories, plan.request.classes
    generated = trajectories * sum(cls.share * cls.generated for cls in classes)
    rate = f", {generated / plan.step:,.0f} generated tokens/s" if plan.step > 0 else ""
    columns = ("longest, tokens", "share", "generated", "prefilled", "turns", "tool seconds")
    title = f"Work of a step: {plural(trajectories, 'trajectory', 'trajectories')}, in classes{rate}"
    table = Table(*map(number, columns), "served by", title=title)
    for cls in classes:
        peak, work = cls.peak_context, (cls.generated, cls.prefill, cls.turns, cls.tool_seconds)
        shape = next(bucket.shape for bucket in plan.allocation.buckets if bucket.above < peak <= bucket.up_to)
        table.add_row(f"{peak:,}", percent(cls.share), *map(plain, work), cell(shape))
    return table
