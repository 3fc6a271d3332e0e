"""Engines of slots that change sides: on GPUs they sleep while the slot trains, and wake with the current weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes.scripted import FirstInstance, Told
from fakes.small_run import CONFIG, FIRST
from fakes.workers import MadeLauncher, MadeWorker

from libra.backends.devices import CPU, SlotDevice
from libra.backends.transport.engine_messages import LoadWeights, Sleep, StartEngine, Wake
from libra.backends.transport.messages import Failure, Message, Stop
from libra.config.run import ShapeConfig
from libra.exec.journal import Journal
from libra.exec.pool import make_pool
from libra.exec.protocols import Applied
from libra.loop.fleet import ServingFleet
from libra.loop.process_controller import RunExecutor, SlotProcesses, WorkerSettings, begin_session
from libra.plan.allocation import Allocation, Bucket

GPU = SlotDevice("cuda", ("0",))
LONGER = Allocation(1, (Bucket("short", 1, 0, 40), Bucket("long", 2, 40, 100)))
SHORTER = Allocation(1, (Bucket("short", 2, 0, 40), Bucket("long", 1, 40, 100)))


class Made:
    """Two trainers, of which hybrid-0 may generate, and two engines."""

    def __init__(self, directory: Path, device: SlotDevice, sleeps: bool) -> None:
        self.launcher, self.told = MadeLauncher(), Told()
        self.launcher.device = device
        engines = {name: ShapeConfig(**{**dict(it), "sleeps": sleeps}) for name, it in CONFIG.engines.items()}
        settings = WorkerSettings(CONFIG.training, engines, 0.45, 0, 0, directory, "fp32", lambda gpus: 16, 4, None)
        self.journal = Journal(directory / "journal.jsonl")
        fleet, pool = ServingFleet(FirstInstance(), FIRST), make_pool(1, 1, 2)
        processes = SlotProcesses(self.launcher, pool, fleet, settings, self.journal, self.told)
        self.executor: RunExecutor = begin_session(processes)

    async def become(self, wanted: Allocation) -> Applied:
        applied = await self.executor.apply(self.executor.transition(wanted))
        assert applied.failure is None and [moved.outcome for moved in applied.moves] == ["done"]
        return applied

    async def engine_in_hybrid(self) -> MadeWorker:
        """Its worker, while it serves the longest contexts."""
        await self.become(LONGER)
        return self.launcher.workers["hybrid-0"]


@asynccontextmanager
async def session(directory: Path, device: SlotDevice = GPU, sleeps: bool = True) -> AsyncIterator[Made]:
    made = Made(directory, device, sleeps)
    try:
        await made.executor.start(FIRST)
        yield made
    finally:
        await made.executor.stop()
        made.journal.close()


def kinds(worker: MadeWorker) -> list[type[Message]]:
    return [type(order) for order in worker.orders]


async def test_an_engine_sleeps_while_its_slot_trains_and_wakes_with_the_current_weights(tmp_path: Path) -> None:
    async with session(tmp_path) as made:
        engine = await made.engine_in_hybrid()
        assert isinstance(engine.orders[0], StartEngine) and engine.orders[0].sleeps
        await made.become(FIRST)
        assert kinds(engine)[-1] is Sleep and not engine.gone.is_set()
        trainer = made.launcher.workers["hybrid-0"]
        assert trainer is not engine and made.executor.processes.trainers.names() == ("core-0", "hybrid-0")
        await made.executor.processes.publish(5, 1, 7)
        assert kinds(engine)[-1] is Sleep  # no weights while it has no memory
        await made.become(LONGER)
        assert trainer.gone.is_set()
        assert kinds(engine)[-2:] == [Wake, LoadWeights] and engine.loaded[-1] == 5
        assert kinds(engine).count(StartEngine) == 1
        assert {entry.handle.name for entry in made.executor.processes.fleet.instances()} >= {"hybrid-0"}
        assert made.told.losses == []


async def test_one_that_dies_in_its_sleep_is_no_loss(tmp_path: Path) -> None:
    async with session(tmp_path) as made:
        engine = await made.engine_in_hybrid()
        await made.become(FIRST)
        engine.die()
        await engine.gone.wait()
        await asyncio.sleep(0)
        await made.become(LONGER)
        assert kinds(made.launcher.workers["hybrid-0"]) == [StartEngine, LoadWeights]
        assert made.told.losses == []


@pytest.mark.parametrize("answer", [Failure("Memory usage increased after sleeping."), None], ids=["fails", "dies"])
async def test_one_that_cannot_sleep_is_ended(tmp_path: Path, answer: Any) -> None:
    async with session(tmp_path) as made:
        engine = await made.engine_in_hybrid()
        engine.instead[Sleep] = answer
        await made.become(FIRST)
        assert engine.gone.is_set()
        assert made.executor.processes.trainers.names() == ("core-0", "hybrid-0")
        await made.become(LONGER)
        assert kinds(made.launcher.workers["hybrid-0"]) == [StartEngine, LoadWeights]
        assert made.told.losses == []


@pytest.mark.parametrize("answer", [Failure("out of memory"), None], ids=["fails", "dies"])
async def test_one_that_cannot_wake_is_started_again(tmp_path: Path, answer: Any) -> None:
    async with session(tmp_path) as made:
        engine = await made.engine_in_hybrid()
        engine.instead[Wake] = answer
        await made.become(FIRST)
        await made.become(LONGER)
        assert engine.gone.is_set()
        assert kinds(made.launcher.workers["hybrid-0"]) == [StartEngine, LoadWeights]
        assert made.told.losses == []
        made.launcher.workers["hybrid-0"].die()  # now it is
        async with asyncio.timeout(10):
            while not made.told.losses:
                await asyncio.sleep(0)


async def test_one_that_is_to_start_again_does_not_sleep(tmp_path: Path) -> None:
    """A restart is measured as what a first start costs."""
    async with session(tmp_path) as made:
        engine = await made.engine_in_hybrid()
        await made.executor.restart("hybrid-0")
        assert engine.gone.is_set() and kinds(engine)[-1] is Stop
        assert kinds(made.launcher.workers["hybrid-0"]) == [StartEngine, LoadWeights]


async def test_another_shape_takes_the_place_of_one_that_sleeps(tmp_path: Path) -> None:
    async with session(tmp_path) as made:
        engine = await made.engine_in_hybrid()
        await made.become(FIRST)
        await made.become(SHORTER)
        assert engine.gone.is_set() and kinds(engine)[-1] is Stop
        assert kinds(made.launcher.workers["hybrid-0"]) == [StartEngine, LoadWeights]


async def test_a_worker_that_is_given_up_while_its_engine_wakes_has_no_process_left(tmp_path: Path) -> None:
    async with session(tmp_path) as made:
        engine, waking = await made.engine_in_hybrid(), asyncio.Event()

        async def never() -> Message:
            waking.set()
            await asyncio.Event().wait()
            raise AssertionError

        engine.instead[Wake] = never
        await made.become(FIRST)
        moving = asyncio.create_task(made.executor.apply(made.executor.transition(LONGER)))
        await waking.wait()
        made.executor.lose("hybrid-0", "it takes too long")
        applied = await moving
        assert [(it.outcome, it.why) for it in applied.moves] == [("undone", "it takes too long")]
        assert engine.gone.is_set()
        assert StartEngine not in kinds(made.launcher.workers["hybrid-0"])  # it trains again


async def test_what_sleeps_ends_with_the_session(tmp_path: Path) -> None:
    async with session(tmp_path) as made:
        engine = await made.engine_in_hybrid()
        await made.become(FIRST)
    await engine.gone.wait()
    assert kinds(engine)[-1] is Stop


@pytest.mark.parametrize(("device", "sleeps"), [(CPU, True), (GPU, False)])
async def test_engines_end_on_cpu_slots_and_where_that_is_wanted(
    tmp_path: Path, device: SlotDevice, sleeps: bool
) -> None:
    async with session(tmp_path, device, sleeps) as made:
        engine = await made.engine_in_hybrid()
        assert isinstance(engine.orders[0], StartEngine) and not engine.orders[0].sleeps
        await made.become(FIRST)
        assert engine.gone.is_set() and kinds(engine)[-1] is Stop


async def test_engines_that_never_train_are_not_told_to_sleep(tmp_path: Path) -> None:
    async with session(tmp_path) as made:
        start = made.launcher.workers["rollout-0"].orders[0]
        assert isinstance(start, StartEngine) and not start.sleeps
        await made.executor.restart("rollout-0")
        assert kinds(made.launcher.workers["rollout-0"]) == [StartEngine, LoadWeights]
