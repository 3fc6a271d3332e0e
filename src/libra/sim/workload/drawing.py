"""A workload of a wanted size, drawn from a log.

Invariant: the same log, size and seed give the same trajectories in the same order; all of the log is in a drawing
that is no smaller than it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from libra.trajectory import Trajectory


def draw(log: Sequence[Trajectory], count: int, seed: int, *, same_prompts: bool = True) -> tuple[Trajectory, ...]:
    """`count` trajectories in random order: without replacement as far as the log goes, what is missing with it.

    One that is drawn again gets an id of its own. It is another sample of its prompt, or with `same_prompts` off, of a
    prompt as long. Raises ValueError where the log is empty.
    """
    if not log:
        raise ValueError("there is no finished trajectory to draw from; give a log with at least one")
    if count < 1:
        raise ValueError(f"count is {count}; draw 1 trajectory or more")
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(log))[:count].tolist()
    order += generator.integers(len(log), size=count - len(order)).tolist()
    times: dict[int, int] = {}
    drawn = []
    for which in order:
        again = times[which] = times.get(which, 0) + 1
        trajectory = log[which]
        drawn.append(trajectory if again == 1 else _another(trajectory, again, same_prompts))
    return tuple(drawn)


def _another(trajectory: Trajectory, again: int, same_prompt: bool) -> Trajectory:
    prompt = trajectory.prompt_id if same_prompt else f"{trajectory.prompt_id} (drawn {again})"
    return replace(trajectory, id=f"{trajectory.id} (drawn {again})", prompt_id=prompt)
