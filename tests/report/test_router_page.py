"""The page of a router from its values: what it shows, and what it says where there is nothing."""

from __future__ import annotations

import re

from libra.report.router_page import router_page
from libra.report.router_view import DecisionView, EndedLength, EngineView, RouterView, SessionView, TrafficSample
from libra.trajectory import Turn

ENGINES = (
    EngineView("e0", 0, True, None, 3, 900, 4096, 12, 340, 2, 1, 0.25, 0.0123),
    EngineView("e1", 1, False, "/health is silent for 2 s", 0, 0, 8192, 0, 0),
)


def view(**more: object) -> RouterView:
    given: dict[str, object] = {
        "policy": "cmlfq",
        "seconds": 75.0,
        "limits": (1000, 8000),
        "engines": ENGINES,
        "sessions": (),
        "contexts": (),
        "decisions": (),
        "samples": (),
        "ended": (),
        "waiting": 0,
        "turns": 12,
        "prompt_tokens": 5000,
        "generated_tokens": 340,
        "retries": 1,
        "migrations": 2,
    }
    return RouterView(**{**given, **more})  # type: ignore[arg-type]


def cells(html: str, label: str) -> list[str]:
    """Words of all cells of a column."""
    found = re.findall(rf'<td data-label="{label}">(.*?)</td>', html, re.DOTALL)
    return [" ".join(re.sub(r"<[^>]*>", " ", it).split()) for it in found]


def test_a_router_without_traffic_says_so() -> None:
    html = router_page(view())
    for said in (
        "no throughput yet",
        "No two trajectories",
        "No turn has been placed yet",
        "No session is in progress",
    ):
        assert said in html
    assert "cmlfq routes to 1 of 2 engines, for 1 min 15 s: 12 turns answered." in html
    assert "Engine e1 is out of service: /health is silent for 2 s." in html
    assert "<svg" not in html


def test_engines_say_what_they_know() -> None:
    html = router_page(view())
    assert cells(html, "Engine") == ["e0", "e1"]
    assert cells(html, "A token takes") == ["12.3 ms", "-"]
    assert cells(html, "Running") == ["2", "-"] and cells(html, "Waiting") == ["1", "-"]
    assert cells(html, "KV held") == ["25 %", "-"]


def test_sessions_and_lengths_are_counted_in_their_buckets() -> None:
    ended = (EndedLength(1.0, 1000, True), EndedLength(2.0, 1001, True), EndedLength(3.0, 90_000, False))
    html = router_page(view(contexts=(1, 1000, 1001), ended=ended))
    assert cells(html, "Sessions now") == ["2", "1"]
    assert cells(html, "Ended lately") == ["33 %", "67 %"]  # beyond the last limit: the last bucket
    assert "1 length of sessions without an end are lower bounds" in html and html.count("<svg") == 1


def test_a_session_shows_its_latest_turns_with_their_tools() -> None:
    turns = tuple(Turn(10 * (it + 1), "look", "error" if it == 7 else "ok", 5, 0.25) for it in range(8))
    session = SessionView("<b>id</b>", "search", "e0", 1234, (*turns, Turn(7, None, None, 0)), "turn on e0")
    html = router_page(view(sessions=(session,), contexts=(1234, 5)))
    (said,) = cells(html, "Turns")
    assert said.startswith("3 earlier turns 40 look ok, 250 ms 50 look ok") and said.endswith("80 look error, 250 ms 7")
    assert "<b>id</b>" not in html and "And 1 session with older turns." in html


def test_decisions_have_their_reasons_the_rest_is_folded() -> None:
    decisions = tuple(DecisionView("12:00:00", f"t{it}", 9, "e0", it == 1, "least loaded") for it in range(14))
    html = router_page(view(decisions=decisions))
    assert cells(html, "Session") == [f"t{it}" for it in range(14)] and cells(html, "Reason") == ["least loaded"] * 14
    assert "2 earlier decisions" in html and "e0 (moves)" in html


def test_charts_are_drawn_of_two_samples_on_and_the_page_loads_nothing() -> None:
    samples = (TrafficSample(2.0, 100.0, 10.0, 1, 0), TrafficSample(4.0, 120.0, 12.0, 2, 1))
    html = router_page(view(samples=samples))
    assert html.count("<svg") == 2
    assert not re.findall(r"(?:src|href)=|@import|url\(", html)
