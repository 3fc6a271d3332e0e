"""Completions that TRL's trainers log (`log_completions`), as one Parquet file per step, or as JSON lines with the same
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra.trajectory.logs.chat import Chat, chat
from libra.trajectory.logs.decoded import turns_of_text
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, episode, same_prompt
from libra.trajectory.record import Trajectory

_NO_REWARD = ("mode", "step", "prompt", "completion", "advantage", "images", "image")


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        found, step = _chat(entry, reading), _step(entry)
        yield episode(
            entry,
            f"{step}-{entry.number}",
            found.prompt_tokens,
            found.turns,
            task=entry.text_or("mode", "trl"),
            prompt_id=found.prompt_id,
            reward=_reward(entry, reading),
            policy_version=step,
        )


def _chat(entry: LogEntry, reading: LogReading) -> Chat:
    if isinstance(entry.fields.get("completion"), list):
        return chat(entry.entries("completion"), reading, already=entry.entries("prompt"))
    prompt = entry.text("prompt")
    return Chat(reading.tokens_of(prompt), turns_of_text(entry.text("completion"), reading), same_prompt(prompt))


def _step(entry: LogEntry) -> int:
    """The step of a row. TRL before 0.24 writes it as text."""
    step = entry.fields.get("step")
    if isinstance(step, str) and step.isascii() and step.isdigit() and len(step) < 16:
        return int(step)
    return entry.tokens("step")


def _reward(entry: LogEntry, reading: LogReading) -> float | None:
    """The sum of all rewards: the numeric columns that are not TRL's own, one per reward function."""
    names = [
        name
        for name, value in entry.fields.items()
        if name not in _NO_REWARD and isinstance(value, int | float) and not isinstance(value, bool)
    ]
    names = [name for name in names if entry.fields[name] == entry.fields[name]]  # NaN: the function returned no reward
    if len(names) > 1:
        reading.remarks[f"rewards added up without their weights ({', '.join(sorted(names))})"] += 1
    return sum(entry.number_of(name) for name in names) if names else None


TRL = LogFormat(
    name="trl",
    written_by="TRL: completions that its trainers log, .parquet or JSON lines",
    holds="trajectories",
    silent_on="tool seconds, outcomes of tools, which answers were cut at the limit; the step is the policy version",
    is_one=lambda entry: {"prompt", "completion", "step"} <= set(entry.fields) and "example_id" not in entry,
    trajectories=_trajectories,
)
