"""An append-only record of what the controller intended and what came of it.

Invariant: a committed entry is on disk before the controller acts on it; an interrupted last line is ignored on
reading, every other damaged line is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class JournalError(ValueError):
    """A journal that cannot be resumed from. The message names file and line."""


class Journal:
    """JSON lines, each `{"kind": ..., ...}`."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            _drop_partial_line(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run

    def note(self, kind: str, **fields: Any) -> None:
        """Record something that may be lost with the last instants of a crash."""
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def commit(self, kind: str, **fields: Any) -> None:
        """Record something that a restarted controller must know; on disk when this returns."""
        self.note(kind, **fields)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    *lines, _interrupted = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:  # not JSON, or not even text
            raise JournalError(f"{path}:{number}: {error}; the journal is damaged, start a new run") from None
        yield entry


def _drop_partial_line(path: Path) -> None:
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        with open(path, "rb+") as file:
            file.truncate(end)
