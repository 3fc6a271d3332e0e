"""Real replicas in processes of their own, which join, leave, are killed and are stopped, against one process alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
from equivalence import LIMITS, RATE, STEPS, Tensors, batch, counts, distance, write_model
from nurseries import TRAINING, nursery
from safetensors.torch import load_file

from libra.exec.launch.answers import STANDARD, Patience
from libra.exec.launch.handles import Handle
from libra.exec.launch.local import LocalLauncher
from libra.exec.train.trainers import Trainers
from libra.exec.wire.messages import Done, Precision, SaveCheckpoint, StartTrainer

pytestmark = pytest.mark.integration

SLOW = 0.05  # share of a core: it sleeps long between its backward pass and the exchange


@dataclass
class Stage:
    """One nursery for all tests here, on one event loop."""

    runner: asyncio.Runner
    launcher: LocalLauncher
    directory: Path
    alone: dict[Precision, tuple[Tensors, Tensors]] = field(default_factory=dict)

    async def hire(
        self, name: str, precision: Precision, seed: int = 0, share: float = 1.0, elsewhere: bool = False
    ) -> Handle:
        """A started replica; `elsewhere` it lives as if on another node, reached at an address of its own."""
        link = await self.launcher.spawn(name, 0)
        if elsewhere:
            link = replace(link, node="elsewhere", host="127.0.0.2")
        handle = Handle(link, lambda name, why: None)
        cores = tuple(sorted(os.sched_getaffinity(0)))[:1]
        model = str(self.directory / "model")
        await handle.start(
            StartTrainer(model, RATE, (0.8, 1.28), "tokens", 12.0, 1.0, 64, precision, seed, share, cores)
        )
        return handle

    def kill(self, replica: Handle) -> None:
        self.launcher.kill(replica.link)

    async def parameters(self, replica: Handle) -> Tensors:
        directory = self.directory / f"saved-{replica.link.pid}"
        await replica.ask(SaveCheckpoint(str(directory), optimiser=False), Done)
        return load_file(directory / "model.safetensors")

    async def reference(self, precision: Precision) -> tuple[Tensors, Tensors]:
        """Parameters before and after all steps by one process."""
        if precision not in self.alone:
            replica = await self.hire("alone", precision)
            trainers = Trainers(replica, self.kill)
            start = await self.parameters(replica)
            for version in range(1, STEPS + 1):
                await step(trainers, version)
            self.alone[precision] = start, await self.parameters(replica)
            await replica.stop()
        return self.alone[precision]

    async def two_cores(self, precision: Precision, patience: Patience = STANDARD) -> Trainers:
        trainers = Trainers(await self.hire("core-0", precision), self.kill, patience)
        await trainers.join(await self.hire("core-1", precision, seed=1), core=True)
        return trainers

    async def end(self, trainers: Trainers, precision: Precision) -> None:
        """Every replica holds what one process alone would hold."""
        start, wanted = await self.reference(precision)
        for replica in trainers.replicas():
            assert distance(await self.parameters(replica), wanted, start) <= LIMITS[precision]
            await replica.stop()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("replicas")
    write_model(directory / "model")
    with asyncio.Runner() as runner:
        context = nursery(directory, TRAINING)
        launcher, _ = runner.run(context.__aenter__())
        runner.run(launcher.ready())
        yield Stage(runner, launcher, directory)
        runner.run(context.__aexit__(None, None, None))


async def step(trainers: Trainers, version: int) -> int:
    samples = batch(version)
    result = await trainers.step(version, samples, *counts(samples))
    assert result.generated_tokens == counts(samples)[1]
    return result.replicas


async def steps_beside(trainers: Trainers, versions: range, change: asyncio.Task[float]) -> None:
    """Steps of two while somebody joins, who then takes part in the next one."""
    for version in versions:
        assert await step(trainers, version) in (2, 3)
    await change


@pytest.mark.parametrize("elsewhere", [False, True], ids=["one node", "two nodes"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_replica_joins_at_step_7_and_leaves_at_step_13(stage: Stage, precision: Precision, elsewhere: bool) -> None:
    async def check() -> None:
        trainers = await stage.two_cores(precision)
        hybrid = await stage.hire("hybrid-0", precision, seed=2, elsewhere=elsewhere)
        assert [await step(trainers, version) for version in range(1, 5)] == [2] * 4
        await steps_beside(trainers, range(5, 7), asyncio.create_task(trainers.join(hybrid)))
        assert bool(_connections(hybrid, "127.0.0.2")) == elsewhere
        assert [await step(trainers, version) for version in range(7, 13)] == [3] * 6
        await (await trainers.leave("hybrid-0")).stop()
        assert [await step(trainers, version) for version in range(13, STEPS + 1)] == [2] * 8
        await stage.end(trainers, precision)

    stage.runner.run(check())


def test_a_joiner_of_another_node_whose_relay_is_killed_gets_another_one(stage: Stage) -> None:
    async def check() -> None:
        trainers = await stage.two_cores("fp32")
        hybrid = await stage.hire("hybrid-0", "fp32", seed=2, elsewhere=True)
        core = psutil.Process(trainers.core.link.pid)
        joining = asyncio.create_task(trainers.join(hybrid))
        while not core.children():
            await asyncio.sleep(0.001)
        [relay] = core.children()
        relay.kill()
        await steps_beside(trainers, range(1, 11), joining)
        assert relay not in core.children()
        assert [await step(trainers, version) for version in range(11, STEPS + 1)] == [3] * 10
        await stage.end(trainers, "fp32")

    stage.runner.run(check())


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_replica_is_killed_in_the_middle_of_step_17(stage: Stage, precision: Precision) -> None:
    async def check() -> None:
        trainers = await stage.two_cores(precision)
        hybrid = await stage.hire("hybrid-0", precision, seed=2, share=SLOW)
        assert [await step(trainers, version) for version in range(1, 13)] == [2] * 12
        await steps_beside(trainers, range(13, 15), asyncio.create_task(trainers.join(hybrid)))
        assert [await step(trainers, version) for version in range(15, 17)] == [3] * 2

        idle = _cpu_nanoseconds(hybrid)
        stepping = asyncio.create_task(step(trainers, 17))
        while _cpu_nanoseconds(hybrid) < idle + 2_000_000:  # it has begun
            await asyncio.sleep(0.001)
        os.kill(hybrid.link.pid, signal.SIGKILL)
        assert await stepping == 2  # its share was made by the others, in this step
        assert trainers.names() == ("core-0", "core-1")
        assert [await step(trainers, version) for version in range(18, STEPS + 1)] == [2] * 3
        await stage.end(trainers, precision)

    stage.runner.run(check())


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_replica_that_is_stopped_is_found_and_its_share_made_by_the_others(
    stage: Stage, precision: Precision
) -> None:
    async def check() -> None:
        trainers = await stage.two_cores(precision, Patience(floor=2.0, grace=1.0))
        hybrid = await stage.hire("hybrid-0", precision, seed=2)
        await trainers.join(hybrid)
        assert [await step(trainers, version) for version in range(1, 17)] == [3] * 16
        os.kill(hybrid.link.pid, signal.SIGSTOP)
        assert await step(trainers, 17) == 2
        assert hybrid.lost and _is_gone(hybrid)
        assert [await step(trainers, version) for version in range(18, STEPS + 1)] == [2] * 3
        await stage.end(trainers, precision)

    stage.runner.run(check())


def test_when_the_first_core_is_killed_the_second_goes_on(stage: Stage) -> None:
    async def check() -> None:
        trainers = await stage.two_cores("fp32")
        await trainers.join(await stage.hire("hybrid-0", "fp32", seed=2))
        assert [await step(trainers, version) for version in range(1, 11)] == [3] * 10
        os.kill(trainers.core.link.pid, signal.SIGKILL)
        assert [await step(trainers, version) for version in range(11, 14)] == [2] * 3
        assert trainers.names() == ("core-1", "hybrid-0")
        await trainers.join(await stage.hire("hybrid-1", "fp32", seed=3))
        assert [await step(trainers, version) for version in range(14, STEPS + 1)] == [3] * 7
        await stage.end(trainers, "fp32")

    stage.runner.run(check())


def _connections(worker: Handle, host: str) -> list[int]:
    """Ports of that address at which the worker is connected."""
    return [c.laddr.port for c in psutil.Process(worker.link.pid).net_connections() if c.laddr.ip == host]


def _cpu_nanoseconds(worker: Handle) -> int:
    """Of its main thread: the first number of the file."""
    return int(Path(f"/proc/{worker.link.pid}/schedstat").read_text().split()[0])


def _is_gone(worker: Handle) -> bool:
    try:
        psutil.Process(worker.link.pid).wait(timeout=5)
    except psutil.TimeoutExpired:
        return False
    except psutil.NoSuchProcess:
        pass
    return True
