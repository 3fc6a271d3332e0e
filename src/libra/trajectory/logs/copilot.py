"""Sessions of GitHub Copilot's coding agent (Azure's public dataset of 2026): calls and tools, without texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from libra.trajectory.logs.calls import LoggedReturn, ModelCall, as_one, turns_of_calls
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, episode
from libra.trajectory.record import LONGEST, ToolStatus, Trajectory

_MILLISECOND = 1e-3


@dataclass(frozen=True, slots=True)
class _Call:
    """A call with its tokens and tools. Calls are ordered by time."""

    entry: LogEntry
    turn: int  # number of the user's turn, from 0
    began: float  # seconds
    batches: list[LogEntry]  # batches of tools that the call requested


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        calls = list(_calls(entry, reading))
        if not calls:
            reading.remarks["sessions without a call that has tokens left out"] += 1
            continue
        back = [_back(call, following, reading) for call, following in zip(calls, [*calls[1:], None], strict=True)]
        counted = [ModelCall(*_tokens(call.entry), it) for call, it in zip(calls, back, strict=True)]
        yield episode(
            entry,
            entry.text("session_id"),
            counted[0].prompt_tokens,
            turns_of_calls(counted),
            task="coding",
            started_at=calls[0].began,
        )


def _calls(session: LogEntry, reading: LogReading) -> Iterator[_Call]:
    for number, turn in enumerate(session.entries("turns")):
        batches: dict[str, list[LogEntry]] = {}
        for batch in turn.entries("tool_batches"):
            batches.setdefault(batch.text_or("request_id", ""), []).append(batch)
        found = []
        for call in turn.entries("llm_calls"):
            if not _is_counted(call):
                reading.remarks["calls without token counts left out"] += 1
                continue
            own = batches.get(call.text_or("message_id", ""), []) if "message_id" in call else []
            found.append(_Call(call, number, call.instant("timestamp"), own))
        yield from sorted(found, key=lambda call: call.began)


def _is_counted(call: LogEntry) -> bool:
    if "tokens" not in call:
        return False
    tokens = call.entry("tokens")
    return "prompt" in tokens and "completion" in tokens


def _tokens(call: LogEntry) -> tuple[int, int]:
    tokens = call.entry("tokens")
    return tokens.tokens("prompt"), tokens.tokens("completion")


def _back(call: _Call, following: _Call | None, reading: LogReading) -> LoggedReturn | None:
    """The return before the next call, from the tools of this call's batches or from the user."""
    if following is None:
        return None
    if call.batches:
        return as_one([_batch(batch, reading) for batch in call.batches], reading)
    pause = min(max(0.0, following.began - call.began - _seconds(call.entry)), LONGEST)
    return LoggedReturn("tool", "unknown", pause) if following.turn == call.turn else LoggedReturn("user", "ok", pause)


def _batch(batch: LogEntry, reading: LogReading) -> LoggedReturn:
    """The return of a batch of tools that ran at the same time; its duration is that of the slowest tool."""
    functions = batch.entries("function_calls")
    if len(functions) > 1:
        reading.remarks["batches of several tools, recorded under the first name"] += 1
    name = functions[0].text_or("name", "tool") if functions else "tool"
    return LoggedReturn(name, _status(batch), _seconds(batch) if "duration_ms" in batch else None)


def _status(batch: LogEntry) -> ToolStatus:
    if "result" not in batch:
        return "unknown"
    return "ok" if batch.text("result").lower() == "success" else "error"


def _seconds(entry: LogEntry) -> float:
    return entry.seconds("duration_ms", _MILLISECOND) if "duration_ms" in entry else 0.0


COPILOT = LogFormat(
    name="copilot",
    written_by="GitHub Copilot's coding agent (Azure's dataset of 2026)",
    holds="trajectories",
    silent_on="rewards, policy versions, whether a session ended",
    is_one=lambda entry: "session_id" in entry and isinstance(entry.fields.get("turns"), list),
    trajectories=_trajectories,
)
