"""One `libra run` process, and what its journal says of it as it goes.

Invariant: what is known of workers is what the journal says, read with code of the soak's own; a signal goes only to a
process that is the named worker of this controller.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.soak.faults import Kind
from libra.backends.launch.worker import die_with
from tests.oracles.run_files import Row, Tail


class Session:
    """From a start of `libra run` to its end. `journal` is shared by the sessions of a run."""

    def __init__(self, number: int, command: Sequence[str], directory: Path, journal: Tail) -> None:
        self.number, self.began = number, time.monotonic()
        self.output, self._journal = directory / f"session-{number}.log", journal
        soak = os.getpid()
        with open(self.output, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "libra.cli.app", "run", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the soak
                preexec_fn=lambda: _begin(soak),
            )
        self.ready = False  # its first allocation is there
        self.ending: Kind | None = None  # the fault after which it may end
        self.pids: dict[str, int] = {}  # the latest of every worker
        self.roles: dict[str, str] = {}  # of workers that are in no move
        self.moves: dict[str, Row] = {}  # by the worker that is in it

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def read(self) -> list[tuple[float, Row]]:
        """New rows of the journal, and when they were found."""
        now, rows = time.monotonic(), self._journal.rows()
        for row in rows:
            self._follow(row)
        return [(now, row) for row in rows]

    def worker(self, name: str) -> psutil.Process | None:
        """Its process; None when it is gone."""
        try:
            process = psutil.Process(self.pids[name])
            ours = process.name() == name and self.pid in {parent.pid for parent in process.parents()}
        except psutil.NoSuchProcess:
            return None
        return process if ours and process.status() != psutil.STATUS_ZOMBIE else None

    def fork_server(self) -> psutil.Process | None:
        try:
            return next(iter(psutil.Process(self.pid).children()), None)
        except psutil.NoSuchProcess:
            return None

    def signal(self, number: int) -> None:
        if self.status is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once; no error where it has ended."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        lines = self.output.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _follow(self, row: Row) -> None:
        match row["kind"]:
            case "start":
                self.pids, self.roles, self.moves = {}, {}, {}
            case "worker":
                self.pids[row["worker"]] = row["pid"]
            case "intend":
                self.moves[row["worker"]] = row
                self.roles.pop(row["worker"], None)
            case "done":
                self.roles[row["worker"]] = self.moves.pop(row["worker"])["after"]["role"]
            case "undone":
                self.roles[row["worker"]] = self.moves.pop(row["worker"])["before"]["role"]
            case "failed":
                del self.moves[row["worker"]]
            case "lost":
                self.roles.pop(row["worker"], None)
            case "applied":
                self.ready = True


def _begin(parent: int) -> None:
    """In the child, before it becomes `libra run`: it dies with the soak, and Ctrl-C means what it means in a terminal
    (a shell has its background jobs ignore it)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(parent)
