"""Rollouts of `verifiers`: `results.jsonl` with one rollout per line. Since verifiers 0.4, `traces.jsonl` with one
episode and its traces per line, as in prime-rl.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from libra.trajectory.logs.calls import LoggedReturn, ModelCall, turns_of_calls
from libra.trajectory.logs.chat import Chat, chat
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, episode, same_prompt
from libra.trajectory.logs.totals import agreeing
from libra.trajectory.record import LONGEST, Trajectory, Turn


def _rollouts(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        found = _chat(entry, reading)
        if "token_usage" in entry:
            usage = entry.entry("token_usage")
            found = agreeing(found, _count(usage, "input_tokens"), _count(usage, "output_tokens"), reading)
        yield episode(
            entry,
            str(entry.number),
            found.prompt_tokens,
            found.turns,
            task=entry.text_or("task", "verifiers"),
            prompt_id=entry.text_or("example_id", found.prompt_id),
            reward=entry.number_of("reward") if "reward" in entry else None,
        )


def _chat(entry: LogEntry, reading: LogReading) -> Chat:
    """The chat of a rollout. Its prompt and completion are messages or plain texts."""
    if isinstance(entry.fields.get("completion"), list):
        return chat(entry.entries("completion"), reading, already=entry.entries("prompt"))
    prompt, answer = entry.text("prompt"), entry.text("completion")
    turn = Turn(reading.tokens_of(answer), None, None, 0)
    return Chat(reading.tokens_of(prompt), (turn,), same_prompt(prompt))


def _count(usage: LogEntry, name: str) -> int | None:
    return usage.tokens(name) if name in usage else None


def _traces(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        task = entry.entry("env").text_or("id", "verifiers") if "env" in entry else "verifiers"
        for trace in entry.entries("traces"):
            counted = [call for call in trace.entries("calls") if "usage" in call]
            if not counted:
                reading.remarks["traces left out, as no call has usage"] += 1
                continue
            calls = [*(_call(trace, *pair) for pair in pairwise(counted)), ModelCall(*_usage(counted[-1]))]
            yield episode(
                trace,
                trace.text("id"),
                calls[0].prompt_tokens,
                turns_of_calls(calls),
                task=task,
                prompt_id=trace.entry("task").text("key") if "task" in trace else None,
                reward=_reward(trace),
                finished=trace.boolean("is_completed") if "is_completed" in trace else True,
                started_at=trace.entry("timing").number_of("start") if "timing" in trace else None,
            )


def _usage(call: LogEntry) -> tuple[int, int]:
    usage = call.entry("usage")
    return usage.tokens("prompt_tokens"), usage.tokens("completion_tokens")


def _call(trace: LogEntry, call: LogEntry, following: LogEntry) -> ModelCall:
    seconds = None
    if "time" in call and "time" in following:
        pause = following.entry("time").number_of("start") - call.entry("time").number_of("end")
        seconds = min(max(0.0, pause), LONGEST)
    return ModelCall(*_usage(call), LoggedReturn(_tool(trace, following), "unknown", seconds))


def _tool(trace: LogEntry, following: LogEntry) -> str:
    """Name of the tool whose return precedes a call: the tool of the parent of the call's node."""
    nodes = trace.entries("nodes")
    at = following.fields.get("node")
    parent = nodes[at].fields.get("parent") if isinstance(at, int) and 0 <= at < len(nodes) else None
    if not isinstance(parent, int) or not 0 <= parent < len(nodes) or "message" not in nodes[parent]:
        return "tool"
    message = nodes[parent].entry("message")
    return message.text_or("name", "") or message.text_or("role", "tool")


def _reward(trace: LogEntry) -> float | None:
    """The sum of the rewards, each multiplied by its weight."""
    if "rewards" not in trace:
        return None
    rewards = trace.entry("rewards")
    found = [rewards.entry(name) for name in rewards.fields]
    return sum(it.number_of("score") * it.number_of("weight") for it in found) if found else None


VERIFIERS = LogFormat(
    name="verifiers",
    written_by="verifiers: results.jsonl",
    holds="trajectories",
    silent_on="tool seconds, outcomes of tools, tokens of single turns, policy versions",
    is_one=lambda entry: (
        {"prompt", "completion"} <= set(entry.fields)
        and ("example_id" in entry or ("reward" in entry and "step" not in entry))
    ),
    trajectories=_rollouts,
)
VERIFIERS_TRACES = LogFormat(
    name="verifiers-traces",
    written_by="verifiers 0.4 and prime-rl: traces.jsonl",
    holds="trajectories",
    silent_on="outcomes of tools, policy versions",
    is_one=lambda entry: isinstance(entry.fields.get("traces"), list),
    trajectories=_traces,
)
