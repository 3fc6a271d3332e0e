"""BurstGPT's traces, with one request per row. The second version also has the session and the duration of an
answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra.trajectory.logs.calls import LoggedReturn, ModelCall, turns_of_calls
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, episode, request
from libra.trajectory.record import LONGEST, Trajectory

_PROMPT, _OUTPUT, _ARRIVAL = "Request tokens", "Response tokens", "Timestamp"
_SESSION, _ELAPSED = "Session ID", "Elapsed time"
_KIND = "Log Type"


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    """Yield requests without a session, then the sessions, each in the order of their first rows."""
    sessions: dict[str, list[LogEntry]] = {}
    for entry in entries:
        if not entry.tokens(_OUTPUT):
            reading.remarks["failed requests (0 response tokens) left out"] += 1
            continue
        if _SESSION in entry:
            sessions.setdefault(entry.text(_SESSION), []).append(entry)
            continue
        task = entry.text_or(_KIND, "request")
        yield request(entry, entry.tokens(_PROMPT), entry.tokens(_OUTPUT), entry.number_of(_ARRIVAL), task)
    for name, rows in sessions.items():
        yield _session(name, sorted(rows, key=lambda row: row.number_of(_ARRIVAL)), reading)


def _session(name: str, rows: list[LogEntry], reading: LogReading) -> Trajectory:
    calls = []
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        back = None if following is None else LoggedReturn("user", "ok", _pause(row, following, reading))
        calls.append(ModelCall(row.tokens(_PROMPT), row.tokens(_OUTPUT), back))
    first = rows[0]
    return episode(
        first,
        name,
        calls[0].prompt_tokens,
        turns_of_calls(calls),
        task=first.text_or(_KIND, "session"),
        started_at=first.number_of(_ARRIVAL),
    )


def _pause(row: LogEntry, following: LogEntry, reading: LogReading) -> float | None:
    """Seconds from an answer to the session's next request."""
    if _ELAPSED not in row:
        reading.remarks["pauses of users not recorded"] += 1
        return None
    pause = following.number_of(_ARRIVAL) - row.number_of(_ARRIVAL) - row.seconds(_ELAPSED)
    if pause < 0:
        reading.remarks["requests that came before the session's last answer: pause 0"] += 1
    return min(max(0.0, pause), LONGEST)


BURSTGPT = LogFormat(
    name="burstgpt",
    written_by="BurstGPT's traces, with or without sessions",
    holds="requests",
    silent_on="prefixes that sessions share, rewards, policy versions",
    is_one=lambda entry: {_PROMPT, _OUTPUT, _ARRIVAL} <= set(entry.fields),
    trajectories=_trajectories,
)
