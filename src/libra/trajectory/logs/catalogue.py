"""The formats of logs that Libra reads. To add a format, write a module with a `LogFormat`, and list it in
`FORMATS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from libra.trajectory.logs.azure import AZURE
from libra.trajectory.logs.burstgpt import BURSTGPT
from libra.trajectory.logs.copilot import COPILOT
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading
from libra.trajectory.logs.inspect_ai import INSPECT
from libra.trajectory.logs.mooncake import MOONCAKE
from libra.trajectory.logs.openai import OPENAI
from libra.trajectory.logs.source import DamagedLineError, log_entries
from libra.trajectory.logs.swe_agent import SWE_AGENT
from libra.trajectory.logs.trl import TRL
from libra.trajectory.logs.verifiers import VERIFIERS, VERIFIERS_TRACES
from libra.trajectory.logs.verl import VERL
from libra.trajectory.logs.vidur import VIDUR
from libra.trajectory.logs.vllm_bench import VLLM_BENCH
from libra.trajectory.logs.weka import WEKA
from libra.trajectory.record import Trajectory, TrajectoryFormatError

FORMATS: Mapping[str, LogFormat] = MappingProxyType(
    {
        it.name: it
        for it in (
            VERL,
            TRL,
            VERIFIERS,
            VERIFIERS_TRACES,
            OPENAI,
            INSPECT,
            SWE_AGENT,
            WEKA,
            COPILOT,
            MOONCAKE,
            BURSTGPT,
            VIDUR,
            VLLM_BENCH,
            AZURE,
        )
    }
)

_OWN = frozenset({"id", "prompt_id", "prompt_tokens", "turns", "finished"})
_REQUEST = frozenset({"arrival", "prompt_tokens", "output_tokens"})  # fields of a file of requests
_SHOWN = 6  # fields of an unknown log that the error names


def first_entry(path: Path | str) -> LogEntry | None:
    """The first entry of a file, which identifies its format. None if the file is empty, of an unknown kind, or starts
    with a line that is not JSON. Raises `TrajectoryFormatError` for a damaged document or table.
    """
    try:
        return next(log_entries(path), None)
    except DamagedLineError:
        return None


def format_of(entry: LogEntry) -> LogFormat | None:
    """The format of a file that begins with this entry; None for Libra's own logs, and for unknown logs."""
    return next((it for it in FORMATS.values() if it.is_one(entry)), None)


def require_own(entry: LogEntry) -> None:
    """Raise `TrajectoryFormatError` for an entry without any field of Libra's logs, and for a user's request."""
    if entry.fields.keys() >= _REQUEST and "turns" not in entry.fields:
        raise TrajectoryFormatError(
            f"{entry.where}: a request, not a trajectory: `libra search` and `libra simulate` take such a file as"
            " --requests; give a log of trajectories here"
        )
    if not _OWN & set(entry.fields):
        names = ", ".join(repr(name)[:40] for name in [*entry.fields][:_SHOWN])
        first = f"the first fields of the entry are {names}" if names else "the entry has no field"
        raise TrajectoryFormatError(
            f"{entry.where}: unknown log format; {first}; `libra trace formats` lists the known formats"
        )


def format_named(name: str) -> LogFormat:
    """The format with this name. Raises `ValueError` for an unknown name."""
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; choose from {', '.join(FORMATS)}")
    return FORMATS[name]


def foreign_trajectories(path: Path | str, of: LogFormat, reading: LogReading) -> Iterator[Trajectory]:
    """The trajectories of a file in the format `of`."""
    return of.trajectories(log_entries(path), reading)


def notes_of(path: Path | str, of: LogFormat, reading: LogReading) -> Iterator[str]:
    """Notes on data that a log lacks, known after reading it: one line for its format, and one for each remark."""
    yield f"{path}: read as {of.name}, which lacks the following (null, unknown or 0 here): {of.silent_on}"
    for remark, times in sorted(reading.remarks.items()):
        yield f"{path}: {remark}: {times:,}"
