"""The replicas as one unit: who gets which samples, who is asked again, and what is no step at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from fakes.far_end import PATIENCE
from fakes.voters import PORT, RELAYS, TOKEN, Fate, Floor, Voter
from hypothesis import given, settings
from hypothesis import strategies as st

import libra.backends.grpo.membership
import libra.backends.grpo.trainers
from libra.backends.devices import CPU, SlotDevice
from libra.backends.grpo import joining
from libra.backends.grpo.joining import JoinError, mirror_seconds
from libra.backends.grpo.joint_step import split_evenly
from libra.backends.grpo.membership import (
    FAILURES,
    STANDARD,
    Boundary,
    CoreLostError,
    ExchangeError,
    Membership,
    Patience,
)
from libra.backends.grpo.trainers import DivergedError, Trainers
from libra.backends.launch.handle import Handle
from libra.backends.transport.messages import Message
from libra.backends.transport.trainer_messages import (
    TOKEN_BYTES,
    CatchUp,
    Commit,
    Discard,
    Enter,
    Entered,
    Follow,
    HostRendezvous,
    Identify,
    MeasureTraining,
    Prepare,
    Publish,
    Published,
    RelayPlace,
    Sample,
    SaveCheckpoint,
    Serve,
    StatePlace,
    Train,
)
from libra.exec.pool import JOIN_BOUNDARIES
from libra.exec.protocols import WorkerFailedError, WorkerLostError
from libra.records.files import DiskError

HOST = "127.0.0.1"
SHORT = Patience(factor=2.0, floor=0.4, unknown=0.4, grace=0.2)  # for those who are told to hang


def sample(number: int, length: int) -> Sample:
    return Sample(f"s{number}", [5] * length, [True] * length, [-1.0] * length, [0] * length, 1.0)


SAMPLES = [sample(0, 9), sample(1, 4), sample(2, 4), sample(3, 1)]


class Scene:
    def __init__(self, floor: Floor, trainers: Trainers) -> None:
        self.floor, self.trainers = floor, trainers

    async def step(self, version: int) -> int:
        """The number of replicas that made it."""
        result = await self.trainers.step(version, SAMPLES, sequences=8, tokens=50)
        assert result.version == version
        return result.replicas

    async def join(self, name: str, node: str = "local", host: str = HOST) -> Voter:
        voter = await self.floor.hire(name, node, host)
        await self.trainers.join(voter.handle, core=name.startswith("core"))
        return voter


@asynccontextmanager
async def assembled(*others: str, patience: Patience = STANDARD) -> AsyncIterator[Scene]:
    """`core-0` and those others that have joined it."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))  # each replica waits on a thread
    floor = Floor()
    core = await floor.hire("core-0")
    scene = Scene(floor, Trainers(core.handle, floor.kill, patience))
    try:
        for name in others:
            await scene.join(name)
        yield scene
    finally:
        await floor.close()


def joined(*others: str, patience: Patience = STANDARD) -> pytest.MarkDecorator:
    """Who has joined the scene's `core-0` before the test."""
    return pytest.mark.parametrize("scene", [(others, patience)], indirect=True, ids=["+".join(("core-0", *others))])


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Scene]:
    others, patience = getattr(request, "param", ((), STANDARD))
    return assembled(*others, patience=patience)


def assert_each_sample_is_trained_once(scene: Scene, steps: int) -> None:
    for version in range(1, steps + 1):
        [generation] = scene.floor.committed[version]
        shares = scene.floor.rounds[generation, version].shares.values()
        assert sorted(id for share in shares for id in share) == [s.id for s in SAMPLES], version
    for replica in scene.trainers.replicas():
        assert scene.floor.replicas[replica.name].steps == list(range(1, steps + 1))


# --- steps that go well --------------------------------------------------------------------------------------------


@joined("hybrid-0")
async def test_a_step_of_two(scene: Scene) -> None:
    core, hybrid = scene.floor.replicas.values()
    result = await scene.trainers.step(5, SAMPLES, sequences=8, tokens=50)
    [first], [second] = core.told(Train), hybrid.told(Train)
    # The core alone counts the batch and publishes, into the buffer that the version before does not use.
    assert first == Train(5, [SAMPLES[0]], 8, 50, Patience().unknown)
    assert second == Train(5, SAMPLES[1:], 0, 0, Patience().unknown)
    assert (core.told(Commit), hybrid.told(Commit)) == ([Commit(5, 1)], [Commit(5, -1)])
    assert (result.version, result.checksum, result.buffer, result.replicas) == (5, 99, 1, 2)
    assert (result.compute_seconds, result.exchange_seconds, result.publish_seconds) == (0.5, 0.1, 0.125)
    assert (result.forward_tokens, result.generated_tokens, result.gradient_norm) == (36, 18, 3.0)
    assert (result.clip_share, result.behaviour_weight_mean, result.prox_gap_mean) == (2 / 18, 3 / 18, 1 / 18)
    # The next step is expected to take as long for a token, and as many tokens as the larger share has.
    await scene.step(6)
    expected = 0.5 / (2 * 9) * 9
    assert [order.patience for order in core.told(Train)[1:]] == [Patience().beside(expected)]


