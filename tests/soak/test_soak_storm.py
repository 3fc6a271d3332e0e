"""Whom a fault may strike: what the run can lose, and never the last core trainer that is sound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import psutil
import pytest

from benchmarks.soak.faults import Fault, Kind
from benchmarks.soak.session import Session
from benchmarks.soak.storm import Storm, Struck


@dataclass
class MadeSitting:
    """Workers that are processes which sleep."""

    roles: dict[str, str]
    pids: dict[str, int] = field(default_factory=dict)
    moves: dict[str, Any] = field(default_factory=dict)
    ready: bool = True
    number: int = 1
    ending: Kind | None = None
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.roles:
            self.start(name)

    def start(self, name: str) -> None:
        self._started[name] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.pids[name] = self._started[name].pid

    def worker(self, name: str) -> psutil.Process | None:
        return psutil.Process(self.pids[name]) if self._started[name].poll() is None else None

    def status(self, name: str) -> int:
        return self._started[name].wait(10)

    def end(self) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()


@pytest.fixture
def session() -> Iterator[MadeSitting]:
    made = MadeSitting({"core-0": "train", "core-1": "train", "hybrid-0": "train", "rollout-0": "rollout"})
    yield made
    made.end()


def weather(session: MadeSitting, *faults: Fault) -> list[Struck]:
    """All faults, one after the other; those that strike nobody are given up at once."""
    struck: list[Struck] = []
    storm = Storm(iter(faults), struck.append)
    while not storm.over:
        storm.tick(cast(Session, session))
        storm._due -= 10.0
    storm.calm()
    return struck


def kills(kind: Kind, draw: float = 0.0) -> Fault:
    return Fault(kind, 0.0, draw, 0.0)


def test_one_core_of_two_is_killed_and_no_other_until_it_is_back(session: MadeSitting) -> None:
    cores = [kills(Kind.KILL_CORE, 0.9)] * 3
    first, *others = weather(session, *cores, kills(Kind.HANG, 0.9), kills(Kind.KILL_HYBRID))
    assert (first.worker, session.status("core-1")) == ("core-1", -signal.SIGKILL)
    assert [entry.kind for entry in others] == [Kind.HANG, Kind.KILL_HYBRID]
    assert [entry.worker for entry in others] == ["rollout-0", "hybrid-0"]
    assert psutil.Process(session.pids["core-0"]).status() != psutil.STATUS_STOPPED


def test_a_core_that_is_back_counts_again(session: MadeSitting) -> None:
    struck: list[Struck] = []
    storm = Storm(iter([kills(Kind.KILL_CORE)] * 2), struck.append)
    while len(struck) < 1:
        storm.tick(cast(Session, session))
    session.status(struck[0].worker)
    session.start(struck[0].worker)
    while len(struck) < 2:
        storm.tick(cast(Session, session))
    assert [entry.kind for entry in struck] == [Kind.KILL_CORE] * 2


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.KILL_CONTROLLER])
def test_nothing_happens_before_all_workers_are_there(session: MadeSitting, kind: Kind) -> None:
    session.ready = False
    struck: list[Struck] = []
    storm = Storm(iter([kills(kind)]), struck.append)
    for _ in range(5):
        storm.tick(cast(Session, session))
        storm._due -= 10.0
    assert (struck, storm.passed) == ([], 0)  # it waits for them


def test_who_is_stopped_goes_on(session: MadeSitting) -> None:
    storm = Storm(iter([Fault(Kind.SLOW, 0.0, 0.99, 0.3)]), lambda struck: None)
    stopped, ends = psutil.Process(session.pids["rollout-0"]), time.monotonic() + 10.0
    seen = set()
    while time.monotonic() < ends and seen < {True, False}:
        storm.tick(cast(Session, session))
        if storm.struck:
            seen.add(stopped.status() == psutil.STATUS_STOPPED)
    assert seen == {True, False}
    os.kill(stopped.pid, 0)


def test_a_worker_in_a_move_is_struck_as_one(session: MadeSitting) -> None:
    assert weather(session, kills(Kind.KILL_MOVING)) == []
    del session.roles["hybrid-0"]
    session.moves["hybrid-0"] = {}
    [struck] = weather(session, kills(Kind.KILL_MOVING))
    assert (struck.worker, session.status("hybrid-0")) == ("hybrid-0", -signal.SIGKILL)
