"""Sessions of coding agents published by WEKA (kv-cache-tester): requests with lengths, times and block hashes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from libra.trajectory.logs.calls import LoggedReturn, ModelCall, turns_of_calls
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, episode
from libra.trajectory.record import LONGEST, Trajectory

_PROMPT, _OUTPUT, _START, _SUBAGENT = "in", "out", "t", "subagent"


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        yield from _agents(entry, entry.text("id"), reading)


def _agents(agent: LogEntry, name: str, reading: LogReading) -> Iterator[Trajectory]:
    """Yield an agent, then the agents that it starts, each as a trajectory."""
    requests = agent.entries("requests")
    own = [it for it in requests if it.fields.get("type") != _SUBAGENT]
    if own:
        calls = [_call(*pair, reading) for pair in zip(own, [*own[1:], None], strict=True)]
        turns = turns_of_calls(calls)
        yield episode(agent, name, calls[0].prompt_tokens, turns, task="coding", started_at=own[0].number_of(_START))
    else:
        reading.remarks["agents without a request left out"] += 1
    started: Sequence[LogEntry] = [it for it in requests if it.fields.get("type") == _SUBAGENT]
    for number, other in enumerate(started, start=1):
        yield from _agents(other, f"{name}/{other.text_or('agent_id', str(number))}", reading)


def _call(request: LogEntry, following: LogEntry | None, reading: LogReading) -> ModelCall:
    prompt, output = request.tokens(_PROMPT), request.tokens(_OUTPUT)
    if following is None:
        return ModelCall(prompt, output)
    kinds = following.values("input_types") if "input_types" in following else []
    tool = "user" if kinds and "tool_result" not in kinds else "tool"
    return ModelCall(prompt, output, LoggedReturn(tool, "unknown", _pause(request, following, reading)))


def _pause(request: LogEntry, following: LogEntry, reading: LogReading) -> float | None:
    """Seconds between an answer and the next request, including the user's pauses."""
    if "think_time" in following:
        return following.seconds("think_time")
    if "api_time" not in request:
        reading.remarks["tool seconds unknown: neither think_time nor api_time"] += 1
        return None
    pause = following.number_of(_START) - request.number_of(_START) - request.seconds("api_time")
    return min(max(0.0, pause), LONGEST)


WEKA = LogFormat(
    name="weka",
    written_by="WEKA's sessions of coding agents (kv-cache-tester)",
    holds="trajectories",
    silent_on="names and outcomes of tools (their seconds include pauses of people), rewards, policy versions",
    is_one=lambda entry: isinstance(entry.fields.get("requests"), list) and "id" in entry,
    trajectories=_trajectories,
)
