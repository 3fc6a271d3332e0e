"""Evaluation logs of Inspect: one JSON document, or a `.eval` archive with one document per sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from libra.trajectory.logs.chat import Chat, chat
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, episode
from libra.trajectory.record import Trajectory, Turn

_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # as in Inspect's value_to_float


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        if "sample" in entry:  # an entry of an archive
            header = entry.entry("header")
            yield _sample(entry.entry("sample"), _task(header), reading)
            continue
        for sample in entry.entries("samples"):
            yield _sample(sample, _task(entry), reading)


def _task(log: LogEntry) -> str:
    return log.entry("eval").text_or("task", "inspect") if "eval" in log else "inspect"


def _sample(sample: LogEntry, task: str, reading: LogReading) -> Trajectory:
    found = chat(sample.entries("messages"), reading)
    found = _counted(found, sample.entries("events"), reading)
    name = sample.text_or("id", str(sample.number))
    return episode(
        sample,
        f"{name}-{sample.tokens('epoch') if 'epoch' in sample else 1}",
        found.prompt_tokens,
        found.turns,
        task=task,
        prompt_id=name,
        reward=_reward(sample, reading),
        finished="error" not in sample,
    )


def _counted(found: Chat, events: Sequence[LogEntry], reading: LogReading) -> Chat:
    """The turns with values from the events: tokens of the calls in order, and seconds of the tools between two
    calls."""
    calls = [at for at, event in enumerate(events) if event.fields.get("event") == "model" and _usage(event)]
    missing = len(found.turns) - len(calls)
    if missing > 0:
        reading.remarks["turns without a recorded call: tokens estimated from text"] += missing
    elif missing < 0:
        reading.remarks["calls that belong to no turn (a grader's) left out"] -= missing
    turns: list[Turn] = []
    prompt, running = found.prompt_tokens, 0
    for number, turn in enumerate(found.turns):
        if number < len(calls):
            context, generated = _tokens(events[calls[number]])
            if number == 0:
                prompt = context
            elif context >= running:  # the return has the tokens that this prompt adds
                turns[-1] = replace(turns[-1], returned_tokens=context - running + turns[-1].returned_tokens)
            else:
                turn = replace(turn, context_tokens=context)
            running = context
            turn = replace(turn, generated_tokens=generated, tool_seconds=_seconds(turn, events[calls[number] + 1 :]))
        elif turn.tool is not None:
            reading.remarks["tool calls without recorded seconds"] += 1
        running = (running or prompt) + turn.generated_tokens + turn.returned_tokens
        turns.append(turn)
    return Chat(prompt, tuple(turns), found.prompt_id)


def _usage(event: LogEntry) -> bool:
    return "output" in event and "usage" in event.entry("output")


def _tokens(event: LogEntry) -> tuple[int, int]:
    """Tokens of the prompt, including cached ones, and of the answer."""
    usage = event.entry("output").entry("usage")
    cached = ("input_tokens_cache_read", "input_tokens_cache_write")
    prompt = usage.tokens("input_tokens") + sum(usage.tokens(name) for name in cached if name in usage)
    return prompt, usage.tokens("output_tokens")


def _seconds(turn: Turn, following: Sequence[LogEntry]) -> float | None:
    """Total seconds of the tools that run before the next call."""
    if turn.tool is None:
        return None
    until = takewhile(lambda event: event.fields.get("event") != "model", following)
    tools = [event for event in until if event.fields.get("event") == "tool" and "working_time" in event]
    return sum(event.seconds("working_time") for event in tools) if tools else None


def _reward(sample: LogEntry, reading: LogReading) -> float | None:
    """The value of the first score."""
    if "scores" not in sample:
        return None
    scores = sample.entry("scores")
    names = list(scores.fields)
    if len(names) > 1:
        reading.remarks[f"samples with several scores, rewarded by the first ({names[0]})"] += 1
    if not names:
        return None
    score = scores.entry(names[0])
    value = score.fields.get("value")
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value in _GRADES:
        return _GRADES[value]
    if not isinstance(value, int | float):
        reading.remarks["samples without reward: the score is neither a number nor a grade"] += 1
        return None
    return score.number_of("value")


INSPECT = LogFormat(
    name="inspect",
    written_by="Inspect: .json and .eval logs",
    holds="trajectories",
    silent_on="policy versions",
    is_one=lambda entry: {"eval", "samples"} <= set(entry.fields) or {"header", "sample"} <= set(entry.fields),
    trajectories=_trajectories,
)
