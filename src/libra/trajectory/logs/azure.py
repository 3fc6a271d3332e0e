"""Azure's public traces of LLM and LMM inference (2023, 2024, 2025), with one request per row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, request
from libra.trajectory.record import Trajectory

_PROMPT, _OUTPUT, _ARRIVAL, _IMAGES = "ContextTokens", "GeneratedTokens", "TIMESTAMP", "NumImages"


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        if _IMAGES in entry and entry.tokens(_IMAGES):
            reading.remarks["requests with images, counted by their context tokens alone"] += 1
        yield request(entry, entry.tokens(_PROMPT), entry.tokens(_OUTPUT), entry.instant(_ARRIVAL))


AZURE = LogFormat(
    name="azure",
    written_by="Azure's traces of LLM inference (2023, 2024) and LMM inference (2025)",
    holds="requests",
    silent_on="prefixes that requests share, tools, rewards, policy versions",
    is_one=lambda entry: {_PROMPT, _OUTPUT, _ARRIVAL} <= set(entry.fields),
    trajectories=_trajectories,
)
