"""A simulation as one HTML page: the numbers of its result with their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from libra.report.page import Bar, Tile, flatten, render
from libra.report.roles_chapter import roles_chapter
from libra.report.simulation_figures import latency_figures, time_figures
from libra.report.simulation_table import (
    ENGINE_NUMBERS,
    PERCENTILES,
    engine_cells,
    shown_engines,
    shown_numbers,
    shown_spreads,
)
from libra.report.simulation_view import SimulationView, headline, notices
from libra.report.words import MISSING, count, fine_duration, percent, plural, worded
from libra.sim.engine.config import EngineConfig
from libra.sim.outcome.definitions import COMPLETED, DEFINITIONS
from libra.sim.outcome.metrics import EngineMetrics

MOST_ENGINES = 64  # rows of the page's table of engines
_LONGEST_VALUE = 300  # letters of a setting: a list of arrival times may have millions


def simulation_page(view: SimulationView, title: str) -> str:
    """The page; `title` names the simulated deployment."""
    engines, left_out = shown_engines(view, MOST_ENGINES)
    return render(
        "simulation.html",
        title,
        headline=headline(view),
        notices=notices(view),
        tiles=headline_tiles(view) if view.metrics.requests else (),
        came=bool(view.metrics.requests),
        latencies=latency_figures(view) if view.phases else (),
        percentiles=("", *(column.capitalize() for column in PERCENTILES), "Of"),
        spreads=[
            (name, *(fine_duration(getattr(spread, column)) for column in PERCENTILES), count(spread.count))
            for name, spread in shown_spreads(view)
        ],
        phases=_phases(view),
        chapters=[chapter for chapter in (roles_chapter(view),) if chapter is not None],
        over_time=time_figures(view),
        engine_columns=(
            "Engine",
            *(("Role",) if view.roles else ()),
            "Bucket",
            *(_capital(DEFINITIONS[key].name) for key in ENGINE_NUMBERS),
        ),
        engines=[_engine(engine, roles=view.roles is not None) for engine in engines],
        left_out=left_out,
        endings=[(ending.status, count(ending.count), ending.reason) for ending in view.endings],
        numbers=shown_numbers(view),
        settings=list(_settings(view)),
        definitions=[(it.name, it.unit, it.text) for it in DEFINITIONS.values()],
        completed=COMPLETED,
    )


def headline_tiles(view: SimulationView) -> tuple[Tile, ...]:
    metrics = view.metrics
    lost = {status: getattr(metrics, status) for status in ("cancelled", "refused", "failed", "unfinished")}
    ended = ", ".join(f"{count(number)} {status}" for status, number in lost.items() if number)
    busiest = max(view.engines, key=lambda engine: engine.busy_share or 0.0)
    until = "time limit" if view.result.partial else "last end"
    peak = f"peak {worded(metrics.kv_peak_share, 'share')}, " if metrics.kv_peak_share is not None else ""
    whole = ("Trajectory", "trajectory_latency") if metrics.trajectories else ("End to end", "latency")
    return (
        Tile("Makespan", fine_duration(metrics.makespan), f"first arrival to {until}"),
        Tile(
            "Finished",
            f"{count(metrics.finished)} of {count(metrics.requests)}",
            ended or worded(metrics.request_rate, "requests/s"),
            alarming=bool(metrics.refused or metrics.failed or metrics.unfinished),
        ),
        Tile(
            "Generated",
            worded(metrics.generated_rate, "tokens/s"),
            f"{count(metrics.generated_tokens)} tokens; prompts {worded(metrics.prompt_rate, 'tokens/s')}",
        ),
        Tile(
            "Engines busy",
            worded(metrics.busy_share, "share"),
            f"busiest: {busiest.name}, {worded(busiest.busy_share, 'share')}",
        ),
        _spread_tile(view, "TTFT", "ttft"),
        _spread_tile(view, "TPOT", "tpot"),
        Tile(
            "KV held",
            worded(metrics.kv_share, "share"),
            f"{peak}{plural(metrics.preemptions, 'preemption')}",
            alarming=metrics.preemptions > metrics.finished,
        ),
        _spread_tile(view, *whole),
    )


def _spread_tile(view: SimulationView, label: str, key: str) -> Tile:
    found = getattr(view.metrics, key)
    if found is None:
        return Tile(label, MISSING, "no request has one")
    return Tile(f"{label}, P50", fine_duration(found.p50), f"P99 {fine_duration(found.p99)}")


def _phases(view: SimulationView) -> list[tuple[str | Bar, ...]]:
    longest = max((phase.seconds for phase in view.phases), default=0.0) or 1.0
    return [(it.name, Bar(fine_duration(it.seconds), it.seconds / longest), percent(it.share)) for it in view.phases]


def _engine(engine: EngineMetrics, *, roles: bool) -> list[str | Bar]:
    cells: list[str | Bar] = [engine.name, *([engine.role] if roles else []), str(engine.bucket)]
    for key, words in zip(ENGINE_NUMBERS, engine_cells(engine), strict=True):
        # Half as long as other bars: there are many columns.
        cells.append(Bar(words, (engine.busy_share or 0.0) / 2) if key == "busy_share" else words)
    return cells


def _settings(view: SimulationView) -> Iterator[tuple[str, str]]:
    for key, value in flatten(dict(view.result.workload), "workload"):
        yield key, value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]} …"
    if view.result.transfers is not None:
        yield from flatten(asdict(view.result.transfers.network), "kv_transfer")
    configs: dict[EngineConfig, list[str]] = {}
    for engine in view.result.engines:
        configs.setdefault(engine.config, []).append(engine.name)
    for config, names in configs.items():
        whose = "engines" if len(configs) == 1 else names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        yield whose, count(len(names))
        yield from flatten(asdict(config), whose)


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
