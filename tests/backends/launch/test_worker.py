"""A slot's speed, on clocks that only the test moves."""

from __future__ import annotations

import os
import time
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.backends.launch.worker import BURST, Pacer


class Clocks:
    """CPU time passes only in `work`; wall time also in `idle` and in `sleep`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu, self.wall = 100.0, 5000.0
        self.slept: list[float] = []
        self.pinned: list[tuple[int, ...]] = []
        monkeypatch.setattr(time, "process_time", lambda: self.cpu)
        monkeypatch.setattr(time, "monotonic", lambda: self.wall)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: self.pinned.append(cores))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.wall += seconds

    def work(self, seconds: float) -> None:
        self.cpu += seconds
        self.wall += seconds

    def idle(self, seconds: float) -> None:
        self.wall += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


@pytest.mark.parametrize(
    ("share", "cores", "refused"),
    [
        (0.0, (0,), True),
        (-0.5, (0,), True),
        (1.5, (0,), True),
        (0.5, (), True),
        (2.5, (0, 1), True),
        (0.45, (0,), False),
        (1.0, (0,), False),
        (2.0, (0, 1), False),
    ],
)
def test_shares(share: float, cores: tuple[int, ...], refused: bool, clocks: Clocks) -> None:
    if refused:
        with pytest.raises(ValueError, match=f"share {share}: expected more than 0 and at most the {len(cores)} core"):
            Pacer(share, cores)
        assert clocks.pinned == []
    else:
        Pacer(share, cores)
        assert clocks.pinned == [cores]


@pytest.mark.parametrize(
    ("name", "share", "idle", "work", "slept"),
    [
        ("a busy slot sleeps until its share is kept", 0.5, 0.0, 0.1, [0.1]),
        ("a smaller share sleeps longer", 0.25, 0.0, 0.1, [0.3]),
        ("a short idle time is paid back", 0.5, 0.01, 0.1, [0.09]),
        ("a long one only up to the burst", 0.5, 60.0, 0.1, [0.1 - 2 * BURST]),
        ("work inside the burst is free", 0.5, 60.0, 1.5 * BURST, []),
        ("a whole core never sleeps", 1.0, 0.0, 5.0, []),
    ],
)
def test_what_a_slot_owes(
    name: str, share: float, idle: float, work: float, slept: list[float], clocks: Clocks
) -> None:
    pacer = Pacer(share, (0,))
    clocks.idle(idle)
    pacer.pace()
    clocks.work(work)
    pacer.pace()
    assert clocks.slept == pytest.approx(slept), name


def test_a_sleep_that_lasts_too_long_is_no_more_than_idle_time(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: clocks.idle(seconds + 10.0))
    pacer = Pacer(0.5, (0,))
    clocks.work(0.1)
    pacer.pace()
    monkeypatch.setattr(time, "sleep", clocks.sleep)
    clocks.work(0.1)
    pacer.pace()
    assert clocks.slept == pytest.approx([0.1 - 2 * BURST])


pieces = st.lists(st.tuples(st.floats(0, 0.05), st.floats(0, 0.5)), min_size=1, max_size=30)


@settings(deadline=None)
@given(share=st.floats(0.05, 0.95), pieces=pieces)
def test_over_any_stretch_the_share_is_kept(share: float, pieces: list[tuple[float, float]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clocks = Clocks(monkeypatch)
        pacer = Pacer(share, (0,))
        ends = [(clocks.cpu, clocks.wall)]
        for work, idle in pieces:
            clocks.idle(idle)
            clocks.work(work)
            pacer.pace()
            ends.append((clocks.cpu, clocks.wall))
    # The surplus over the share since the stretch began is never more than what an idle slot may save up.
    surplus = [cpu - share * wall for cpu, wall in ends]
    lowest = accumulate(surplus, min)
    assert all(now - low <= BURST + 1e-6 for now, low in zip(surplus, lowest, strict=True))


@settings(deadline=None)
@given(share=st.floats(0.05, 0.95), pieces=pieces)
def test_a_slot_is_not_made_slower_than_its_share(share: float, pieces: list[tuple[float, float]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clocks = Clocks(monkeypatch)
        pacer = Pacer(share, (0,))
        began = clocks.cpu, clocks.wall
        for work, _ in pieces:
            clocks.work(work)
            pacer.pace()
    cpu, wall = clocks.cpu - began[0], clocks.wall - began[1]
    assert cpu == pytest.approx(share * wall, abs=1e-6)
