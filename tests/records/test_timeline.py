from __future__ import annotations

import json
from collections import defaultdict
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.plan.transition import Role
from libra.records.causes import Cause
from libra.records.timeline import Timeline

Event = dict[str, Any]


def written(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))
    return events


def lane_names(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def slices(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    lanes: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    return lanes


def test_a_small_run(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with closing(Timeline(path)) as timeline:
        timeline.role("w0", "train", 0.0)
        timeline.role("w1", "rollout:short", 0.0)
        timeline.turns("w1", 2, 0.1)
        timeline.turns("w1", 2, 0.2)
        timeline.cause("w1", Cause.TOOL_BOUND, 0.25, 0.75)
        timeline.staleness(0.5, 2, 1.5)
        timeline.work("w0", "batch", 0.5, 1.25, {"tokens": 900})
        timeline.move("w1", "rollout:short -> train", 1.25, 2.5, {"outcome": "failed"})
        timeline.step(1, 0.0, 1.5, {"reward": 0.25})
        timeline.weights("w1", 1, 1.5)
        timeline.role("w1", "draining", 2.0)
        timeline.lost("w1", 2.5, "signal 9")
    events = written(path)
    names = lane_names(events)
    drawn = [
        (names[lane], event["name"], event["ts"], event["dur"]) for lane, row in slices(events).items() for event in row
    ]
    assert sorted(drawn) == [
        ("training steps", "step 1", 0, 1_500_000),
        ("w0", "batch", 500_000, 750_000),
        ("w0", "train", 0, 2_500_000),
        ("w1", "draining", 2_000_000, 500_000),
        ("w1", "failed", 2_500_000, 0),
        ("w1", "rollout:short", 0, 2_000_000),
        ("w1", "rollout:short -> train", 1_250_000, 1_250_000),
        ("w1", "waiting for tools", 250_000, 500_000),
    ]
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"turns": 2}, {"mean": 0.5, "max": 2}]
    assert [(e["name"], e["ts"], e["s"]) for e in events if e["ph"] == "i"] == [
        ("weights v1", 1_500_000, "t"),
        ("lost: signal 9", 2_500_000, "g"),
    ]
    colours = {e["name"]: e["cname"] for e in events if "cname" in e}
    assert len({colours[role] for role in ("train", "draining", "failed", "rollout:short")}) == 4
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "roles",
        "moves",
        "where the time goes",
        "work",
        "running turns",
        "staleness",
    }


calls = st.lists(
    st.tuples(
        st.sampled_from(["role", "work", "move", "step", "weights", "turns", "lost"]),
        st.sampled_from(["w0", "w1", 'w"2\n']),
        st.sampled_from([*Role, "rollout:long"]),
        st.floats(0, 5, allow_subnormal=False),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(calls=calls, limit=st.integers(1, 60))
def test_any_run_gives_valid_named_lanes_that_never_go_backwards(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, str, str, float]], limit: int
) -> None:
    path = tmp_path_factory.mktemp("timeline") / "t.json"
    now = 0.0
    with closing(Timeline(path, max_events=limit)) as timeline:
        for number, (kind, worker, role, gap) in enumerate(calls):
            if kind == "role":
                timeline.role(worker, role, now)
            elif kind == "work":
                timeline.work(worker, "batch", max(0.0, now - 2 * gap), now)  # overlaps what came before
            elif kind == "move":
                timeline.move(worker, "idle -> train", max(0.0, now - 2 * gap), now)
            elif kind == "step":
                timeline.step(number, now - gap / 2, now)
            elif kind == "weights":
                timeline.weights(worker, number, now)
            elif kind == "turns":
                timeline.turns(worker, number, now)
            else:
                timeline.lost(worker, now, "gone")
            now += gap
    events = written(path)
    named = set(lane_names(events))
    for lane, row in slices(events).items():
        assert lane in named
        assert all(event["dur"] >= 0 for event in row)
        for earlier, later in pairwise(row):
            assert later["ts"] >= earlier["ts"] + earlier["dur"]
    content = [event for event in events if event["ph"] != "M"]
    assert len(content) <= limit + 1 + 3  # the note that it is full, and the last role of each of three workers
    assert sum("timeline full" in event["name"] for event in content) <= 1


def test_a_full_timeline_says_so_and_keeps_the_last_roles(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with closing(Timeline(path, max_events=5)) as timeline:
        timeline.role("w0", "rollout", 0.0)
        for number in range(20):
            timeline.turns("w0", number, float(number))
    content = [event["name"] for event in written(path) if event["ph"] != "M"]
    assert content == ["w0"] * 5 + ["timeline full: later events are not kept", "rollout"]


def test_a_killed_run_leaves_a_file_that_only_lacks_its_bracket(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline = Timeline(path)
    timeline.weights("w0", 1, 0.5)
    open_file = path.read_text(encoding="utf-8")
    timeline.close()
    timeline.close()
    assert [event["name"] for event in json.loads(open_file + "]")][-1] == "weights v1"
    with pytest.raises(ValueError, match="closed"):
        timeline.weights("w0", 2, 1.0)


def test_a_moved_start_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with closing(Timeline(path)) as timeline:
        timeline.work("w0", "one", 0.0, 1.0)
        timeline.work("w0", "two", 0.9, 2.0)
    last = written(path)[-1]
    assert (last["ts"], last["dur"], last["args"]) == (1_000_000, 1_000_000, {"reported_start": 0.9})


def test_mistakes_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_events"):
        Timeline(tmp_path / "none.json", max_events=0)
    with closing(Timeline(tmp_path / "t.json")) as timeline:
        with pytest.raises(ValueError, match="role 'sleeping': unknown"):
            timeline.role("w0", "sleeping", 0.0)
        with pytest.raises(ValueError, match=r"batch of w0 ends at 1\.0 s, before its start at 2\.0 s"):
            timeline.work("w0", "batch", 2.0, 1.0)
        with pytest.raises(ValueError, match="-1 cannot run"):
            timeline.turns("w0", -1, 0.0)
