"""Trajectories that drift by the step that their group is for.

Invariant: a group's trajectories do not depend on which system starts it, or when: all systems get the same work. If
the drift followed the version that starts a group, more staleness would mean shorter trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libra.sim.training_run.episodes import Episodes
from libra.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class ByStep:
    """Episodes of which every `groups` groups are one step's, in the order of their numbers."""

    episodes: Episodes
    groups: int

    @property
    def samples_per_prompt(self) -> int:
        return self.episodes.samples_per_prompt

    @property
    def max_context(self) -> int:
        return self.episodes.max_context

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        """The version is that of the policy which starts it, and says nothing but how stale it is."""
        drawn = self.episodes.group(number, number // self.groups)
        return tuple(replace(trajectory, policy_version=version) for trajectory in drawn)
