"""Mooncake's public traces: one request per line, with the hashes of its prompt's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, arrival_of, request
from libra.trajectory.record import Trajectory

_PROMPT, _OUTPUT, _ARRIVAL, _BLOCKS = "input_length", "output_length", "timestamp", "hash_ids"
_MILLISECOND = 1e-3


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        if _BLOCKS in entry and entry.values(_BLOCKS):
            reading.remarks["requests whose shared blocks (hash_ids) are not kept"] += 1
        arrival = arrival_of(entry, _ARRIVAL, reading, _MILLISECOND)
        yield request(entry, entry.tokens(_PROMPT), entry.tokens(_OUTPUT), arrival)


MOONCAKE = LogFormat(
    name="mooncake",
    written_by="Mooncake's traces (timestamp in ms, input_length, output_length, hash_ids)",
    holds="requests",
    silent_on="tools, rewards, policy versions",
    is_one=lambda entry: {_PROMPT, _OUTPUT} <= set(entry.fields),
    trajectories=_trajectories,
)
