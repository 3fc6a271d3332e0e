"""Outcome of a post-training run.

Invariant: tokens and trajectories are counted once, after training has used them. Seconds are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.sim.training_run.borrowed import BorrowedOutcome


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One optimiser step."""

    version: int  # the version that the step made
    started: float  # seconds at which the trainer began the batch, or a part of it
    ended: float  # seconds at which the optimiser had made the version
    waited: float  # seconds since the previous step in which the trainer waited for groups or another layout
    training: float  # seconds
    trajectories: int
    generated_tokens: int
    final_context_tokens: int  # tokens of training, summed over trajectories
    longest_context: int
    staleness: float  # versions from the start of a trajectory to its training, mean over trajectories
    worst_staleness: int
    training_devices: int
    generating_devices: int  # of own engines in service when the trainer began the last part of its batch


@dataclass(frozen=True, slots=True)
class EngineSpan:
    """One of the run's own engines between two published versions. Times are seconds."""

    engine: str
    up_to: int  # tokens: largest final context of its bucket
    start: float
    end: float
    busy: float  # seconds of the span with work


@dataclass(frozen=True, slots=True)
class PlanChange:
    """One change of the plan during the run."""

    version: int
    seconds: float  # at which it was decided
    stopped: int  # engines
    started: int
    training_devices: int  # of the new plan
    generating_devices: int


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One simulated run."""

    system: str
    steps: tuple[SimulatedStep, ...]
    changes: tuple[PlanChange, ...]
    seconds: float  # until the last step's weights were published
    engine_seconds: float  # device seconds in which engines were in service
    engine_busy: float  # part of `engine_seconds` in which engines had work
    placements: int  # of turns, and of the rests of stopped turns
    migrations: int  # placements on another engine than before
    migrated_tokens: int  # context tokens of the migrations
    moved_tokens: int  # part of `migrated_tokens` whose KV was moved; the rest was computed again
    interrupted: int  # turns that were stopped to continue elsewhere
    preemptions: int
    lenders: tuple[BorrowedOutcome, ...] = ()  # of borrowed devices
    engines: tuple[EngineSpan, ...] = ()  # in service when a version was published, in order of time

    @property
    def generated_tokens(self) -> int:
        return sum(step.generated_tokens for step in self.steps)

    @property
    def throughput(self) -> float:
        """Generated tokens per second. Only tokens that training has used count."""
        return self.generated_tokens / self.seconds

    @property
    def migrated_share(self) -> float:
        """Context tokens of migrations, over all tokens that were trained on."""
        return self.migrated_tokens / sum(step.final_context_tokens for step in self.steps)

    @property
    def step_seconds(self) -> float:
        """Mean seconds from one published version to the next."""
        return self.seconds / len(self.steps)

    def settled_step_seconds(self, left_out: int) -> float:
        """`step_seconds` without the first `left_out` steps, which begin with idle engines; over all steps if no others
        remain."""
        steps = self.steps[left_out:]
        if not steps or not left_out:
            return self.step_seconds
        return (self.steps[-1].ended - self.steps[left_out - 1].ended) / len(steps)

    @property
    def trainer_share(self) -> float:
        """Share of the time in which the trainer computes."""
        return sum(step.training for step in self.steps) / self.seconds

    @property
    def engine_share(self) -> float:
        """Share of `engine_seconds` in which engines have work. If trainers share the devices, `engine_seconds` include
        training."""
        return self.engine_busy / self.engine_seconds
