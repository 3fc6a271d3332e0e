"""Chat logs with the `messages` of one episode per line, in OpenAI's or Anthropic's form, optionally with the last
call's `usage`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace

from libra.trajectory.logs.chat import chat
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, episode
from libra.trajectory.logs.totals import last_call
from libra.trajectory.record import Trajectory


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        found = chat(entry.entries("messages"), reading)
        if "tools" in entry:  # the prompt includes definitions of tools
            defined = reading.tokens_of(json.dumps(entry.values("tools")))
            found = replace(found, prompt_tokens=found.prompt_tokens + defined)
        if "usage" in entry:
            usage = entry.entry("usage")
            found = last_call(found, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))
            if len(found.turns) > 1:
                reading.remarks["episodes whose usage is taken as the last call's: its prompt is all before it"] += 1
        yield episode(
            entry,
            entry.text_or("id", str(entry.number)),
            found.prompt_tokens,
            found.turns,
            task=entry.text_or("task", "chat"),
            prompt_id=found.prompt_id,
            reward=entry.number_of("reward") if "reward" in entry else None,
        )


def _count(usage: LogEntry, name: str) -> int | None:
    return usage.tokens(name) if name in usage else None


OPENAI = LogFormat(
    name="openai",
    written_by="chat logs: messages of one episode per line, with or without usage",
    holds="trajectories",
    silent_on="tool seconds, outcomes of OpenAI's tools, policy versions",
    is_one=lambda entry: isinstance(entry.fields.get("messages"), list) and "info" not in entry,
    trajectories=_trajectories,
)
