"""Real engines and real trainers: weights, versions, log-probs, roles that change, and workers that are lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from arithmetic import LOGPROB_GAP, PRECISION
from real_workers import start_engine, start_trainer, trained_model
from shared_fork_server import SharedForkServer

import libra.backends.vllm.engine_handle
from libra.backends.grpo.trainers import Trainers
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import LocalLauncher
from libra.backends.transport.engine_messages import Generate, LoadWeights, Piece
from libra.backends.transport.messages import Acknowledged, Ready
from libra.backends.transport.trainer_messages import (
    Commit,
    Publish,
    Published,
    Reduced,
    Sample,
    SaveCheckpoint,
    Score,
    Scored,
    Train,
    Trained,
)
from libra.backends.vllm.engine_handle import EngineHandle
from libra.environments.protocol import Prompt
from libra.exec.protocols import WorkerFailedError
from libra.loop.episode import EpisodeRequest
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.running_turn import Draft, RunningTurn
from libra.plan.allocation import Allocation, Bucket
from libra.route.baselines import LeastLoaded

pytestmark = pytest.mark.integration

PROMPT = [5, 6, 7, 8, 9, 10, 11]
ARITHMETIC_GAP = LOGPROB_GAP[PRECISION]


@dataclass(frozen=True)
class Pair:
    launcher: LocalLauncher
    model: Path
    ready: Ready
    trainer: Handle
    engine: EngineHandle

    def kill(self, replica: Handle) -> None:
        self.launcher.kill(replica.link)


@dataclass
class Made:
    """What an engine made of a turn, one entry per token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def take(self, piece: Piece) -> None:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += [piece.version] * len(piece.tokens)


async def made(engine: EngineHandle, request: Generate) -> Made:
    turn = Made()
    await engine.generate(request, turn.take)
    return turn


@asynccontextmanager
async def pair(
    fork_server: SharedForkServer, directory: Path, lost: Callable[[str, str], object] = lambda name, why: None
) -> AsyncIterator[Pair]:
    """`lost` hears of the engine's loss."""
    async with fork_server.open() as launcher:
        model, trainer, ready = await trained_model(launcher, directory, 256)
        engine = EngineHandle(await launcher.spawn("engine", 0), lost)
        await engine.start(start_engine(model, ready))
        yield Pair(launcher, model, ready, trainer, engine)


@pytest.fixture
def both(fork_server: SharedForkServer, tmp_path: Path) -> AbstractAsyncContextManager[Pair]:
    return pair(fork_server, tmp_path)


def turn(name: str, tokens: int, salt: str | None = None, temperature: float = 1.0) -> Generate:
    return Generate(name, PROMPT, tokens, temperature, -1, 0, salt)


def samples(count: int, offset: int = 0) -> list[Sample]:
    made = []
    for index in range(count):
        length = 6 + 5 * index
        tokens = [4 + (offset + 3 * index + position) % 12 for position in range(length)]
        own = [position >= 3 for position in range(length)]
        made.append(Sample(str(index), tokens, own, [-2.0] * length, [0] * length, 1.0 if index % 2 else -0.7))
    return made


async def step(trainer: Handle, version: int, buffer: int) -> Trained:
    """A whole step of one replica."""
    batch = samples(5)
    tokens = sum(sum(s.generated) for s in batch)
    await trainer.ask(Train(version, batch, len(batch), tokens, 60.0), Reduced)
    return await trainer.ask(Commit(version, buffer), Trained)


def gap(generated: list[float], scored: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(generated, scored[len(PROMPT) - 1 :], strict=True))


async def test_engine_and_trainer_agree_after_updates_and_not_before(both: Pair) -> None:
    for version in (1, 2, 3):
        done = await step(both.trainer, version, version % 2)
        old = await made(both.engine, turn(f"old-{version}", 24, salt=f"old-{version}"))
        await both.engine.load(LoadWeights(version, version % 2, done.checksum))
        new = await made(both.engine, turn(f"new-{version}", 24, salt=f"new-{version}"))
        scored = await both.trainer.ask(Score([PROMPT + old.tokens, PROMPT + new.tokens]), Scored)
        assert new.versions == [version] * 24
        assert gap(new.logprobs, scored.logprobs[1]) < ARITHMETIC_GAP
        assert gap(old.logprobs, scored.logprobs[0]) > ARITHMETIC_GAP  # the check can tell versions apart


