"""The protocol of planning requests, for slots of one machine or a cluster of GPUs."""

from __future__ import annotations

from typing import Protocol

from libra.lengths import TrajectoryClass
from libra.plan.options.menu import Menu


class PlanningRequest(Protocol):
    """A request to the planner. Times are seconds, lengths are tokens."""

    @property
    def classes(self) -> tuple[TrajectoryClass, ...]:
        """Classes of trajectories, shortest first; their shares sum to 1."""

    @property
    def trajectories(self) -> int:
        """Trajectories that one optimiser step trains on."""

    @property
    def staleness(self) -> int:
        """Versions by which a trajectory's oldest token may lag; 0: nothing overlaps."""

    @property
    def devices(self) -> int:
        """Number of devices, without those that serve users."""

    @property
    def longest_context(self) -> int:
        """Tokens of the longest possible context."""

    @property
    def unknown_tool_seconds(self) -> float:
        """Assumed seconds of a tool call of unknown duration."""

    @property
    def refreshes(self) -> bool:
        """Whether engines compute contexts again after an update of the weights."""

    @property
    def title(self) -> str:
        """Model and devices, as a text."""

    @property
    def assumed_router(self) -> str:
        """The router assumed by prices, as a text; empty if the request gives its hit rate."""

    @property
    def counts_unfinished(self) -> bool:
        """Whether the classes include unfinished trajectories with their length so far."""

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Sources of times that were not measured in the run itself: (name of the times, source)."""

    def menu(self) -> Menu:
        """The menu of priced options."""
