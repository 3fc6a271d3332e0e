"""Faults as they come: each strikes a process that it can strike at its moment, and is written down.

Invariant: a fault that is not of `ENDING` strikes only what a run can lose: from its first allocation on, and never the
last core trainer that is sound. So a session that ends otherwise has ended wrongly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from benchmarks.soak.faults import ENDING, HARMLESS, Fault, Kind
from benchmarks.soak.session import Session
from libra.backends.launch.worker import die_with

_STOPPED = frozenset({Kind.SLOW, Kind.HANG})
_PATIENCE = 3.0  # seconds for which a fault waits for a target


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was done. `time` is of the soak's clock; `worker` and `pid` are empty for those of no worker."""

    time: float
    session: int
    kind: Kind
    worker: str
    pid: int
    seconds: float


@dataclass(slots=True)
class _Stopped:
    """A process that stands still, and when it goes on."""

    process: psutil.Process
    until: float


class Storm:
    def __init__(self, faults: Iterator[Fault], tell: Callable[[Struck], None]) -> None:
        """`tell` hears of every fault that is done."""
        self._faults, self._tell = faults, tell
        self.struck: list[Struck] = []
        self.passed = 0  # faults that found no target
        self._next: Fault | None = None
        self._due = 0.0
        self._stopped: list[_Stopped] = []
        self._hogs: list[tuple[subprocess.Popen[bytes], float]] = []
        self._harmed: set[int] = set()  # processes that were killed or hang

    @property
    def over(self) -> bool:
        """No fault is left."""
        return self._next is None and self._due > 0

    def tick(self, session: Session) -> None:
        """Let processes go on that were held long enough, and do the fault that is due."""
        now = time.monotonic()
        self._let_go(now)
        if self._next is None:
            self._take(now)
        elif now >= self._due:
            if self._strike(session, self._next, now):
                self._take(now)
            elif session.ready and now >= self._due + _PATIENCE:
                self.passed += 1
                self._take(now)

    def session_ended(self) -> None:
        """The wait for the next fault begins anew; no process is held any more."""
        self._due = time.monotonic()
        self._stopped.clear()

    def calm(self) -> None:
        """Let all processes that are held go on."""
        self._let_go(float("inf"))

    def _take(self, now: float) -> None:
        self._next = next(self._faults, None)
        self._due = now + (self._next.pause if self._next is not None else 0.0)

    def _let_go(self, now: float) -> None:
        for stopped in [stopped for stopped in self._stopped if now >= stopped.until]:
            self._stopped.remove(stopped)
            _send(stopped.process, signal.SIGCONT)
        for hog, until in [entry for entry in self._hogs if now >= entry[1]]:
            self._hogs.remove((hog, until))
            hog.kill()
            hog.wait()

    def _strike(self, session: Session, fault: Fault, now: float) -> bool:
        """Do the fault. Returns whether there was a target."""
        if fault.kind in ENDING:
            return self._end(session, fault, now)
        if not session.ready:
            return False
        if fault.kind is Kind.HOG:
            self._hog(now + fault.seconds)
            return self._note(session, fault, now)
        if fault.kind is Kind.SLOW_CONTROLLER:
            controller = psutil.Process(session.pid)
            _send(controller, signal.SIGSTOP)
            self._stopped.append(_Stopped(controller, now + fault.seconds))
            return self._note(session, fault, now)
        return self._strike_worker(session, fault, now)

    def _strike_worker(self, session: Session, fault: Fault, now: float) -> bool:
        names = sorted(self._candidates(session, fault.kind))
        if not names:
            return False
        name = names[int(fault.draw * len(names))]
        process = session.worker(name)
        if process is None:
            return False
        if fault.kind in _STOPPED:
            _send(process, signal.SIGSTOP)
            self._stopped.append(_Stopped(process, now + fault.seconds))
        else:
            _send(process, signal.SIGKILL)
        if fault.kind not in HARMLESS:
            self._harmed.add(session.pids[name])
        return self._note(session, fault, now, name, session.pids[name])

    def _hog(self, until: float) -> None:
        """Start a process that only computes."""
        soak = os.getpid()
        hog = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=lambda: die_with(soak))
        self._hogs.append((hog, until))

    def _candidates(self, session: Session, kind: Kind) -> set[str]:
        if kind is Kind.KILL_MOVING:
            return {name for name in session.moves if name in session.pids}
        sound = {name for name in session.roles if session.pids[name] not in self._harmed}
        cores = {name for name in sound if name.startswith("core")}
        if len(cores) < 2 and kind is not Kind.SLOW:
            sound -= cores
        match kind:
            case Kind.KILL_ENGINE:
                return {name for name in sound if session.roles[name] == "rollout"}
            case Kind.KILL_HYBRID:
                return {name for name in sound if session.roles[name] == "train" and name not in cores}
            case Kind.KILL_CORE:
                return sound & cores
        return sound

    def _end(self, session: Session, fault: Fault, now: float) -> bool:
        if not session.ready and fault.kind is not Kind.KILL_CONTROLLER:
            return False
        self.calm()  # who stands still cannot end
        match fault.kind:
            case Kind.KILL_CONTROLLER:
                session.signal(signal.SIGKILL)
            case Kind.INTERRUPT:
                session.signal(signal.SIGINT)
            case Kind.KILL_FORK_SERVER:
                _send(session.fork_server(), signal.SIGKILL)
            case Kind.KILL_CORES:
                for name in [name for name in session.pids if name.startswith("core")]:
                    _send(session.worker(name), signal.SIGKILL)
        session.ending = fault.kind
        return self._note(session, fault, now)

    def _note(self, session: Session, fault: Fault, now: float, worker: str = "", pid: int = 0) -> bool:
        struck = Struck(now, session.number, fault.kind, worker, pid, fault.seconds)
        self.struck.append(struck)
        self._tell(struck)
        return True


def _send(process: psutil.Process | None, number: int) -> None:
    try:
        if process is not None:
            process.send_signal(number)  # not where the id is another's by now
    except psutil.NoSuchProcess:
        pass
