"""Every second of every worker has one cause: against a model that paints ticks, for any order of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.backends.protocols import Share, StepResult
from libra.loop.recorder import step_parts
from libra.plan.transition import Role
from libra.records.causes import Cause
from libra.records.device_time import DeviceTime, Part, Phase

WORKERS = ("core-0", "hybrid-0", "rollout-0")
UNPRODUCTIVE = (Phase.OUTSIDE, Phase.AGAIN)


@dataclass
class Painted:
    """One worker as a list of ticks, each of one cause; what is known late is painted over."""

    role: Role = Role.IDLE
    path: list[Role] = field(default_factory=list)  # since it last worked
    turns: int = 0
    tools: int = 0
    ticks: list[Cause] = field(default_factory=list)
    final: int = 0  # ticks that are not painted over any more
    told_to_load: tuple[int, Cause] | None = None  # at which tick, and what it did then
    trains_since: int = 0


class Painter:
    def __init__(self) -> None:
        self.workers = {name: Painted() for name in WORKERS}
        self.phase, self.held_back, self.step_began, self.now = Phase.OUTSIDE, True, 0, 0

    def cause(self, worker: Painted) -> Cause:
        if worker.told_to_load is not None:
            return worker.told_to_load[1]
        if worker.role is Role.DRAINING:
            return Cause.MOVING
        if worker.role is Role.JOINING:
            last = [role for role in worker.path if role in (Role.DRAINING, Role.FAILED)][-1:]
            return Cause.MOVING if last == [Role.DRAINING] else Cause.STARTING
        if worker.role is Role.FAILED:
            return Cause.FAILED
        if worker.role is Role.IDLE:
            since = [role for role in worker.path if role in (Role.FAILED, Role.JOINING, Role.DRAINING)][-1:]
            return Cause.FAILED if since == [Role.FAILED] else Cause.IDLE
        if self.phase is Phase.OUTSIDE:
            return Cause.EVALUATING
        if self.phase is Phase.AGAIN:
            return Cause.REDOING
        if worker.role is Role.TRAIN:
            return {
                Phase.WAITING: Cause.ROLLOUT_BOUND,
                Phase.STEPPING: Cause.COMPUTING,
                Phase.PUBLISHING: Cause.PUBLISHING,
                Phase.HELD: Cause.BOUNDARY,
                Phase.CHECKPOINTING: Cause.CHECKPOINTING,
            }[self.phase]
        if worker.turns > 0:
            return Cause.GENERATING
        if worker.tools > 0:
            return Cause.TOOL_BOUND
        return Cause.TRAINING_BOUND if self.phase is not Phase.WAITING and self.held_back else Cause.NO_WORK

    def pass_ticks(self, ticks: int) -> None:
        for worker in self.workers.values():
            worker.ticks += [self.cause(worker)] * ticks
        self.now += ticks

    def role(self, name: str, role: Role) -> None:
        worker = self.workers[name]
        if role in (Role.TRAIN, Role.ROLLOUT):
            worker.path = []
        else:
            worker.path.append(role)
        if role is Role.TRAIN and worker.role is not Role.TRAIN:
            worker.trains_since = self.now
        if role is Role.FAILED and worker.role is Role.TRAIN and self.phase is Phase.STEPPING:
            for tick in range(max(self.step_began, worker.trains_since, worker.final), self.now):
                worker.ticks[tick] = Cause.REDOING
        worker.role, worker.told_to_load = role, None

    def load(self, name: str) -> None:
        worker = self.workers[name]
        if worker.role is Role.ROLLOUT and worker.told_to_load is None and self.phase not in UNPRODUCTIVE:
            worker.told_to_load = self.now, self.cause(worker)

    def loaded(self, name: str, ticks: int) -> None:
        worker = self.workers[name]
        if worker.told_to_load is not None:
            for tick in range(max(worker.told_to_load[0], worker.final, self.now - ticks), self.now):
                worker.ticks[tick] = Cause.LOADING
            worker.told_to_load = None

    def stepped(self, parts: dict[str, list[tuple[Cause, int]]], publishing: int) -> None:
        if self.phase is not Phase.STEPPING:
            return
        for name, worker in self.workers.items():
            if worker.role is Role.TRAIN:
                if name in parts:
                    whole = [cause for cause, ticks in parts[name] for _ in range(ticks)]
                    whole += [Cause.COMPUTING] * (self.now - self.step_began - publishing - len(whole))
                    whole += [Cause.PUBLISHING] * (self.now - self.step_began)
                else:
                    whole = [Cause.BOUNDARY] * (self.now - self.step_began)
                for tick in range(max(self.step_began, worker.trains_since, worker.final), self.now):
                    worker.ticks[tick] = whole[tick - self.step_began]
        self.phase = Phase.PUBLISHING

    def take(self) -> None:
        for worker in self.workers.values():
            worker.final = self.now

    def sums(self, name: str) -> dict[Cause, float]:
        return {cause: float(ticks) for cause, ticks in Counter(self.workers[name].ticks).items()}


Event = tuple[int, int, int, list[int]]  # ticks before it, which, of whom, numbers for whatever it needs
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), st.lists(st.integers(0, 7), min_size=5, max_size=5)
    ),
    min_size=30,
    max_size=60,
)
# What is most of a run is drawn most often: a step with all its parts needs several events in their order.
ROLES = (Role.ROLLOUT, Role.TRAIN, Role.FAILED, Role.DRAINING, Role.JOINING, Role.IDLE, Role.TRAIN, Role.ROLLOUT)
PHASES = (Phase.STEPPING, Phase.WAITING, Phase.OUTSIDE, Phase.CHECKPOINTING, Phase.PUBLISHING, Phase.AGAIN, Phase.HELD)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_seconds_are_those_of_painted_ticks(events: list[Event]) -> None:
    spans: dict[str, list[tuple[Cause, float, float]]] = {name: [] for name in WORKERS}
    devices = DeviceTime(lambda worker, cause, start, end: spans[worker].append((cause, start, end)))
    painter = Painter()
    for name in WORKERS:
        devices.role(name, Role.IDLE, 0.0)
        painter.role(name, Role.IDLE)
    for name, role in zip(WORKERS, (Role.TRAIN, Role.TRAIN, Role.ROLLOUT), strict=True):
        devices.role(name, role, 0.0)
        painter.role(name, role)
    taken = {name: Counter[Cause]() for name in WORKERS}
    before: dict[str, dict[Cause, float]] = {name: {} for name in WORKERS}
    for ticks, which, of, numbers in events:
        painter.pass_ticks(ticks)
        now, name = float(painter.now), WORKERS[of]
        match which:
            case 0 | 1:
                role = ROLES[numbers[0]]
                devices.role(name, role, now)
                painter.role(name, role)
            case 2 | 3:
                change = 1 if numbers[0] % 2 or painter.workers[name].turns == 0 else -1
                devices.turns(name, change, now)
                painter.workers[name].turns += change
            case 4:
                change = 1 if numbers[0] % 2 or painter.workers[name].tools == 0 else -1
                devices.tools(name, change, now)
                painter.workers[name].tools += change
            case 5:
                devices.load(name, now)
                painter.load(name)
            case 6:
                devices.loaded(name, float(numbers[0]), now)
                painter.loaded(name, numbers[0])
            case 7 if painter.phase is Phase.STEPPING:
                causes = (Cause.BOUNDARY, Cause.REDOING, Cause.COMPUTING, Cause.EXCHANGING)
                short = [number % 3 for number in numbers]
                parts = {name: list(zip(causes, short, strict=False)) for name in WORKERS[: numbers[0] % 4]}
                room = painter.now - painter.step_began
                if all(sum(ticks for _, ticks in row) + short[4] <= room for row in parts.values()):
                    given_parts = {
                        name: [Part(cause, float(ticks)) for cause, ticks in row] for name, row in parts.items()
                    }
                    devices.stepped(given_parts, float(short[4]), now)
                    painter.stepped(parts, short[4])
            case 7 | 8:
                phase = PHASES[numbers[0] % len(PHASES)]
                if (painter.phase, phase) != (Phase.STEPPING, Phase.STEPPING):
                    devices.phase(phase, now)
                    painter.phase = phase
                    painter.step_began = painter.now if phase is Phase.STEPPING else painter.step_began
            case _:
                if numbers[0] % 2:
                    devices.hold_back(not painter.held_back, now)
                    painter.held_back = not painter.held_back
                else:
                    for worker, seconds in devices.take(now).items():
                        taken[worker].update(seconds)
                    painter.take()
        for worker, seconds in devices.seconds(now).items():
            assert all(seconds.get(cause, 0.0) >= spent for cause, spent in before[worker].items())
            assert sum(seconds.values()) <= now
            before[worker] = dict(seconds)
    end = float(painter.now)
    for worker, seconds in devices.take(end).items():
        assert min(seconds.values(), default=0.0) >= 0
        taken[worker].update(seconds)
    for name in WORKERS:
        assert devices.seconds(end)[name] == painter.sums(name) == dict(taken[name])
        assert sum(taken[name].values()) == end
        assert all(start < stop for _, start, stop in spans[name])
        assert all(left[2] == right[1] for left, right in pairwise(spans[name]))


@pytest.fixture
def devices() -> DeviceTime:
    """An engine and a replica, as the steps begin."""
    made = DeviceTime()
    made.role("core-0", Role.TRAIN, 0.0)
    made.role("rollout-0", Role.ROLLOUT, 0.0)
    made.phase(Phase.WAITING, 0.0)
    return made


def test_an_engine_waits_for_tools_for_training_or_for_nothing(devices: DeviceTime) -> None:
    devices.turns("rollout-0", 2, 1.0)
    devices.turns("rollout-0", -1, 2.0)
    devices.tools("rollout-0", 1, 2.0)
    devices.turns("rollout-0", -1, 4.0)  # the other one waits for its tool
    devices.tools("rollout-0", -1, 7.0)
    devices.phase(Phase.STEPPING, 12.0)
    devices.hold_back(False, 20.0)  # the last groups have been started
    assert devices.seconds(33.0)["rollout-0"] == {
        Cause.GENERATING: 3.0,
        Cause.TOOL_BOUND: 3.0,
        Cause.TRAINING_BOUND: 8.0,
        Cause.NO_WORK: 1.0 + 5.0 + 13.0,
    }


def test_an_engine_that_takes_weights_ends_its_iteration_first(devices: DeviceTime) -> None:
    devices.turns("rollout-0", 1, 0.0)
    devices.load("rollout-0", 5.0)
    assert devices.seconds(5.5)["rollout-0"] == {Cause.GENERATING: 5.0}  # more is not known yet
    devices.turns("rollout-0", -1, 5.5)
    devices.loaded("rollout-0", 0.75, 6.0)
    assert devices.seconds(7.0)["rollout-0"] == {Cause.GENERATING: 5.25, Cause.LOADING: 0.75, Cause.NO_WORK: 1.0}


def test_a_step_that_was_made_again_after_a_loss(devices: DeviceTime) -> None:
    """The boundary was held, one attempt failed, and the slower of two replicas is waited for."""
    devices.role("core-1", Role.TRAIN, 0.0)
    devices.phase(Phase.STEPPING, 10.0)
    shares = (Share("core-0", 4.0, 3.0), Share("core-1", 6.0, 1.0))
    result = StepResult(1, 0, 0, 2, 9.0, 6.0, 1.0, 0.5, 0, 0, 0.0, 1.0, 0.0, 1.0, 1.0, 2.0, shares)
    devices.stepped(step_parts(result), result.publish_seconds, 22.0)
    devices.phase(Phase.WAITING, 25.0)
    common = {Cause.ROLLOUT_BOUND: 10.0, Cause.BOUNDARY: 1.0, Cause.REDOING: 2.0, Cause.PUBLISHING: 3.5}
    seconds = devices.seconds(25.0)
    waited = {Cause.REPLICA_BOUND: 2.0, Cause.EXCHANGING: 1.0}
    assert seconds["core-0"] == {**common, Cause.COMPUTING: 4.0 + 1.5, **waited}
    assert seconds["core-1"] == {**common, Cause.COMPUTING: 6.0 + 1.5, Cause.EXCHANGING: 1.0}


def test_what_a_lost_replica_did_of_its_last_step_is_done_again(devices: DeviceTime) -> None:
    """It has hung in it, or what it had computed is gone."""
    devices.role("hybrid-0", Role.TRAIN, 0.0)
    devices.phase(Phase.STEPPING, 10.0)
    devices.role("hybrid-0", Role.FAILED, 34.0)
    devices.role("hybrid-0", Role.IDLE, 34.0)
    assert devices.seconds(36.0)["hybrid-0"] == {Cause.ROLLOUT_BOUND: 10.0, Cause.REDOING: 24.0, Cause.FAILED: 2.0}


def test_a_start_is_not_a_move_and_a_loss_lasts_until_the_next_start() -> None:
    devices = DeviceTime()
    path = [
        (Role.IDLE, 0.0), (Role.JOINING, 1.0), (Role.ROLLOUT, 3.0), (Role.DRAINING, 3.0), (Role.IDLE, 7.0),
        (Role.JOINING, 7.0), (Role.TRAIN, 15.0), (Role.FAILED, 15.0), (Role.IDLE, 15.0), (Role.JOINING, 31.0),
        (Role.TRAIN, 63.0),
    ]  # fmt: skip
    for role, now in path:
        devices.role("hybrid-0", role, now)
    assert devices.seconds(127.0)["hybrid-0"] == {
        Cause.IDLE: 1.0,
        Cause.STARTING: 2.0 + 32.0,
        Cause.MOVING: 4.0 + 8.0,
        Cause.FAILED: 16.0,
        Cause.EVALUATING: 64.0,
    }
