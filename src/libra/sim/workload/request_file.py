"""Requests on disk: Libra's JSON lines, the CSV of Azure's public traces of LLM serving, and other logs.

Invariant: a file is read completely, or refused with one line that names the file, the line and the field. Nothing in a
file is repaired. Arrivals never decrease from line to line, and every request has at least one prompt token and one
output token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from libra.config.input_file import open_input
from libra.config.json_line import line_problem
from libra.config.yaml_file import unknown
from libra.sim.clock import TICKS, ticks
from libra.sim.engine.request import Stop
from libra.sim.workload.requests import RecordedRequest
from libra.trajectory import Trajectory, TrajectoryFormatError
from libra.trajectory.log_file import Tell, read_trajectories, warn
from libra.trajectory.logs.catalogue import first_entry, format_of
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# A tick is the 12th decimal. The traces of 2024 mark their times as UTC; the traces of 2023 have no time zone.
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,12}))?(?:\+00:00)?", re.ASCII)
_MOST_DIGITS = 15
_MOST_TOKENS = 2**31 - 1
_LATEST = 9_200_000  # seconds, about 106 days: nearly 2^63 ticks

_Tokens = Annotated[int, Field(le=_MOST_TOKENS)]
_Instant = Annotated[float, Field(lt=_LATEST)]


class RequestFormatError(ValueError):
    """A file of requests cannot be used. The message is one line: file, line, field, fault."""


@dataclass(frozen=True, slots=True)
class _Line:
    __pydantic_config__ = ConfigDict(extra="forbid")

    arrival: _Instant  # seconds, as `cancel_at`
    prompt_tokens: _Tokens
    output_tokens: _Tokens
    prefix: str | None = None
    prefix_tokens: _Tokens | None = None
    priority: int = 0
    cancel_at: _Instant | None = None
    stop: Stop = "length"

    def __post_init__(self) -> None:
        if not self.arrival >= 0:
            raise ValueError("arrival must be >= 0")
        if self.prompt_tokens < 1:
            raise ValueError("prompt_tokens must be >= 1")
        if self.output_tokens < 1:
            raise ValueError("output_tokens must be >= 1")
        if (self.prefix is None) != (self.prefix_tokens is None):
            raise ValueError("prefix and prefix_tokens must both be given, or neither")
        if self.prefix_tokens is not None and not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise ValueError("prefix_tokens must be >= 0, and no more than prompt_tokens")
        if self.cancel_at is not None and self.cancel_at < self.arrival:
            raise ValueError("cancel_at must not be before arrival")


@cache
def _adapter() -> TypeAdapter[_Line]:
    return TypeAdapter(_Line)


def parse_request(line: str | bytes, where: str) -> RecordedRequest:
    """Parse one JSON line: `arrival` in seconds, `prompt_tokens`, `output_tokens`, and optionally `prefix` with
    `prefix_tokens`, `priority`, `stop`, and `cancel_at` in seconds of the same clock. Error messages begin with
    `where`."""
    try:
        read = _adapter().validate_json(line, strict=True)
    except ValidationError as error:
        raise RequestFormatError(" ".join(f"{where}: {_problem(error.errors()[0])}".split())) from None
    return RecordedRequest(
        arrival=ticks(read.arrival),
        prompt_tokens=read.prompt_tokens,
        output_tokens=read.output_tokens,
        prefix=read.prefix,
        prefix_tokens=read.prefix_tokens or 0,
        priority=read.priority,
        cancel_at=None if read.cancel_at is None else ticks(read.cancel_at),
        stop=read.stop,
    )


def _problem(found: ErrorDetails) -> str:
    if found["type"] == "unexpected_keyword_argument":
        return unknown("field", str(found["loc"][-1]), (it.name for it in fields(_Line)))
    return line_problem(found)


def read_requests(path: Path | str, tell: Tell = warn) -> tuple[RecordedRequest, ...]:
    """Read a file of requests, in the order of arrival: Libra's JSON lines, a `.csv` file like `read_azure_requests`,
    or another log that `libra.read_trajectories` reads. `tell` gets a line on data that such a log lacks. Raises
    `RequestFormatError`, also for a blank line or an empty file."""
    first = _first_entry(path)
    if first is not None and (of := format_of(first)) is not None and tuple(first.fields) != _AZURE_FIELDS:
        return _logged_requests(path, of, tell)
    if Path(path).suffix.lower() == ".csv" or (first is not None and tuple(first.fields) == _AZURE_FIELDS):
        return read_azure_requests(path)
    with _opened(path) as lines:
        return _in_order(
            path, ((number, parse_request(line, f"{path}:{number}")) for number, line in enumerate(lines, start=1))
        )


def read_azure_requests(path: Path | str) -> tuple[RecordedRequest, ...]:
    """Read a CSV file of columns TIMESTAMP, ContextTokens and GeneratedTokens, as in Azure's traces of 2023 and 2024,
    in the order of arrival; time zero is the first request's. Raises `RequestFormatError` like `read_requests`."""
    with _opened(path) as lines:
        if tuple(_cells(lines.readline())) != _AZURE_FIELDS:
            raise _refusal(f"{path}:1", "line", f"the header must be {','.join(_AZURE_FIELDS)}")
        return _in_order(path, _azure_requests(path, lines))