@joined("hybrid-0")
async def test_a_step_of_few_tokens_does_not_make_the_next_ones_patient(scene: Scene) -> None:
    core = scene.floor.replicas["core-0"]
    whole, few = [sample(0, 1000), sample(1, 1000)], [sample(0, 1), sample(1, 1)]
    for version, samples in enumerate([whole, few, whole], start=1):  # each takes half a second
        await scene.trainers.step(version, samples, sequences=8, tokens=50)
    _, _, third = core.told(Train)
    assert third.patience <= Patience().beside(2 * 0.5)


@joined("hybrid-0")
async def test_a_step_may_take_what_the_longest_one_says(scene: Scene) -> None:
    assert scene.trainers.step_allowance == Patience().unknown
    seconds = []
    for version in (1, 2, 3):
        result = await scene.trainers.step(version, SAMPLES, sequences=8, tokens=50)
        seconds.append(result.wall_seconds)
        assert scene.trainers.step_allowance == Patience().beside(max(seconds))


@joined("hybrid-0")
async def test_a_step_without_a_sample(scene: Scene) -> None:
    result = await scene.trainers.step(1, [], sequences=8, tokens=50)
    assert (result.generated_tokens, result.behaviour_weight_mean) == (0, 1.0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 4))
def test_every_sample_has_one_replica_and_the_loads_are_even(lengths: list[int], parts: int) -> None:
    samples = [sample(number, length) for number, length in enumerate(lengths)]
    shares = split_evenly(samples, parts)
    assert len(shares) == parts
    assert sorted(s.id for share in shares for s in share) == sorted(s.id for s in samples)
    loads = [sum(len(s.tokens) for s in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


# --- joining and leaving -------------------------------------------------------------------------------------------


async def test_joining_and_leaving(scene: Scene) -> None:
    core, trainers = scene.floor.replicas["core-0"], scene.trainers
    await scene.step(1)
    hybrid = await scene.join("hybrid-0")
    assert core.told(Prepare) == [Prepare(1, 0, 2, HOST, HOST, PORT, TOKEN)]
    assert [type(order) for order in hybrid.orders] == [Prepare, Follow, CatchUp, Enter]
    assert hybrid.told(Prepare) == [Prepare(1, 1, 2, HOST, HOST, PORT, TOKEN)]
    assert (trainers.names(), trainers.size, trainers.hybrids()) == (("core-0", "hybrid-0"), 2, ("hybrid-0",))
    assert await scene.step(2) == 2
    assert await trainers.leave("hybrid-0") is hybrid.handle
    assert core.told(Prepare)[1:] == [Prepare(2, 0, 1, HOST, HOST, 0, TOKEN)]
    assert len(hybrid.told(Prepare)) == 1
    with pytest.raises(ValueError, match="core-0 is a core trainer, which never leaves"):
        await trainers.leave("core-0")
    with pytest.raises(WorkerLostError, match="hybrid-0 is not a training replica"):
        await trainers.leave("hybrid-0")
    await trainers.join(hybrid.handle)
    assert await scene.step(3) == 2
    assert_each_sample_is_trained_once(scene, 3)


async def test_a_joiner_of_another_node_reads_the_core_through_a_relay(scene: Scene) -> None:
    core = scene.floor.replicas["core-0"]
    core.handle.host = "10.0.0.1"
    await scene.step(1)
    neighbour = await scene.join("hybrid-0")
    assert core.told(Serve) == [] and isinstance(neighbour.told(Follow)[0].places[0], StatePlace)
    far = await scene.join("hybrid-1", "elsewhere", "10.0.0.2")
    [serve], [follow] = core.told(Serve), far.told(Follow)
    assert serve.host == "10.0.0.1" and len(serve.token) == TOKEN_BYTES
    assert follow.places == [RelayPlace("10.0.0.1", RELAYS, serve.token)]
    assert core.told(Prepare)[-1] == Prepare(2, 0, 3, "10.0.0.1", "10.0.0.1", PORT, TOKEN)
    assert neighbour.told(Prepare)[-1] == Prepare(2, 1, 3, HOST, "10.0.0.1", PORT, TOKEN)
    assert far.told(Prepare) == [Prepare(2, 2, 3, "10.0.0.2", "10.0.0.1", PORT, TOKEN)]
    assert await scene.step(2) == 3
    assert_each_sample_is_trained_once(scene, 2)


async def test_the_relay_keeps_off_the_core_that_the_core_replica_computes_on(scene: Scene) -> None:
    core = scene.floor.replicas["core-0"]
    for number, (cores, wanted) in enumerate({(0, 1, 2): (0, 2), (1,): (1,)}.items()):
        core.handle.link = replace(core.handle.link, cores=cores, core=1)
        await scene.join(f"hybrid-{number}", "elsewhere")
        assert core.told(Serve)[-1].cores == wanted


async def test_a_joiner_that_lost_its_way_to_the_core_gets_a_new_one_with_a_token_of_its_own(scene: Scene) -> None:
    core = scene.floor.replicas["core-0"]
    far = await scene.floor.hire("hybrid-0", "elsewhere")
    far.behind.append("the core cannot be reached")
    await scene.trainers.join(far.handle)
    first, second = core.told(Serve)
    assert first.token != second.token
    assert [order.places[0].token for order in far.told(Follow)] == [first.token, second.token]
    assert await scene.step(1) == 2


async def test_a_core_that_no_other_node_can_read_costs_the_joiner_only(scene: Scene) -> None:
    scene.floor.replicas["core-0"].will(Serve, ["fail"])
    far = await scene.floor.hire("hybrid-0", "elsewhere")
    with pytest.raises(JoinError, match="cannot be read from node elsewhere: no such address"):
        await scene.trainers.join(far.handle)
    assert far.killed and await scene.step(1) == 1


@joined("hybrid-0")
async def test_core_replicas_come_before_hybrid_ones(scene: Scene) -> None:
    second = await scene.join("core-1")
    assert scene.trainers.names() == ("core-0", "core-1", "hybrid-0")
    hybrid = scene.floor.replicas["hybrid-0"]
    assert second.told(Prepare)[-1] == Prepare(2, 1, 3, HOST, HOST, PORT, TOKEN)
    assert hybrid.told(Prepare)[-1] == Prepare(2, 2, 3, HOST, HOST, PORT, TOKEN)
    assert await scene.step(1) == 3
    with pytest.raises(ValueError, match="never leaves"):
        await scene.trainers.leave("core-1")


async def test_steps_go_on_while_a_replica_follows(scene: Scene) -> None:
    joiner = await scene.floor.hire("hybrid-0")
    joiner.late = 2
    joining = asyncio.create_task(scene.trainers.join(joiner.handle))
    version = 0
    while not joining.done():
        version += 1
        replicas = await scene.step(version)
    assert version > 1 and replicas in (1, 2)
    await joining
    assert await scene.step(version + 1) == 2
    assert_each_sample_is_trained_once(scene, version + 1)


async def test_a_joiner_that_is_not_level_is_not_let_in(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.backends.grpo.joining.HOLD", 60.0)  # it answers at once, however busy the machine is
    await scene.step(1)
    joiner = await scene.floor.hire("hybrid-0")
    joiner.late = 1000
    joiner.steps = [9]
    joiner.will(Follow, [])
    joiner._copy = lambda place: None  # type: ignore[method-assign]
    with pytest.raises(JoinError, match=f"hybrid-0 cannot join: .* at {JOIN_BOUNDARIES} step boundaries"):
        await scene.trainers.join(joiner.handle)
    assert joiner.told(Enter) == [] and joiner.handle.lost and joiner.killed
    # Same number, another hash: each time it started again.
    assert len(joiner.told(Follow)) == JOIN_BOUNDARIES
    assert await scene.step(2) == 1


async def test_for_a_joiner_that_is_always_overtaken_the_core_stands_still(scene: Scene) -> None:
    joiner = await scene.floor.hire("hybrid-0")
    joiner.behind.append("three copies were overtaken")
    await scene.trainers.join(joiner.handle)
    assert [type(order) for order in joiner.orders] == [Prepare, Follow, Follow, CatchUp, Enter]
    assert await scene.step(1) == 2

    other = await scene.floor.hire("hybrid-1")
    other.behind.extend(["three copies were overtaken", "and another one"])
    with pytest.raises(JoinError, match="hybrid-1 cannot join: and another one"):
        await scene.trainers.join(other.handle)
    assert await scene.step(2) == 2


async def test_steps_do_not_wait_for_a_joiner_in_the_middle_of_an_update(scene: Scene) -> None:
    voter = await scene.floor.hire("hybrid-0")
    entering = asyncio.create_task(scene.trainers.join(voter.handle))
    while not voter.told(Follow):
        await asyncio.sleep(0)
    voter.free.clear()
    while not voter.told(CatchUp):
        await asyncio.sleep(0.001)
    assert [await scene.step(version) for version in (1, 2, 3)] == [1, 1, 1]
    assert not entering.done()
    voter.free.set()
    await entering
    assert await scene.step(4) == 2


async def test_for_a_joiner_that_is_always_in_the_middle_of_an_update_a_boundary_waits_at_last(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "COURTEOUS", 3)
    voter = await scene.floor.hire("hybrid-0")
    voter.busy_seconds = 3 * joining.HOLD
    entering, version = asyncio.create_task(scene.trainers.join(voter.handle)), 0
    while not entering.done():
        version += 1
        replicas = await scene.step(version)
    assert await entering > 2 * joining.HOLD
    assert replicas == 2


async def test_nobody_waits_for_a_joiner_while_no_step_is_due(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "COURTEOUS", 0)
    voter = await scene.floor.hire("hybrid-0")
    voter.busy_seconds = 3 * joining.HOLD
    assert await scene.trainers.join(voter.handle) == 0.0


async def test_a_step_that_is_due_while_the_boundary_is_held_has_waited_since_then() -> None:
    boundary = Boundary()

    async def step() -> float:
        async with boundary.step() as waited:
            return waited

    async with boundary:
        began = time.monotonic()
        await asyncio.sleep(0.05)
        assert boundary.waited(began) == 0.0
        stepping = asyncio.create_task(step())
        await asyncio.sleep(0)
        due = time.monotonic()
        await asyncio.sleep(0.02)
        waited = boundary.waited(began)
        assert 0.02 <= waited <= time.monotonic() - due + 0.01
        assert boundary.waited(time.monotonic()) < waited
    assert await stepping >= waited
    assert boundary.waited(began) == 0.0
    async with boundary:
        given_up = asyncio.create_task(step())
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert boundary.waited(began) == 0.0


@joined("hybrid-0", patience=SHORT)
async def test_a_joiner_in_the_middle_of_a_copy_outlives_the_loss_of_another_and_steps_do_not_wait_for_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_copy_seconds", lambda core: PATIENCE)
    joiner = await scene.floor.hire("hybrid-1")
    entering = asyncio.create_task(scene.trainers.join(joiner.handle))
    while not joiner.told(Follow):
        await asyncio.sleep(0)
    async with scene.trainers.boundary:  # it follows, and goes on copying when it has answered
        joiner.free.clear()
        scene.floor.replicas["hybrid-0"].fall()
    assert [await scene.step(version) for version in (1, 2, 3)] == [1, 1, 1]
    await asyncio.sleep(2 * SHORT.floor)
    assert not entering.done() and not joiner.killed
    joiner.free.set()
    await entering
    assert scene.trainers.names() == ("core-0", "hybrid-1")
    assert await scene.step(4) == 2
    assert_each_sample_is_trained_once(scene, 4)


@pytest.mark.parametrize("order", [Prepare, Follow, CatchUp, Enter])
@joined("hybrid-0")
async def test_a_joiner_that_dies_on_its_way_leaves_the_others_as_they_were(scene: Scene, order: type) -> None:
    joiner = await scene.floor.hire("hybrid-1")
    joiner.will(order, ["die"])
    with pytest.raises(WorkerLostError, match="hybrid-1 was lost"):
        await scene.trainers.join(joiner.handle)
    assert scene.trainers.names() == ("core-0", "hybrid-0")
    assert await scene.step(1) == 2
    assert_each_sample_is_trained_once(scene, 1)


@pytest.mark.parametrize(
    ("order", "fates", "follows"),
    [
        (Prepare, ["die"], 1),
        (Identify, ["die"], 1),
        (Identify, ["ok", "die"], 2),
        (Serve, ["die"], 1),
        (Enter, ["die"], 1),
    ],
)
@joined("core-1")
async def test_when_a_core_dies_during_a_join_the_joiner_follows_another(
    scene: Scene, order: type, fates: list[Fate], follows: int
) -> None:
    await scene.step(1)
    scene.floor.replicas["core-0"].will(order, fates)
    joiner = await scene.floor.hire("hybrid-0", "elsewhere" if order is Serve else "local")
    await scene.trainers.join(joiner.handle)
    assert scene.trainers.names() == ("core-1", "hybrid-0")
    assert len(joiner.told(Follow)) == follows
    assert await scene.step(2) == 2
    assert_each_sample_is_trained_once(scene, 2)


async def test_a_boundary_that_goes_from_hand_to_hand_was_held_before_the_step(scene: Scene) -> None:
    """As after a checkpoint for which a joiner has waited: nobody holds it at the moment, and it is somebody's turn."""

    async def held() -> None:
        async with scene.trainers.boundary:
            await asyncio.sleep(0.05)

    async with scene.trainers.boundary:
        holding = asyncio.create_task(held())
        await asyncio.sleep(0)
    result = await scene.trainers.step(1, SAMPLES, 4, 18)
    assert result.held_seconds >= 0.05
    await holding
    assert (await scene.trainers.step(2, SAMPLES, 4, 18)).held_seconds < 0.05


@joined("hybrid-0")
async def test_a_membership_changes_between_two_steps(scene: Scene) -> None:
    core = scene.floor.replicas["core-0"]
    known = len(core.orders)
    async with scene.trainers.boundary:
        leaving = asyncio.create_task(scene.trainers.leave("hybrid-0"))
        stepping = asyncio.create_task(scene.step(1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(core.orders) == known
    await leaving
    assert await stepping in (1, 2)
    assert await scene.step(2) == 1
    assert_each_sample_is_trained_once(scene, 2)


@joined("hybrid-0")
async def test_a_membership_that_does_not_come_about_is_tried_again(scene: Scene) -> None:
    hybrid = scene.floor.replicas["hybrid-0"]
    hybrid.will(Enter, ["fail"])
    second = await scene.join("hybrid-1")
    assert [order.generation for order in second.told(Enter)] == [2, 3]
    hybrid.will(Enter, ["fail"] * FAILURES)
    with pytest.raises(ExchangeError, match="core-0, hybrid-0 do not find each other: not everyone came"):
        await scene.trainers.leave("hybrid-1")


@pytest.mark.parametrize("fates", [["die"], ["break"], ["fail", "fail"]])
@joined("hybrid-0")
async def test_measuring_goes_on_without_those_that_are_lost_in_it(scene: Scene, fates: list[Fate]) -> None:
    core, hybrid = scene.floor.replicas.values()
    hybrid.will(MeasureTraining, fates)
    measured = await scene.trainers.measure(MeasureTraining([[4]], 1))
    assert len(measured) == (2 if fates[0] == "fail" else 1)
    assert not any(answer.failure for answer in measured)
    assert not core.handle.lost
    assert await scene.step(1) == len(measured)


@joined("hybrid-0")
async def test_measuring_that_fails_without_a_loss_is_an_end_after_a_few_times(scene: Scene) -> None:
    scene.floor.replicas["hybrid-0"].will(MeasureTraining, ["fail"] * FAILURES)
    with pytest.raises(ExchangeError, match=f"measuring failed {FAILURES} times although no replica is lost: lost"):
        await scene.trainers.measure(MeasureTraining([[4]], 1))


@joined("hybrid-0", patience=SHORT)
async def test_one_that_cannot_enter_does_not_hurry_those_that_wait_for_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libra.backends.grpo.membership, "FORMING_SECONDS", 2.0)
    core, hybrid = scene.floor.replicas.values()
    hybrid.will(Enter, ["fail"])
    receive, fast = core.handle._receive, iter([False])

    def late(message: Message) -> None:
        delay = 2 * SHORT.floor if isinstance(message, Entered) and not next(fast, True) else 0.0
        asyncio.get_running_loop().call_later(delay, receive, message)

    core.handle._receive = late  # type: ignore[method-assign]
    await scene.join("hybrid-1")
    assert scene.trainers.names() == ("core-0", "hybrid-0", "hybrid-1")


async def test_a_joiner_whose_membership_does_not_form_is_introduced_again(scene: Scene) -> None:
    joiner = await scene.floor.hire("hybrid-0")
    joiner.unformed = {1}
    await scene.trainers.join(joiner.handle)
    assert joiner.told(Prepare) == [Prepare(number, 1, 2, HOST, HOST, PORT, TOKEN) for number in (1, 2)]
    assert len(joiner.told(Follow)) == 1
    assert await scene.step(1) == 2


async def test_a_replica_that_could_not_listen_for_the_others_is_asked_again(scene: Scene) -> None:
    core, joiner = scene.floor.replicas["core-0"], await scene.floor.hire("hybrid-0")
    core.will(HostRendezvous, ["fail"])
    joiner.unformed = {1}
    await scene.trainers.join(joiner.handle)
    assert [order.port for order in joiner.told(Prepare)] == [0, PORT]
    assert core.told(HostRendezvous) == [HostRendezvous(HOST, 0, TOKEN)] * 2
    assert await scene.step(1) == 2


@joined("core-1", "core-2", "hybrid-0")
async def test_who_dies_when_the_others_are_to_meet_at_it_is_left_behind(scene: Scene) -> None:
    scene.floor.replicas["core-0"].fall()
    scene.floor.replicas["core-1"].will(HostRendezvous, ["die"])
    assert await scene.step(1) == 2
    assert scene.trainers.names() == ("core-2", "hybrid-0")
    assert scene.floor.replicas["hybrid-0"].told(Prepare)[-1].port == PORT


@pytest.mark.parametrize("order", [Follow, CatchUp])
@joined(patience=SHORT)
async def test_a_joiner_that_hangs_holds_the_boundary_for_a_little_while_only(scene: Scene, order: type) -> None:
    joiner = await scene.floor.hire("hybrid-0")
    joiner.will(order, ["hang"])
    with pytest.raises(WorkerLostError, match="hybrid-0 was lost"):
        await asyncio.wait_for(scene.trainers.join(joiner.handle), 5.0)
    assert joiner.killed


# --- steps that go wrong -------------------------------------------------------------------------------------------


@joined("hybrid-0")
async def test_when_a_replica_is_lost_before_its_vote_the_rest_make_the_same_step(scene: Scene) -> None:
    core, hybrid = scene.floor.replicas.values()
    hybrid.will(Train, ["die"])
    assert await scene.step(2) == 1
    lost, made = core.told(Train)
    assert lost.samples == [SAMPLES[0]]
    assert (made.version, made.sequences, made.tokens) == (2, 8, 50)
    assert sorted(s.id for s in made.samples) == [s.id for s in SAMPLES]
    assert core.told(Discard) == [Discard()]
    assert (core.told(Commit), core.steps) == ([Commit(2, 0)], [2])
    assert scene.trainers.names() == ("core-0",)


@joined("core-1", "hybrid-0")
async def test_when_the_publisher_dies_another_core_publishes(scene: Scene) -> None:
    first, second, _ = scene.floor.replicas.values()
    first.will(Commit, ["die"])
    result = await scene.trainers.step(3, SAMPLES, sequences=8, tokens=50)
    assert (result.checksum, result.buffer) == (1003, 1)
    assert 0 < result.publish_seconds < result.wall_seconds
    assert second.told(Publish) == [Publish(3, 1)]
    assert (scene.trainers.core, scene.trainers.names()) == (second.handle, ("core-1", "hybrid-0"))
    assert await scene.step(4) == 2


@pytest.mark.parametrize(("order", "fate"), [(Train, "die"), (Commit, "die"), (Train, "break")])
@joined("hybrid-0")
async def test_without_a_core_there_is_no_step(scene: Scene, order: type, fate: Fate) -> None:
    scene.floor.replicas["core-0"].will(order, [fate])
    with pytest.raises(CoreLostError, match="core trainer core-0 is gone, and none is left"):
        await scene.step(2)


@joined("hybrid-0")
async def test_replicas_that_differ_are_an_end(scene: Scene) -> None:
    scene.floor.replicas["hybrid-0"].will(Commit, ["fail"])
    with pytest.raises(DivergedError, match="after step 2 the replicas core-0, hybrid-0 have different parameters"):
        await scene.step(2)


@joined("hybrid-0")
async def test_a_step_that_diverges_is_an_end_and_told_with_its_number(scene: Scene) -> None:
    scene.floor.replicas["hybrid-0"].diverged = "the norm of its gradient is nan"
    with pytest.raises(DivergedError, match=r"step 2 diverged: the norm of its gradient is nan; lower training\.learn"):
        await scene.step(2)


@joined("hybrid-0")
async def test_an_exchange_that_fails_without_a_loss_is_tried_again_a_few_times(scene: Scene) -> None:
    core, hybrid = scene.floor.replicas.values()
    hybrid.will(Train, ["fail"])
    assert await scene.step(1) == 2
    assert len(core.told(Train)) == 2
    hybrid.will(Train, ["fail"] * FAILURES)
    with pytest.raises(ExchangeError, match=f"step 2 failed {FAILURES} times although no replica is lost: lost"):
        await scene.step(2)
    assert core.steps == hybrid.steps == [1]


@joined("hybrid-0", "hybrid-1")
async def test_when_one_replica_has_no_sum_nobody_steps(scene: Scene) -> None:
    core, first, second = scene.floor.replicas.values()
    first.will(Train, ["unsure"])
    second.will(Train, ["late"])
    assert await scene.step(1) == 2
    assert [len(voter.told(Train)) for voter in (core, first, second)] == [2, 2, 1]
    assert core.told(Discard) == first.told(Discard) == [Discard()]
    assert_each_sample_is_trained_once(scene, 1)


@pytest.mark.parametrize(
    ("order", "fate", "made_by"),
    [
        (Train, "die", 1),
        (Train, "late", 1),
        (Train, "break", 1),
        (Commit, "die", 2),  # its gradient is in the sum
        (Commit, "break", 2),
    ],
)
@joined("hybrid-0")
async def test_a_replica_that_is_lost_in_a_step_does_not_undo_it(
    scene: Scene, order: type, fate: Fate, made_by: int
) -> None:
    hybrid = scene.floor.replicas["hybrid-0"]
    hybrid.will(order, [fate])
    assert await scene.step(1) == made_by
    assert hybrid.killed == (fate == "break") and scene.trainers.names() == ("core-0",)
    assert await scene.step(2) == 1
    assert_each_sample_is_trained_once(scene, 2)


@joined("hybrid-0")
async def test_a_worker_that_breaks_while_another_one_joins_does_not_end_the_join(scene: Scene) -> None:
    scene.floor.replicas["hybrid-0"].will(Prepare, ["break"])
    await scene.join("hybrid-1")
    assert scene.trainers.names() == ("core-0", "hybrid-1")
    assert await scene.step(1) == 2


async def test_what_only_a_core_is_asked_may_fail_without_its_loss(scene: Scene) -> None:
    scene.floor.replicas["core-0"].will(Publish, ["break"])
    with pytest.raises(WorkerFailedError, match="core-0: broken"):
        await scene.trainers.ask_core(Publish(3, 1), Published)


@joined("hybrid-0", patience=SHORT)
async def test_while_one_hangs_the_others_may_wait_for_it_longer_than_for_any_other_order(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libra.backends.grpo.trainers, "ANSWER_DEADLINE", 0.2)
    monkeypatch.setattr(Membership.ask, "__defaults__", (None, 0.2))
    scene.floor.replicas["hybrid-0"].will(Train, ["hang"])
    # Less than twice what a step may take, and more than any other order has.
    asyncio.get_running_loop().call_later(0.6, lambda: scene.floor.rounds[1, 1].fail())
    assert await scene.step(1) == 1
    assert scene.trainers.names() == ("core-0",)


@pytest.mark.parametrize("order", [Train, Commit, Discard, Prepare, Enter])
@joined("hybrid-0", "hybrid-1", patience=SHORT)
async def test_a_replica_that_hangs_is_found_and_killed(
    scene: Scene, order: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libra.backends.grpo.membership, "FORMING_SECONDS", SHORT.floor)
    _, second, hybrid = scene.floor.replicas.values()
    hybrid.will(order, ["hang"])
    if order is not Train and order is not Commit:  # those come with the loss of somebody else
        second.will(Train, ["die"])
    if order is Train:  # the others wait in the exchange until their patience is at its end
        asyncio.get_running_loop().call_later(0.3, lambda: scene.floor.rounds[2, 1].fail())
    await scene.step(1)
    assert hybrid.killed and hybrid.name not in scene.trainers.names()
    await scene.step(2)
    assert_each_sample_is_trained_once(scene, 2)


@joined("core-1", patience=SHORT)
async def test_a_core_that_hangs_between_two_steps_is_found_by_a_join(scene: Scene) -> None:
    scene.floor.replicas["core-0"].will(Identify, ["hang"])
    await scene.join("hybrid-0")
    assert scene.floor.replicas["core-0"].killed
    assert scene.trainers.names() == ("core-1", "hybrid-0")
    assert await scene.step(1) == 2


@joined("hybrid-0")
async def test_who_died_since_the_last_step_keeps_nobody_from_joining_or_leaving(scene: Scene) -> None:
    trainers = scene.trainers
    scene.floor.replicas["hybrid-0"].handle.declare_lost("killed")
    other = await scene.join("hybrid-1")
    assert trainers.names() == ("core-0", "hybrid-1")
    await scene.join("hybrid-2")
    other.handle.declare_lost("killed")
    await trainers.leave("hybrid-2")
    assert trainers.names() == ("core-0",)
    third = await scene.join("hybrid-3")
    third.handle.declare_lost("killed")
    with pytest.raises(WorkerLostError, match="worker hybrid-3 is not a training replica at present"):
        await trainers.leave("hybrid-3")
    assert await scene.step(1) == 1
    (await scene.join("hybrid-4")).handle.declare_lost("killed")
    assert await scene.step(2) == 1
    assert len(scene.floor.replicas["core-0"].told(Train)) == 2  # no step was tried with one that is lost
    assert_each_sample_is_trained_once(scene, 2)


@joined("core-1")
async def test_whichever_core_is_there_answers(scene: Scene) -> None:
    first, second = scene.floor.replicas.values()
    first.will(Publish, ["die"])
    assert await scene.trainers.ask_core(Publish(3, 1), Published) == Published(3, 1003)
    assert (first.told(Publish), second.told(Publish)) == ([Publish(3, 1)], [Publish(3, 1)])
    scene.trainers.require_core()
    second.will(Publish, ["die"])
    with pytest.raises(CoreLostError, match="core trainer core-0, core-1 is gone, and none is left"):
        await scene.trainers.ask_core(Publish(3, 1), Published)
    with pytest.raises(CoreLostError):
        scene.trainers.require_core()


async def test_weights_that_cannot_be_written_leave_no_part_of_a_file(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.part").touch()
    scene.floor.replicas["core-0"].will(SaveCheckpoint, ["break"])
    with pytest.raises(DiskError, match=r"cannot be written \(worker core-0: broken\)"):
        await scene.trainers.save(tmp_path, optimiser=True)
    assert not list(tmp_path.iterdir())


# --- whatever happens ----------------------------------------------------------------------------------------------

_FATES = st.lists(st.sampled_from(["ok", "ok", "ok", "die", "fail", "late", "unsure"]), max_size=5)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.integers(1, 6),
    fates=st.fixed_dictionaries(
        {name: st.tuples(_FATES, _FATES, _FATES) for name in ("core-1", "hybrid-0", "hybrid-1", "hybrid-2")}
    ),
    leaves_at=st.integers(0, 6),
    joins_at=st.integers(0, 6),
)
def test_no_sample_is_trained_twice_or_lost(
    steps: int, fates: dict[str, tuple[list[Fate], list[Fate], list[Fate]]], leaves_at: int, joins_at: int
) -> None:
    """One core lives; the others die in votes, commits and changes of the membership, one leaves, one joins."""

    async def run() -> None:
        async with asyncio.timeout(PATIENCE), assembled("core-1", "hybrid-0", "hybrid-1") as scene:
            joiner = await scene.floor.hire("hybrid-2")
            for name, (votes, commits, entries) in fates.items():
                scene.floor.replicas[name].will(Train, votes)
                scene.floor.replicas[name].will(Commit, ["die" if fate == "die" else "ok" for fate in commits])
                scene.floor.replicas[name].will(Enter, ["die" if fate == "die" else "ok" for fate in entries])
            changes: list[asyncio.Task[object]] = []
            for version in range(1, steps + 1):
                if version == leaves_at:
                    changes.append(asyncio.create_task(scene.trainers.leave("hybrid-1")))
                if version == joins_at:
                    changes.append(asyncio.create_task(scene.trainers.join(joiner.handle)))
                try:
                    await scene.step(version)
                except ExchangeError:  # several times with nobody lost: the run ends after the step before
                    steps_made = version - 1
                    break
            else:
                steps_made = steps
            for change in changes:
                try:
                    await change
                except WorkerLostError:
                    pass
            assert_each_sample_is_trained_once(scene, steps_made)
            assert "core-0" in scene.trainers.names()

    asyncio.run(run())


@pytest.mark.parametrize(("device", "seconds"), [(SlotDevice("cuda", ("0",)), 128.0), (CPU, 0.0)])
def test_a_core_on_a_gpu_has_time_to_copy_its_state_out(device: SlotDevice, seconds: float) -> None:
    """For a joiner: three vectors of 32 GB and a gradient, of a model whose weights are published in 16 GB."""
    core = SimpleNamespace(link=SimpleNamespace(device=device), weight_bytes=16_000_000_000)
    assert mirror_seconds(cast(Handle, core)) == seconds
