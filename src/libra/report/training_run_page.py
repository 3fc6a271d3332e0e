"""A simulated post-training run as one HTML page: its steps, and what became of the lent devices."""

from __future__ import annotations

from collections.abc import Sequence

from libra.plan.transition import Role
from libra.report.charts import Figure, Series, column_figure, line_figure
from libra.report.engine_lanes import bucket_rows, engine_lanes
from libra.report.lending_section import lending_section
from libra.report.page import ROLES, Tile, render
from libra.report.vega import Axis
from libra.report.words import count, duration, percent, plural, signed_percent
from libra.sim.training_run.outcome import SimulatedRun, SimulatedStep


def training_run_page(outcome: SimulatedRun, planned: float, title: str) -> str:
    """`planned` are the seconds of a step by the plan; `title` names what was simulated."""
    histories = [it.history for it in outcome.lenders if it.history is not None]
    ended = outcome.steps[-1].ended
    return render(
        "training_run.html",
        title,
        headline=_headline(outcome, planned),
        notices=(),
        tiles=(*_tiles(outcome, planned), *_lender_tiles(outcome)),
        steps=_figures(outcome.steps, planned),
        engines=engine_lanes(outcome) if outcome.engines else None,
        buckets=bucket_rows(outcome.engines),
        lending=lending_section(histories, "the run began", ((ended, "ends", "the last step was made"),)),
    )


def _headline(outcome: SimulatedRun, planned: float) -> str:
    said = (
        f"{plural(len(outcome.steps), 'step')} in {duration(outcome.seconds)}: {duration(outcome.step_seconds)} a step,"
        f" {signed_percent(outcome.step_seconds / planned - 1, 1)} of what was planned. The trainer computes"
        f" {percent(outcome.trainer_share, 0)} of the time."
    )
    if not outcome.lenders:
        return said
    requests, missed = sum(it.requests for it in outcome.lenders), sum(len(it.missed.any) for it in outcome.lenders)
    return f"{said} {count(missed)} of {plural(requests, 'request')} of users missed their SLO."


def _tiles(outcome: SimulatedRun, planned: float) -> tuple[Tile, ...]:
    return (
        Tile("Step", duration(outcome.step_seconds), f"planned {duration(planned)}"),
        Tile("Generated", f"{count(outcome.throughput)} tokens/s", "that were trained on"),
        Tile("Engines of one's own", f"{percent(outcome.engine_share, 0)} busy", "of the time in service"),
        Tile("Turns moved", count(outcome.migrations), f"of {count(outcome.placements)} that were placed"),
    )


def _lender_tiles(outcome: SimulatedRun) -> tuple[Tile, ...]:
    lenders = outcome.lenders
    if not lenders:
        return ()
    lent = sum(it.lent for it in lenders) / len(lenders) / outcome.seconds
    away = sum(it.away for it in lenders) / len(lenders) / outcome.seconds
    missed, blamed, inside = (
        sum(map(len, found))
        for found in zip(
            *((it.missed.any, it.attributable, it.attributable - it.uncovered) for it in lenders), strict=True
        )
    )
    cost = f"{count(missed)} missed their SLO, {count(blamed)} by lending, {count(inside)} of them inside the envelope"
    return (
        Tile("Lent", percent(lent, 0), f"of the time of {plural(len(lenders), 'device')} that serve"),
        Tile("Recalled", percent(away), f"of their time, {plural(sum(it.recalls for it in lenders), 'recall')}"),
        Tile("Users' requests", count(sum(it.requests for it in lenders)), cost, alarming=bool(inside)),
    )


def _figures(steps: Sequence[SimulatedStep], planned: float) -> tuple[Figure, ...]:
    x = Axis("optimiser step", (steps[0].version - 0.5, steps[-1].version + 0.5))
    parts = [
        Series("trains", ROLES[Role.TRAIN], [(it.version, it.training) for it in steps]),
        Series("waits for complete groups", ROLES[Role.IDLE], [(it.version, it.waited) for it in steps]),
    ]
    stale = [
        Series("of the stalest trajectory", "var(--deep)", [(it.version, it.worst_staleness) for it in steps]),
        Series("mean", "var(--blue)", [(it.version, it.staleness) for it in steps]),
    ]
    line = Series("planned", "var(--deep)", [(it.version, planned) for it in steps])
    note = f"Steps are the trainer's; engines generate meanwhile. The line is the plan's step of {duration(planned)}."
    return (
        column_figure("Seconds of a step", note, parts, x, Axis("seconds of one step"), overlay=line),
        line_figure("Staleness", "Versions between generation and training.", stale, x, Axis("versions")),
    )
