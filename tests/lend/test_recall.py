from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.lend.gate import Grant, ServingView
from libra.lend.recall import Recall, RecallPolicy, WatchedRule
from libra.lend.traffic.envelope import Envelope, Load, RateWindow


def test_lending_stops_at_once_and_the_quiet_time_doubles_when_it_comes_back_too_soon() -> None:
    recall = Recall(RecallPolicy(quiet=10.0, most_quiet=25.0))
    says = [
        (0.0, None, None),
        (1.0, "burst", "burst"),
        (2.0, None, "burst"),  # calm since here
        (11.9, None, "burst"),
        (12.0, None, None),  # lent again
        (13.0, "burst", "burst"),  # too soon: 20 s from now on
        (14.0, None, "burst"),
        (15.0, "more", "more"),  # and from the beginning
        (16.0, None, "more"),
        (35.9, None, "more"),
        (36.0, None, None),
        (40.0, "burst", "burst"),  # too soon again: no more than 25 s
        (41.0, None, "burst"),
        (65.9, None, "burst"),
        (66.0, None, None),
        (500.0, "burst", "burst"),  # after a long time it is 10 s again
        (501.0, None, "burst"),
        (511.0, None, None),
    ]
    for now, breach, wanted in says:
        assert recall.observe(breach, now) == wanted, now
    assert recall.recalls == 4


@pytest.mark.parametrize(
    ("load", "breach"),
    [
        (Load(2.0, 100, 8, 4000), None),
        (Load(2.1, 100, 8, 4000), "2.1 requests/s, lent up to 2"),
        (Load(2.0, 101, 8, 4000), "101 queued tokens, lent up to 100"),
        (Load(2.0, 100, 9, 4000), "9 requests, lent up to 8"),
        (Load(2.0, 100, 8, 4001), "4001 tokens, lent up to 4000"),
    ],
)
def test_a_load_outside_its_envelope_says_how(load: Load, breach: str | None) -> None:
    assert Envelope(rate=2.0, queued=100, live=8, context=4000, window=30.0).breach(load) == breach


@given(
    gaps=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 3.0, 10.0, 30.0]), st.integers(0, 3)), min_size=1, max_size=40)
)
def test_the_rate_is_of_the_last_window(gaps: list[tuple[float, int]]) -> None:
    window, now, came = RateWindow(10.0), 0.0, 0
    arrivals: list[tuple[float, float]] = []  # when, and how many of them: after a gap of 30 s a third of those in it
    assert window.rate(now, 0) == 0.0
    for gap, new in gaps:
        now, came = now + gap, came + new
        arrivals.append((now, new * min(1.0, 10.0 / gap) if gap else new))
        expected = sum(count for at, count in arrivals if at > now - 10.0) / 10.0
        assert window.rate(now, came) == pytest.approx(expected)


def test_a_pause_in_which_nobody_looked_is_no_burst() -> None:
    window = RateWindow(10.0)
    window.rate(0.0, 0)
    assert window.rate(1.0, 2) == 0.2
    assert window.rate(101.0, 202) == 2.0


def test_a_count_that_others_began_or_that_begins_again_says_nothing_of_the_rate() -> None:
    window = RateWindow(10.0)
    assert window.rate(0.0, 5_000) == 0.0  # who came before anybody looked
    assert window.rate(1.0, 5_001) == 0.1
    assert window.rate(2.0, 3) == 0.3  # the engine was started again
    assert window.rate(3.0, 4) == 0.4
    assert window.rate(12.5, 4) == 0.1


class Always:
    """Grants whatever the view."""

    def decide(self, view: ServingView, now: float, cost: object) -> Grant:
        return Grant(now + 1, 1)


def test_nothing_is_granted_outside_the_envelope() -> None:
    envelope = Envelope(rate=0.2, queued=100, live=8, context=4000, window=10.0)
    rule = WatchedRule(Always(), envelope, Recall(RecallPolicy(quiet=5.0, most_quiet=60.0)), second=1000.0)

    def granted(now: float, came: int, live: int = 1) -> bool:
        return isinstance(rule.decide(ServingView(live, 0, 0.0, came=came), now, None), Grant)  # type: ignore[arg-type]

    assert granted(0.0, 0)
    assert granted(0.0, 1)
    assert granted(1_000.0, 2)
    assert not granted(2_000.0, 3)  # 3 requests in 10 s
    assert not granted(10_500.0, 3)  # 2, but not for 5 s yet
    assert granted(15_500.0, 3)
    assert not granted(15_600.0, 3, live=9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RecallPolicy(0.0, 1.0),
        lambda: RecallPolicy(2.0, 1.0),
        lambda: RateWindow(0.0),
        lambda: Envelope(1, 0, 1, 1, 1),
    ],
)
def test_what_is_refused(make) -> None:
    with pytest.raises(ValueError):
        make()
