"""The trace of a simulation: readable by the viewers, within its bound, and what happened."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_simulation import busy, cut_short, open_loop, run, trajectories

from libra.report.simulation_trace import write_simulation_trace
from libra.sim.clock import TICKS
from libra.sim.outcome.result import SimulationResult

Event = dict[str, Any]
RESULTS = {"busy": busy, "cut short": cut_short, "trajectories": trajectories}


def written(result: SimulationResult, path: Path, **settings: int) -> list[Event]:
    write_simulation_trace(result, path, **settings)
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))
    return events


def slices(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int, Event]]]:
    """(start, end, event) in nanoseconds, by row."""
    rows: dict[tuple[int, int], list[tuple[int, int, Event]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            rows[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000), event))
    return rows


@pytest.mark.parametrize("name", RESULTS)
def test_rows_are_named_do_not_overlap_and_are_as_few_as_can_be(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]()
    events = written(result, tmp_path / "trace.json")
    rows = slices(events)
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(rows) <= names
    for row in rows.values():
        for (_, end, _), (start, _, _) in pairwise(row):
            assert start >= end
    requests = result.requests
    for index in range(len(result.engines)):
        its = (requests.engine == index) & (requests.status != 2) & (requests.arrival <= result.end)
        arrivals = requests.arrival[its]
        ends = np.where(requests.finish[its] < 0, result.end, requests.finish[its])
        at_once = max(int(((arrivals <= moment) & (ends > moment)).sum()) for moment in arrivals)
        assert sum(group == index + 1 and row > 1 for group, row in rows) == at_once


def test_a_request_is_queued_prefilled_and_decoded_in_its_times(tmp_path: Path) -> None:
    result = busy()
    requests = result.requests
    found: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for row in slices(written(result, tmp_path / "trace.json")).values():
        for start, end, event in row:
            if "request" in event["args"]:
                found[event["args"]["request"]].append((event["name"], start, end))
    assert sorted(found) == sorted(requests.number.tolist())
    columns = (requests.number, requests.arrival, requests.scheduled, requests.first_token, requests.finish)
    for number, *ticks in zip(*(column.tolist() for column in columns), strict=True):
        moments = [tick // 1000 for tick in ticks]
        wanted = zip(("queued", "prefill", "decode"), pairwise(moments), strict=True)
        assert found[number] == [(name, start, end) for name, (start, end) in wanted if start < end]


def test_what_did_not_finish_is_drawn_as_far_as_it_came(tmp_path: Path) -> None:
    events = written(cut_short(), tmp_path / "trace.json")
    ends = [end for row in slices(events).values() for _, end, _ in row]
    assert max(ends) == 3 * TICKS // 1000
    instants = [event for event in events if event["ph"] == "i"]
    assert [event["name"] for event in instants] == ["refused: request 7"]
    assert instants[0]["pid"] == 0 and instants[0]["args"]["reason"].startswith("no engine holds its 5000 tokens")
    cancelled = [e for row in slices(events).values() for _, _, e in row if e["args"].get("status") == "cancelled"]
    assert {event["args"]["request"] for event in cancelled} == {5}


def test_counters_and_pauses_are_those_that_were_watched(tmp_path: Path) -> None:
    result = busy()
    events = written(result, tmp_path / "trace.json")
    for index, series in enumerate(result.series):
        its = [event for event in events if event["pid"] == index + 1]
        assert {f"engine <{index}>"} == {e["args"]["name"] for e in its if e["name"] == "process_name"}
        running = [event["args"]["running"] for event in its if event["name"] == "requests"]
        assert running == [*(round(it, 3) for it in series.running.tolist()), 0]
        pauses = [e for e in its if e["name"] == "new weights"]
        assert [round(e["ts"] * 1000) for e in pauses] == [start // 1000 for start, _ in series.pauses]
        assert len(pauses) == 1
    unwatched = written(run(open_loop(5), watched=False), tmp_path / "unwatched.json")
    assert not any(event["ph"] == "C" for event in unwatched)


@pytest.mark.parametrize("most", [1, 7, 50, 333, 1000])
def test_a_long_simulation_stays_within_the_bound(most: int, tmp_path: Path) -> None:
    events = written(busy(), tmp_path / "trace.json", max_events=most)
    content = [event for event in events if event["ph"] != "M"]
    assert len(content) <= most + 1
    notes = [event["name"] for event in content if event["ph"] == "i"]
    drawn = {event["args"]["request"] for event in content if "request" in event["args"]}
    assert len(notes) == (len(drawn) < 150)
    assert all("of 150 requests is drawn" in note for note in notes)
