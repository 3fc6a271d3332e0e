"""Files that a run writes, read as they grow.

Invariant: nothing of the run's own code is used to read it. A segment of episodes that was seen once stays readable
here after the run has deleted it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Tail:
    """The whole lines of a file that is appended to, as they come. What is cut off its end was never whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0  # bytes

    def rows(self) -> list[Row]:
        """New since the last call, without the checksums of lines."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        found = [json.loads(line) for line in whole.splitlines()]
        return [{key: value for key, value in row.items() if key != "crc"} for row in found]


class Segments:
    """Hard links to every `episodes-<n>.jsonl` of a run directory, in a directory of their own."""

    def __init__(self, run: Path, kept: Path) -> None:
        self._run, self._kept = run, kept
        kept.mkdir()
        self._seen: set[tuple[str, int]] = set()

    def look(self) -> None:
        for path in self._run.glob("episodes-*.jsonl"):
            try:
                inode = path.stat().st_ino
                if (path.name, inode) not in self._seen:
                    # One that was cut off before its first line is begun again under its name.
                    os.link(path, self._kept / f"{path.stem}.{len(self._seen):06d}.jsonl")
                    self._seen.add((path.name, inode))
            except FileNotFoundError:
                pass  # deleted meanwhile


def read_rows(path: Path) -> list[Row]:
    """All whole lines of a file; none where it does not exist. Raises ValueError at a line that is no JSON object."""
    return Tail(path).rows()


def read_segments(kept: Path) -> list[tuple[int, list[Row]]]:
    """Segments by their number, in order; one that was begun again comes after what was cut off."""
    found = []
    for path in sorted(kept.glob("episodes-*.jsonl")):
        number = int(path.name.split(".")[0].removeprefix("episodes-"))
        found.append((number, read_rows(path)))
    return found
