"""A simulation as one HTML page.

Invariant: the page is complete in itself, shows the numbers of its result with their definitions, and is the same for
the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from libra.report.figures import Figure
from libra.report.markup import Markup, join, tag, text
from libra.report.page import bar, cards, page, section, tile_row
from libra.report.simulation_charts import latency_figures, time_figures
from libra.report.simulation_table import (
    ENGINE_NUMBERS,
    PERCENTILES,
    engine_cells,
    shown_engines,
    shown_numbers,
    shown_spreads,
)
from libra.report.simulation_verdict import SimulationView, headline, headline_tiles, notices
from libra.report.simulation_words import fine_duration
from libra.report.tables import flatten, table
from libra.report.words import count, percent
from libra.sim.engine.config import EngineConfig
from libra.sim.outcome.definitions import COMPLETED, DEFINITIONS

MOST_ENGINES = 64  # rows of the page's table of engines
_LONGEST_VALUE = 300  # letters of a setting: a list of arrival times may be millions
_BUSY = "#56b4e9"

_STYLE = """
.phases td { width: auto; }
.phases td:first-child, .endings td:first-child { width: 12em; }
.numbers td, .phases td { font-variant-numeric: tabular-nums; }
.definitions td:first-child { width: 13em; }
.definitions td:nth-child(2) { width: 7em; color: var(--soft); }
.pairs td:first-child { width: 50%; color: var(--soft); }
"""


def simulation_page(view: SimulationView, title: str) -> str:
    """The page; `title` names what was simulated."""
    return page(title, _sections(view, title), _STYLE)


def _sections(view: SimulationView, title: str) -> Iterator[Markup]:
    yield tag("h1", text(title))
    yield tag("p", text(headline(view)), class_="verdict")
    said = notices(view)
    if said:
        yield tag("ul", *(tag("li", text(notice)) for notice in said), class_="notices")
    if not view.metrics.requests:
        return
    yield tile_row(headline_tiles(view))
    yield tag("h2", text("How long requests take"))
    if view.phases:
        yield cards(latency_figures(view))
        yield section("Latencies of finished requests", _latencies(view))
        yield section(
            "Where the time of a request goes",
            _phases(view),
            "Means over the finished requests. What a preemption costs is in the phase that it came in.",
        )
    else:
        yield tag("p", text("No request finished, so no latency is known."), class_="missing")
    yield tag("h2", text("How full the engines are"))
    yield cards(_over_time(view))
    yield _engines(view)
    if view.endings:
        yield tag("h2", text("What did not finish"))
        yield section("Requests that did not finish, and why", _endings(view))
    yield tag("h2", text("Behind the numbers"))
    yield section("All numbers", table(("Metric", "Value"), _texts(shown_numbers(view)), "pairs"))
    yield section("What was simulated", table(("Setting", "Value"), _texts(_settings(view)), "settings"))
    yield section("Definitions", _definitions(), COMPLETED)


def _over_time(view: SimulationView) -> tuple[Figure, ...]:
    figures = time_figures(view)
    if not figures:
        body = tag("p", text("Everything happened at one instant."), class_="missing")
        return (Figure("Over time", "", body),)
    if not view.result.series:
        body = tag("p", text("Nobody watched the engines: give the simulation a watcher."), class_="missing")
        return (*figures, Figure("Requests and KV of the engines", "", body))
    return figures


def _latencies(view: SimulationView) -> Markup:
    rows = [
        (name, *(fine_duration(getattr(spread, column)) for column in PERCENTILES), count(spread.count))
        for name, spread in shown_spreads(view)
    ]
    return table(("", *(column.capitalize() for column in PERCENTILES), "Of"), _texts(rows), "numbers")


def _phases(view: SimulationView) -> Markup:
    largest = max(phase.seconds for phase in view.phases)
    rows = [
        (
            text(phase.name),
            join(bar(phase.seconds, largest, _BUSY), text(fine_duration(phase.seconds))),
            text(percent(phase.share)),
        )
        for phase in view.phases
    ]
    return table(("Phase", "Mean", "Share"), rows, "phases")


def _engines(view: SimulationView) -> Markup:
    shown, left_out = shown_engines(view, MOST_ENGINES)
    busy = ENGINE_NUMBERS.index("busy_share")
    rows = []
    for engine in shown:
        cells = [text(cell) for cell in engine_cells(engine)]
        cells[busy] = join(bar(engine.busy_share or 0.0, 2.0, _BUSY), cells[busy])
        rows.append((text(engine.name), text(str(engine.bucket)), *cells))
    columns = ("Engine", "Bucket", *(_capital(DEFINITIONS[key].name) for key in ENGINE_NUMBERS))
    note = f"The {len(shown)} busiest are shown; {left_out:,} more are there." if left_out else ""
    return section("Engines", table(columns, rows, "numbers"), note)


def _endings(view: SimulationView) -> Markup:
    rows = [(ending.status, count(ending.count), ending.reason) for ending in view.endings]
    return table(("Status", "Requests", "Why"), _texts(rows), "endings")


def _settings(view: SimulationView) -> Iterator[tuple[str, str]]:
    for key, value in flatten(dict(view.result.workload), "workload"):
        yield key, value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]} …"
    configs: dict[EngineConfig, list[str]] = {}
    for engine in view.result.engines:
        configs.setdefault(engine.config, []).append(engine.name)
    for config, names in configs.items():
        whose = "engines" if len(configs) == 1 else names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        yield whose, count(len(names))
        yield from flatten(asdict(config), whose)


def _definitions() -> Markup:
    rows = [(it.name, it.unit, it.text) for it in DEFINITIONS.values()]
    return table(("Metric", "Unit", "Meaning"), _texts(rows), "definitions")


def _texts(rows: Iterable[Sequence[str]]) -> list[tuple[Markup, ...]]:
    return [tuple(text(cell) for cell in row) for row in rows]


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
