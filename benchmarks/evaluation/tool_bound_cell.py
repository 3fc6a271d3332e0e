"""A cell of `ceiling`: how fast a run would be if tools, and nothing else, took time.

Invariant: generating, training, weights and changes of plan take no time at all; tools take what they take in the run,
and staleness is kept.
"""

from __future__ import annotations

from typing import Any

from benchmarks.evaluation.setting import Setting
from libra.trajectory import Trajectory


def tool_bound(setting: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second, and the seconds of the run.

    Groups start as soon as staleness lets them: as many as 1 + staleness steps train on at once, then those of one step
    whenever a step has been made. A group has to be trained on by the step that would be too late otherwise; which
    groups make the steps before is free.
    """
    where = Setting(**setting)
    ahead = where.staleness  # steps
    made: list[float] = []  # seconds, by step
    tokens, longest = 0, 0.0
    for step in range(where.run_steps):
        batch = _batch(where, step)
        tokens += sum(trajectory.generated_tokens for trajectory in batch)
        slowest = max(_tool_seconds(trajectory) for trajectory in batch)
        if step <= ahead:  # all of these start at once, and have until the last of these steps
            longest = max(longest, slowest)
            made.append(longest if step in (ahead, where.run_steps - 1) else 0.0)
        else:
            made.append(max(made[-1], made[step - 1 - ahead] + slowest))
    return {"throughput": tokens / made[-1], "seconds": made[-1]}


def _batch(setting: Setting, step: int) -> list[Trajectory]:
    prompts = setting.groups_per_step
    groups = (setting.episodes.group(step * prompts + number, step) for number in range(prompts))
    return [trajectory for group in groups for trajectory in group]


def _tool_seconds(trajectory: Trajectory) -> float:
    return sum(turn.tool_seconds or 0.0 for turn in trajectory.turns)
