"""Prefill and decode apart on a page, in a verdict and in a trace."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_simulation import apart, busy
from pages import Page, figure, marks, needs_nothing

from libra.report.roles_chapter import roles_chapter
from libra.report.simulation_page import simulation_page
from libra.report.simulation_trace import write_simulation_trace
from libra.report.simulation_view import SimulationView, headline, simulation_view
from libra.report.words import fine_duration
from libra.sim.clock import TICKS

CASES: dict[str, dict[str, Any]] = {
    "requests": {"rate": 1.0, "count": 40},
    "prefill": {"prefill": 1, "decode": 8, "rate": 1000.0},
    "link": {"bandwidth": 2e9, "blocks": 4000},
    "decode": {"seats": 4},
    "decode blocks": {"blocks": 260},
}


@cache
def seen(name: str) -> SimulationView:
    return simulation_view(apart(**CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_the_bottleneck_is_named(name: str) -> None:
    view = seen(name)
    assert view.roles is not None and view.roles.bottleneck == name
    assert view.roles.why in headline(view)


def test_pulls_that_wait_for_a_link_are_no_want_of_blocks() -> None:
    """They hold the blocks of both engines, for which all others wait."""
    view = simulation_view(apart(400, 100.0, bandwidth=2e9))
    assert view.roles is not None and view.roles.bottleneck == "link"
    assert view.roles.waits["decode"] > view.roles.waits["link"] / 2
    assert view.roles.why.endswith("KV that is kept for pulls fills the prefill engines.")


def test_a_page_of_roles() -> None:
    view = seen("link")
    page = simulation_page(view, "apart")
    needs_nothing(page)
    titles = re.findall(r"<figure.*?<h3>(.*?)</h3>", page, re.DOTALL)
    assert titles[3:8] == [
        "Where requests are",
        "Use of links",
        "Transfers that share a link",
        "TTFT of requests by their arrival",
        "KV kept for pulls",
    ]
    assert marks(figure(page, "Use of links"), "line") == 4  # one for each engine, in its direction
    said, roles = Page(page).text, view.roles
    assert roles is not None
    for part, spread in roles.metrics.ttft.items():
        assert f"{part} {fine_duration(spread.mean)}" in said
    assert "Links: the bottleneck" in said and "Engine Role Bucket" in said
    assert [phase.name for phase in view.phases] == [
        *("queueing", "prefill", "waiting to pull", "KV transfer", "first decode", "decode")
    ]
    assert view.metrics.latency is not None
    assert sum(phase.seconds for phase in view.phases) == pytest.approx(view.metrics.latency.mean)


def test_a_page_of_pushes() -> None:
    view = simulation_view(apart(push=True, bandwidth=2e9))
    page = simulation_page(view, "apart")
    said, roles = Page(page).text, view.roles
    assert roles is not None and roles.bottleneck == "link" and "requests wait for pushes" in roles.why
    assert marks(figure(page, "KV kept for pushes"), "line") == 2
    assert "pull" not in said
    assert "kv_transfer.push true" in said and "kv_transfer.bandwidth 2000000000.0" in said
    assert [phase.name for phase in view.phases] == [
        *("waiting for decode", "waiting for prefill", "prefill", "KV transfer", "first decode", "decode")
    ]
    assert view.metrics.latency is not None
    assert sum(phase.seconds for phase in view.phases) == pytest.approx(view.metrics.latency.mean)


def test_reservations_that_wait_for_prompts_are_charged_to_engines_for_prompts() -> None:
    few = simulation_view(apart(push=True, prefill=1, decode=12, rate=2000.0, blocks=300)).roles
    assert few is not None and few.bottleneck == "prefill"
    assert few.waited_pulls is not None and few.waited_pulls > 0.5
    assert f"{fine_duration(few.waits['prefill'] + few.waits['decode'])} of" in few.why


def test_a_trace_of_pushes(tmp_path: Path) -> None:
    write_simulation_trace(apart(push=True, bandwidth=2e9), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    names = {it["pid"]: it["args"]["name"] for it in events if it["name"] == "process_name"}
    where = Counter((names[it["pid"]].split("-")[0], it["name"]) for it in events if it["ph"] == "X")
    assert set(where) <= {
        *(("prefill", name) for name in ("queued", "prefill", "KV kept")),
        *(("decode", name) for name in ("waiting for decode", "blocks reserved", "KV transfer", "decode")),
    }
    assert where["decode", "blocks reserved"] == where["decode", "KV transfer"] == where["prefill", "KV kept"] == 150


def test_many_engines_are_told_by_the_busiest_and_the_mean() -> None:
    page = simulation_page(simulation_view(apart(40, prefill=5, decode=5)), "apart")
    assert "into decode, busiest" in page and "the busiest and the mean of 10 engines" in page


def test_failures_are_told_with_their_reason() -> None:
    def fail(cluster: Any) -> None:
        cluster.at(2 * TICKS, lambda _: cluster.close("prefill-0"))

    view = simulation_view(apart(bandwidth=2e9, before=fail))
    said = Page(simulation_page(view, "apart")).text
    assert view.metrics.failed and "aborted" in said
    assert f"failed {view.metrics.failed} nothing comes from prefill-…" in said


def test_nothing_of_roles_without_them() -> None:
    assert roles_chapter(simulation_view(busy())) is None
    assert simulation_view(busy()).roles is None


def test_nothing_handed_over_or_finished_yet() -> None:
    for limit in (0.01, 0.2):
        cut = simulation_view(apart(time_limit=round(limit * TICKS)))
        chapter = roles_chapter(cut)
        assert chapter is not None and cut.roles is not None and cut.roles.bottleneck == "unknown"
        assert [table.title for table in chapter.tables] == ["Bottleneck"]
    unwatched = simulation_view(replace(seen("link").result, series=()))
    assert unwatched.roles is not None and unwatched.roles.bottleneck == "link"


def test_a_trace_shows_requests_where_they_are(tmp_path: Path) -> None:
    result = seen("link").result
    write_simulation_trace(result, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    names = {it["pid"]: it["args"]["name"] for it in events if it["name"] == "process_name"}
    where = Counter((names[it["pid"]].split("-")[0], it["name"]) for it in events if it["ph"] == "X")
    assert set(where) <= {
        *(("prefill", name) for name in ("queued", "prefill", "KV kept")),
        *(("decode", name) for name in ("waiting to pull", "KV transfer", "decode")),
    }
    assert where["prefill", "KV kept"] == where["decode", "KV transfer"] == where["decode", "decode"] == 150
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for it in events:
        if it["ph"] == "X":
            lanes.setdefault((it["pid"], it["tid"]), []).append((it["ts"], it["ts"] + it["dur"]))
    for slices in lanes.values():
        slices.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(slices))
    used = [it["args"]["used"] for it in events if it["ph"] == "C" and it["name"] == "KV out"]
    assert max(used) == pytest.approx(1.0) and min(used) >= 0.0
