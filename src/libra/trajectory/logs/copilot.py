"""Sessions of GitHub Copilot's coding agent (Azure's public dataset of 2026): calls and tools, without texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra.trajectory.logs.calls import LoggedReturn, ModelCall, as_one, turns_of_calls
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, episode
from libra.trajectory.record import LONGEST, ToolStatus, Trajectory

_MILLISECOND = 1e-3


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        calls = list(_calls(entry, reading))
        if not calls:
            reading.remarks["sessions without a call that has tokens left out"] += 1
            continue
        back = [_back(*pair, reading) for pair in zip(calls, [*calls[1:], None], strict=True)]
        counted = [ModelCall(*_tokens(call), it) for (call, _), it in zip(calls, back, strict=True)]
        yield episode(
            entry,
            entry.text("session_id"),
            counted[0].prompt_tokens,
            turns_of_calls(counted),
            task="coding",
            started_at=calls[0][0].instant("timestamp"),
        )


def _calls(session: LogEntry, reading: LogReading) -> Iterator[tuple[LogEntry, LogEntry]]:
    """Each call that has tokens, with the turn of the user that it belongs to, in the order of time."""
    for turn in session.entries("turns"):
        counted = [call for call in turn.entries("llm_calls") if _is_counted(call)]
        helpers = len(turn.entries("llm_calls")) - len(counted)
        if helpers:
            reading.remarks["calls without token counts left out"] += helpers
        for call in sorted(counted, key=lambda call: call.instant("timestamp")):
            yield call, turn


def _is_counted(call: LogEntry) -> bool:
    if "tokens" not in call:
        return False
    tokens = call.entry("tokens")
    return "prompt" in tokens and "completion" in tokens


def _tokens(call: LogEntry) -> tuple[int, int]:
    tokens = call.entry("tokens")
    return tokens.tokens("prompt"), tokens.tokens("completion")


def _back(
    called: tuple[LogEntry, LogEntry], following: tuple[LogEntry, LogEntry] | None, reading: LogReading
) -> LoggedReturn | None:
    """What came back before the next call: tools of the batches that name this call, or the user."""
    call, turn = called
    if following is None:
        return None
    next_call, next_turn = following
    batches = [it for it in turn.entries("tool_batches") if _names(it, call)]
    if batches:
        return as_one([_batch(batch, reading) for batch in batches], reading)
    pause = next_call.instant("timestamp") - call.instant("timestamp") - _seconds(call)
    same = next_turn.inside == turn.inside
    return LoggedReturn("tool" if same else "user", "unknown" if same else "ok", min(max(0.0, pause), LONGEST))


def _names(batch: LogEntry, call: LogEntry) -> bool:
    return "request_id" in batch and batch.fields["request_id"] == call.fields.get("message_id")


def _batch(batch: LogEntry, reading: LogReading) -> LoggedReturn:
    """Tools that ran at the same time: the batch took as long as the longest."""
    functions = batch.entries("function_calls")
    if len(functions) > 1:
        reading.remarks["batches of several tools, under the name of the first"] += 1
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
    silent_on="rewards, policy versions, whether a session was over",
    is_one=lambda entry: "session_id" in entry and isinstance(entry.fields.get("turns"), list),
    trajectories=_trajectories,
)
