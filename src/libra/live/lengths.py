"""Lengths of a gateway's trajectories, for a planner.

Invariant: a finished trajectory counts in full. A trajectory that its client never finished counts as a lower bound.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from libra.lengths.cohorts import OCTAVES
from libra.lengths.tracker import LengthTracker
from libra.trajectory import Trajectory

_UNFINISHED = 1024  # the latest unfinished trajectories that count
_CLASSES = 8


@dataclass(slots=True)
class SeenLengths:
    """Statistics of ended trajectories. Call `ended` for each trajectory that ends."""

    tracker: LengthTracker = field(default_factory=LengthTracker)
    untracked: int = 0  # number of trajectories that are too long for the tracker
    _finished: int = 0
    _unfinished: deque[Trajectory] = field(default_factory=lambda: deque(maxlen=_UNFINISHED))

    def ended(self, trajectory: Trajectory) -> None:
        if trajectory.peak_context >= 2**OCTAVES:
            self.untracked += 1
        elif trajectory.finished:
            self.tracker.observe(trajectory)
            self._finished += 1
        else:
            self._unfinished.append(trajectory)

    def summary(self) -> dict[str, Any]:
        """Numbers of trajectories, and their classes by final context, shortest first, as JSON values."""
        classes: list[dict[str, float]] = []
        if self._finished:
            self.tracker.observe_running(self._unfinished)
            classes = [
                {
                    "share": found.share,
                    "mean_context": found.mean_context,
                    "peak_context": found.peak_context,
                    "generated": found.generated,
                    "turns": found.turns,
                    "tool_seconds": found.tool_seconds,
                }
                for found in self.tracker.classes(_CLASSES)
            ]
        counts = {"finished": self._finished, "unfinished": len(self._unfinished), "untracked": self.untracked}
        return counts | {"classes": classes}
