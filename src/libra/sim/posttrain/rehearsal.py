"""Plans tried out in the simulator, with the router that would serve them, before one is proposed.

Invariant: all plans of one comparison get the same groups of trajectories, drawn from what finished last, and a router
that knows what the run's router knows; neither the run nor its router notices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from libra.plan.plan import Plan
from libra.route.policy import Policy
from libra.sim.posttrain.episodes import Episodes
from libra.sim.posttrain.loop import simulate_posttraining
from libra.sim.posttrain.resampled import Resampled
from libra.sim.posttrain.system import System
from libra.trajectory import Trajectory, truncate

STEPS = 4  # that are measured, after as many as it takes until every batch in flight was started in the rehearsal


@dataclass(slots=True)
class Rehearsal:
    """The `check` of a `Replanner`. Tell it each moment before the replanner decides."""

    system: System  # as it will run, but for the plan
    steps: int = STEPS
    seed: int = 0
    _recent: tuple[Trajectory, ...] = ()
    _policy: Policy | None = None
    _live: tuple[str, ...] = ()

    def prepare(self, finished: Sequence[Trajectory], running: Sequence[Trajectory], policy: Policy) -> None:
        """`finished` are the trajectories to draw from, if there are any, `policy` is the router as it is now, and
        `running` what it routes."""
        if finished:
            self._recent = tuple(finished)
        self._live = tuple(trajectory.id for trajectory in running)
        self._policy = policy

    def __call__(self, plans: Sequence[Plan], mean_context: float) -> list[float]:
        policy = self._policy
        if policy is None or not self._recent:
            raise ValueError("there is nothing to rehearse with: call prepare() with what has finished and the router")
        recipe = self.system.request.recipe
        drawn = Resampled(self._recent, recipe.samples_per_prompt, recipe.max_length, self.seed)
        # Prompts stay as they are, so the growth is all in the turns.
        prompts = sum(trajectory.prompt_tokens for trajectory in self._recent)
        turns = sum(trajectory.final_context for trajectory in self._recent) - prompts
        wanted = mean_context * len(self._recent) - prompts
        episodes = _Grown(drawn, max(0.0, wanted / turns) if turns > 0 else 1.0)
        snapshot = policy.snapshot()
        restore: Callable[[dict[str, Any]], Policy] = type(policy).restore

        def route() -> Policy:
            copy = restore(snapshot)
            for trajectory_id in self._live:
                copy.forget(trajectory_id)
            return _Untaught(copy)

        ahead = 1 + recipe.staleness
        seconds = []
        for plan in plans:
            system = replace(self.system, plan=plan, replan=None, route=route)
            steps = simulate_posttraining(system, episodes, ahead + self.steps).steps
            seconds.append((steps[-1].ended - steps[ahead - 1].ended) / self.steps)
        return seconds


class _Untaught:
    """A router that learns nothing more: what it knows is what is to be tried out."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.place, self.tool_returned, self.outlived = policy.place, policy.tool_returned, policy.outlived
        self.forget, self.instance_gone, self.snapshot = policy.forget, policy.instance_gone, policy.snapshot

    def finished(self, trajectory: Trajectory) -> None:
        self._policy.forget(trajectory.id)

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        raise NotImplementedError("a router in a rehearsal is not stored: store the one that it copies")


@dataclass(frozen=True, slots=True)
class _Grown:
    """Episodes whose turns are `factor` times as long."""

    episodes: Episodes
    factor: float
    samples_per_prompt: int = field(init=False)
    max_context: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples_per_prompt", self.episodes.samples_per_prompt)
        object.__setattr__(self, "max_context", self.episodes.max_context)

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        return tuple(self._grown(trajectory) for trajectory in self.episodes.group(number, version))

    def describe(self) -> dict[str, Any]:
        return {"name": "grown", "factor": self.factor, "episodes": self.episodes.describe()}

    def _grown(self, trajectory: Trajectory) -> Trajectory:
        factor = self.factor
        turns = tuple(
            replace(
                turn,
                generated_tokens=math.ceil(turn.generated_tokens * factor),
                returned_tokens=math.ceil(turn.returned_tokens * factor),
                context_tokens=None if turn.context_tokens is None else math.ceil(turn.context_tokens * factor),
            )
            for turn in trajectory.turns
        )
        return truncate(replace(trajectory, turns=turns), self.max_context)
