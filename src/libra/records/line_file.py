"""A file of lines that only grows.

Invariant: a line is whole or it is not there. What a kill or a full disk cut off is dropped when the file is opened
again, and left out by readers before that. An appended line is with the operating system when `append` returns, so it
outlives the process; it outlives the machine from the next `sync` on.
"""

from __future__ import annotations

import os
from pathlib import Path

from libra.records.disk import DiskError, writing

_BLOCK = 1 << 16  # bytes read at a time when looking for the last newline


class LineFile:
    """Appends to `path`. Raises `DiskError` where that is not possible; the lines before stay as they were."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            drop_partial_line(path)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
            self._size = os.fstat(self._file.fileno()).st_size

    def append(self, line: bytes) -> None:
        """One line, without its newline."""
        rest = memoryview(line + b"\n")
        size = len(rest)
        try:
            while rest:  # near the end of a disk, less is written than was asked for
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with writing(self.path):
                os.ftruncate(self._file.fileno(), self._size)
            raise DiskError(self.path, error) from None
        self._size += size

    def sync(self) -> None:
        """Everything appended so far is on disk when this returns."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def whole_lines(path: Path) -> list[bytes]:
    """All lines that were finished, without their newlines."""
    *lines, _interrupted = path.read_bytes().split(b"\n")
    return lines


def drop_partial_line(path: Path) -> None:
    """Cut off a last line that was never finished; no error where there is no file."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        end = start = file.seek(0, os.SEEK_END)
        keep = 0
        while start > 0 and keep == 0:
            start = max(0, start - _BLOCK)
            file.seek(start)
            newline = file.read(_BLOCK).rfind(b"\n")
            keep = start + newline + 1 if newline >= 0 else 0
        if keep != end:
            file.truncate(keep)
