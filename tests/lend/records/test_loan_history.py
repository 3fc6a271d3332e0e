"""What became of lent devices, from the records of a run."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from fakes.made_loans import BEGAN, EVENTS, SLO, write_loans
from hypothesis import given
from hypothesis import strategies as st

from libra.lend.records.loan_history import (
    GrantSpan,
    LoanHistory,
    RecallSpan,
    RunClock,
    ServingSpan,
    UserRequest,
    run_loans,
)
from libra.lend.records.loan_trace import closest_together, draw_loans
from libra.records.schema import EventRecord
from libra.records.timeline import Timeline


def test_histories_are_those_of_the_records(tmp_path: Path) -> None:
    write_loans(tmp_path)
    first, second = run_loans(tmp_path, RunClock(EVENTS).seconds, EVENTS)
    assert (first.name, first.rule, first.slo, first.pace) == ("lent-0", "gate", SLO, 0.08)
    assert [(it.start, it.end, it.granted, it.tokens, it.overstayed) for it in first.grants] == [
        (1.0, pytest.approx(1.02), 0.04, 7, False),
        (2.0, pytest.approx(2.02), 0.04, 5, True),
    ]
    assert [(it.start, it.sequences, it.margin) for it in first.serving] == [(3.0, 2, 0.05), (4.0, 3, -0.01)]
    # The largest part: 4 of 8 requests are live at 2 s, all 8 at 4.5 s, and none came before the first look.
    assert first.load == [(1.0, 0.0), (2.0, 0.5), (4.5, 1.0), (9.0, 0.0)]
    assert first.refusals == {"due": 1, "load": 1}
    assert first.quotas == [(2.5, 3 << 20)]
    assert [it.number for it in first.requests] == [0, 1, 2, 3]
    assert first.recalls == [] and second.recalls == [RecallSpan(6.0, 8.5, "4 requests/s, lent up to 2")]


def test_a_recall_that_is_not_over_lasts_to_the_end(tmp_path: Path) -> None:
    write_loans(tmp_path)
    events = (*EVENTS[:2], EventRecord(20.0, "checkpoint", None, "wrote it"))
    assert run_loans(tmp_path, RunClock(events).seconds, events)[1].recalls[0].end == 20.0


@pytest.mark.parametrize(
    ("what", "grants", "requests", "alone", "missed"),
    [
        ("nobody borrowed it: it is not lending", [], [(0.0, 0.6, 0.01)], None, [(True, False, False)]),
        ("nobody knows", [(0.2, 0.3)], [(0.0, 0.6, 0.01)], None, [(True, False, None)]),
        ("lent before serving was busy", [(0.2, 0.3)], [(0.4, 0.6, 0.01)], None, [(True, False, False)]),
        ("lent to its end, not to its first token", [(0.7, 0.8)], [(0.0, 0.6, 0.01)], None, [(True, False, False)]),
        ("the pace goes on to the end", [(0.7, 0.8)], [(0.0, 0.4, 0.2)], None, [(False, True, None)]),
        ("one before it was kept", [(0.2, 0.3)], [(0.0, 0.4, 0.02), (0.5, 0.6, 0.01)], None, [(True, False, None)]),
        ("it was idle meanwhile", [(0.2, 0.3)], [(0.0, 0.4, 0.01), (0.6, 0.6, 0.01)], None, [(True, False, False)]),
        ("served alone it met it", [(0.2, 0.3)], [(0.0, 0.6, 0.01)], frozenset({0}), [(True, False, True)]),
        ("served alone it missed it, too", [(0.2, 0.3)], [(0.0, 0.6, 0.2)], frozenset(), [(True, True, False)]),
        ("all are in time", [(0.2, 0.3)], [(0.0, 0.5, 0.1)], None, []),
    ],
)
def test_who_is_to_blame(
    what: str,
    grants: list[tuple[float, float]],
    requests: list[tuple[float, float, float]],
    alone: frozenset[int] | None,
    missed: list[tuple[bool, bool, bool | None]],
) -> None:
    """Requests are (came, ttft, tpot), of eleven tokens."""
    history = LoanHistory(
        "lent-0",
        "gate",
        SLO,
        0.08,
        0.04,
        [GrantSpan(start, end, 0.1) for start, end in grants],
        requests=[
            UserRequest(number, came, came + ttft + 10 * tpot, 20, 11, ttft, tpot)
            for number, (came, ttft, tpot) in enumerate(requests)
        ],
        blamed=alone,
    )
    assert [(it.ttft, it.tpot, it.blamed) for it in history.missed()] == missed, what


def test_the_clock_of_a_run_that_went_on() -> None:
    clock = RunClock(
        [EventRecord(0.0, "began", None, "", clock=100.0), EventRecord(30.0, "began", None, "", clock=500.0)]
    )
    assert clock.known and not RunClock(EVENTS[1:]).known
    assert [clock.seconds(at) for at in (95.0, 110.0, 130.0, 131.0, 490.0, 500.0, 512.0)] == [
        -5.0,
        10.0,
        30.0,
        None,  # lost: the run went on from 30 s
        None,
        30.0,
        42.0,
    ]


@given(
    gaps=st.lists(st.floats(0.0, 5.0), max_size=30),
    most=st.integers(1, 12),
)
def test_the_smallest_gaps_are_closed_first(gaps: list[float], most: int) -> None:
    spans, at = [], 0.0
    for gap in gaps:
        spans.append(ServingSpan(at + gap, at + gap + 0.5, 1, None))
        at = spans[-1].end
    found = closest_together(spans, most)
    assert [span for run in found for span in run] == spans
    assert len(found) == min(most, len(spans))
    closed = [after.start - before.end for run in found for before, after in pairwise(run)]
    left = [after[0].start - before[-1].end for before, after in pairwise(found)]
    assert not (closed and left) or max(closed) <= min(left)


def test_a_timeline_shows_what_was_lent(tmp_path: Path) -> None:
    write_loans(tmp_path)
    with closing(Timeline(tmp_path / "timeline.json")) as timeline:
        found = run_loans(tmp_path, lambda at: at - BEGAN, EVENTS)
        timeline.more(lambda trace, group: draw_loans(trace, group, found))
    events = json.loads((tmp_path / "timeline.json").read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = [(lanes[it["tid"]], it["name"], it["ts"], it["dur"]) for it in events if it["ph"] == "X"]
    assert drawn == [
        ("lent-0: rollout", "grant", 1_000_000, 20_000),
        ("lent-0: rollout", "grant", 2_000_000, 20_000),
        ("lent-0: serving", "serving step", 3_000_000, 10_000),
        ("lent-0: serving", "serving step", 4_000_000, 10_000),
        ("lent-1: rollout", "grant", 1_000_000, 500_000),
        ("lent-1: recalled", "4 requests/s, lent up to 2", 6_000_000, 2_500_000),
    ]
    [over] = [it["args"] for it in events if it["ph"] == "X" and it["args"].get("overstayed")]
    assert over == {"lent_ms": 20.0, "granted_ms": 40.0, "tokens": 5, "overstayed": 1}
    counters = [(it["name"], it["ts"], it["args"]) for it in events if it["ph"] == "C" and it["ts"] > 2_000_000]
    assert counters == [
        ("lent-0: due margin", 3_010_000, {"ms": 50.0}),
        ("lent-0: due margin", 4_010_000, {"ms": -10.0}),
        ("lent-0: load", 4_500_000, {"% of envelope": 100.0}),
        ("lent-0: load", 9_000_000, {"% of envelope": 0.0}),
        ("lent-0: KV lent", 2_500_000, {"MiB": 3.0}),
    ]
    missed = [(it["name"], it["ts"], it["args"]["lending_to_blame"]) for it in events if it["ph"] == "i"]
    assert missed == [
        ("request 1 missed its SLO", 2_500_000, "not known"),
        ("request 2 missed its SLO", 5_700_000, "no"),
    ]


def test_a_long_loan_leaves_room_on_the_timeline(tmp_path: Path) -> None:
    grants = [GrantSpan(at, at + 0.5, 0.5) for at in range(500)]
    serving = [ServingSpan(at + 0.5, at + 0.75, 1, 0.001 * at) for at in range(500)]
    with closing(Timeline(tmp_path / "timeline.json", max_events=200)) as timeline:
        history = LoanHistory("lent-0", "gate", SLO, 0.08, 0.5, grants, serving)
        timeline.more(lambda trace, group: draw_loans(trace, group, [history]))
        timeline.role("w0", "train", 1.0)
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert sum(it["args"]["lent_ms"] for it in events if "lent_ms" in it["args"]) == 250_000
    assert sum(it["ph"] in "XC" for it in events) <= 101
    assert min(it["args"]["ms"] for it in events if it["ph"] == "C") == 0.0


def test_nothing_is_drawn_where_nothing_was_lent(tmp_path: Path) -> None:
    with closing(Timeline(tmp_path / "timeline.json")) as timeline:
        timeline.more(lambda trace, group: draw_loans(trace, group, run_loans(tmp_path, lambda at: at, EVENTS)))
    assert "lent" not in (tmp_path / "timeline.json").read_text()
