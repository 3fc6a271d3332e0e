"""A simulated post-training run as one HTML page: its steps, and the chapters of rooms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from libra.config.rooms import offered
from libra.plan.transition import Role
from libra.report.charts import Figure, Series, column_figure, line_figure
from libra.report.engine_lanes import bucket_rows, engine_lanes
from libra.report.page import ROLES, Tile, render
from libra.report.vega import Axis
from libra.report.words import count, duration, percent, plural, signed_percent
from libra.sim.training_run.outcome import SimulatedRun, SimulatedStep


@dataclass(frozen=True, slots=True)
class RunChapter:
    """A room's additions to the page of a run: to headline and tiles, and a section."""

    sentences: tuple[str, ...]
    tiles: tuple[Tile, ...]
    section: Markup  # empty: no section


def training_run_page(outcome: SimulatedRun, planned: float, title: str) -> str:
    """The page of a simulated run. `planned` is the plan's seconds of a step; `title` names the run."""
    chapters: list[RunChapter] = [made(outcome) for made in offered("training run page")]
    return render(
        "training_run.html",
        title,
        headline=" ".join((_headline(outcome, planned), *(it for chapter in chapters for it in chapter.sentences))),
        notices=(),
        tiles=(*_tiles(outcome, planned), *(it for chapter in chapters for it in chapter.tiles)),
        steps=_figures(outcome.steps, planned),
        engines=engine_lanes(outcome) if outcome.engines else None,
        buckets=bucket_rows(outcome.engines),
        chapters=chapters,
    )


def _headline(outcome: SimulatedRun, planned: float) -> str:
    return (
        f"{plural(len(outcome.steps), 'step')} in {duration(outcome.seconds)}: {duration(outcome.step_seconds)} a step,"
        f" {signed_percent(outcome.step_seconds / planned - 1, 1)} against the plan. The trainer computes"
        f" {percent(outcome.trainer_share, 0)} of the time."
    )


def _tiles(outcome: SimulatedRun, planned: float) -> tuple[Tile, ...]:
    return (
        Tile("Step", duration(outcome.step_seconds), f"planned {duration(planned)}"),
        Tile("Generated", f"{count(outcome.throughput)} tokens/s", "of those trained on"),
        Tile("Own engines", f"{percent(outcome.engine_share, 0)} busy", "of the time in service"),
        Tile("Turns moved", count(outcome.migrations), f"of {count(outcome.placements)} placed"),
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