def _first_entry(path: Path | str) -> LogEntry | None:
    try:
        return first_entry(path)
    except (TrajectoryFormatError, OSError):
        return None  # `read_requests` then raises an error that names the line


def _logged_requests(path: Path | str, of: LogFormat, tell: Tell) -> tuple[RecordedRequest, ...]:
    """The requests of a log whose trajectories each have a single turn and an arrival time. Time zero is the first
    arrival."""
    found: list[tuple[float, Trajectory]] = []
    try:
        for trajectory in read_trajectories(path, tell, log_format=of):
            found.append((_arrival(path, trajectory), trajectory))
    except TrajectoryFormatError as error:
        raise RequestFormatError(str(error)) from None
    if not found:
        raise RequestFormatError(f"{path}: there is no request; give a file with at least one")
    found.sort(key=lambda it: it[0])
    zero = found[0][0]
    return tuple(_logged(path, arrival - zero, trajectory) for arrival, trajectory in found)


def _arrival(path: Path | str, trajectory: Trajectory) -> float:
    """The time at which a request arrives, in seconds of its log."""
    where, remedy = f"{path}: {trajectory.id}", "give the log to --trajectories"
    if len(trajectory.turns) != 1:
        raise RequestFormatError(f"{where}: a trajectory of {len(trajectory.turns)} turns, not a request; {remedy}")
    if trajectory.started_at is None:
        raise RequestFormatError(f"{where}: the log has no time of arrival; {remedy}")
    return trajectory.started_at


def _logged(path: Path | str, arrival: float, trajectory: Trajectory) -> RecordedRequest:
    prompt, generated = trajectory.prompt_tokens, trajectory.generated_tokens
    for name, count in (("prompt", prompt), ("generated", generated)):
        if not 1 <= count <= _MOST_TOKENS:
            raise RequestFormatError(
                f"{path}: request {trajectory.id}: {count} {name} tokens, not 1 to {_MOST_TOKENS:,}; leave it out"
            )
    if arrival >= _LATEST:
        raise RequestFormatError(
            f"{path}: request {trajectory.id}: arrives {_LATEST:,} s or more after the first; cut the log there"
        )
    return RecordedRequest(ticks(arrival), prompt, generated)


def _opened(path: Path | str) -> IO[bytes]:
    try:
        return open_input(path)
    except OSError as error:
        raise RequestFormatError(f"{path}: {error.strerror}; give a file of requests, .jsonl or .csv") from None


def _azure_requests(path: Path | str, lines: Iterable[bytes]) -> Iterator[tuple[int, RecordedRequest]]:
    zero: int | None = None
    for number, line in enumerate(lines, start=2):
        where = f"{path}:{number}"
        cells = _cells(line)
        if len(cells) != len(_AZURE_FIELDS):
            raise _refusal(where, "line", f"{len(cells)} fields instead of {len(_AZURE_FIELDS)}")
        instant = _instant(cells[0], where)
        zero = instant if zero is None else zero
        if instant - zero >= _LATEST * TICKS:
            raise _refusal(where, _AZURE_FIELDS[0], f"{cells[0]} is {_LATEST:,} s or more after the first request's")
        prompt, output = (_tokens(cell, where, field) for cell, field in zip(cells[1:], _AZURE_FIELDS[1:], strict=True))
        yield number, RecordedRequest(instant - zero, prompt, output)


def _in_order(path: Path | str, requests: Iterable[tuple[int, RecordedRequest]]) -> tuple[RecordedRequest, ...]:
    read: list[RecordedRequest] = []
    for number, request in requests:
        if read and request.arrival < read[-1].arrival:
            raise _refusal(f"{path}:{number}", "arrival", "before that of the line above; sort the file by arrival")
        read.append(request)
    if not read:
        raise RequestFormatError(f"{path}: there is no request; give a file with at least one")
    return tuple(read)


def _cells(line: bytes) -> list[str]:
    return line.decode("utf-8", errors="replace").removesuffix("\n").removesuffix("\r").split(",")


def _instant(cell: str, where: str) -> int:
    """Ticks since the year 1."""
    match = _TIMESTAMP.fullmatch(cell)
    if match is None:
        raise _refusal(where, _AZURE_FIELDS[0], f"{cell[:40]!r} is not YYYY-MM-DD HH:MM:SS with up to 12 decimals, UTC")
    try:
        since = datetime.fromisoformat(match[1]) - datetime.min
    except ValueError as error:
        raise _refusal(where, _AZURE_FIELDS[0], str(error)) from None
    return (since.days * 86_400 + since.seconds) * TICKS + int((match[2] or "0").ljust(12, "0"))


def _tokens(cell: str, where: str, field: str) -> int:
    if not (cell.isascii() and cell.isdigit() and len(cell) <= _MOST_DIGITS and 1 <= int(cell) <= _MOST_TOKENS):
        raise _refusal(where, field, f"{cell[:40]!r} is not a number of tokens, 1 to {_MOST_TOKENS:,}")
    return int(cell)


def _refusal(where: str, field: str, problem: str) -> RequestFormatError:
    return RequestFormatError(" ".join(f"{where}: {field}: {problem}".split()))
