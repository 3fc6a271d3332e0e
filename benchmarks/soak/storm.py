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
from functools import partial

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


class Storm:
    def __init__(self, faults: Iterator[Fault], tell: Callable[[Struck], None]) -> None:
        """`tell` hears of every fault that is done."""
        self._faults, self._tell = faults, tell
        self.struck: list[Struck] = []
        self.passed = 0  # faults that found no target
        self._next: Fault | None = None
        self._due = 0.0
        self._held: list[tuple[float, Callable[[], None]]] = []  # until when, and what lets it go
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
        """The wait for the next fault begins anew."""
        self._due = time.monotonic()

    def calm(self) -> None:
        """Let all processes that are held go on."""
        self._let_go(float("inf"))

    def _take(self, now: float) -> None:
        self._next = next(self._faults, None)
        self._due = now + (self._next.pause if self._next is not None else 0.0)

    def _let_go(self, now: float) -> None:
        over, self._held = ([it for it in self._held if (now >= it[0]) is due] for due in (True, False))
        for _, let_go in over:
            let_go()

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
            self._stop(psutil.Process(session.pid), now + fault.seconds)
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
            self._stop(process, now + fault.seconds)
        else:
            _send(process, signal.SIGKILL)
        if fault.kind not in HARMLESS:
            self._harmed.add(session.pids[name])
        return self._note(session, fault, now, name, session.pids[name])

    def _stop(self, process: psutil.Process, until: float) -> None:
        _send(process, signal.SIGSTOP)
        self._held.append((until, partial(_send, process, signal.SIGCONT)))

    def _hog(self, until: float) -> None:
        """Start a process that only computes."""
        soak = os.getpid()
        hog = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=lambda: die_with(soak))
        self._held.append((until, partial(_end, hog)))

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


def _end(hog: subprocess.Popen[bytes]) -> None:
    hog.kill()
    hog.wait()


def _send(process: psutil.Process | None, number: int) -> None:
    try:
        if process is not None:
            process.send_signal(number)  # not where the id is another's by now
    except psutil.NoSuchProcess:
        pass
