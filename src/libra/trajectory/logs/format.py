"""The interface of log formats, and the state of reading one log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from libra.trajectory.logs.count import CharacterCount, TokenCount
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.record import Trajectory, TrajectoryFormatError, Turn


@dataclass(slots=True)
class LogReading:
    """State of reading one log: the token counter, and remarks on missing data with their counts."""

    count: TokenCount = field(default_factory=CharacterCount)
    remarks: Counter[str] = field(default_factory=Counter)

    def tokens_of(self, text: str) -> int:
        """Number of tokens of a text, if the log has no count for it."""
        if text:
            self.remarks[f"texts whose tokens are {self.count.how}, without a chat template"] += 1
        return self.count(text)


@dataclass(frozen=True, slots=True)
class LogFormat:
    """One format: its shape, the data that it lacks, and its reader.

    `is_one` recognises the format by the first entry of a file. `trajectories` reads the entries in order, with one in
    memory at a time if the format allows it, and raises `TrajectoryFormatError` for an unreadable entry."""

    name: str
    written_by: str
    holds: Literal["trajectories", "requests"]  # requests: single turns with arrival times
    silent_on: str  # data that the format never has, for the note to the user
    is_one: Callable[[LogEntry], bool]
    trajectories: Callable[[Iterable[LogEntry], LogReading], Iterator[Trajectory]]


def episode(
    entry: LogEntry,
    id: str,
    prompt_tokens: int,
    turns: Iterable[Turn],
    *,
    task: str,
    prompt_id: str | None = None,
    reward: float | None = None,
    policy_version: int = 0,
    finished: bool = True,
    started_at: float | None = None,
) -> Trajectory:
    """A trajectory. It is finished if the log says so and its last turn calls no tool. Raises `TrajectoryFormatError`
    for impossible values, with the place of the entry.
    """
    turns = tuple(turns)
    try:
        return Trajectory(
            id=id,
            prompt_id=id if prompt_id is None else prompt_id,
            task=task,
            prompt_tokens=prompt_tokens,
            turns=turns,
            reward=reward,
            policy_version=policy_version,
            finished=finished and bool(turns) and turns[-1].tool is None,
            started_at=started_at,
        )
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise TrajectoryFormatError(f"{entry.where}: {reason}; correct it, or leave the record out") from None


def request(
    entry: LogEntry, prompt_tokens: int, output_tokens: int, arrival: float | None, task: str = "request"
) -> Trajectory:
    """A request as a trajectory of one turn, which starts at its arrival time in seconds."""
    turn = Turn(output_tokens, None, None, 0)
    return episode(entry, str(entry.number), prompt_tokens, (turn,), task=task, started_at=arrival)


def arrival_of(entry: LogEntry, field: str, reading: LogReading, unit: float = 1.0) -> float | None:
    """Arrival time of a request in seconds. The log counts in units of `unit` seconds. Returns None, with a remark, if
    the log has no time.
    """
    if field in entry:
        return entry.number_of(field) * unit
    reading.remarks["requests without a time of arrival"] += 1
    return None


def ended(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """The turns of an ended episode, without the last tool's return, which no turn reads."""
    *before, last = turns
    return (*before, Turn(last.generated_tokens, None, None, 0, None, last.context_tokens))


def same_prompt(text: str) -> str:
    """A name that is equal for equal prompts."""
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
