"""Traces of the simulator Vidur, with one request per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, arrival_of, request
from libra.trajectory.record import Trajectory

_PROMPT, _OUTPUT, _ARRIVAL = "num_prefill_tokens", "num_decode_tokens", "arrived_at"


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        arrival = arrival_of(entry, _ARRIVAL, reading)
        yield request(entry, entry.tokens(_PROMPT), entry.tokens(_OUTPUT), arrival)


VIDUR = LogFormat(
    name="vidur",
    written_by="Vidur's traces of requests (arrived_at, num_prefill_tokens, num_decode_tokens)",
    holds="requests",
    silent_on="prefixes that requests share, tools, rewards, policy versions",
    is_one=lambda entry: {_PROMPT, _OUTPUT} <= set(entry.fields),
    trajectories=_trajectories,
)
