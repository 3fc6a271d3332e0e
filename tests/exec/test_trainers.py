"""The replicas as one unit: who gets which samples, who is asked again, and what is no step at all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import pytest
from far_end import PATIENCE, FarEnd, connect
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.exec.handles import Handle, WorkerFailedError, WorkerLostError
from libra.exec.messages import Done, Failure, Message, Regroup, Regrouped, Sample, Stop, Train, Trained
from libra.exec.trainers import CoreLostError, DivergedError, Trainers, split_evenly

PORT = 29511
GONE = Failure("gradient exchange of 2 replicas failed", peer_lost=True)


def sample(number: int, length: int) -> Sample:
    return Sample(f"s{number}", [5] * length, [True] * length, [-1.0] * length, [0] * length, 1.0)


SAMPLES = [sample(0, 9), sample(1, 4), sample(2, 4), sample(3, 1)]


def trained(version: int, hash: int = 7, seconds: float = 1.0, tokens: int = 5) -> Trained:
    return Trained(version, 99, hash, seconds, seconds / 4, 0.125, 2 * tokens, tokens, 1.0, 1.5 * tokens, 0.5, 3.0)


class Replica:
    """A trainer at the far end of a real handle: answers what it was told to, or as one that succeeds."""

    def __init__(self, handle: Handle, far: FarEnd) -> None:
        self.handle = handle
        self.orders: list[Message] = []
        self.to_train: deque[Message | None] = deque()  # answers to Train; None: the process dies
        self._far = far
        self._life = asyncio.create_task(self._live())

    @property
    def trains(self) -> list[Train]:
        return [order for order in self.orders if isinstance(order, Train)]

    @property
    def memberships(self) -> list[Regroup]:
        return [order for order in self.orders if isinstance(order, Regroup)]

    async def end(self) -> None:
        await self.handle.stop()
        await self._life

    async def _live(self) -> None:
        while True:
            try:
                order = await self._far.receive()
            except ConnectionError:
                return
            self.orders.append(order)
            answer: Message | None = Done()
            match order:
                case Regroup():
                    answer = Regrouped(order.generation, 0.0)
                case Train():
                    answer = self.to_train.popleft() if self.to_train else trained(order.version)
            if answer is None:
                self._far.close()
                return
            self._far.send(answer)
            if isinstance(order, Stop):
                self._far.close()
                return


def together(scenario: Callable[[Trainers, Replica, Replica], Awaitable[None]]) -> None:
    """Run a scenario with a core replica and a hybrid one that has joined it."""

    async def run() -> None:
        core = Replica(*await connect(Handle, lambda name, why: None, "core-0"))
        hybrid = Replica(*await connect(Handle, lambda name, why: None, "hybrid-0"))
        trainers = Trainers(core.handle, lambda: PORT)
        await trainers.join(hybrid.handle)
        try:
            await asyncio.wait_for(scenario(trainers, core, hybrid), PATIENCE)
        finally:
            await asyncio.gather(core.end(), hybrid.end())

    asyncio.run(run())


def test_joining_and_leaving() -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        assert (trainers.names(), trainers.size) == (("core-0", "hybrid-0"), 2)
        assert core.memberships == [Regroup(1, 0, 2, PORT, share_state=True)]
        assert hybrid.memberships == [Regroup(1, 1, 2, PORT, share_state=True)]
        assert await trainers.leave("hybrid-0") is hybrid.handle
        assert core.memberships[1:] == [Regroup(2, 0, 1, PORT, share_state=False)]
        assert len(hybrid.memberships) == 1
        with pytest.raises(ValueError, match="core-0 is the core trainer, which never leaves"):
            await trainers.leave("core-0")
        await trainers.join(hybrid.handle)
        assert hybrid.memberships[1:] == [Regroup(3, 1, 2, PORT, share_state=True)]

    together(scenario)


def test_a_step_of_two() -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        core.to_train.append(trained(5, seconds=1.0, tokens=9))
        hybrid.to_train.append(trained(5, seconds=3.0, tokens=1))
        result = await trainers.step(5, SAMPLES, sequences=8, tokens=50)
        [first], [second] = core.trains, hybrid.trains
        # The core alone counts the batch and publishes, into the buffer that the version before does not use.
        assert first == Train(5, [SAMPLES[0]], 8, 50, publish_to=1)
        assert second == Train(5, SAMPLES[1:], 0, 0, publish_to=-1)
        assert (result.version, result.checksum, result.buffer, result.replicas) == (5, 99, 1, 2)
        # Who waits for the others in the exchange is not slow: the exchange takes what it takes the last to come.
        assert (result.compute_seconds, result.exchange_seconds) == (3.0, 0.25)
        assert (result.forward_tokens, result.generated_tokens) == (20, 10)
        assert (result.clip_share, result.behaviour_weight_mean, result.prox_gap_mean) == (0.2, 1.5, 0.1)

    together(scenario)


def test_a_step_without_a_sample() -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        for replica in (core, hybrid):
            replica.to_train.append(Trained(1, 99, 7, 0.5, 0.1, 0.1, 0, 0, 0.0, 0.0, 0.0, 0.0))
        result = await trainers.step(1, [], sequences=8, tokens=50)
        assert core.trains == [Train(1, [], 8, 50, publish_to=1)]
        assert (result.clip_share, result.behaviour_weight_mean, result.prox_gap_mean) == (0.0, 1.0, 0.0)

    together(scenario)


def test_when_a_replica_is_lost_before_the_exchange_the_rest_make_the_same_step() -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        hybrid.to_train.append(None)
        core.to_train.append(GONE)
        result = await trainers.step(2, SAMPLES, sequences=8, tokens=50)
        assert core.memberships[1:] == [Regroup(2, 0, 1, PORT, share_state=True)]
        lost, made = core.trains
        assert lost.samples == [SAMPLES[0]]
        assert (made.version, made.sequences, made.tokens, made.publish_to) == (2, 8, 50, 0)
        assert sorted(s.id for s in made.samples) == [s.id for s in SAMPLES]
        assert (result.replicas, trainers.names()) == (1, ("core-0",))

    together(scenario)


def test_a_lost_core_is_an_end() -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        core.to_train.append(None)
        hybrid.to_train.append(GONE)
        with pytest.raises(CoreLostError, match="core-0 is gone during step 2"):
            await trainers.step(2, SAMPLES, 8, 50)

    together(scenario)


def test_a_replica_that_died_since_the_last_step_keeps_nobody_from_joining_or_leaving() -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        other, third = [Replica(*await connect(Handle, lambda name, why: None, name)) for name in ("other", "third")]
        hybrid.handle.declare_lost("killed")
        await trainers.join(other.handle)
        assert trainers.names() == ("core-0", "other")
        await trainers.join(third.handle)
        other.handle.declare_lost("killed")
        await trainers.leave("third")
        assert trainers.names() == ("core-0",)
        with pytest.raises(WorkerLostError, match="replica hybrid-0 went away before it could leave"):
            await trainers.leave("hybrid-0")
        await asyncio.gather(other.end(), third.end())

    together(scenario)


def test_replicas_that_differ_are_an_end() -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        core.to_train.append(trained(2, hash=7))
        hybrid.to_train.append(trained(2, hash=8))
        with pytest.raises(DivergedError, match="after step 2 the replicas core-0, hybrid-0 hold different parameters"):
            await trainers.step(2, SAMPLES, 8, 50)

    together(scenario)


@pytest.mark.parametrize(
    ("hybrid_says", "message"), [(Failure("out of memory"), "out of memory"), (GONE, "gradient exchange")]
)
def test_a_failure_without_a_loss_is_not_tried_again(hybrid_says: Failure, message: str) -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        core.to_train.append(GONE if hybrid_says.peer_lost else trained(2))
        hybrid.to_train.append(hybrid_says)
        with pytest.raises(WorkerFailedError, match=message):
            await trainers.step(2, SAMPLES, 8, 50)
        assert len(core.trains) == 1

    together(scenario)


def test_a_membership_changes_between_two_steps() -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        async with trainers.boundary:
            leaving = asyncio.create_task(trainers.leave("hybrid-0"))
            stepping = asyncio.create_task(trainers.step(1, SAMPLES, 8, 50))
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(core.orders) == 1  # the first membership
        await leaving
        assert (await stepping).replicas == 1
        assert hybrid.trains == []

    together(scenario)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 4))
def test_every_sample_has_one_replica_and_the_loads_are_even(lengths: list[int], parts: int) -> None:
    samples = [sample(number, length) for number, length in enumerate(lengths)]
    shares = split_evenly(samples, parts)
    assert len(shares) == parts
    assert sorted(s.id for share in shares for s in share) == sorted(s.id for s in samples)
    loads = [sum(len(s.tokens) for s in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_a_replica_that_dies_after_the_exchange_does_not_undo_the_step() -> None:
    async def scenario(trainers: Trainers, core: Replica, hybrid: Replica) -> None:
        hybrid.to_train.append(None)  # dies, but its gradient was in the sum: the core has stepped
        result = await trainers.step(2, SAMPLES, sequences=8, tokens=50)
        assert [order.version for order in core.trains] == [2]
        assert (result.version, trainers.names()) == (2, ("core-0",))

    together(scenario)
