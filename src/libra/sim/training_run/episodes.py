"""What the policy under training generates, at every stage of it.

Invariant: a group is the same for every system that is simulated: who generates it, when and where changes neither its
tokens nor its tools, but the version it starts under may, as that is what drift means.
"""

from __future__ import annotations

from typing import Any, Protocol

from libra.trajectory import Trajectory


class Episodes(Protocol):
    """Groups of trajectories, each of one prompt."""

    @property
    def samples_per_prompt(self) -> int:
        """Trajectories of a group."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens that no trajectory outgrows."""
        ...

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        """The group that is started as the `number`-th of a run, from 0, under this version of the policy.

        Its trajectories have ids of their own in the run, a common `prompt_id`, and `version` as their
        `policy_version`. Equal arguments give equal groups; the same number under another version is the same draw at
        another stage of the drift.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Name, distributions, parameters and seed, as JSON values."""
        ...
