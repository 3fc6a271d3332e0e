"""Files of logs as entries: JSON lines, a JSON document, tables as CSV or Parquet, and archives of JSON documents.

Invariant: the first bytes of a file determine its kind, never its name. Only one line, row or archive member is in
memory at a time. A JSON document is in memory as a whole.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO

from libra.config.input_file import open_input
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.record import TrajectoryFormatError

_BOM = b"\xef\xbb\xbf"
# Errors that `zipfile` raises for a damaged, encrypted or unknown archive.
_DAMAGED = (OSError, EOFError, RuntimeError, ValueError, KeyError, struct.error, zlib.error, zipfile.BadZipFile)


class DamagedLineError(TrajectoryFormatError):
    """A line of JSON lines is not a JSON object."""


def log_entries(path: Path | str) -> Iterator[LogEntry]:
    """Yield the entries of a file, or of all files in a folder, in the order of the names and numbers of the files.

    `.gz` files are unpacked. An empty file, or one of an unknown kind, has no entries. Raises `TrajectoryFormatError`
    for a damaged file, and `OSError` if a file cannot be opened.
    """
    if Path(path).is_dir():
        files = sorted((it for it in Path(path).iterdir() if it.is_file()), key=_by_numbers)
        entries = chain.from_iterable(map(log_entries, files))
        yield from (replace(entry, number=number) for number, entry in enumerate(entries, start=1))
        return
    with open_input(path) as raw:
        head = raw.read(4)
        raw.seek(0)
        if head == b"PAR1":
            yield from _parquet(path)
        elif head == b"PK\x03\x04":
            yield from _archive(path, raw)
        elif head.startswith(b"\x1f\x8b"):
            yield from _unpacked(path, raw)
        else:
            yield from _text(path, raw)


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Sort key with `2.jsonl` before `10.jsonl`, for frameworks that write one file per step."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", path.name)]


def _unpacked(path: Path | str, raw: IO[bytes]) -> Iterator[LogEntry]:
    try:
        yield from _text(path, io.BufferedReader(gzip.GzipFile(fileobj=raw)))
    except (EOFError, OSError, zlib.error) as error:
        raise _packed(path, error) from None


def _text(path: Path | str, lines: IO[bytes]) -> Iterator[LogEntry]:
    first = lines.readline().removeprefix(_BOM)
    start = first.strip()
    if start.startswith(b"{") and start.endswith(b"}"):
        yield from _json_lines(path, first, lines)
    elif start.startswith((b"{", b"[")):
        yield from _document(str(path), first + lines.read())
    elif b"," in start:
        yield from _csv(path, first, lines)


def _json_lines(path: Path | str, first: bytes, rest: Iterable[bytes]) -> Iterator[LogEntry]:
    number = 1
    yield _line(first, path, number)
    for line in rest:
        number += 1
        yield _line(line, path, number)


def _line(line: bytes, path: Path | str, number: int) -> LogEntry:
    where = f"{path}:{number}"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(":")[0]
        raise DamagedLineError(f"{where}: not JSON ({reason}); give one object on each line") from None
    if not isinstance(found, dict):
        raise DamagedLineError(f"{where}: not a JSON object; give one object on each line")
    return LogEntry(found, where, number)


def _document(where: str, content: bytes) -> Iterator[LogEntry]:
    try:
        found = json.loads(content)
    except json.JSONDecodeError as error:
        place, reason = f"{where}:{error.lineno}", error.msg
        raise TrajectoryFormatError(f"{place}: not JSON ({reason}); correct it, or write the file again") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise TrajectoryFormatError(f"{where}: not JSON ({reason}); write the file again") from None
    if isinstance(found, dict):
        yield LogEntry(found, where, 1)
        return
    for number, item in enumerate(found, start=1):
        if not isinstance(item, dict):
            raise TrajectoryFormatError(f"{where}: item {number}: not a JSON object; give a list of objects")
        yield LogEntry(item, f"{where}: item {number}", number)


def _csv(path: Path | str, first: bytes, rest: Iterable[bytes]) -> Iterator[LogEntry]:
    rows, number = csv.reader(line.decode() for line in chain((first,), rest)), 0
    try:
        names = [name.strip() for name in next(rows)]
        for number, cells in enumerate(rows, start=1):
            where = f"{path}:{rows.line_num}"
            if len(cells) != len(names):
                raise TrajectoryFormatError(f"{where}: line: {len(cells)} fields instead of {len(names)}; correct it")
            yield LogEntry(dict(zip(names, map(_value, cells), strict=True)), where, number)
        if not number:
            raise TrajectoryFormatError(f"{path}: a header without rows; give a log with at least one row")
    except (csv.Error, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise TrajectoryFormatError(
            f"{path}:{rows.line_num + 1}: line: not CSV in UTF-8 ({reason}); correct it"
        ) from None


def _value(cell: str) -> int | float | str | None:
    """A cell as a number if it looks like one, otherwise as text; None if it is empty."""
    cell = cell.strip()
    if not cell or len(cell) > 40:
        return cell or None
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def _archive(path: Path | str, raw: IO[bytes]) -> Iterator[LogEntry]:
    """Yield the documents in `samples/` of a ZIP file, by name, each with the task's name from `header.json`."""
    try:
        archive = zipfile.ZipFile(raw)
    except _DAMAGED as error:
        raise _packed(path, error) from None
    names = sorted(name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json"))
    header = next(_member(path, archive, "header.json"), None) if "header.json" in archive.namelist() else None
    for number, name in enumerate(names, start=1):
        for sample in _member(path, archive, name):
            fields = {"header": {} if header is None else header.fields, "sample": sample.fields}
            yield LogEntry(fields, sample.where, number)


def _member(path: Path | str, archive: zipfile.ZipFile, name: str) -> Iterator[LogEntry]:
    try:
        content = archive.read(name)
    except _DAMAGED as error:
        raise _packed(f"{path}:{name}", error) from None
    yield from _document(f"{path}:{name}", content)


def _packed(where: Path | str, error: Exception) -> TrajectoryFormatError:
    reason = " ".join(str(error).split())[:80]
    return TrajectoryFormatError(f"{where}: damaged while it was packed ({reason}); unpack it, or fetch it again")


def _parquet(path: Path | str) -> Iterator[LogEntry]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise TrajectoryFormatError(
            f"{path}: a Parquet file, but pyarrow is not installed: pip install pyarrow"
        ) from None
    from pyarrow import ArrowException

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1_000):
            for row in batch.to_pylist():
                number += 1
                yield LogEntry(row, f"{path}:{number}", number)
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise TrajectoryFormatError(f"{path}: row {number + 1}: damaged ({reason}); write the file again") from None
