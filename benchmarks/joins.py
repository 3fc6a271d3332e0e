"""Effect of a joining replica on the steps of a core trainer.

Invariant: a step is timed as its caller sees it, waiting for the step boundary included, so whatever a join holds up is
in the number. Steps alone and steps during a join alternate on the same processes.

    python -m benchmarks.joins [--quick] [--remote] [--json FILE]

A core and a hybrid replica of one model (60 M parameters), each on a core of its own. The core steps all the time. Over
and over the hybrid joins, makes one step together with it, and leaves. It joins as a started process: its start is
measured by `libra run`. "During" are the steps of the core alone that overlap with a join: while the hybrid copies the
state, applies what it missed, and the next gradient exchange is formed. The entry itself holds up the step after them,
which two replicas make and which therefore cannot be compared: for how long is counted apart.

With `--remote` the two are told that they live on different nodes, with addresses of their own: the hybrid reads the
core's state over TCP, from a relay beside the core. What the relay takes is counted apart; it runs on the other core.

Times of a machine that does other things too say little. So the core's own processor time per step is counted as well:
whatever a join puts on its critical path is in it, and what the neighbours do is mostly not.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from benchmarks.command import command_line, quiet_machine, show
from benchmarks.gpu.setting import generated, lost, sample
from benchmarks.rows import Row, at_most
from libra.backends.grpo.trainers import Trainers, start_order
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import LocalLauncher
from libra.backends.tiny_model import write_tiny_model
from libra.config.run import ModelConfig, TrainingConfig

WORST, MEDIAN = 0.05, 0.01  # relative; a step during a join may be this much slower

_BEFORE = 3  # steps alone before each join


@dataclass(frozen=True, slots=True)
class Size:
    model: ModelConfig
    samples: int  # of 64 tokens, in a step
    joins: int


FULL = Size(ModelConfig(hidden_size=640, layers=12, heads=10, kv_heads=5, head_dim=64), samples=6, joins=24)
QUICK = Size(ModelConfig(hidden_size=128, layers=3), samples=4, joins=3)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds that one step took, and seconds of processor time that the core spent in it."""

    wall: float
    processor: float


@dataclass(slots=True)
class Measured:
    before: list[Step] = field(default_factory=list)
    during: list[Step] = field(default_factory=list)
    held: list[float] = field(default_factory=list)  # seconds that a step waited at its boundary, by each join
    joins: list[float] = field(default_factory=list)  # seconds from the order to the entry
    relay: float | None = None  # mean seconds of processor time of a relay


def rows(options: Namespace) -> list[Row]:
    cores = sorted(os.sched_getaffinity(0))
    with quiet_machine(), tempfile.TemporaryDirectory() as directory:
        measured = asyncio.run(measure(QUICK if options.quick else FULL, Path(directory), cores, options.remote))
    if len(cores) < 2:
        print("the machine has one core: the joiner takes the core's time, so only its processor time says something")
    return rows_of(measured)


async def measure(size: Size, directory: Path, cores: Sequence[int], remote: bool) -> Measured:
    write_tiny_model(directory / "model", size.model, "0123456789+-*/", longest_context=128)
    measured = Measured()
    async with LocalLauncher.open(directory / "logs") as launcher:
        await launcher.ready()
        core = await _start(launcher, "core-0", directory / "model", cores[0])
        hybrid = await _start(launcher, "hybrid-0", directory / "model", cores[-1])
        if remote:
            hybrid.node, hybrid.host = "another", "127.0.0.2"
        stepper = _Stepper(Trainers(core, lambda replica: launcher.kill(replica.link)), core.link.pid, size.samples)
        for _ in range(_BEFORE):
            await stepper.step()  # the first ones pay for what is set up once
        for _ in range(size.joins):
            measured.before += [await stepper.step() for _ in range(_BEFORE)]
            began = time.monotonic()
            joining = asyncio.create_task(stepper.trainers.join(hybrid))
            while stepper.trainers.size == 1:
                step = await stepper.step()
                if stepper.replicas == 1:
                    measured.during.append(step)
            measured.held.append(await joining)
            measured.joins.append(time.monotonic() - began)
            await stepper.step()  # together
            await stepper.trainers.leave("hybrid-0")
        if remote:
            measured.relay = _children_seconds(core.link.pid) / (size.joins - 1)  # the last one has not been awaited
        await asyncio.gather(core.stop(), hybrid.stop())
    return measured


def rows_of(measured: Measured) -> list[Row]:
    before, during = ([step.wall for step in steps] for steps in (measured.before, measured.during))
    own_before, own_during = ([step.processor for step in steps] for steps in (measured.before, measured.during))
    case = f"{len(measured.joins)} joins, {len(during)} steps during them"
    return [
        Row(case, "step before, median", median(before), "s"),
        Row(case, "step before, worst", max(before), "s"),
        at_most(case, "step during / before, median", median(during) / median(before), "", 1 + MEDIAN),
        at_most(case, "step during / before, worst", max(during) / max(before), "", 1 + WORST),
        Row(case, "processor time of the core before, median", median(own_before), "s"),
        at_most(case, "processor time, the same, median", median(own_during) / median(own_before), "", 1 + MEDIAN),
        at_most(case, "processor time, the same, worst", max(own_during) / max(own_before), "", 1 + WORST),
        Row(case, "step boundary held, median", median(measured.held) * 1e3, "ms"),
        Row(case, "step boundary held, worst", max(measured.held) * 1e3, "ms"),
        at_most(case, "step boundary held, worst / step before", max(measured.held) / median(before), "", WORST),
        Row(case, "from the order to the entry, median", median(measured.joins), "s"),
        *([] if measured.relay is None else [Row(case, "processor time of a relay, mean", measured.relay, "s")]),
    ]


class _Stepper:
    """Makes the same step over and over."""

    def __init__(self, trainers: Trainers, core: int, samples: int) -> None:
        self.trainers = trainers
        self._core = core
        self._batch = [sample(number, 64, 14) for number in range(samples)]
        self._version = 0
        self.replicas = 0  # that made the last step

    async def step(self) -> Step:
        self._version += 1
        wall, processor = time.monotonic(), _processor_seconds(self._core)
        result = await self.trainers.step(self._version, self._batch, len(self._batch), generated(self._batch))
        self.replicas = result.replicas
        return Step(time.monotonic() - wall, _processor_seconds(self._core) - processor)


async def _start(launcher: LocalLauncher, name: str, model: Path, core: int) -> Handle:
    worker = Handle(await launcher.spawn(name, 0), lost)
    training = TrainingConfig(steps=1, denominator="tokens", micro_batch_tokens=128)
    order = start_order(
        model, training, learning_rate=1e-5, precision="fp32", seed=0, share=1.0, link=worker.link, cores=(core,)
    )
    await worker.start(order)
    return worker


def _children_seconds(process: int) -> float:
    """Processor time of the children that another process has seen end."""
    times = psutil.Process(process).cpu_times()
    return float(times.children_user + times.children_system)


def _processor_seconds(process: int) -> float:
    """Processor time of all threads of another process, by the kernel's clock (see clock_getcpuclockid(3))."""
    return time.clock_gettime((~process << 3) | 2)


if __name__ == "__main__":
    parser = command_line("joins", __doc__, quick="a tiny model and few joins: a first look, not a verdict")
    parser.add_argument("--remote", action="store_true", help="the joiner reads the core over TCP, as on another node")
    show(parser, rows)
