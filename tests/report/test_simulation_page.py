"""The page and the tables of a simulation: complete, the same numbers, nothing drawn that is not there."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache

import pytest
from made_simulation import busy, cut_short, open_loop, run, trajectories
from pages import Page, figure, marks, needs_nothing
from rich.console import Console

from libra.report.simulation_figures import time_figures
from libra.report.simulation_page import MOST_ENGINES, simulation_page
from libra.report.simulation_table import MOST_ENGINES as MOST_ROWS
from libra.report.simulation_table import simulation_tables
from libra.report.simulation_view import headline, notices, simulation_view
from libra.report.words import fine_duration, percent
from libra.sim.clock import TICKS
from libra.sim.engine.request import Request
from libra.sim.outcome.definitions import DEFINITIONS
from libra.sim.outcome.result import SimulationResult
from libra.sim.workload.requests import Requests

RESULTS = {"busy": busy, "cut short": cut_short, "trajectories": trajectories}


@cache
def source(result: SimulationResult) -> str:
    return simulation_page(simulation_view(result), "a <b> cluster")


def printed(*tables: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(*tables)
    return console.export_text()


@pytest.mark.parametrize("name", RESULTS)
def test_a_page_needs_nothing_but_itself(name: str) -> None:
    page = source(RESULTS[name]())
    needs_nothing(page)
    assert source.__wrapped__(RESULTS[name]()) == page


@pytest.mark.parametrize("name", RESULTS)
def test_a_page_says_its_numbers_and_what_they_mean(name: str) -> None:
    view = simulation_view(RESULTS[name]())
    said = Page(source(view.result)).text
    for words in ("a <b> cluster", headline(view), *notices(view), *(engine.name for engine in view.engines)):
        assert words in said
    for definition in DEFINITIONS.values():
        assert f"{definition.name} {definition.unit} {definition.text}" in said
    for found in (view.metrics.latency, view.metrics.ttft, view.metrics.tpot):
        assert found is not None
        assert " ".join(fine_duration(it) for it in (found.mean, found.p50, found.p90, found.p99, found.max)) in said
    assert "workload.name" in said and "max_num_seqs 16" in said


def test_figures_of_a_page() -> None:
    page = source(busy())
    titles = re.findall(r"<figure.*?<h3>(.*?)</h3>", page, re.DOTALL)
    assert titles == [
        "Time to first token",
        "Time per output token",
        "End to end",
        "Arrived and finished",
        "Waiting requests",
        "Running requests",
        "KV held",
    ]
    assert marks(figure(page, "Running requests"), "line") == 3  # a line an engine
    assert "new weights after" in figure(page, "KV held")
    assert marks(figure(page, "Time to first token"), "line") == 2  # with the queueing in it
    assert "Trajectories" in re.findall(r"<figure.*?<h3>(.*?)</h3>", source(trajectories()), re.DOTALL)


def test_a_distribution_rises_from_nothing_to_all() -> None:
    heights = [float(y) for y in re.findall(r"end to end: ([\d.]+) \(time", figure(source(busy()), "End to end"))]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (0.0, 100.0)


def test_waiting_on_a_chart_is_all_the_queueing() -> None:
    """Means over stretches of equal length: their sum is the time that all requests queued."""
    view = simulation_view(run(open_loop(100, 60.0)))
    drawn = next(it for it in time_figures(view) if it.title == "Waiting requests")
    means = [float(found) for found in re.findall(r"engine &lt;0&gt;: ([\d.e-]+) \(", drawn.chart)]
    assert view.metrics.queueing is not None
    queued = view.metrics.queueing.mean * view.metrics.queueing.count
    assert sum(means) / len(means) * view.metrics.makespan == pytest.approx(queued, rel=0.01)  # three digits each


def test_many_engines_are_told_by_their_extremes_and_the_busiest_ones() -> None:
    count = MOST_ENGINES + 6
    view = simulation_view(run(open_loop(200, 200.0), count))
    page = simulation_page(view, "many")
    assert re.findall(r"</i>(\w+)</li>", figure(page, "KV held")) == ["largest", "mean", "smallest"]
    assert f"The {MOST_ENGINES} busiest are shown, 6 others are not." in Page(page).text
    assert f"{count - MOST_ROWS} others are not shown" in printed(*simulation_tables(view))


def test_without_a_watcher_the_page_says_what_is_missing() -> None:
    said = Page(source(run(open_loop(), watched=False))).text
    assert "This simulation did not record the load of its engines." in said
    assert "Waiting requests" in said and "Running requests" not in said
    assert "KV peak -" in said


def test_pages_of_what_hardly_happened() -> None:
    nothing = Page(source(run(Requests(list, {"name": "none"})))).text
    assert "No request arrived" in nothing
    refused = Page(source(run(Requests(lambda: [Request(0, 5, 9000, 1)], {"name": "one"})))).text
    assert "so no latency is known" in refused and "Everything happened at one instant." in refused
    one = run(Requests(lambda: [Request(0, 0, 9, 1)], {"name": "one"}))
    assert "1 of 1 request finished in" in Page(source(one)).text
    early = Page(source(run(open_loop(5), time_limit=TICKS // 1000))).text
    assert "5 requests are not finished" in early


def test_tables_say_the_numbers_in_a_hundred_columns() -> None:
    view = simulation_view(cut_short())
    said = printed(*simulation_tables(view))
    assert "…" not in said.replace("no engine holds its … tokens and a turn of … more", "")
    assert view.metrics.ttft is not None
    for words in (
        fine_duration(view.metrics.makespan),
        fine_duration(view.metrics.ttft.p99),
        "its caller gave it up",
        "the time limit came first",
        "engine <0>",
    ):
        assert words in said
    assert "Requests that did not finish" not in printed(*simulation_tables(simulation_view(busy())))
    assert "trajector" not in said and "completed trajectories" in printed(
        *simulation_tables(simulation_view(trajectories()))
    )


@pytest.mark.parametrize(
    ("width", "names", "spared"),
    [
        (100, "e0", ""),
        (80, "a800-0/4-7", "preemptions, KV held"),
        (80, "a800-nvlink-12/4-7-long", "preemptions, KV held, requests"),
        (55, "a800-nvlink-12/4-7", "preemptions, KV held, requests, cache hits, KV peak"),
    ],
)
def test_engines_keep_their_names_and_numbers_where_room_is_wanting(width: int, names: str, spared: str) -> None:
    view = simulation_view(busy())
    engines = tuple(replace(engine, name=f"{names}-{number}") for number, engine in enumerate(view.engines))
    *_, table = simulation_tables(replace(view, engines=engines), width)
    said = printed(table, width=width)
    assert "…" not in said
    assert table.caption == (f"A wider terminal also shows {spared}" if spared else None)
    for engine in engines:
        (row,) = (line for line in said.splitlines() if engine.name in line)
        assert f"{engine.generated_tokens:,}" in row
        assert percent(engine.busy_share or 0.0, 1) in row