async def test_log_probs_are_of_the_distribution_that_was_sampled(both: Pair) -> None:
    """In one batch at once, as evaluations and training may be: 0 is greedy, of which nothing is trained."""
    for version in (1, 2, 3):  # away from the uniform distribution, which is the same at any temperature
        done = await step(both.trainer, version, version % 2)
    await both.engine.load(LoadWeights(3, 1, done.checksum))
    await both.trainer.ask(SaveCheckpoint(str(both.model), optimiser=False), Acknowledged)
    heats = (0.0, 0.7, 1.0, 1.3)
    turns = await asyncio.gather(*(made(both.engine, turn(f"at-{heat}", 48, None, heat)) for heat in heats))
    alone = await made(both.engine, turn("greedy", 48, None, 0.0))
    assert alone.tokens == turns[0].tokens and len(turns[0].logprobs) == 48
    sampled = {heat: made for heat, made in zip(heats, turns, strict=True) if heat}
    for heat in sampled:
        trainer = Handle(await both.launcher.spawn(f"trainer-{heat}", 0), lambda name, why: None)
        await trainer.start(start_trainer(both.model, 0, heat))
        scored = await trainer.ask(Score([PROMPT + it.tokens for it in sampled.values()]), Scored)
        for other, logprobs in zip(sampled, scored.logprobs, strict=True):
            assert (gap(sampled[other].logprobs, logprobs) < ARITHMETIC_GAP) == (other == heat)


async def test_the_same_seed_samples_the_same_tokens(both: Pair) -> None:
    seeds = (3, 3, 4)
    one, again, other = [
        (await made(both.engine, Generate(f"r{index}", PROMPT, 24, 1.0, -1, 0, seed=seed))).tokens
        for index, seed in enumerate(seeds)
    ]
    assert one == again != other


async def test_weights_arrive_in_the_middle_of_a_turn_without_draining(both: Pair) -> None:
    first = await both.trainer.ask(Publish(1, 1), Published)
    await both.engine.load(LoadWeights(1, 1, first.checksum))
    running = asyncio.create_task(made(both.engine, turn("long", 200)))
    while both.engine.running == 0:
        await asyncio.sleep(0)
    second = await step(both.trainer, 2, 0)
    await both.engine.load(LoadWeights(2, 0, second.checksum))
    assert not running.done()
    versions = (await running).versions
    assert len(versions) == 200
    assert versions == sorted(versions) and set(versions) == {1, 2}


async def test_a_damaged_update_is_refused_and_the_old_weights_stay(both: Pair) -> None:
    first = await both.trainer.ask(Publish(1, 1), Published)
    await both.engine.load(LoadWeights(1, 1, first.checksum))
    done = await step(both.trainer, 2, 0)
    with pytest.raises(WorkerFailedError, match="version 2: checksum"):
        await both.engine.load(LoadWeights(2, 0, done.checksum ^ 1))
    assert (await made(both.engine, turn("after", 8))).versions == [1] * 8
    await both.engine.load(LoadWeights(2, 0, done.checksum))
    assert (await made(both.engine, turn("then", 8))).versions == [2] * 8


async def test_a_worker_leaves_rollout_joins_training_and_goes_back(both: Pair) -> None:
    """The hybrid's way: engine, replica, engine; the core trains before, with and after it."""
    trainers = Trainers(both.trainer, both.kill)
    batch = samples(6)
    tokens = sum(sum(sample.generated) for sample in batch)
    alone = await trainers.step(1, batch, len(batch), tokens)
    await both.engine.stop()

    hybrid = Handle(await both.launcher.spawn("hybrid", 0), lambda name, why: None)
    await hybrid.start(start_trainer(both.model, 1))
    await trainers.join(hybrid)
    together = await trainers.step(2, samples(6, offset=5), len(batch), tokens)  # raises if replicas differ
    assert (alone.replicas, together.replicas) == (1, 2)

    leaving = await trainers.leave("hybrid")
    await leaving.stop()
    after = await trainers.step(3, batch, len(batch), tokens)
    assert after.replicas == 1
    engine = EngineHandle(await both.launcher.spawn("hybrid-engine", 0), lambda name, why: None)
    await engine.start(start_engine(both.model, both.ready))
    await engine.load(LoadWeights(3, after.buffer, after.checksum))
    new = await made(engine, turn("back", 16))
    scored = await both.trainer.ask(Score([PROMPT + new.tokens]), Scored)
    assert new.versions == [3] * 16
    assert gap(new.logprobs, scored.logprobs[0]) < ARITHMETIC_GAP


# --- an engine goes away in the middle of a turn -----------------------------------------------------------------


