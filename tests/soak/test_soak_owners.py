"""Owners of lent devices start again what has ended: the server first, and the agent once it serves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.soak import owners
from benchmarks.soak.owners import Owner

ENDLESS = "import sys, time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who was started, in order. All of them are processes that say that they are ready, and sleep."""
    names: list[str] = []

    def start(owner: Owner, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        names.append(name)
        with owner._log(name).open("wb") as log:
            return subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=log)

    monkeypatch.setattr(Owner, "_start", start)
    monkeypatch.setattr(owners, "_PAUSE", 0.0)
    return names


@pytest.fixture
def owner(tmp_path: Path, started: list[str]) -> Iterator[Owner]:
    made = Owner(tmp_path, 0)
    yield made
    made.end()


def tended_until(owner: Owner, there: Callable[[], bool]) -> None:
    while not there():
        owner.tend()


def test_what_has_ended_is_started_again(owner: Owner, started: list[str]) -> None:
    owner.tend()
    assert started == ["server"] and owner.process("agent") is None
    tended_until(owner, lambda: owner.process("agent") is not None)
    assert started == ["server", "agent"]
    for who in ("agent", "server"):
        process = owner.process(who)
        assert process is not None
        process.kill()
        tended_until(owner, lambda who=who, pid=process.pid: getattr(owner.process(who), "pid", pid) != pid)
    assert started == ["server", "agent", "agent", "server"]  # the agent is there while its server is not
    assert len(owner.starts) == 2
    assert owner.process("borrower") is None
