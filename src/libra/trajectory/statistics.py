"""Summary of a log of trajectories: counts, lengths, tools, and the weight of the longest trajectories.

Invariant: every number is exact over the given trajectories, finished and unfinished. Missing values are counted as
unknown, never guessed. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from libra.trajectory import ToolStatus, Trajectory


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """One quantity over all trajectories. Percentiles are by nearest rank, so each is a value that occurs."""

    mean: float
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class ToolStats:
    name: str
    calls: int
    outcomes: tuple[tuple[ToolStatus, int], ...]  # status and number of calls, by name; only statuses that occurred
    mean_seconds: float | None  # over the calls with recorded seconds; None without such a call
    unknown_seconds: int  # calls without recorded seconds


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Summary of a log of trajectories."""

    count: int
    finished: int
    tasks: tuple[tuple[str, int], ...]  # task and number of trajectories, by name
    prompts: int  # number of different prompts
    turns: LengthSpread
    prompt: LengthSpread  # in tokens, as are the next three
    generated: LengthSpread
    returned: LengthSpread
    final_context: LengthSpread
    tools: tuple[ToolStats, ...]  # most called first
    unknown_tool_seconds_share: float  # of all tool calls; 0 without tool calls
    reward_mean: float | None  # over the trajectories with a reward; None without such a trajectory
    longest_tenth_share: float | None  # see `trace_stats`; None if no token was generated


@dataclass(slots=True)
class _ToolTally:
    outcomes: Counter[ToolStatus] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


def trace_stats(trajectories: Iterable[Trajectory]) -> TraceStats:
    """Summarise a log in one pass, which keeps a few integers per trajectory.

    `longest_tenth_share` is the share of all generated tokens that the longest tenth of the trajectories (rounded up)
    generated. It is 0.1 if all are equally long, and close to 1 with a long tail.
    """
    finished = 0
    tasks: Counter[str] = Counter()
    prompt_ids: set[str] = set()
    turns, prompt, generated, returned, final_context = [], [], [], [], []
    rewards: list[float] = []
    tallies: defaultdict[str, _ToolTally] = defaultdict(_ToolTally)
    for trajectory in trajectories:
        finished += trajectory.finished
        tasks[trajectory.task] += 1
        prompt_ids.add(trajectory.prompt_id)
        turns.append(len(trajectory.turns))
        prompt.append(trajectory.prompt_tokens)
        generated.append(trajectory.generated_tokens)
        returned.append(sum(turn.returned_tokens for turn in trajectory.turns))
        final_context.append(trajectory.final_context)
        if trajectory.reward is not None:
            rewards.append(trajectory.reward)
        for turn in trajectory.turns:
            if turn.tool is None or turn.status is None:
                continue  # both are None, or neither
            tally = tallies[turn.tool]
            tally.outcomes[turn.status] += 1
            if turn.tool_seconds is not None:
                tally.seconds.append(turn.tool_seconds)
    if not turns:
        raise ValueError("no trajectories to summarise; give a log with at least one line")
    tools = sorted((_tool_stats(name, tally) for name, tally in tallies.items()), key=lambda t: (-t.calls, t.name))
    calls = sum(tool.calls for tool in tools)
    return TraceStats(
        count=len(turns),
        finished=finished,
        tasks=tuple(sorted(tasks.items())),
        prompts=len(prompt_ids),
        turns=_spread(turns),
        prompt=_spread(prompt),
        generated=_spread(generated),
        returned=_spread(returned),
        final_context=_spread(final_context),
        tools=tuple(tools),
        unknown_tool_seconds_share=sum(tool.unknown_seconds for tool in tools) / calls if calls else 0.0,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        longest_tenth_share=_longest_tenth_share(generated),
    )


def _spread(values: Sequence[int]) -> LengthSpread:
    ordered = sorted(values)

    def percentile(percent: int) -> int:
        rank = -(-percent * len(ordered) // 100)  # rounded up in integers, so that 0.9 * 10 is rank 9
        return ordered[rank - 1]

    return LengthSpread(sum(ordered) / len(ordered), percentile(50), percentile(90), percentile(99), ordered[-1])


def _tool_stats(name: str, tally: _ToolTally) -> ToolStats:
    calls, known = tally.outcomes.total(), len(tally.seconds)
    return ToolStats(
        name=name,
        calls=calls,
        outcomes=tuple(sorted(tally.outcomes.items())),
        mean_seconds=sum(tally.seconds) / known if known else None,
        unknown_seconds=calls - known,
    )


def _longest_tenth_share(generated: Sequence[int]) -> float | None:
    total = sum(generated)
    if total == 0:
        return None
    tenth = -(-len(generated) // 10)
    return sum(sorted(generated, reverse=True)[:tenth]) / total
