"""A run under faults, from its first start to its last session, in which it is left alone.

Invariant: it is bounded in time whatever the run does, and nothing that it started is running when it returns.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Row
from benchmarks.soak.accounts import accounts, checked, weights
from benchmarks.soak.faults import Fault, Kind
from benchmarks.soak.processes import Processes, shared_memory
from benchmarks.soak.session import Session
from benchmarks.soak.storm import Storm, Struck
from benchmarks.soak.survival import LOOK_SECONDS, Ended, Seen, growth, recoveries, survival
from libra.config.run import load_config
from tests.oracles.run_accounts import Sizes
from tests.oracles.run_files import Segments, Tail, read_rows
from tests.oracles.shared_memory import shared_files, unused_shared_files

CONFIG = Path(__file__).with_name("soak.yaml")

_SAMPLE_SECONDS = 1.0  # between two looks at the processes
_START_SECONDS = 300.0  # to the first checkpoint: warm-up and measurement are in it
_LAST_STEPS = 10  # that are made in peace
_LAST_SECONDS = 300.0  # for those
_END_SECONDS = 60.0  # from a fault that ends a session to its end
_MOST_WRONG_ENDS = 3  # after which the rest of the faults would find the same


class SoakError(RuntimeError):
    """The run did not get to where faults can begin."""


@dataclass(frozen=True, slots=True)
class Soaked:
    rows: tuple[Row, ...]
    struck: tuple[Struck, ...]
    sessions: int

    @property
    def held(self) -> bool:
        return all(row.met is not False for row in self.rows)


class Soak:
    """One run. Its files go to `directory`, which is emptied; `say` is told what happens."""

    def __init__(self, directory: Path, say: Callable[[str], None], config: Path = CONFIG) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._directory, self._say, self._config = directory, say, config
        self._run_directory = directory / load_config(config).name
        self._kept = directory / "episodes"
        self._segments = Segments(self._run_directory, self._kept)
        self._journal = Tail(self._run_directory / "journal.jsonl")
        self._processes = Processes()
        self._ends: list[Ended] = []
        self._seen: list[Seen] = []
        self._session: Session | None = None
        self._sampled = 0.0

    def run(self, faults: Iterator[Fault], seconds: float) -> Soaked:
        """Strike with faults for `seconds`, or until there are no more. Then the run ends in peace, and is checked.
        Raises `SoakError` where it never reached its first checkpoint."""
        began, files, memory = time.monotonic(), shared_files(), shared_memory()
        storm = Storm(faults, lambda struck: self._say(_words(struck)))
        try:
            self._until_checkpoint(self._start("--overwrite"))
            self._weather(storm, time.monotonic() + seconds)
            storm.calm()
            steps = self._end_in_peace()
        finally:
            storm.calm()
            if self._session is not None:
                self._session.kill()
        self._say(f"shared memory of this machine: {(shared_memory() - memory) / 2**20:+.0f} MiB since the start")
        counted = {
            "steps": steps,
            "sessions": len(self._ends),
            "moves": sum(entry.row["kind"] == "done" for entry in self._seen),
            "processes": self._processes.count,
            "faults without a process to strike": storm.passed,
            **Counter(f"fault: {entry.kind}" for entry in storm.struck),
            "seconds": round(time.monotonic() - began),
        }
        rows = (
            *self._checks(storm, steps, files),
            *recoveries(storm.struck, self._seen),
            *(Row("the soak", what, count, "") for what, count in counted.items()),
        )
        return Soaked(rows, tuple(storm.struck), len(self._ends))

    def _start(self, *options: str) -> Session:
        command = [str(self._config), "--directory", str(self._directory), *options]
        self._session = Session(len(self._ends) + 1, command, self._directory, self._journal)
        self._sampled = 0.0
        return self._session

    def _until_checkpoint(self, session: Session) -> None:
        """Before its first checkpoint a run cannot be resumed."""
        ends = time.monotonic() + _START_SECONDS
        while not any(self._run_directory.glob("checkpoint-*[0-9]/state.json")):
            if session.status is not None or time.monotonic() > ends:
                raise SoakError(f"the run made no checkpoint: {session.last_words()} (see {session.output})")
            self._look(session)

    def _weather(self, storm: Storm, until: float) -> None:
        session = self._session
        assert session is not None
        wrong = 0
        while time.monotonic() < until and not storm.over and wrong < _MOST_WRONG_ENDS:
            self._look(session)
            if session.ending is None and session.status is None:
                storm.tick(session)
            if session.ending is not None or session.status is not None:
                wrong += not self._ended(session).expected
                storm.session_ended()
                session = self._start("--resume")

    def _end_in_peace(self) -> int:
        """Run the last session with a number of steps to end at; returns that number."""
        session = self._session
        assert session is not None
        while not session.ready and session.status is None:
            self._look(session)
        session.ending = Kind.INTERRUPT
        session.signal(signal.SIGINT)
        self._ended(session)
        steps = len(read_rows(self._run_directory / "metrics.jsonl")) + _LAST_STEPS
        self._say(f"no more faults: the run is to end with step {steps}")
        session = self._start("--resume", "--steps", str(steps))
        ends = time.monotonic() + _LAST_SECONDS
        while session.status is None and time.monotonic() < ends:
            self._look(session)
        self._ended(session)
        self._session = None
        return steps

    def _look(self, session: Session) -> None:
        """Read what is new, and sleep until the next look."""
        time.sleep(LOOK_SECONDS)
        self._seen += [Seen(found, session.number, row) for found, row in session.read()]
        self._segments.look()
        if time.monotonic() - self._sampled >= _SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            self._processes.look(session.pid, session.number, session.ready)

    def _ended(self, session: Session) -> Ended:
        """Wait for its end, which is made where it does not come; its last entries belong to it."""
        self._processes.look(session.pid, session.number, ready=False)
        ends = time.monotonic() + _END_SECONDS
        while session.status is None and time.monotonic() < ends:
            self._look(session)
        status = session.status
        session.kill()
        left = self._processes.left()
        self._look(session)
        seconds, said = time.monotonic() - session.began, session.last_words()
        ended = Ended(session.number, session.ending, status, seconds, left, said)
        self._ends.append(ended)
        self._say(f"session {ended.session} ended with {status} after {ended.seconds:.0f} s")
        return ended

    def _checks(self, storm: Storm, steps: int, files: set[str]) -> Iterator[Row]:
        config = load_config(self._config).training
        sizes = Sizes(steps, config.prompts_per_step, config.samples_per_prompt, config.max_staleness)
        yield from survival(self._ends, storm.struck, self._seen)
        if self._ends[-1].status != 0:
            return  # there is nothing whole to look at
        yield from accounts(self._run_directory, self._kept, sizes)
        yield weights(self._run_directory / "model")
        yield from growth(self._processes.samples)
        yield checked("no port is listened on any more", self._processes.listening(), "looked once")
        what, found = "only the loopback interface was listened on", sorted(self._processes.everywhere)
        yield checked(what, found, f"{self._processes.count} processes")
        yield checked("no shared memory is left", unused_shared_files(files), "looked once")


def _words(struck: Struck) -> str:
    for_long = f" for {struck.seconds:.1f} s" if struck.seconds else ""
    return f"{struck.kind}{for_long}" + (f": {struck.worker} ({struck.pid})" if struck.worker else "")
