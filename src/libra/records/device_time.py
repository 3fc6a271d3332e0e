"""Attributes every second of every worker to a cause.

Invariant: the causes of a worker add up to its seconds since its first role, in any order of events. The seconds of a
cause never decrease. The module does no I/O and reads no clock: the caller reports events with their times, on any
clock that never goes back. Some durations are known only at their end: the parts of a step, and an engine's pause for
weights. No sum includes their seconds before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from libra.plan.transition import Role
from libra.records.causes import Cause

Seconds = Mapping[str, Mapping[Cause, float]]
"""Seconds by worker and cause. Causes without seconds are left out."""


class Phase(Enum):
    """Phase of the training side as a whole."""

    OUTSIDE = auto()  # outside the training loop: measurement, evaluation
    WAITING = auto()  # for a batch
    STEPPING = auto()
    PUBLISHING = auto()
    HELD = auto()  # a checkpoint is due, but a worker that joins or leaves holds the step boundary
    CHECKPOINTING = auto()
    AGAIN = auto()  # repeats steps that an interrupted run had already made


_TRAINER = {
    Phase.OUTSIDE: Cause.EVALUATING,
    Phase.WAITING: Cause.ROLLOUT_BOUND,
    Phase.STEPPING: Cause.COMPUTING,
    Phase.PUBLISHING: Cause.PUBLISHING,
    Phase.HELD: Cause.BOUNDARY,
    Phase.CHECKPOINTING: Cause.CHECKPOINTING,
    Phase.AGAIN: Cause.REDOING,
}
_UNPRODUCTIVE = {Phase.OUTSIDE: Cause.EVALUATING, Phase.AGAIN: Cause.REDOING}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step of one replica."""

    cause: Cause
    seconds: float


@dataclass(slots=True)
class _Device:
    since: float  # start of the time that is not booked yet
    cause: Cause = Cause.IDLE
    role: Role = Role.IDLE
    moving: bool = False  # whether it is between two roles
    lost: bool = False  # whether its process is lost and not replaced yet
    turns: int = 0  # number of turns in its engine
    tools: int = 0  # pending tool calls of episodes whose last turn it served
    loading: bool = False
    seconds: dict[Cause, float] = field(default_factory=dict)


