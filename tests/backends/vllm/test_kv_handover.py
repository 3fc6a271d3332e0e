"""A context on its way between two engines, with the test at their ends: who is asked what, and what becomes of it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from fakes.far_end import PATIENCE, FarEnd, connect, generated, piece
from hypothesis import given
from hypothesis import strategies as st

import libra.backends.vllm.kv_handover
from libra.backends.transport.engine_messages import Fetched, Generate, Interrupt, KVTransfer, Save, Saved
from libra.backends.vllm.engine_handle import EngineHandle
from libra.backends.vllm.kv_handover import ContextMove, ContextMoves, KVHandover, KVLeases
from libra.cost.device import DeviceProfile, EngineCost, HandoverCost, SwitchCost, TrainCost
from libra.cost.engine_memory import BLOCK_TOKENS
from libra.cost.transfer import handover_pays
from libra.environments.protocol import Prompt
from libra.loop.episode import EpisodeRequest
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.running_turn import Draft, RunningTurn
from libra.plan.allocation import Allocation, Bucket
from libra.route.baselines import LeastLoaded

FRAMES = 8
CONTEXT = list(range(3 * BLOCK_TOKENS + 5))
PROFILE = DeviceProfile(
    "", "", EngineCost(0.0, 0, 0, 1e-3, 0), TrainCost(0, 0, 0), SwitchCost(0, 0, 0), 0.0, HandoverCost(0.01, 1e-4)
)


@dataclass
class Scene:
    handover: KVHandover
    source: EngineHandle
    source_far: FarEnd
    target: EngineHandle
    target_far: FarEnd

    def begin(self) -> asyncio.Task[tuple[KVTransfer | None, ContextMove]]:
        return asyncio.create_task(self.handover.bring(CONTEXT, "salt", self.source, self.target))

    async def asked_to_save(self) -> Save:
        order = await self.source_far.receive()
        assert isinstance(order, Save)
        return order

    async def saved(self) -> tuple[KVTransfer, ContextMove]:
        """A context that lies in its frames."""
        brought = self.begin()
        order = await self.asked_to_save()
        self.source_far.send(Saved(order.transfer.number, 3))
        transfer, change = await brought
        assert transfer is not None
        return transfer, change

    async def free(self, frames: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.handover.leases.free != frames:
                await asyncio.sleep(0.001)


@pytest.fixture
@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    handover = KVHandover(16, FRAMES * BLOCK_TOKENS)
    handover.price_by(PROFILE)
    source = await connect(EngineHandle, lambda name, why: None, "source")
    target = await connect(EngineHandle, lambda name, why: None, "target")
    try:
        yield Scene(handover, *source, *target)
    finally:
        for handle, far in (source, target):
            handle.close()
            far.close()


async def test_a_context_is_saved_and_taken(scene: Scene) -> None:
    brought = scene.begin()
    order = await scene.asked_to_save()
    assert (order.tokens, order.salt, len(order.transfer.frames)) == (CONTEXT[: 3 * BLOCK_TOKENS], "salt", 3)
    assert scene.handover.leases.free == FRAMES - 3
    scene.source_far.send(Saved(order.transfer.number, 2))  # it had forgotten the third
    transfer, change = await brought
    assert transfer == KVTransfer(order.transfer.number, order.transfer.frames[:2])
    assert scene.handover.leases.free == FRAMES - 3
    scene.target_far.send(Fetched(transfer.number, 2 * BLOCK_TOKENS))
    await scene.free(FRAMES)
    assert (change.context, change.handed_tokens, change.why) == (len(CONTEXT), 2 * BLOCK_TOKENS, "handed over")
    assert change.seconds > 0


async def test_what_the_target_cannot_use_is_told(scene: Scene) -> None:
    transfer, change = await scene.saved()
    scene.target_far.send(Fetched(transfer.number, 0))
    await scene.free(FRAMES)
    assert (change.handed_tokens, change.why) == (0, "no block of it was used")


async def test_a_target_that_goes_away_needs_nothing(scene: Scene) -> None:
    _, change = await scene.saved()
    scene.target_far.close()
    await scene.free(FRAMES)
    assert change.handed_tokens == 0


async def test_a_source_that_goes_away_keeps_its_frames_while_it_lives(scene: Scene) -> None:
    brought = scene.begin()
    await scene.source_far.receive()
    scene.source.link = replace(scene.source.link, pid=1)  # a process that goes on
    scene.source_far.close()
    transfer, change = await brought
    assert transfer is None and change.why == "the engine was lost"
    assert scene.handover.leases.free == FRAMES - 3
    again, change = await scene.begin()
    assert again is None and change.why == "the engine was gone"


async def test_a_source_that_is_slow_is_not_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libra.backends.vllm.kv_handover, "SAVE_SECONDS", 0.02)
    brought = scene.begin()
    order = await scene.asked_to_save()
    transfer, change = await brought
    assert transfer is None and change.why.startswith("it was not saved within")
    # It may still write there, until it says that it has.
    assert scene.handover.leases.free == FRAMES - 3
    scene.source_far.send(Saved(order.transfer.number, 3))
    await scene.free(FRAMES)


async def test_a_turn_that_is_given_up_meanwhile_leaves_nothing_leased(scene: Scene) -> None:
    brought = scene.begin()
    order = await scene.asked_to_save()
    brought.cancel()
    await asyncio.gather(brought, return_exceptions=True)
    assert scene.handover.leases.free == FRAMES - 3
    scene.source_far.send(Saved(order.transfer.number, 3))
    await scene.free(FRAMES)


async def test_a_turn_that_is_given_up_as_its_context_is_saved_leaves_nothing_leased(scene: Scene) -> None:
    save = scene.source.save

    def given_up(order: Save) -> asyncio.Future[Saved | None]:
        saved = save(order)
        saved.add_done_callback(lambda _: brought.cancel())
        return saved

    scene.source.save = given_up  # type: ignore[method-assign]
    brought = scene.begin()
    order = await scene.asked_to_save()
    scene.source_far.send(Saved(order.transfer.number, 3))
    with pytest.raises(asyncio.CancelledError):
        await brought
    await scene.free(FRAMES)


def on_its_way(scene: Scene) -> tuple[ServingFleet, Draft]:
    """A context that the source holds, where the target is the only one to go on."""
    fleet = ServingFleet(LeastLoaded(), Allocation(1, (Bucket("any", 1, 0, 400),)), scene.handover)
    fleet.add(ServingEngine(scene.target, "any", 400))
    draft = Draft(EpisodeRequest("t", Prompt("p", "", ""), 0.0, 0.0), started_at=0.0, kv_engine=scene.source)
    draft.given(list(CONTEXT))
    draft.kv_tokens = len(CONTEXT)
    return fleet, draft


async def test_an_engine_that_leaves_while_a_context_is_saved_for_it_is_not_sent_the_turn(scene: Scene) -> None:
    """It would be one more that has to stop there, and nobody would tell it to."""
    fleet, draft = on_its_way(scene)
    turn = RunningTurn(draft, "test", fleet, 9, -1)
    placement = turn.place()
    assert placement is not None
    served = asyncio.create_task(turn.serve(placement, "part"))
    order = await scene.asked_to_save()
    fleet.remove("target")
    scene.source_far.send(Saved(order.transfer.number, 3))
    await served
    assert scene.target.running == 0 and scene.target_far.nothing_waits()
    assert turn.change is None and draft.kv_engine is scene.source
    scene.target.close()
    await scene.free(FRAMES)


@pytest.mark.parametrize("made", [[], [7]])
async def test_kv_is_where_it_was_until_the_next_engine_has_made_something(scene: Scene, made: list[int]) -> None:
    """An engine that is lost with the context still ahead of it never had any of its KV."""
    fleet, draft = on_its_way(scene)
    draft.given([1, 2])  # of a tool
    turn = RunningTurn(draft, "test", fleet, 9, -1)
    placement = turn.place()
    assert placement is not None
    served = asyncio.create_task(turn.serve(placement, "part"))
    order = await scene.asked_to_save()
    scene.source_far.send(Saved(order.transfer.number, 3))
    assert isinstance(await scene.target_far.receive(), Generate)
    if made:
        scene.target_far.send(generated(piece("part", *made)))
    fleet.remove("target")
    scene.target_far.close()
    await served
    if made:
        assert (draft.kv_engine, draft.kv_tokens) == (scene.target, len(CONTEXT) + 2 + len(made))
    else:
        assert (draft.kv_engine, draft.kv_tokens) == (scene.source, len(CONTEXT))


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        (replace(PROFILE, handover=None), "its cost is not measured"),
        (replace(PROFILE, handover=HandoverCost(0.1, 0.0)), "computing it again is cheaper"),
        (replace(PROFILE, handover=HandoverCost(0.0, 1e-3)), "computing it again is cheaper"),
    ],
)
async def test_what_is_cheaper_to_compute_is_not_asked_for(scene: Scene, profile: DeviceProfile, why: str) -> None:
    scene.handover.price_by(profile)
    transfer, change = await scene.begin()
    assert (transfer, change.why) == (None, why)
    assert scene.source_far.nothing_waits() and scene.handover.leases.free == FRAMES


async def test_an_engine_of_another_node_is_not_asked(scene: Scene) -> None:
    scene.target.link = replace(scene.target.link, node="other")
    assert scene.handover.place(scene.target) is None and scene.handover.place(scene.source) is not None
    transfer, change = await scene.begin()
    assert (transfer, change.why) == (None, "an engine is on another node, or on a lent device")
    assert scene.source_far.nothing_waits()


async def test_a_full_memory_is_not_waited_for(scene: Scene) -> None:
    await scene.saved()
    await scene.saved()
    transfer, change = await scene.begin()
    assert (transfer, change.why) == (None, "too many contexts are being handed over")


@pytest.mark.parametrize(("tokens", "pays"), [(0, False), (11, False), (12, True), (1000, True)])
def test_handing_over_pays_for_long_contexts(tokens: int, pays: bool) -> None:
    """0.01 s and 0.1 ms a token against 1 ms a token: equal at 11.1."""
    assert handover_pays(PROFILE, tokens) is pays


def test_a_handover_also_waits_for_an_iteration() -> None:
    slow = replace(PROFILE, engine=replace(PROFILE.engine, step=0.01))
    assert not handover_pays(slow, 22) and handover_pays(slow, 23)


async def test_an_engine_is_vacant_when_what_its_turns_want_is_saved(scene: Scene) -> None:
    """A turn asks for its KV in the moment in which it hears that it has stopped."""

    async def turn() -> None:
        await scene.source.generate(Generate("t", CONTEXT, 9, 1.0, -1, 0), lambda piece: None)
        await scene.handover.bring(CONTEXT, None, scene.source, scene.target)

    turned = asyncio.create_task(turn())
    await scene.source_far.receive()
    vacant = asyncio.create_task(scene.source.vacate(PATIENCE))
    assert await scene.source_far.receive() == Interrupt("t")
    scene.source_far.send(generated(ended=["t"]))
    order = await scene.asked_to_save()
    assert not vacant.done()
    scene.source_far.send(Saved(order.transfer.number, 3))
    await vacant
    await turned


async def test_an_engine_that_does_not_answer_is_not_waited_for(scene: Scene) -> None:
    scene.begin()
    await scene.source_far.receive()
    await scene.source.vacate(0.02)


def test_changes_add_up() -> None:
    changes = ContextMoves()
    for change in (ContextMove(100, 96, 0.5, ""), ContextMove(40), ContextMove(64, 32, 0.25, "")):
        changes.add(change)
    assert changes == ContextMoves(2, 128, 0.75, 1, 4 + 40 + 32)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=40))
def test_a_frame_is_in_one_transfer(asked: list[tuple[int, int]]) -> None:
    """Leases of so many blocks, each followed by so many releases of the oldest transfers."""
    leases, held, numbers = KVLeases(10), list[KVTransfer](), set[int]()
    for blocks, releases in asked:
        free = leases.free
        assert free == 10 - sum(len(transfer.frames) for transfer in held)
        transfer = leases.lease(blocks)
        assert (transfer is None) == (blocks > free)
        if transfer is not None:
            assert len(transfer.frames) == blocks and transfer.number not in numbers
            numbers.add(transfer.number)
            held.append(transfer)
        frames = [frame for transfer in held for frame in transfer.frames]
        assert len(set(frames)) == len(frames) and set(frames) <= set(range(10))
        for transfer in held[:releases]:
            leases.release(transfer)
        held = held[releases:]
    for transfer in held:
        leases.release(transfer)
    assert leases.free == 10


def test_frames_of_a_process_are_kept_until_it_is_gone() -> None:
    leases = KVLeases(4)
    writer = subprocess.Popen(["sleep", "60"])
    try:
        transfer = leases.lease(3)
        assert transfer is not None
        leases.release_after(writer.pid, transfer)
        assert leases.free == 1 and leases.lease(2) is None
    finally:
        writer.kill()
        writer.wait()
    assert leases.free == 4
