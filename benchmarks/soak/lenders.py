"""The servers of a run that borrows, watched as it goes: their processes, when requests ended, who kept them waiting.

Invariant: requests are read from what servers write, with code of the soak's own. Times are of the machine's monotonic
clock.
"""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.soak.owners import Owner
from benchmarks.soak.session import Session
from benchmarks.soak.written import Row, Tail

_SERVER = re.compile(r"server-\d+")
_SCAN_SECONDS = 1.0  # between two looks for servers that have started


@dataclass(frozen=True, slots=True)
class Served:
    """A request that ended. Seconds, of the monotonic clock where they are times."""

    session: int
    server: int
    arrival: float
    first: float  # token
    end: float
    ttft: float
    tpot: float
    tokens: int
    waited: float  # of its life, that its server waited for a core which other processes had
    preempted: int = 0  # requests of its server so far


@dataclass(slots=True)
class _Life:
    """Records of one server in one session."""

    requests: list[Row] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when its wait for a core was read
    waited: list[float] = field(default_factory=list)


class Lenders:
    """`count` servers, whose files are in `directory`: of the run itself, or of `owners`; none for a run that borrows
    nothing."""

    def __init__(self, directory: Path, count: int, owners: Sequence[Owner] = ()) -> None:
        self.count, self.directory, self.owners = count, directory, owners
        run = directory
        self._tails = [Tail(run / f"served-{number}.jsonl") for number in range(count)]
        self._lives: defaultdict[tuple[int, int], _Life] = defaultdict(_Life)
        self._processes: dict[str, psutil.Process] = {}  # of the session that was looked at last
        self._seen: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
        self._scanned = (0, 0.0)

    def process(self, name: str) -> psutil.Process | None:
        """Process of a server of the session that was looked at last, if it is running."""
        if self.owners:
            return self.owned(name)
        process = self._processes.get(name)
        return process if process is not None and process.is_running() else None

    def owned(self, name: str) -> psutil.Process | None:
        """A process of an owner: of server-0, agent-0, borrower-0 or follower-0."""
        kind, _, number = name.rpartition("-")
        return self.owners[int(number)].process(kind)

    def borrower(self, session: Session, name: str) -> psutil.Process | None:
        """The process of an engine that the run calls so."""
        return self.owned(name.replace("lent", "borrower")) if self.owners else session.worker(name)

    def device(self, borrower: str) -> Path:
        """The file of its token; `borrower` is as the run names it."""
        return self.directory / borrower.replace("lent", "device")

    def record(self, borrower: str) -> Path:
        return self.directory / f"{borrower.replace('lent', 'lending')}.jsonl"

    @property
    def servers(self) -> list[str]:
        """Names of the servers that are running now."""
        names = [f"server-{n}" for n in range(len(self.owners))] or sorted(self._processes)
        return [name for name in names if self.process(name) is not None]

    def look(self, session: Session) -> None:
        """Read what is new."""
        if not self.count:
            return
        for owner in self.owners:
            owner.tend()
        if not self.owners:
            self._scan(session)
        now = time.monotonic()
        for number, tail in enumerate(self._tails):
            life = self._lives[session.number, number]
            life.requests += tail.rows()
            process = self.process(f"server-{number}")
            waited = None if process is None else _waited(process.pid)
            if waited is not None:
                life.times.append(now)
                life.waited.append(waited)

    def _scan(self, session: Session) -> None:
        number, when = self._scanned
        if number == session.number and time.monotonic() < when + _SCAN_SECONDS:
            return
        self._scanned, self._processes = (session.number, time.monotonic()), {}
        try:
            for process in psutil.Process(session.pid).children(recursive=True):
                if _SERVER.fullmatch(name := process.name()):
                    self._processes[name] = process
                    self._seen[session.number, name].add(process.pid)
        except psutil.NoSuchProcess:
            pass

    @property
    def served(self) -> list[Served]:
        """All requests that ended, in no order."""
        return [
            request for (session, server), life in self._lives.items() for request in _requests(session, server, life)
        ]

    def back(self, server: str, time: float) -> float:
        """Time at which a server that was killed at `time` was started again; inf: not in this session."""
        starts = self.owners[int(server.removeprefix("server-"))].starts if self.owners else []
        return next((start for start in starts if start > time), math.inf)

    @property
    def started_again(self) -> list[str]:
        """Servers that had another process in the middle of a session."""
        return [f"{name} in session {session}" for (session, name), pids in self._seen.items() if len(pids) > 1]


def _requests(session: int, server: int, life: _Life) -> Iterator[Served]:
    for row in life.requests:
        first = row["came"] + row["ttft"]
        end = first + row["tpot"] * max(1, row["output_tokens"] - 1)
        yield Served(
            session,
            server,
            row["came"],
            first,
            end,
            row["ttft"],
            row["tpot"],
            row["output_tokens"],
            _between(life, row["came"], end),
            row.get("preempted", 0),
        )


def _between(life: _Life, begin: float, end: float) -> float:
    """Seconds that the server waited for a core: at most, as they are known at a few moments only."""
    if not life.times:
        return 0.0
    first = max(0, bisect_right(life.times, begin) - 1)
    last = min(len(life.times) - 1, bisect_left(life.times, end))
    return life.waited[last] - life.waited[first]


def _waited(pid: int) -> float | None:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def holds(pid: int, device: Path) -> bool:
    """Whether this process has the device's token, by the kernel's own word."""
    try:
        inode = device.stat().st_ino
    except FileNotFoundError:
        return False
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    # 1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF; one that waits has "->" behind its number
    return any(it[1] == "FLOCK" and it[4] == str(pid) and it[5].endswith(f":{inode}") for it in locks)
