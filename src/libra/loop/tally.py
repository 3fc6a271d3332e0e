"""What a sitting has counted so far, for whoever asks while it goes on.

Invariant: numbers only grow, except those of the last step; each is the sum of what the records of this sitting say.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from libra.exec.transitions import Moved
from libra.records.causes import Cause, total
from libra.records.schema import StepRecord

OUTCOMES = ("done", "undone", "failed")  # of moves


@dataclass(slots=True)
class Spell:
    """How often something happened, and how long it took in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass(slots=True)
class Tally:
    last: StepRecord | None = None
    steps: Spell = field(default_factory=Spell)
    trajectories_started: int = 0
    trajectories_trained: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    staleness: Counter[int] = field(default_factory=Counter)  # of trajectories trained on
    moves: dict[str, Spell] = field(default_factory=lambda: {outcome: Spell() for outcome in OUTCOMES})
    joins: Spell = field(default_factory=Spell)
    held: Spell = field(default_factory=Spell)  # steps that waited for joins
    device_seconds: dict[Cause, float] = field(default_factory=dict)  # of all workers, in the steps
    losses: Counter[str] = field(default_factory=Counter)  # by worker

    def step(self, record: StepRecord) -> None:
        self.last = record
        self.steps.add(record.step_seconds)
        self.trajectories_trained += record.trajectories
        self.generated_tokens += record.generated_tokens
        self.trained_tokens += record.trained_tokens
        self.device_seconds = total((self.device_seconds, *record.device_seconds.values()))
        for versions, trajectories in enumerate(record.staleness):
            self.staleness[versions] += trajectories

    def started(self, trajectories: int) -> None:
        self.trajectories_started += trajectories

    def moved(self, moved: Moved) -> None:
        self.moves[moved.outcome].add(moved.seconds)

    def joined(self, seconds: float, held_seconds: float) -> None:
        self.joins.add(seconds)
        self.held.add(held_seconds)

    def lost(self, worker: str) -> None:
        self.losses[worker] += 1
