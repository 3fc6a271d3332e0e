"""Statistics of a workload's episodes that are also published for other workloads.

Invariant: every number is exact over the trajectories given. Lengths are tokens, times are seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.route.tool_state import ToolState, payload_class
from libra.sim.training_run.episodes import Episodes
from libra.trajectory import Trajectory

PERCENTS = (5, 25, 50, 75, 90, 99, 100)
BATCH = 512  # trajectories that start together, where what is left of a batch's time is measured


@dataclass(frozen=True, slots=True)
class Facts:
    """Statistics of some trajectories, all of one stage of a run."""

    trajectories: int
    mean_final_context: float
    final_context: tuple[int, ...]  # percentiles `PERCENTS`, nearest rank
    mean_generated: float
    mean_turns: float
    most_turns: int
    no_return_share: float  # of trajectories that call no tool
    mean_tool_seconds: float  # of a tool call; 0 where there is none
    p99_tool_seconds: float
    tool_time_share: float  # of rollout seconds
    longest_tenth_tokens: float  # share of the generated tokens that the tenth with most of them has
    longest_tenth_seconds: float  # share of the rollout seconds that the tenth that takes longest has
    tail_share: float  # of the time of a batch of `BATCH`: how much is left when nine tenths of it are done, on average
    prompt_share: float  # of the variance of log final context that lies between prompts
    signal: float  # see `explained`, at the first tool return
    signal_everywhere: float  # the same over all tool returns


def facts(trajectories: Sequence[Trajectory], token_seconds: float, passive: Collection[str] = ()) -> Facts:
    """`token_seconds`: what it takes to generate a token. A trajectory's rollout seconds are those of its generated
    tokens and of its tools, as if no engine were ever full; a tool of unrecorded seconds adds none. `passive`: see
    `returns`."""
    if not trajectories:
        raise ValueError("there is no trajectory; give one or more")
    final = np.array([trajectory.final_context for trajectory in trajectories])
    generated = np.array([trajectory.generated_tokens for trajectory in trajectories])
    turns = np.array([len(trajectory.turns) for trajectory in trajectories])
    tool_times = [
        [turn.tool_seconds or 0.0 for turn in trajectory.turns if turn.tool is not None] for trajectory in trajectories
    ]
    tool_seconds = np.array([sum(times) for times in tool_times])
    calls = np.array([seconds for times in tool_times for seconds in times] or [0.0])
    rollout = generated * token_seconds + tool_seconds
    prompts = [trajectory.prompt_id for trajectory in trajectories]
    return Facts(
        trajectories=len(trajectories),
        mean_final_context=float(final.mean()),
        final_context=tuple(np.percentile(final, PERCENTS, method="inverted_cdf").tolist()),
        mean_generated=float(generated.mean()),
        mean_turns=float(turns.mean()),
        most_turns=int(turns.max()),
        no_return_share=float(np.mean([not times for times in tool_times])),
        mean_tool_seconds=float(calls.mean()),
        p99_tool_seconds=float(np.percentile(calls, 99)),
        tool_time_share=float(tool_seconds.sum() / rollout.sum()),
        longest_tenth_tokens=longest_tenth(generated),
        longest_tenth_seconds=longest_tenth(rollout),
        tail_share=tail(rollout),
        prompt_share=explained(prompts, np.log(final)),
        signal=_signal(trajectories, passive, first_only=True),
        signal_everywhere=_signal(trajectories, passive, first_only=False),
    )


def longest_tenth(values: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Share of their sum that the tenth with the largest (rounded up to whole ones) has."""
    ordered = np.sort(values)[::-1]
    return float(ordered[: -(-len(ordered) // 10)].sum() / ordered.sum())


def tail(seconds: NDArray[np.float64]) -> float:
    """Share of a batch's time that is left when nine tenths of it are done, on average over whole batches of `BATCH`
    in order; over all of them as one where there are fewer."""
    batches = [seconds[start : start + BATCH] for start in range(0, len(seconds) - BATCH + 1, BATCH)] or [seconds]
    return float(np.mean([1 - np.percentile(batch, 90, method="inverted_cdf") / batch.max() for batch in batches]))


def explained(groups: Iterable[object], values: Sequence[float] | NDArray[np.float64]) -> float:
    """Adjusted R^2: 1 - (variance within groups) / (variance of all), each of them unbiased, so that groups which say
    nothing have 0 on average however many they are. 0 where all values are equal, or no group has two."""
    members: defaultdict[object, list[float]] = defaultdict(list)
    for group, value in zip(groups, values, strict=True):
        members[group].append(float(value))
    count = sum(map(len, members.values()))
    if count <= len(members):
        return 0.0
    total = float(np.var(np.asarray(values, float), ddof=1))
    within = sum(len(its) * float(np.var(its)) for its in members.values()) / (count - len(members))
    return 1 - within / total if total > 0 else 0.0


def returns(trajectory: Trajectory, passive: Collection[str] = ()) -> list[tuple[ToolState, int]]:
    """The state of each tool return, and the tokens generated and returned after it. What `passive` ones return, a
    user's words for example, is not listed."""
    remaining = sum(turn.generated_tokens + turn.returned_tokens for turn in trajectory.turns)
    found = []
    for turn in trajectory.turns:
        remaining -= turn.generated_tokens + turn.returned_tokens
        if turn.tool is not None and turn.status is not None and turn.tool not in passive:
            state = ToolState(turn.tool, payload_class(turn.returned_tokens), turn.status)
            found.append((state, remaining))
    return found


def at_version(episodes: Episodes, version: int, groups: int, first: int = 0) -> list[Trajectory]:
    """The trajectories of `groups` groups from number `first` on, all generated at one version."""
    return [each for number in range(first, first + groups) for each in episodes.group(number, version)]


def _signal(trajectories: Iterable[Trajectory], passive: Collection[str], first_only: bool) -> float:
    found: list[tuple[ToolState, int]] = []
    for trajectory in trajectories:
        its = returns(trajectory, passive)
        found += its[:1] if first_only else its
    return explained([state for state, _ in found], [remaining for _, remaining in found])
