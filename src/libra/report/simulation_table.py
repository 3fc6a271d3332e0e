"""Terminal tables of a simulation.

Invariant: tables only show numbers of their view. They are legible in 80 columns, with fewer details than in 100.
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.table import Column, Table

from libra.report.simulation_view import SimulationView
from libra.report.tables import number, whole
from libra.report.words import MISSING, cell, fine_duration, percent, worded
from libra.sim.outcome.definitions import DEFINITIONS
from libra.sim.outcome.metrics import EngineMetrics, Spread

MOST_ENGINES = 40  # rows of the terminal's table of engines

SPREADS = ("queueing", "ttft_prefill", "ttft", "tpot", "latency", "trajectory_latency")
PERCENTILES = ("mean", "p50", "p90", "p99", "max")
_NUMBERS = (
    "requests",
    "finished",
    "cancelled",
    "refused",
    "failed",
    "unfinished",
    "trajectories",
    "trajectories_completed",
    "makespan",
    "generated_rate",
    "prompt_rate",
    "request_rate",
    "busy_share",
    "paused_share",
    "kv_share",
    "kv_peak_share",
    "cache_hit_rate",
    "preemptions",
    "iterations",
    "iterations_per_event",
)
ENGINE_NUMBERS = (
    "requests",
    "generated_tokens",
    "busy_share",
    "kv_share",
    "kv_peak_share",
    "cache_hit_rate",
    "preemptions",
)
_SPARED_FIRST = ("preemptions", "kv_share", "requests", "cache_hit_rate", "kv_peak_share")  # if the terminal is narrow
_FRAME = 3  # characters of a column in addition to its text


def simulation_tables(view: SimulationView, width: int = 100) -> tuple[Table, ...]:
    """Tables of numbers, latencies, unfinished requests (if any) and engines, for a rich console of `width` columns."""
    endings = [_endings(view)] if view.endings else []
    return (_numbers(view), _latencies(view), *endings, _engines(view, width))


def shown_numbers(view: SimulationView) -> list[tuple[str, str]]:
    """(name, value) of every number that applies to this simulation."""
    values = {key: getattr(view.metrics, key) for key in _NUMBERS}
    silent = {"interrupted", "cancelled", "refused", "failed", "unfinished", "trajectories", "trajectories_completed"}
    return [
        (DEFINITIONS[key].name, worded(value, DEFINITIONS[key].unit))
        for key, value in values.items()
        if value or key not in silent or (key == "trajectories_completed" and values["trajectories"])
    ]


def shown_spreads(view: SimulationView) -> list[tuple[str, Spread]]:
    """(name, spread) of each latency that has values. If `ttft` and `ttft_prefill` are equal, only `ttft`."""
    found = {key: getattr(view.metrics, key) for key in SPREADS}
    if found["ttft"] == found["ttft_prefill"]:
        del found["ttft_prefill"]
    return [
        ("TTFT" if key == "ttft" and "ttft_prefill" not in found else DEFINITIONS[key].name, spread)
        for key, spread in found.items()
        if spread is not None
    ]


def shown_engines(view: SimulationView, most: int) -> tuple[tuple[EngineMetrics, ...], int]:
    """The engines in their order, or only the busiest if there are too many; and the number of engines left out."""
    engines = view.engines
    if len(engines) <= most:
        return engines, 0
    ordered = sorted(engines, key=lambda engine: -(engine.busy_share or 0.0))
    return tuple(ordered[:most]), len(engines) - most


def engine_cells(engine: EngineMetrics) -> list[str]:
    """The `ENGINE_NUMBERS` in words."""
    return [worded(getattr(engine, key), DEFINITIONS[key].unit) for key in ENGINE_NUMBERS]


def _numbers(view: SimulationView) -> Table:
    table = Table("", number(""), title="Simulation", show_header=False)
    for name, value in shown_numbers(view):
        table.add_row(name, value)
    return table


def _latencies(view: SimulationView) -> Table:
    table = Table("", *map(whole, PERCENTILES), title="Latencies of finished requests")
    for name, spread in shown_spreads(view):
        table.add_row(name, *(fine_duration(getattr(spread, column)) for column in PERCENTILES))
    if view.phases:
        table.caption = "mean: " + ", ".join(f"{phase.name} {percent(phase.share)}" for phase in view.phases)
    else:
        table.add_row(MISSING, *(MISSING for _ in PERCENTILES))
    return table


def _endings(view: SimulationView) -> Table:
    columns = (Column("status", no_wrap=True), whole("requests"), "why")
    table = Table(*columns, title="Requests that did not finish, and reasons")
    for ending in view.endings:
        table.add_row(ending.status, f"{ending.count:,}", cell(ending.reason))
    return table


def _engines(view: SimulationView, width: int) -> Table:
    shown, left_out = shown_engines(view, MOST_ENGINES)
    columns = {"engine": [engine.name for engine in shown]}
    if len({engine.bucket for engine in view.engines}) > 1:
        columns["bucket"] = [str(engine.bucket) for engine in shown]
    cells = [engine_cells(engine) for engine in shown]
    for place, key in enumerate(ENGINE_NUMBERS):
        columns[_header(key)] = [row[place] for row in cells]
    spared = []
    for key in _SPARED_FIRST:
        if _width(columns) <= width:
            break
        del columns[_header(key)]
        spared.append(DEFINITIONS[key].name)
    table = Table(
        title="Engines" if not left_out else f"The {len(shown)} busiest engines; {left_out:,} others are not shown"
    )
    for header in columns:
        table.add_column(header, justify="left" if header == "engine" else "right", no_wrap=True, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(cell, row))
    if spared:
        table.caption = f"A wider terminal also shows {', '.join(spared)}"
    return table


def _header(key: str) -> str:
    """Header with one word per line, since numbers are narrower than their names."""
    return DEFINITIONS[key].name.replace(" ", "\n")


def _width(columns: dict[str, list[str]]) -> int:
    texts = ([*header.split("\n"), *cells] for header, cells in columns.items())
    return 1 + sum(_FRAME + max(map(cell_len, column)) for column in texts)