class LongTurn:
    """A turn of hundreds of tokens, which starts on the first engine of a fleet."""

    MOST = 240

    def __init__(self) -> None:
        self.fleet = ServingFleet(LeastLoaded(), Allocation(1, (Bucket("any", 2, 0, 256),)))
        self.draft = Draft(EpisodeRequest("g0-0", Prompt("p", "", ""), 0.0, 1.0), started_at=0.0)
        self.draft.given(list(PROMPT))
        self.running = RunningTurn(self.draft, "test", self.fleet, self.MOST, -1)

    def lost(self, name: str, why: str) -> None:
        self.fleet.remove(name)

    async def begin(self, both: Pair, other: EngineHandle) -> None:
        """Some tokens on the pair's engine, with the other one in service beside it; both have weights of version 1."""
        published = await both.trainer.ask(Publish(1, 1), Published)
        for engine in (both.engine, other):
            await engine.load(LoadWeights(1, 1, published.checksum))
        self.fleet.add(ServingEngine(both.engine, "any", 256))
        self.part = self.serve("first")
        self.fleet.add(ServingEngine(other, "any", 256))
        await self.grow_to(20)

    def serve(self, name: str) -> asyncio.Task[None]:
        placement = self.running.place()
        assert placement is not None
        return asyncio.create_task(self.running.serve(placement, name))

    async def grow_to(self, tokens: int) -> None:
        async with asyncio.timeout(60):
            while len(self.draft.tokens) - len(PROMPT) < tokens:
                await asyncio.sleep(0.001)

    async def check(self, trainer: Handle, kept: list[int], kept_logprobs: list[float]) -> None:
        """It is whole, begins with what was kept, and is what the trainer would say of it."""
        draft = self.draft
        assert self.running.over and len(draft.tokens) == len(PROMPT) + self.MOST
        assert draft.tokens[: len(kept)] == kept and draft.logprobs[: len(kept)] == kept_logprobs
        assert draft.versions[len(PROMPT) :] == [1] * self.MOST
        scored = await trainer.ask(Score([draft.tokens]), Scored)
        assert gap(draft.logprobs[len(PROMPT) :], scored.logprobs[0]) < ARITHMETIC_GAP


Moving = tuple[LongTurn, Pair, EngineHandle]


@pytest.fixture
@asynccontextmanager
async def moving(fork_server: SharedForkServer, tmp_path: Path) -> AsyncIterator[Moving]:
    """A turn that has begun on the pair's engine, and another engine."""
    turn = LongTurn()
    async with pair(fork_server, tmp_path, turn.lost) as both:
        other = EngineHandle(await both.launcher.spawn("other", 0), lambda name, why: None)
        await other.start(start_engine(both.model, both.ready))
        await turn.begin(both, other)
        yield turn, both, other


@pytest.mark.parametrize("end", ["killed", "hangs"])
async def test_a_turn_goes_on_when_its_engine_is_lost(
    moving: Moving, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(libra.backends.vllm.engine_handle, "SILENT_LOOKS", 5)
    turn, both, _ = moving
    began = time.monotonic()
    os.kill(both.engine.link.pid, signal.SIGKILL if end == "killed" else signal.SIGSTOP)
    await turn.part
    kept, kept_logprobs = list(turn.draft.tokens), list(turn.draft.logprobs)
    assert len(kept) >= len(PROMPT) + 20 and not turn.running.over
    second = turn.serve("second")
    await turn.grow_to(len(kept) - len(PROMPT) + 1)
    if end == "killed":
        assert time.monotonic() - began < 2.0
    await second
    await turn.check(both.trainer, kept, kept_logprobs)


async def test_a_turn_goes_on_when_its_engine_is_to_do_something_else(moving: Moving) -> None:
    turn, both, other = moving
    turn.fleet.remove(both.engine.name)
    await both.engine.stop()
    await turn.part
    kept, kept_logprobs = list(turn.draft.tokens), list(turn.draft.logprobs)
    assert not turn.running.over
    # All that the engine made has come: it said how much that was.
    assert both.engine.generated_tokens == len(kept) - len(PROMPT)
    await turn.serve("second")
    assert other.generated_tokens == turn.MOST - both.engine.generated_tokens
    await turn.check(both.trainer, kept, kept_logprobs)


async def test_a_turn_is_moved_while_it_runs(moving: Moving) -> None:
    turn, both, _ = moving
    both.engine.interrupt("first")
    await turn.part
    kept, kept_logprobs = list(turn.draft.tokens), list(turn.draft.logprobs)
    assert not turn.running.over and both.engine.generated_tokens == len(kept) - len(PROMPT)
    turn.fleet.remove(both.engine.name)  # so that the policy sends it to the other one
    await turn.serve("second")
    await turn.check(both.trainer, kept, kept_logprobs)
    # The first engine has nothing left of it and goes on with others.
    assert len((await made(both.engine, Generate("next", PROMPT, 8, 1.0, -1, 0))).tokens) == 8