class DeviceTime:
    """Seconds by worker and cause. `told` is called with each settled span of time: worker, cause, start and end. The
    spans of a worker are contiguous."""

    def __init__(self, told: Callable[[str, Cause, float, float], None] = lambda *_: None) -> None:
        self._told = told
        self._devices: dict[str, _Device] = {}
        self._phase = Phase.OUTSIDE
        self._held_back = True
        self._stepping_since = 0.0
        self._taken: dict[str, dict[Cause, float]] = {}

    def role(self, worker: str, role: Role, now: float) -> None:
        """Set the role of a worker. Its time begins with its first role."""
        device = self._devices.setdefault(worker, _Device(now))
        device.loading = False
        if role is Role.FAILED and device.role is Role.TRAIN and self._phase is Phase.STEPPING:
            self._book(worker, Cause.REDOING, now)  # the worker hangs, or its part of the step is lost
        device.moving = role is Role.DRAINING or (device.moving and role in (Role.IDLE, Role.JOINING))
        device.lost = role is Role.FAILED or (device.lost and role is Role.IDLE)
        device.role = role
        self._turn(worker, now)

    def turns(self, worker: str, change: int, now: float) -> int:
        """Add `change` turns to an engine; returns the new number."""
        device = self._devices[worker]
        device.turns += change
        self._turn(worker, now)
        return device.turns

    def tools(self, worker: str, change: int, now: float) -> None:
        """Add `change` to the number of episodes that wait for a tool and whose last turn the worker served."""
        device = self._devices[worker]
        device.tools += change
        self._turn(worker, now)

    def load(self, worker: str, now: float) -> None:
        """Record that an engine was told to load new weights. The engine loads them after its current iteration."""
        device = self._devices[worker]
        if device.role is Role.ROLLOUT and self._phase not in _UNPRODUCTIVE and not device.loading:
            self._book(worker, device.cause, now)
            device.loading = True

    def loaded(self, worker: str, seconds: float, now: float) -> None:
        """Record that an engine has loaded the weights, and paused for `seconds` seconds."""
        device = self._devices[worker]
        if device.loading:
            self._book(worker, device.cause, now - seconds)
            self._book(worker, Cause.LOADING, now)
            device.loading = False
            self._turn(worker, now)

    def phase(self, phase: Phase, now: float) -> None:
        """Set the phase of the training side."""
        self._phase = phase
        if phase is Phase.STEPPING:
            self._stepping_since = now
        self._turn_all(now)

    def stepped(self, parts: Mapping[str, Sequence[Part]], publish_seconds: float, now: float) -> None:
        """Record that a step is made, and that the publication of its weights begins. `parts` has the parts of each
        replica, in order from the step's start. The optimiser took the remaining seconds, except the last
        `publish_seconds`, which the writing of the new weights took.
        """
        for worker, device in self._devices.items():
            if device.role is Role.TRAIN and self._phase is Phase.STEPPING:
                at = self._stepping_since
                # A replica without parts joined after the step began.
                for part in parts.get(worker, (Part(Cause.BOUNDARY, now - at),)):
                    at += part.seconds
                    self._book(worker, part.cause, min(at, now))
                self._book(worker, Cause.COMPUTING, now - publish_seconds)
                self._book(worker, Cause.PUBLISHING, now)
        self.phase(Phase.PUBLISHING if self._phase is Phase.STEPPING else self._phase, now)

    def hold_back(self, held_back: bool, now: float) -> None:
        """Set whether the bound on staleness keeps groups from starting."""
        if held_back != self._held_back:
            self._held_back = held_back
            self._turn_all(now)

    def seconds(self, now: float) -> Seconds:
        """Seconds by worker and cause that are settled."""
        return {worker: self._settled(device, now) for worker, device in self._devices.items()}

    def under_way(self) -> dict[str, tuple[int, int]]:
        """Number of turns and of pending tool calls of every engine."""
        return {
            worker: (device.turns, device.tools)
            for worker, device in self._devices.items()
            if device.role is Role.ROLLOUT
        }

    def take(self, now: float) -> Seconds:
        """Settle all time until now under its present cause, and return the seconds since the last call."""
        gained: dict[str, dict[Cause, float]] = {}
        for worker, device in self._devices.items():
            self._book(worker, device.cause, now)
            before = self._taken.get(worker, {})
            gains = {cause: seconds - before.get(cause, 0.0) for cause, seconds in device.seconds.items()}
            gained[worker] = {cause: gains[cause] for cause in Cause if gains.get(cause, 0.0) > 0}
            self._taken[worker] = dict(device.seconds)
        return gained

    def _turn_all(self, now: float) -> None:
        for worker in self._devices:
            self._turn(worker, now)

    def _turn(self, worker: str, now: float) -> None:
        """Update the cause of a worker's time. If it changes, book the time until now under the old cause."""
        device = self._devices[worker]
        cause = self._cause(device)
        if cause is not device.cause and not device.loading:
            self._book(worker, device.cause, now)
            device.cause = cause

    def _book(self, worker: str, cause: Cause, until: float) -> None:
        device = self._devices[worker]
        if until > device.since:
            device.seconds[cause] = device.seconds.get(cause, 0.0) + until - device.since
            self._told(worker, cause, device.since, until)
            device.since = until

    def _settled(self, device: _Device, now: float) -> dict[Cause, float]:
        unsettled = device.loading or (device.role is Role.TRAIN and self._phase is Phase.STEPPING)
        open_seconds = 0.0 if unsettled else max(0.0, now - device.since)
        sums = {**device.seconds, device.cause: device.seconds.get(device.cause, 0.0) + open_seconds}
        return {cause: sums[cause] for cause in Cause if sums.get(cause, 0.0) > 0}

    def _cause(self, device: _Device) -> Cause:
        match device.role:
            case Role.TRAIN:
                return _TRAINER[self._phase]
            case Role.ROLLOUT:
                return self._engine_cause(device)
            case Role.DRAINING:
                return Cause.MOVING
            case Role.JOINING:
                return Cause.MOVING if device.moving else Cause.STARTING
            case Role.FAILED:
                return Cause.FAILED
            case Role.IDLE:
                return Cause.FAILED if device.lost else Cause.IDLE

    def _engine_cause(self, device: _Device) -> Cause:
        if self._phase in _UNPRODUCTIVE:
            return _UNPRODUCTIVE[self._phase]
        if device.turns:
            return Cause.GENERATING
        if device.tools:
            return Cause.TOOL_BOUND
        # While the trainers wait for a batch, its turns run on other engines.
        return Cause.TRAINING_BOUND if self._held_back and self._phase is not Phase.WAITING else Cause.NO_WORK
