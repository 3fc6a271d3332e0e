"""Trajectories of SWE-agent (`.traj`) and mini-swe-agent (`.traj.json`), with one episode per document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from libra.trajectory.logs.chat import Chat, chat, text_of
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, ended, episode, same_prompt
from libra.trajectory.logs.totals import agreeing
from libra.trajectory.record import Trajectory, Turn


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        info = entry.entry("info") if "info" in entry else entry.within("info", {})
        over = "exit_status" in info
        found = _steps(entry, reading) if "trajectory" in entry else _messages(entry, reading)
        if over and found.turns:
            found = replace(found, turns=ended(found.turns))
        yield episode(
            entry,
            entry.text_or("instance_id", str(entry.number)),
            *_agreed(found, info, reading),
            task=entry.text_or("environment", "swe-agent"),
            prompt_id=found.prompt_id,
            finished=over,
        )


def _agreed(found: Chat, info: LogEntry, reading: LogReading) -> tuple[int, tuple[Turn, ...]]:
    """Prompt and turns, scaled to the sums over all calls in `info.model_stats`."""
    if "model_stats" not in info:
        return found.prompt_tokens, found.turns
    stats = info.entry("model_stats")
    if "api_calls" in stats and stats.tokens("api_calls") != len(found.turns):
        reading.remarks[
            "episodes with more or fewer calls than steps: tokens of all calls divided among the steps"
        ] += 1
    sent, received = (stats.tokens(name) if name in stats else None for name in ("tokens_sent", "tokens_received"))
    # Zeros mean that the tokens were not counted.
    agreed = agreeing(found, sent or None, received or None, reading)
    return agreed.prompt_tokens, agreed.turns


def _messages(entry: LogEntry, reading: LogReading) -> Chat:
    """Turns of mini-swe-agent. The user's message after an answer is the output of the command."""
    found = chat(entry.entries("messages"), reading)
    turns = (replace(turn, tool="bash") if turn.tool == "user" else turn for turn in found.turns)
    return replace(found, turns=tuple(turns))


def _steps(entry: LogEntry, reading: LogReading) -> Chat:
    """Turns of SWE-agent. Each step has an answer, its command and the output."""
    turns = []
    for step in entry.entries("trajectory"):
        answer = step.text_or("response", "") or step.text_or("thought", "") + step.text_or("action", "")
        words = step.text_or("action", "").split(maxsplit=1)
        seconds = step.seconds("execution_time") if "execution_time" in step else None
        if seconds is None:
            reading.remarks["commands without recorded seconds"] += 1
        returned = reading.tokens_of(step.text_or("observation", ""))
        turns.append(Turn(reading.tokens_of(answer), words[0] if words else "none", "unknown", returned, seconds))
    prompt = []
    for message in entry.entries("history"):
        if message.text("role") == "assistant":
            break
        prompt.append(text_of(message))
    return Chat(sum(map(reading.tokens_of, prompt)), tuple(turns), same_prompt("\n".join(prompt)))


SWE_AGENT = LogFormat(
    name="swe-agent",
    written_by="SWE-agent (.traj) and mini-swe-agent (.traj.json)",
    holds="trajectories",
    silent_on="outcomes of commands, tokens of single steps, rewards, policy versions",
    is_one=lambda entry: (
        ("trajectory" in entry and ("history" in entry or "info" in entry)) or {"messages", "info"} <= set(entry.fields)
    ),
    trajectories=_trajectories,
)
