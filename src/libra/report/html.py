"""A run as one HTML page.

Invariant: the page is complete in itself (no script, no address, no font to fetch) and is a function of the run
directory alone: the same files give the same page.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from libra.records.run_log import RunLog, read_run
from libra.report.figures import device_figures, learning_figures, roles_figure, speed_figures
from libra.report.markup import Markup, tag, text
from libra.report.page import cards, page, section, tile_row
from libra.report.tables import (
    decisions_table,
    evaluations_table,
    events_table,
    health_table,
    losses_table,
    settings_table,
    trajectories_text,
)
from libra.report.verdict import LOSSES, headline, notices, tiles


def render_report(run_directory: Path) -> str:
    """The page for a run directory, finished or not. Raises what `read_run` raises."""
    log = read_run(run_directory)
    return page(log.name, _sections(log))


def _sections(log: RunLog) -> Iterable[Markup]:
    yield tag("h1", text(log.name))
    yield tag("p", text(headline(log)), class_="verdict")
    said = notices(log)
    if said:
        yield tag("ul", *(tag("li", text(notice)) for notice in said), class_="notices")
    yield tile_row(tiles(log))
    yield tag("h2", text("What it learned"))
    yield cards(learning_figures(log))
    yield tag("h2", text("How fast it was"))
    yield cards(speed_figures(log))
    yield tag("h2", text("Why devices were idle"))
    yield cards(device_figures(log))
    yield tag("h2", text("Who did what, and why it changed"))
    yield cards((roles_figure(log),))
    yield section("Decisions", decisions_table(log))
    if log.losses:
        yield section(LOSSES, losses_table(log))
    yield tag("h2", text("Behind the numbers"))
    yield section("Evaluations", evaluations_table(log))
    yield section("Training", health_table(log), trajectories_text(log))
    yield section("Events", events_table(log))
    yield section("Settings", settings_table(log))
