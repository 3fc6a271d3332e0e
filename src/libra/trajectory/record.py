"""One agent episode: token counts, tool outcomes and times.

Invariant: every `Trajectory` in memory obeys the schema. An invalid JSONL line is refused with the file, the line and
the field, and never repaired. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from libra.config.input_file import MOST
from libra.config.json_line import line_problem
from libra.config.sealed_line import opened

ToolStatus = Literal["ok", "error", "timeout", "unknown"]

_STRICT = ConfigDict(extra="forbid")
# Optional fields; no other check would find a misspelt one.
_OPTIONAL = ("tool_seconds", "context_tokens", "started_at")

LONGEST = 1e9  # seconds of one tool call, some 30 years; larger values are errors, and their sums could overflow


class TrajectoryFormatError(ValueError):
    """A trajectory file cannot be used. The message has one line with file, line, field and fault."""


def _require_tokens(name: str, count: int) -> None:
    if count < 0:
        raise ValueError(f"{name} must be >= 0")
    if count > MOST:
        raise ValueError(f"{name} must be at most {MOST}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation, and the tool return that follows. `tool` is None in the last turn of a finished episode."""

    __pydantic_config__ = _STRICT

    generated_tokens: int
    tool: str | None
    status: ToolStatus | None
    returned_tokens: int
    tool_seconds: float | None = None  # None: not recorded
    # Context at the start of the turn, if it is not the running sum, as after a compaction.
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        _require_tokens("generated_tokens", self.generated_tokens)
        _require_tokens("returned_tokens", self.returned_tokens)
        if self.context_tokens is not None:
            _require_tokens("context_tokens", self.context_tokens)
        if self.tool_seconds is not None and not 0 <= self.tool_seconds <= LONGEST:
            raise ValueError(f"tool_seconds must be from 0 to {LONGEST:g}, or null if it was not recorded")
        if (self.tool is None) != (self.status is None):
            raise ValueError("tool and status must both be set, or both be null")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All turns of one episode."""

    __pydantic_config__ = _STRICT

    id: str
    prompt_id: str
    task: str
    prompt_tokens: int
    turns: tuple[Turn, ...]
    reward: float | None
    policy_version: int
    finished: bool
    started_at: float | None = None

    def __post_init__(self) -> None:
        _require_tokens("prompt_tokens", self.prompt_tokens)
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError("reward must be finite, or null if there is none")
        if self.started_at is not None and not math.isfinite(self.started_at):
            raise ValueError("started_at must be finite, or left out")
        if self.finished and (not self.turns or self.turns[-1].tool is not None):
            raise ValueError("turns: a finished trajectory ends with a turn whose tool is null")

    @property
    def generated_tokens(self) -> int:
        return sum(turn.generated_tokens for turn in self.turns)

    def contexts(self) -> tuple[int, ...]:
        """Context in tokens at the start of each turn."""
        contexts, running = [], self.prompt_tokens
        for turn in self.turns:
            if turn.context_tokens is not None:
                running = turn.context_tokens
            contexts.append(running)
            running += turn.generated_tokens + turn.returned_tokens
        return tuple(contexts)

    @property
    def final_context(self) -> int:
        """Tokens in context at the end of the last turn."""
        added = 0
        for turn in reversed(self.turns):
            added += turn.generated_tokens + turn.returned_tokens
            if turn.context_tokens is not None:
                return turn.context_tokens + added
        return self.prompt_tokens + added

    @property
    def peak_context(self) -> int:
        """The largest context of the trajectory, in tokens. Its engine needs room for it."""
        if not self.turns:
            return self.prompt_tokens
        most, running = 0, self.prompt_tokens
        for turn in self.turns:
            if turn.context_tokens is not None:
                running = turn.context_tokens
            running += turn.generated_tokens + turn.returned_tokens
            if running > most:
                most = running
        return most


def truncate(trajectory: Trajectory, max_context: int) -> Trajectory:
    """The trajectory as an engine with `max_context` >= 1 tokens would cut it, which finishes it at the limit.

    The turn that exceeds the limit becomes the last turn, generates only the tokens that fit, and loses its tool
    return. A turn that would start at the limit is dropped. A prompt without room for the first turn loses the tokens
    that this turn needs. A trajectory that fits is returned unchanged.
    """
    if max_context < 1:
        raise ValueError(f"max_context is {max_context}; an engine holds 1 token or more")
    if trajectory.peak_context <= max_context:
        return trajectory
    if not trajectory.turns:
        return replace(trajectory, prompt_tokens=max_context)
    starts = trajectory.contexts()
    cut = next(
        number
        for number, (turn, start) in enumerate(zip(trajectory.turns, starts, strict=True))
        if start + turn.generated_tokens + turn.returned_tokens > max_context
    )
    start = starts[cut]
    if start >= max_context and cut > 0:
        cut, start = cut - 1, starts[cut - 1]
    last = trajectory.turns[cut]
    if start >= max_context:
        start = max_context - min(last.generated_tokens, max_context)
    last = replace(
        last,
        generated_tokens=min(last.generated_tokens, max_context - start),
        tool=None,
        status=None,
        returned_tokens=0,
        tool_seconds=None,
        context_tokens=None if last.context_tokens is None else start,
    )
    return replace(
        trajectory,
        prompt_tokens=start if cut == 0 and last.context_tokens is None else min(trajectory.prompt_tokens, max_context),
        turns=(*trajectory.turns[:cut], last),
        finished=True,
    )


@cache
def _adapter() -> TypeAdapter[Trajectory]:
    return TypeAdapter(Trajectory)


def parse_trajectory(line: str | bytes, where: str) -> Trajectory:
    """Parse one JSON line, with or without a checksum, as a `Trajectory`. Error messages begin with `where`, such as
    `log.jsonl:12`. Unknown fields are ignored, since other systems may add some, but a likely typo of an optional field
    is refused.
    """
    try:
        line = opened(line)
        return _adapter().validate_json(line, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
    except ValueError as error:
        raise TrajectoryFormatError(f"{where}: {error}") from None
    unknown = [problem["loc"] for problem in problems if problem["type"] == "unexpected_keyword_argument"]
    if len(unknown) < len(problems):
        first = next(problem for problem in problems if problem["type"] != "unexpected_keyword_argument")
        raise TrajectoryFormatError(" ".join(f"{where}: {line_problem(first)}".split()))
    for *_, name in unknown:
        if meant := difflib.get_close_matches(str(name), _OPTIONAL, n=1):
            raise TrajectoryFormatError(f"{where}: {str(name)!r} is not a field; did you mean {meant[0]}?")
    return parse_trajectory(json.dumps(_without(json.loads(line), unknown)), where)


def _without(record: Any, places: Iterable[tuple[int | str, ...]]) -> Any:
    """The record without the fields at these places."""
    for *above, name in places:
        inner = record
        for part in above:
            inner = inner[part]
        del inner[name]
    return record


def dump_trajectory(trajectory: Trajectory) -> str:
    """The trajectory as one JSON line without a newline. Optional fields without a value are left out."""
    record: dict[str, Any] = asdict(trajectory)
    if record["started_at"] is None:
        del record["started_at"]
    for turn in record["turns"]:
        if turn["context_tokens"] is None:
            del turn["context_tokens"]
    return json.dumps(record, separators=(",", ":"))


def write_trajectories(path: Path | str, trajectories: Iterable[Trajectory]) -> None:
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(dump_trajectory(trajectory) + "\n" for trajectory in trajectories)
