"""Real engines: a turn goes on with the KV that another engine has computed, or with none; never with a wrong one."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from arithmetic import LOGPROB_GAP, PRECISION
from real_workers import start_engine, trained_model
from shared_fork_server import SharedForkServer

from libra.backends.launch.handle import Handle
from libra.backends.machine import served_dtype
from libra.backends.tiny_model import kv_bytes_per_token
from libra.backends.transport.engine_messages import Fetched, Generate, HandoverMeasured, LoadWeights, MeasureHandover
from libra.backends.transport.trainer_messages import Publish, Published
from libra.backends.vllm.engine_handle import EngineHandle
from libra.backends.vllm.kv_handover import ContextMove, KVHandover
from libra.cost.device import DeviceProfile, EngineCost, HandoverCost, SwitchCost, TrainCost
from libra.cost.engine_memory import BLOCK_TOKENS
from libra.environments.protocol import Prompt
from libra.loop.episode import EpisodeRequest
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.running_turn import Draft, RunningTurn
from libra.plan.allocation import Allocation, Bucket
from libra.route.baselines import LeastLoaded
from tests.oracles.shared_memory import shared_files, unused_shared_files

pytestmark = pytest.mark.integration

LONGEST = 512
PROMPT = [4 + (7 * place + place * place // 5) % 12 for place in range(150)]
MOST = 320  # tokens of the turn: it must not end before it is interrupted
DTYPE = served_dtype(PRECISION)
GAP = LOGPROB_GAP[PRECISION] / 3  # of a token computed in another batch, by the same engine
# Every context is handed over: what is cheaper is not this test's question.
PROFILE = DeviceProfile(
    "test", "test", EngineCost(0, 0, 0, 1, 0), TrainCost(1, 1, 1), SwitchCost(1, 1, 1), 0.0, HandoverCost(0, 0)
)


@dataclass
class Scene:
    """Two engines, `a` and `b`, of one model."""

    handover: KVHandover
    trainer: Handle
    a: EngineHandle
    b: EngineHandle

    async def publish(self, version: int, *engines: EngineHandle) -> None:
        published = await self.trainer.ask(Publish(version, version % 2), Published)
        for engine in engines:
            await engine.load(LoadWeights(version, version % 2, published.checksum))


@dataclass
class Told:
    """One greedy turn, and how its context came to the engine that ended it."""

    draft: Draft
    change: ContextMove | None

    @property
    def made(self) -> list[int]:
        return self.draft.tokens[len(PROMPT) :]

    @property
    def logprobs(self) -> list[float]:
        return self.draft.logprobs[len(PROMPT) :]


@asynccontextmanager
async def scene(fork_server: SharedForkServer, directory: Path, refresh_kv: bool = False) -> AsyncIterator[Scene]:
    async with fork_server.open() as launcher:
        model, trainer, ready = await trained_model(launcher, directory, LONGEST)
        handover = KVHandover(kv_bytes_per_token(model, DTYPE), LONGEST)
        handover.price_by(PROFILE)
        start = start_engine(model, ready, LONGEST, 2 * LONGEST, refresh_kv, handover.memory.place)
        engines = [EngineHandle(await launcher.spawn(name, 0), lambda name, why: None) for name in "ab"]
        await asyncio.gather(*(engine.start(start) for engine in engines))
        made = Scene(handover, trainer, *engines)
        await made.publish(1, *engines)
        yield made


async def told(
    scene: Scene,
    salt: str,
    leave: Callable[[EngineHandle, str], Awaitable[None]] | None = None,
    after: int = 61,
    fresh: bool = True,
) -> Told:
    """A greedy turn that starts at `a` and ends at `b`, which it `leave`s for with so many tokens; without `leave`, one
    that is never interrupted. `fresh` turns have no KV in common."""
    fleet = ServingFleet(LeastLoaded(), Allocation(1, (Bucket("any", 2, 0, LONGEST),)), scene.handover)
    fleet.add(ServingEngine(scene.a, "any", LONGEST))
    draft = Draft(EpisodeRequest(salt, Prompt("p", "", ""), 0.0, 0.0, fresh), started_at=0.0)
    draft.given(list(PROMPT))
    turn = RunningTurn(draft, "test", fleet, MOST, -1)
    name = f"{salt}-first"
    first = asyncio.create_task(_serve(turn, name))
    if leave is not None:
        async with asyncio.timeout(60):
            while len(draft.tokens) < len(PROMPT) + after:
                await asyncio.sleep(0.001)
        fleet.remove("a")
        fleet.add(ServingEngine(scene.b, "any", LONGEST))
        await leave(scene.a, name)
    await first
    if leave is not None:
        assert not turn.over
        await _serve(turn, f"{salt}-second")
    assert turn.over
    return Told(draft, turn.change)


async def next_turn(scene: Scene, told: Told) -> None:
    """A tool has returned, and the turn after it is made by `a`."""
    fleet = ServingFleet(LeastLoaded(), Allocation(1, (Bucket("any", 1, 0, LONGEST),)), scene.handover)
    fleet.add(ServingEngine(scene.a, "any", LONGEST))
    told.draft.given([5, 6, 7])
    turn = RunningTurn(told.draft, "test", fleet, 20, -1)
    await _serve(turn, f"{told.draft.asked.id}-next")
    assert turn.over
    told.change = turn.change


async def _serve(turn: RunningTurn, name: str) -> None:
    placement = turn.place()
    assert placement is not None
    await turn.serve(placement, name)


async def interrupted(engine: EngineHandle, turn: str) -> None:
    engine.interrupt(turn)


def same(one: Told, other: Told) -> None:
    assert one.made == other.made
    assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)) < GAP


async def measured(scene: Scene) -> None:
    """What a hand-over costs, for the profile."""
    transfer = scene.handover.leases.lease(8)
    assert transfer is not None
    found = await scene.a.ask(MeasureHandover([33, 8 * BLOCK_TOKENS + 1], 2, transfer), HandoverMeasured)
    assert [tokens for tokens, _ in found.contexts] == [32, 256] * 2
    assert all(seconds > 0 for _, seconds in found.contexts)


def holders(memory: int) -> set[int]:
    """Processes that hold or map the frames with this inode."""
    found = set()
    for process in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        inodes = set()
        with suppress(OSError):  # it has ended, or is somebody else's
            lines = (process / "maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if "memfd:libra-kv" in line}
            for file in (process / "fd").iterdir():
                with suppress(OSError):  # it was closed meanwhile
                    if "memfd:libra-kv" in str(file.readlink()):
                        inodes.add(file.stat().st_ino)
        if memory in inodes:
            found.add(int(process.name))
    return found


def test_a_turn_goes_on_elsewhere_with_its_kv_as_if_never_interrupted(
    fork_server: SharedForkServer, tmp_path: Path
) -> None:
    named = shared_files()

    async def check() -> int:
        async with scene(fork_server, tmp_path) as two:
            memory = os.fstat(two.handover.memory.place.descriptor).st_ino
            assert holders(memory) == {os.getpid(), two.a.link.pid, two.b.link.pid}
            whole = await told(two, "whole")
            assert whole.change is None
            prefilled = two.b.prefilled_tokens
            moved = await told(two, "moved", interrupted)
            same(moved, whole)
            assert moved.change is not None and moved.change.why == "handed over"
            context = moved.change.context
            assert context >= len(PROMPT) + 61
            # Whole blocks came; what was computed again is the rest of the last one.
            assert moved.change.handed_tokens == (context - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            assert two.b.prefilled_tokens - prefilled == context - moved.change.handed_tokens
            await next_turn(two, whole)
            context, prefilled = len(moved.draft.tokens), two.a.prefilled_tokens
            await next_turn(two, moved)
            same(moved, whole)
            # The first engine still had what it had made, and the turn after it is handed back to where it began.
            assert moved.change is not None and 0 < moved.change.handed_tokens < context - BLOCK_TOKENS
            assert two.a.prefilled_tokens - prefilled < 2 * BLOCK_TOKENS
            assert two.handover.leases.free == LONGEST // BLOCK_TOKENS
            await measured(two)
            await two.a.stop()
            await two.b.stop()
            return memory

    memory = asyncio.run(check())
    gc.collect()
    assert holders(memory) == set()
    assert not unused_shared_files(named)


async def test_an_engine_that_leaves_puts_down_what_its_turns_want(
    fork_server: SharedForkServer, tmp_path: Path
) -> None:
    """And with `kv_on_update: refresh` nothing that is older than the weights, as within one engine."""
    async with scene(fork_server, tmp_path, refresh_kv=True) as two:
        whole = await told(two, "whole")

        async def updated(engine: EngineHandle, turn: str) -> None:
            await two.publish(2, two.a, two.b)
            engine.interrupt(turn)

        new = await told(two, "new", interrupted, fresh=False)
        same(new, whole)
        assert new.change is not None and new.change.handed_tokens > 0
        old = await told(two, "old", updated, fresh=False)
        same(old, whole)
        assert old.change is not None and old.change.why == "the engine no longer had it"

        fleet = ServingFleet(LeastLoaded(), Allocation(1, (Bucket("any", 2, 0, LONGEST),)), two.handover)
        fleet.add(ServingEngine(two.a, "any", LONGEST))
        drafts = []

        async def episode(name: str) -> ContextMove | None:
            draft = Draft(EpisodeRequest(name, Prompt("p", "", ""), 0.0, 0.0, fresh=True), started_at=0.0)
            draft.given(list(PROMPT))
            drafts.append(draft)
            turn = RunningTurn(draft, "test", fleet, MOST, -1)
            parts = 0
            while not turn.over:
                await _serve(turn, f"{name}-{parts}")
                parts += 1
            assert parts == 2
            return turn.change

        episodes = asyncio.gather(*(episode(f"e{number}") for number in range(3)))
        async with asyncio.timeout(60):
            while len(drafts) < 3 or any(len(draft.tokens) < len(PROMPT) + 40 for draft in drafts):
                await asyncio.sleep(0.001)
        fleet.remove("a")
        fleet.add(ServingEngine(two.b, "any", LONGEST))
        await two.a.vacate(5.0)
        await two.a.stop()
        for draft, change in zip(drafts, await episodes, strict=True):
            same(Told(draft, change), whole)
        # The frames hold two contexts of the three: the third is computed again, unless one was taken by then.
        *first_two, third = sorted(change.why for change in await episodes if change)
        assert first_two == ["handed over", "handed over"]
        assert third in ("handed over", "too many contexts are being handed over")


async def test_what_cannot_be_handed_over_is_computed_again(fork_server: SharedForkServer, tmp_path: Path) -> None:
    """A damaged block, weights that are newer, a turn that ends before it began, an engine that is killed after it was
    asked."""
    async with scene(fork_server, tmp_path) as two:
        whole = await told(two, "whole")
        frames = two.handover.memory
        save = two.a.save

        def damaged(order):  # type: ignore[no-untyped-def]
            saved = save(order)
            saved.add_done_callback(lambda _: frames.payload[order.transfer.frames[3]].__setitem__(17, 255))
            return saved

        two.a.save = damaged  # type: ignore[method-assign]
        turn = await told(two, "damaged", interrupted)
        same(turn, whole)
        assert turn.change is not None and turn.change.handed_tokens == 3 * BLOCK_TOKENS
        two.a.save = save  # type: ignore[method-assign]

        async def updated(engine: EngineHandle, turn: str) -> None:
            await two.publish(2, engine)
            engine.interrupt(turn)

        turn = await told(two, "newer", updated)
        same(turn, whole)
        assert turn.change is not None and turn.change.handed_tokens == 0

        transfer = two.handover.leases.lease(2)
        os.kill(two.b.link.pid, signal.SIGSTOP)  # it hears at once of a turn and of its end
        fetched = two.b.fetched(transfer.number)
        early = Generate("early", PROMPT, MOST, 0.0, -1, 0, transfer=transfer)
        generating = asyncio.create_task(two.b.generate(early, lambda piece: None))
        await asyncio.sleep(0)
        two.b.interrupt("early")
        os.kill(two.b.link.pid, signal.SIGCONT)
        assert await asyncio.wait_for(fetched, 10) == Fetched(transfer.number, 0)
        await generating
        two.handover.leases.release(transfer)

        def killed(order):  # type: ignore[no-untyped-def]
            os.kill(two.a.link.pid, signal.SIGSTOP)  # it has been asked and does not come to answer
            saved = save(order)
            os.kill(two.a.link.pid, signal.SIGKILL)
            return saved

        two.a.save = killed  # type: ignore[method-assign]
        turn = await told(two, "killed", interrupted)
        same(turn, whole)
        assert turn.change is not None and turn.change.why == "the engine was lost"
        async with asyncio.timeout(10):
            while two.handover.leases.free < LONGEST // BLOCK_TOKENS:
                await asyncio.sleep(0.01)
