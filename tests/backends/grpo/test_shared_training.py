"""Replicas that come and go, against one process that makes all the steps alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest
import torch
from fakes.replicas import Crew, MeanOfMeans, Worker, crew
from fakes.samples import LIMITS, STEPS, batch, counts, distance, write_model
from msgspec.structs import replace

import libra.backends.grpo.publication
import libra.backends.grpo.train_state
from libra.backends.grpo.joining import JoinError
from libra.backends.grpo.publication import DeviceBoard
from libra.backends.grpo.train_state import SNAPSHOTS
from libra.backends.grpo.trainer import TrainerProcess
from libra.backends.grpo.trainers import Trainers
from libra.backends.transport.messages import Precision
from libra.backends.transport.shared_memory import Vector
from libra.backends.transport.trainer_messages import Reduced, Train

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpt2"))


async def step(trainers: Trainers, version: int) -> int:
    samples = batch(version)
    return (await trainers.step(version, samples, *counts(samples))).replicas


async def alone(crew: Crew) -> tuple[Tensors, Tensors]:
    """Parameters before and after all steps by one process."""
    trainers = await crew.assemble()
    worker = crew.workers["core-0"]
    start = worker.parameters()
    for version in range(1, STEPS + 1):
        await step(trainers, version)
    return start, worker.parameters()


async def come_and_go(crew: Crew) -> list[Worker]:
    """Two cores, and a hybrid that contributes from step 7 on and is gone at step 13; returns the cores."""
    trainers = await crew.assemble("core-1")
    hybrid = await crew.hire("hybrid-0")
    joining: asyncio.Task[float] | None = None
    sizes = []
    for version in range(1, STEPS + 1):
        if version == 5:
            joining = asyncio.create_task(trainers.join(hybrid.handle))  # beside steps 5 and 6
        if version == 7 and joining is not None:
            await joining
        if version == 13:
            await trainers.leave("hybrid-0")
        sizes.append(await step(trainers, version))
    assert sizes[:4] + sizes[6:] == [2] * 4 + [3] * 6 + [2] * 8
    return [crew.workers["core-0"], crew.workers["core-1"]]


def average_means(trainer: TrainerProcess) -> None:
    reduce = trainer.reduce

    def own_mean(order: Train) -> Reduced:
        sequences, tokens = counts(order.samples)
        return reduce(replace(order, sequences=sequences, tokens=tokens))

    trainer.reduce = own_mean  # type: ignore[method-assign]
    trainer.elastic.exchange = MeanOfMeans()


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
async def test_replicas_that_come_and_go_train_what_one_process_trains(precision: Precision, model: Path) -> None:
    async with crew(model, precision, micro_batch=64) as reference:
        start, wanted = await alone(reference)
    async with crew(model, precision, micro_batch=64) as several:
        for core in await come_and_go(several):
            assert distance(core.parameters(), wanted, start) <= LIMITS[precision]
    async with crew(model, precision, micro_batch=64, dress=average_means) as wrong:  # the test would notice
        for core in await come_and_go(wrong):
            assert distance(core.parameters(), wanted, start) > 1000 * LIMITS[precision]


async def test_a_joiner_takes_over_everything_from_the_second_core_too(model: Path) -> None:
    async with crew(model, "fp32") as several:
        trainers = await several.assemble("core-1", "hybrid-0")
        for version in (1, 2, 3):
            assert await step(trainers, version) == 3
        assert len({worker.trainer.state.checksum for worker in several.workers.values()}) == 1
        optimisers = [worker.trainer.state.optimiser_tensors() for worker in several.workers.values()]
        for name, tensor in optimisers[0].items():
            assert all(torch.equal(tensor, other[name]) for other in optimisers[1:])
        # Who has left falls behind, and may come back.
        hybrid = await trainers.leave("hybrid-0")
        assert await step(trainers, 4) == 2
        await trainers.join(hybrid)
        assert await step(trainers, 5) == 3


async def test_joiners_follow_a_core_whose_state_is_on_a_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a CPU here, whose state is not in shared memory: only its mirror is."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(libra.backends.grpo.train_state, "make_board", lambda shape, device: DeviceBoard(shape, cpu))
    async with crew(model, "fp32", micro_batch=64) as several:
        cores = await come_and_go(several)
        boards = [cast(DeviceBoard, core.trainer.state._board) for core in cores]
        assert len({core.trainer.state.checksum for core in cores}) == 1
        assert [board._mirrored for board in boards] == [False, False]  # nobody joins, so no step is copied
        assert not any(vector.any() for board in boards for vector in board.host_vectors)  # its memory is given back
        on_device = cores[0].parameters()
    monkeypatch.undo()
    async with crew(model, "fp32", micro_batch=64) as reference:
        start, wanted = await alone(reference)
        assert distance(on_device, wanted, start) <= LIMITS["fp32"]


async def test_a_joiner_that_is_overtaken_is_let_in_by_a_core_that_stands_still(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies are torn by steps as long as steps are made."""
    async with crew(model, "fp32") as several:
        trainers = await several.assemble()
        core = several.workers["core-0"].trainer.state
        torn = []

        def copy(source: Vector, target: Vector) -> None:
            target[:] = source
            if not trainers.boundary.locked():
                core.put_back(core.keep())
                torn.append(core.number)

        await step(trainers, 1)
        monkeypatch.setattr(libra.backends.grpo.publication, "_copy", copy)
        await trainers.join((await several.hire("hybrid-0")).handle)
        assert len(torn) == 3 * SNAPSHOTS
        assert await step(trainers, 2) == 2


async def test_a_joiner_of_another_model_is_told_so(model: Path, tiny_model: Path) -> None:
    async with crew(model, "fp32") as several, crew(tiny_model, "fp32") as others:
        trainers = await several.assemble()
        stranger = await others.hire("hybrid-0")
        trainers._kill = lambda handle: None
        with pytest.raises(JoinError, match="hybrid-0 cannot join: the core's state cannot be read: process"):
            await trainers.join(stranger.handle)
        assert await step(trainers, 1) == 1
