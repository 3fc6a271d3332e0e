"""The protocol of planning questions, about slots of one machine or a cluster of GPUs."""

from __future__ import annotations

from typing import Protocol

from libra.lengths import TrajectoryClass
from libra.plan.options.menu import Menu


class PlanningRequest(Protocol):
    """A question to the planner. Times are seconds, lengths are tokens."""

    @property
    def classes(self) -> tuple[TrajectoryClass, ...]:
        """Classes of trajectories, shortest first; their shares sum to 1."""

    @property
    def trajectories(self) -> int:
        """Trajectories that one optimiser step trains on."""

    @property
    def staleness(self) -> int:
        """Versions that a trajectory's oldest token may lag behind; 0: nothing overlaps."""

    @property
    def devices(self) -> int:
        """All devices, without those that serve."""

    @property
    def longest_context(self) -> int:
        """Tokens that no trajectory outgrows."""

    @property
    def unknown_tool_seconds(self) -> float:
        """Seconds that a tool call of unknown duration counts as."""

    @property
    def refreshes(self) -> bool:
        """Whether an update of the weights lets engines compute contexts again."""

    @property
    def title(self) -> str:
        """Model and devices, for people."""

    @property
    def assumed_router(self) -> str:
        """The router that prices assume, for people; empty where the request says how often it is right."""

    @property
    def counts_unfinished(self) -> bool:
        """Whether the classes count unfinished trajectories, as at least as long as they are."""

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Sources of times that were not measured in the run itself: (times of what, source)."""

    def menu(self) -> Menu:
        """Everything that could be chosen, priced."""
