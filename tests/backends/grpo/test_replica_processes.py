"""Real replicas in processes of their own, which join, leave, are killed and are stopped, against one process alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from fakes.samples import STEPS
from fakes.stage import Stage, cpu_nanoseconds, is_gone, open_stage, step, steps_beside

from libra.backends.grpo.membership import Patience
from libra.backends.launch.handle import Handle
from libra.backends.transport.messages import Precision

pytestmark = pytest.mark.integration

SLOW = 0.05  # share of a core: it sleeps long between its backward pass and the exchange


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("replicas")) as stage:
        yield stage


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

        idle = cpu_nanoseconds(hybrid)
        stepping = asyncio.create_task(step(trainers, 17))
        while cpu_nanoseconds(hybrid) < idle + 2_000_000:  # it has begun
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
        assert hybrid.lost and is_gone(hybrid.link.pid)
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
