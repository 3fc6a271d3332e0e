"""Owners of lent devices start again what has ended: the server first, and the agent once it serves."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.soak import owners
from benchmarks.soak.owners import Owner
from benchmarks.soak.processes import still_there
from libra.lend.backend.device_page import BorrowerTally, DevicePage

ROOT = Path(__file__).parents[2]

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


def test_grants_are_those_of_the_page_whatever_became_of_the_record(owner: Owner, tmp_path: Path) -> None:
    assert owner.grants == 0  # nobody has served yet
    page = DevicePage(tmp_path / "device-0", create=True)
    page.tally = BorrowerTally(grants=7, unrecorded=5)
    assert owner.grants == 7
    page.close()


OWNING = """
import signal, sys, time
from pathlib import Path
from benchmarks.soak import owners
from benchmarks.soak.owners import Owner

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever a shell said of jobs in its background
popen = owners.subprocess.Popen
owners.subprocess.Popen = lambda command, **how: popen([sys.executable, "-c", sys.argv[2]], **how)
owner = Owner(Path(sys.argv[1]), 0)
try:
    while owner.process("agent") is None:
        owner.tend()
    print(*(owner.process(who).pid for who in ("server", "agent")), flush=True)
    time.sleep(600)
finally:
    owner.end()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_outlives_the_soak_however_it_ends(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", OWNING, str(tmp_path), ENDLESS]
    soak = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert soak.stdout is not None
        family = [psutil.Process(int(pid)) for pid in soak.stdout.readline().split()]
        assert len(family) == 2
        soak.send_signal(number)
        soak.wait(30)
        assert still_there(family) == []
    finally:
        soak.kill()
        soak.wait()
