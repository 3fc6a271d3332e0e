"""Real replicas in processes of their own, and what one process alone makes of the same steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from fakes.fork_servers import TRAINING, fork_server
from fakes.samples import LIMITS, RATE, STEPS, Tensors, batch, counts, distance, write_model
from safetensors.torch import load_file

from libra.backends.grpo.membership import STANDARD, Patience
from libra.backends.grpo.trainers import Trainers
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import LocalLauncher
from libra.backends.transport.messages import Acknowledged, Precision, Sharding
from libra.backends.transport.trainer_messages import SaveCheckpoint, StartTrainer


@dataclass(frozen=True)
class Division:
    """What a replica consists of."""

    processes: int
    sharding: Sharding


ONE_PROCESS = Division(1, "none")


@dataclass
class Stage:
    """One fork server for all tests here, on one event loop."""

    runner: asyncio.Runner
    launcher: LocalLauncher
    directory: Path
    alone: dict[tuple[Precision, int], tuple[Tensors, Tensors]] = field(default_factory=dict)

    lost: dict[str, str] = field(default_factory=dict)  # why, by name
    _next_slot: int = 0

    async def hire(
        self,
        name: str,
        precision: Precision,
        seed: int = 0,
        share: float = 1.0,
        division: Division = ONE_PROCESS,
        elsewhere: bool = False,
    ) -> Handle:
        """A started replica; `elsewhere` it lives as if on another node, reached at an address of its own."""
        link = await self.launcher.spawn(name, self._next_slot)
        self._next_slot += 1
        if elsewhere:
            link = replace(link, node="elsewhere", host="127.0.0.2")
        handle = Handle(link, self.lost.__setitem__)
        await handle.start(
            StartTrainer(
                model_directory=str(self.directory / "model"),
                learning_rate=RATE,
                clip=(0.8, 1.28),
                denominator="tokens",
                token_constant=12.0,
                temperature=1.0,
                micro_batch_tokens=64,
                precision=precision,
                seed=seed,
                share=share,
                cores=(link.core,),
                processes=division.processes,
                sharding=division.sharding,
            )
        )
        return handle

    def kill(self, replica: Handle) -> None:
        self.launcher.kill(replica.link)

    async def parameters(self, replica: Handle) -> Tensors:
        directory = self.directory / f"saved-{replica.link.pid}"
        await replica.ask(SaveCheckpoint(str(directory), optimiser=False), Acknowledged)
        return load_file(directory / "model.safetensors")

    async def reference(self, precision: Precision, steps: int = STEPS) -> tuple[Tensors, Tensors]:
        """Parameters before and after so many steps by one process."""
        if (precision, steps) not in self.alone:
            replica = await self.hire("alone", precision)
            trainers = Trainers(replica, self.kill)
            start = await self.parameters(replica)
            for version in range(1, steps + 1):
                await step(trainers, version)
            self.alone[precision, steps] = start, await self.parameters(replica)
            await replica.stop()
        return self.alone[precision, steps]

    async def two_cores(
        self, precision: Precision, patience: Patience = STANDARD, division: Division = ONE_PROCESS
    ) -> Trainers:
        core = await self.hire("core-0", precision, division=division)
        trainers = Trainers(core, self.kill, patience)
        await trainers.join(await self.hire("core-1", precision, seed=1, division=division), core=True)
        return trainers

    async def end(self, trainers: Trainers, precision: Precision, steps: int = STEPS) -> None:
        """Every replica holds what one process alone would hold."""
        start, wanted = await self.reference(precision, steps)
        for replica in trainers.replicas():
            assert distance(await self.parameters(replica), wanted, start) <= LIMITS[precision]
            await replica.stop()


@contextmanager
def open_stage(directory: Path) -> Iterator[Stage]:
    write_model(directory / "model")
    with asyncio.Runner() as runner:
        context = fork_server(directory, TRAINING)
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


def cpu_nanoseconds(worker: Handle) -> int:
    """Of its main thread: the first number of the file."""
    return int(Path(f"/proc/{worker.link.pid}/schedstat").read_text().split()[0])


def is_gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(timeout=5)
    except psutil.TimeoutExpired:
        return False
    except psutil.NoSuchProcess:
        pass
    return True
