"""The file that a borrower writes `lending.jsonl` with.

Invariant: lending does not depend on it. A disk that is full ends the record, which is told once, and not the loan.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from libra.records.files import DiskError, LineFile
from libra.records.lending import LendingLine, LendingTerms

_LINES = 64  # kept before they are written, at most


class LendingRecord:
    """Lines are kept until there is time for them (`flush`): not while the device is held."""

    def __init__(self, path: Path, terms: LendingTerms, told: Callable[[str], None]) -> None:
        """Appends to the file. `told` gets the line of a disk that is full. Raises `DiskError` where it cannot be
        written at all."""
        self._file: LineFile | None = LineFile(path)
        self._told, self._lines = told, list[LendingLine]()
        self.lost = 0  # lines
        self._file.append(terms.to_json().encode())

    def append(self, line: LendingLine) -> None:
        if self._file is not None:
            self._lines.append(line)
        else:
            self.lost += 1

    def flush(self, *, all_of_it: bool = False) -> None:
        if self._file is None or len(self._lines) < (1 if all_of_it else _LINES):
            return
        text, kept = "\n".join(line.to_json() for line in self._lines), len(self._lines)
        self._lines.clear()
        try:
            self._file.append(text.encode())
        except DiskError as error:
            self._file.close()
            self._file, self.lost = None, kept
            self._told(f"{error}; lending goes on, unrecorded from here on")

    def close(self) -> None:
        self.flush(all_of_it=True)
        if self._file is not None:
            self._file.close()
            self._file = None
