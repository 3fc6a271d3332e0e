"""Workers die at any point, moves fail and hang, plans change, the controller is killed: nothing is lost, and nothing
is trained on twice."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.world import World, failure
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

FAULTS = 1000
NUMBERS = st.integers(0, 11)


@pytest.fixture(autouse=True)
def no_fsync() -> Iterator[None]:
    """The machine does not fail here, only the controller; syncing thousands of entries would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


class Faults(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="libra-faults-"))
        self.world = World(self.directory, steps=4)

    @rule(numbers=st.lists(NUMBERS, min_size=6, max_size=6))
    def plan(self, numbers: list[int]) -> None:
        rest = iter(numbers)
        self.world.plan(lambda below: next(rest) % below)

    @rule(which=NUMBERS)
    def go_on(self, which: int) -> None:
        self.world.go_on(which)

    @rule(which=NUMBERS, kind=NUMBERS)
    def fail(self, which: int, kind: int) -> None:
        self.world.fail(which, failure(kind))

    @rule(which=NUMBERS)
    def kill(self, which: int) -> None:
        self.world.kill(which)

    @rule()
    def hang(self) -> None:
        self.world.hang()

    @rule(seconds=st.sampled_from([1.0, 100.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        if self.world.applying is None:
            self.world.clock += seconds

    @rule(which=NUMBERS)
    def turns_end(self, which: int) -> None:
        self.world.feed()
        self.world.end_turn(which)

    @rule()
    def train(self) -> None:
        self.world.take()

    @rule()
    def publish(self) -> None:
        self.world.publish()

    @rule(killed=st.booleans())
    def checkpoint(self, killed: bool) -> None:
        self.world.checkpoint(killed)

    @rule()
    def crash(self) -> None:
        self.world.crash()

    @invariant()
    def sound(self) -> None:
        self.world.require_sound()

    def teardown(self) -> None:
        try:
            if self.can_go_on():
                self.world.finish()
                self.world.require_everything_trained_once()
        finally:
            self.world.close()
            self.world.loop.close()
            shutil.rmtree(self.directory)

    def can_go_on(self) -> bool:
        """Whether a slot is left that may generate; otherwise no plan exists, and a run says so and ends."""
        return any(len(worker.allowed) == 2 or "rollout" in worker.allowed for worker in self.world.pool.healthy())


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


def test_a_thousand_faults_in_one_run(tmp_path: Path) -> None:
    """Also in the same run, one after the other: what an accident leaves behind must not add up."""
    draw = random.Random(20)
    world = World(tmp_path, steps=200)
    try:
        while sum(world.faults.values()) < FAULTS:
            match draw.choices(
                ["plan", "go on", "fail", "kill", "hang", "turn", "train", "checkpoint", "crash", "hour"],
                [20, 50, 6, 6, 2, 60, 30, 3, 2, 8],
            )[0]:
                case "plan":
                    world.plan(draw.randrange)
                case "go on":
                    world.go_on(draw.randrange(12))
                case "fail":
                    world.fail(draw.randrange(12), failure(draw.randrange(4)))
                case "kill":
                    world.kill(draw.randrange(12))
                case "hang":
                    world.hang()
                case "turn":
                    world.feed()
                    world.end_turn(draw.randrange(12))
                case "train":
                    world.take()
                    world.publish()
                case "checkpoint":
                    world.checkpoint(killed=draw.random() < 0.3)
                case "crash":
                    world.crash()
                case "hour" if world.applying is None:
                    world.clock += 4000.0
        assert min(world.faults.values()) > 20, world.faults
        if not any("rollout" in worker.allowed for worker in world.pool.healthy()):
            world.crash()  # every slot was retired: a new session has them all again
        world.finish()
        world.require_everything_trained_once()
    finally:
        world.close()
        world.loop.close()
