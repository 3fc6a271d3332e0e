"""A run as one HTML page.

Invariant: the page is complete in itself (no script, no address, no font to fetch) and is a function of the run
directory alone: the same files give the same page.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from libra.report.figures import Figure, learning_figures, roles_figure, speed_figures
from libra.report.markup import NOTHING, Markup, join, tag, text
from libra.report.page_style import STYLE
from libra.report.run_log import RunLog, read_run
from libra.report.tables import (
    decisions_table,
    evaluations_table,
    events_table,
    health_table,
    settings_table,
    trajectories_text,
)
from libra.report.verdict import Tile, headline, notices, tiles


def render_report(run_directory: Path) -> str:
    """The page for a run directory, finished or not. Raises what `read_run` raises."""
    log = read_run(run_directory)
    head = join(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", text(f"{log.name} · Libra")),
        tag("style", Markup(STYLE)),
    )
    page = tag("html", tag("head", head), tag("body", tag("main", *_sections(log))), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _sections(log: RunLog) -> Iterable[Markup]:
    yield tag("h1", text(log.name))
    yield tag("p", text(headline(log)), class_="verdict")
    said = notices(log)
    if said:
        yield tag("ul", *(tag("li", text(notice)) for notice in said), class_="notices")
    yield tag("div", *(_tile(tile) for tile in tiles(log)), class_="tiles")
    yield tag("h2", text("What it learned"))
    yield _cards(learning_figures(log))
    yield tag("h2", text("How fast it was"))
    yield _cards(speed_figures(log))
    yield tag("h2", text("Who did what, and why it changed"))
    yield _cards((roles_figure(log),))
    yield _table_card("Decisions", decisions_table(log))
    yield tag("h2", text("Behind the numbers"))
    yield _table_card("Evaluations", evaluations_table(log))
    yield _table_card("Training", health_table(log), trajectories_text(log))
    yield _table_card("Events", events_table(log))
    yield _table_card("Settings", settings_table(log))


def _tile(tile: Tile) -> Markup:
    kind = "tile alarm" if tile.alarming else "tile"
    return tag(
        "div", tag("span", text(tile.label)), tag("b", text(tile.value)), tag("span", text(tile.detail)), class_=kind
    )


def _cards(figures: Iterable[Figure]) -> Markup:
    return tag("div", *(_card(figure) for figure in figures), class_="cards")


def _card(figure: Figure) -> Markup:
    note = tag("p", text(figure.note), class_="note") if figure.note else NOTHING
    body = tag("div", figure.body, class_="scroll") if figure.wide else figure.body
    return tag("figure", tag("h3", text(figure.title)), note, body, class_="card wide" if figure.wide else "card")


def _table_card(title: str, body: Markup, note: str = "") -> Markup:
    said = tag("p", text(note), class_="note") if note else NOTHING
    return tag("section", tag("h3", text(title)), said, body, class_="card table")
