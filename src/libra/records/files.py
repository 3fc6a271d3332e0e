"""Writes the files of a run. A file is written completely, or stays unchanged.

A line of a `LineFile` is whole or absent. A line that a kill or a full disk cut off is dropped when the file is opened
again. Until then, readers skip this line. A failed write raises `DiskError`, with the file and the remedy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libra.config.input_file import read_input
from libra.config.sealed_line import sealed

_BLOCK = 1 << 16  # bytes that are read at a time to find the last newline
_REMEDIES = {
    errno.ENOSPC: "free some space on its disk",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


class DiskError(RuntimeError):
    """A file of a run cannot be written. The message has the file and the remedy."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = _REMEDIES.get(error.errno or 0, "free some space on its disk, or make it writable")
        super().__init__(f"{path} cannot be written ({error.strerror or error}): {remedy}")


def write_whole(path: Path, text: str | bytes) -> None:
    """Write or replace a file atomically: it has either its old or its new content. The new content is on disk when the
    function returns. Raises `DiskError`.
    """
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        try:
            part.unlink(missing_ok=True)  # it may be a link, or another user's file
            with open(part, "xb") as file:
                file.write(text.encode() if isinstance(text, str) else text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)  # frees its space on a full disk
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the `OSError` of a write to `path` into `DiskError`."""
    try:
        yield
    except OSError as error:
        raise DiskError(path, error) from None


class LineFile:
    """Appends lines to `path`. Raises `DiskError` if that fails, and leaves earlier lines unchanged.

    A line survives a crash of the process once `append` returns, and a crash of the machine after the next `sync`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            drop_partial_line(path)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
            self._size = os.fstat(self._file.fileno()).st_size

    def append(self, line: bytes) -> None:
        """Append one line, given without its newline."""
        rest = memoryview(line + b"\n")
        size = len(rest)
        try:
            while rest:  # on a nearly full disk, a write may be partial
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with writing(self.path):
                os.ftruncate(self._file.fileno(), self._size)
            raise DiskError(self.path, error) from None
        self._size += size

    def sync(self) -> None:
        """Force all appended lines to disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class ChainedFile(LineFile):
    """A `LineFile` whose lines are sealed and form a chain from the first line on."""

    def __init__(self, path: Path) -> None:
        with writing(path):
            lines = whole_lines(path) if path.exists() else []
        self._last = lines[-1] if lines else b""
        super().__init__(path)

    def append(self, line: bytes) -> None:
        """Append one line of JSON, given without its checksum and its newline."""
        line = sealed(line, self._last)
        super().append(line)
        self._last = line


def whole_lines(path: Path) -> list[bytes]:
    """All complete lines, without their newlines. Raises `OSError`, also if the path is not a regular file."""
    *lines, _interrupted = read_input(path).split(b"\n")
    return lines


def drop_partial_line(path: Path) -> None:
    """Remove an incomplete last line; no error if there is no file."""
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
