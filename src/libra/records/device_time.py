"""What every second of every worker went to.

Invariant: a worker's seconds since it was first heard of add up over the causes, whatever happens in which order; no
cause has less than before. Pure: the caller says what happens and when, on any clock that does not go back.

Some things are known only when they are over: how a step was divided, and how long an engine stood still for weights.
Until then the seconds concerned are not settled, and are in no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from libra.records.causes import Cause
from libra.records.roles import Role

Seconds = Mapping[str, Mapping[Cause, float]]
"""Worker to cause to seconds; causes without any are left out."""


class Phase(Enum):
    """What the training side does, as a whole."""

    OUTSIDE = auto()  # no steps are to be made: measurement, evaluation
    WAITING = auto()  # for a batch
    STEPPING = auto()
    PUBLISHING = auto()
    HELD = auto()  # a checkpoint is due, and the step boundary is somebody else's
    CHECKPOINTING = auto()
    AGAIN = auto()  # steps that an interrupted run had made already


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
    """So many seconds of a step, for one replica."""

    cause: Cause
    seconds: float


@dataclass(slots=True)
class _Device:
    since: float  # the cause holds
    cause: Cause = Cause.IDLE
    role: Role = Role.IDLE
    moving: bool = False  # on its way from one role to another
    lost: bool = False  # and nothing was started in its place yet
    turns: int = 0  # that its engine has
    tools: int = 0  # called by episodes that it served last
    loading: bool = False
    seconds: dict[Cause, float] = field(default_factory=dict)


class DeviceTime:
    """`told` gets each span of time that is settled: worker, cause, start and end. A worker's spans follow each other
    without a gap."""

    def __init__(self, told: Callable[[str, Cause, float, float], None] = lambda *_: None) -> None:
        self._told = told
        self._devices: dict[str, _Device] = {}
        self._phase = Phase.OUTSIDE
        self._held_back = True
        self._stepping_since = 0.0
        self._taken: dict[str, dict[Cause, float]] = {}

    def role(self, worker: str, role: Role, now: float) -> None:
        """A worker has this role from now on; its time begins with the first."""
        device = self._devices.setdefault(worker, _Device(now))
        device.loading = False
        if role is Role.FAILED and device.role is Role.TRAIN and self._phase is Phase.STEPPING:
            self._book(worker, Cause.REDOING, now)  # it hangs, or what it has computed is gone with it
        device.moving = role is Role.DRAINING or (device.moving and role in (Role.IDLE, Role.JOINING))
        device.lost = role is Role.FAILED or (device.lost and role is Role.IDLE)
        device.role = role
        self._turn(worker, now)

    def turns(self, worker: str, change: int, now: float) -> int:
        """An engine has so many turns more, or less; returns how many."""
        device = self._devices[worker]
        device.turns += change
        self._turn(worker, now)
        return device.turns

    def tools(self, worker: str, change: int, now: float) -> None:
        """So many more, or less, of the episodes that it served last wait for a tool."""
        device = self._devices[worker]
        device.tools += change
        self._turn(worker, now)

    def load(self, worker: str, now: float) -> None:
        """An engine is told to take new weights: it ends an iteration first."""
        device = self._devices[worker]
        if device.role is Role.ROLLOUT and self._phase not in _UNPRODUCTIVE and not device.loading:
            self._book(worker, device.cause, now)
            device.loading = True

    def loaded(self, worker: str, seconds: float, now: float) -> None:
        """It has taken them, and stood still for so long."""
        device = self._devices[worker]
        if device.loading:
            self._book(worker, device.cause, now - seconds)
            self._book(worker, Cause.LOADING, now)
            device.loading = False
            self._turn(worker, now)

    def phase(self, phase: Phase, now: float) -> None:
        """The training side does this from now on."""
        self._phase = phase
        if phase is Phase.STEPPING:
            self._stepping_since = now
        self._turn_all(now)

    def stepped(self, parts: Mapping[str, Sequence[Part]], publish_seconds: float, now: float) -> None:
        """A step is made, and its weights are published from now on: how each replica spent it, one thing after the
        other from its beginning. What is left is the optimiser's, and at the end somebody wrote the new weights."""
        for worker, device in self._devices.items():
            if device.role is Role.TRAIN and self._phase is Phase.STEPPING:
                at = self._stepping_since
                # Who takes no part has come in after the step had begun.
                for part in parts.get(worker, (Part(Cause.BOUNDARY, now - at),)):
                    at += part.seconds
                    self._book(worker, part.cause, min(at, now))
                self._book(worker, Cause.COMPUTING, now - publish_seconds)
                self._book(worker, Cause.PUBLISHING, now)
        self.phase(Phase.PUBLISHING if self._phase is Phase.STEPPING else self._phase, now)

    def hold_back(self, held_back: bool, now: float) -> None:
        """Whether there are groups that staleness does not let start yet."""
        if held_back != self._held_back:
            self._held_back = held_back
            self._turn_all(now)

    def seconds(self, now: float) -> Seconds:
        """Until now, as far as it is settled."""
        return {worker: self._settled(device, now) for worker, device in self._devices.items()}

    def under_way(self) -> dict[str, tuple[int, int]]:
        """Turns and tool calls of every engine."""
        return {
            worker: (device.turns, device.tools)
            for worker, device in self._devices.items()
            if device.role is Role.ROLLOUT
        }

    def take(self, now: float) -> Seconds:
        """Since the last call; everything until now is settled as it looks now."""
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
        """What was true until now is booked, if something else is from now on."""
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
        # While the trainers wait, something is generated that they wait for; elsewhere, as it is not here.
        return Cause.TRAINING_BOUND if self._held_back and self._phase is not Phase.WAITING else Cause.NO_WORK
