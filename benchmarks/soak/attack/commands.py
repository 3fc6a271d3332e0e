"""Commands that stop where they have read all their input, in a process that runs one after the other.

Invariant: what stops is the service that would begin or the session that would be run; every reader before it is the
command's own. A command that hangs is ended by an alarm together with its process, and so is noticed.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from typer.testing import CliRunner

from libra.cli.app import app
from tests.fakes.stopped_run import read_and_stop

MOST_SECONDS, MOST_BYTES = 5.0, 500 * 10**6
_ALARM = 6 * MOST_SECONDS  # of the clock: other work may share the machine
_ROOM = 4 * 2**30  # bytes that may be written to; no limit of addresses, as V8 reserves many
_STATUS = Path("/proc/self/status")


class Command(msgspec.Struct, frozen=True):
    """Words of a command line, and the directory that they are seen from."""

    words: tuple[str, ...]
    directory: str


class Ended(msgspec.Struct, frozen=True):
    """The end of a command. `status` is negative where a signal ended the process; `seconds` are CPU time, in which
    other work on the machine does not count; `peak` is resident bytes."""

    status: int
    said: str
    raised: str
    seconds: float
    peak: int

    @property
    def wrong(self) -> str | None:
        """Fault of the command; None where it reads its input, or refuses it in one line. A command that finds nothing
        feasible (status 3) has read its input, and may tell its progress first."""
        if self.raised:
            return f"raised {self.raised[:120]}"
        if self.status not in (0, 2, 3):
            return f"ended with status {self.status}"
        if self.status == 2 and self.said.count("\n") != 1:
            return f"said {self.said.count(chr(10))} lines: {self.said[:120]!r}"
        if self.seconds >= MOST_SECONDS:
            return f"took {self.seconds:.1f} s"
        if self.peak >= MOST_BYTES:
            return f"took {self.peak / 1e6:,.0f} MB"
        return None


class Commands:
    """The process, which is started again after a command that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, words: Sequence[object], directory: Path) -> Ended:
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(Command(tuple(map(str, words)), str(directory))) + b"\n")
        process.stdin.flush()
        if answer := process.stdout.readline():
            return msgspec.json.decode(answer, type=Ended)
        status, self._process = process.wait(), None
        return Ended(status, "", "", _ALARM if status == -signal.SIGALRM else 0.0, 0)

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.soak.attack.commands"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])


async def _serve_nothing(*_: object) -> None: ...


def _without_services() -> None:
    import libra.lend.cli.commands
    import libra.loop.run
    import libra.serve.http

    patched: Any = libra
    patched.loop.run.run = read_and_stop
    patched.serve.http.serve = patched.lend.cli.commands._serve = _serve_nothing


def _run(command: Command) -> Ended:
    os.chdir(command.directory)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    signal.setitimer(signal.ITIMER_REAL, _ALARM)
    began = sum(os.times()[:4])  # CPU seconds of this process and of those that it waited for
    result = CliRunner().invoke(app, list(command.words))
    took = sum(os.times()[:4]) - began
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    [peak] = [int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    fine = result.exception is None or isinstance(result.exception, SystemExit)
    return Ended(result.exit_code, result.stderr, "" if fine else repr(result.exception), took, 1024 * peak)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_ROOM, _ROOM))
    _without_services()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing else is written there
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(_run(msgspec.json.decode(line, type=Command))) + b"\n")
        gc.collect()


if __name__ == "__main__":
    main()
