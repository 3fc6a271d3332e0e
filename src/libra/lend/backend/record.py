"""The writer of a borrower's `lending.jsonl`.

Invariant: lending does not depend on the record. A full disk ends the record but not the loan, and is reported once.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from libra.lend.backend.device_page import LendingError
from libra.lend.records.lending import LendingLine, LendingTerms, are_terms
from libra.records.files import DiskError, LineFile

_LINES = 64  # most lines in memory before they are written
_FIRST = 1 << 16  # most bytes of the first line of a record


def open_record(path: Path) -> int:
    """Open a record, or create it, and lock it for this borrower. Returns the descriptor. Raises LendingError if the
    file is not a record, or another borrower writes it."""
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise LendingError(f"record: {path} is not a regular file; name another file")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise LendingError(f"record: {path}: {error.strerror}; name a file that can be written") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        first, newline, _ = os.pread(descriptor, _FIRST, 0).partition(b"\n")
        if (first or newline) and not (newline and are_terms(first)):
            raise LendingError(
                f"record: {path} exists and is not the record of a loan; name another file, or remove it"
            )
    except BlockingIOError:
        os.close(descriptor)
        raise LendingError(f"record: {path} is written for another loan; name another file") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class LendingRecord:
    """Keeps lines in memory until `flush`, so that nothing is written while the borrower has the device."""

    def __init__(self, path: Path, terms: LendingTerms, told: Callable[[str], None]) -> None:
        """Open the record and append `terms`. `told` is called once if the disk becomes full. Raises the errors of
        `open_record`, and `DiskError` if the file cannot be written at all."""
        self._only = open_record(path)
        self._file: LineFile | None = LineFile(path)
        self._told, self._lines = told, list[LendingLine]()
        self.lost = 0  # lines
        self._file.append(terms.to_line())

    def append(self, line: LendingLine) -> None:
        if self._file is not None:
            self._lines.append(line)
        else:
            self.lost += 1

    def flush(self, *, all_of_it: bool = False) -> None:
        if self._file is None or len(self._lines) < (1 if all_of_it else _LINES):
            return
        lines, kept = b"\n".join(line.to_line() for line in self._lines), len(self._lines)
        self._lines.clear()
        try:
            self._file.append(lines)
        except DiskError as error:
            self._file.close()
            self._file, self.lost = None, kept
            self._told(f"{error}; lending continues without a record")

    def close(self) -> None:
        self.flush(all_of_it=True)
        if self._file is not None:
            self._file.close()
            self._file = None
        os.close(self._only)
