"""Slots that are engines of agents: who is there, who is asked again, and the weights that they can follow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fakes.workers import MadeLauncher

import libra.lend.backend.lenders
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import LenderRefusedError, RunWeights
from libra.backends.transport.channel import AgentChannel
from libra.backends.transport.engine_messages import Borrow, Lent, LoadWeights, NotNow
from libra.backends.transport.messages import Acknowledged, Failure, Message, Stop, Tensor
from libra.backends.weights.grid import Grid
from libra.exec.protocols import WorkerLostError
from libra.lend.backend.lenders import LenderLauncher
from libra.lend.weights.processes import WeightsFollower

LAYOUT = (Tensor("a", (1000,), 0, "float32"),)
PUBLISHED = RunWeights(LAYOUT, 4032, LoadWeights(3, 1, 0x9E3C6D2E))
WANTED = Borrow(64, 8, 256)
LENT = Lent("chat", 2.0, "")


class Inner(MadeLauncher):
    """A launcher whose weights lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = os.memfd_create("weights", 0)
        os.ftruncate(self.weights, 2 * PUBLISHED.size)


class Lenders:
    """The launcher under test, and an agent that answers what the test says."""

    def __init__(self, directory: Path) -> None:
        self.inner, self.told, self.changes = Inner(), list[str](), asyncio.Event()
        self.socket = directory / "agent"
        inner: Any = self.inner
        place = ("127.0.0.1", 0)
        self.launcher = LenderLauncher(
            inner, {4: self.socket}, WANTED, place, directory / "publisher.log", self.told.append
        )
        self.launcher.slots_changed = self.changes.set
        self.answer: Message = LENT
        self.heard: list[Message] = []
        self.open: list[AgentChannel] = []

    async def change(self) -> None:
        await self.changes.wait()
        self.changes.clear()

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[None]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = AgentChannel(reader, writer)
            self.open.append(channel)
            with contextlib.suppress(ConnectionError):
                while True:
                    self.heard.append(message := await channel.receive())
                    channel.send(Acknowledged() if isinstance(message, Stop) else self.answer)

        server = await asyncio.start_unix_server(serve, self.socket)
        try:
            yield
        finally:
            server.close()
            self.socket.unlink()
            for channel in self.open:
                channel.close()


@contextlib.asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Lenders]:
    made = Lenders(directory)
    try:
        async with asyncio.timeout(30):
            yield made
    finally:
        await made.launcher.close()
        os.close(made.inner.weights)


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libra.lend.backend.lenders, "_LOOK_SECONDS", 0.001)


async def test_an_agent_that_is_away_is_asked_until_it_lends(tmp_path: Path) -> None:
    async with opened(tmp_path) as lenders:
        launcher = lenders.launcher
        await launcher.look()
        assert not launcher.offers(4) and launcher.offers(0)
        with pytest.raises(WorkerLostError):
            await launcher.spawn("lent-0", 4)
        lenders.answer = NotNow("the engine is not ready yet; try again")
        async with lenders.agent():
            while len(lenders.heard) < 3:
                await asyncio.sleep(0)
            lenders.answer = LENT
            await lenders.change()
            assert launcher.offers(4)
            link = await launcher.spawn("lent-0", 4)
            assert link.pid == os.getpid() and launcher.exists(link)
            launcher.kill(link)
            assert not launcher.offers(4)
            await lenders.change()  # it went
            await lenders.change()  # and may be had again
            assert launcher.offers(4)
        assert lenders.told == [
            f"{lenders.socket} lends nothing yet, and is queried again: no agent answers (No such file or directory)",
            f"{lenders.socket} lends nothing yet, and is queried again: the engine is not ready yet; try again",
        ]


async def test_an_agent_that_says_no_at_first_is_an_error_and_later_is_told(tmp_path: Path) -> None:
    async with opened(tmp_path) as lenders:
        lenders.answer = Failure("layouts that differ")
        async with lenders.agent():
            with pytest.raises(LenderRefusedError, match=r"agent: layouts that differ"):
                await lenders.launcher.look()
            lenders.answer = LENT
            await lenders.launcher.look()
            lenders.launcher.begin(PUBLISHED)
            engine = Handle(await lenders.launcher.spawn("lent-0", 4), lambda name, why: None)
            lenders.answer = Failure("layouts that differ")
            with pytest.raises(LenderRefusedError, match="worker lent-0: layouts that differ"):
                await lenders.launcher.join(engine)
            lenders.answer = NotNow("another controller has this engine")
            engine = Handle(await lenders.launcher.spawn("lent-0", 4), lambda name, why: None)
            with pytest.raises(WorkerLostError, match="another controller"):
                await lenders.launcher.join(engine)


async def test_weights_can_be_followed_and_a_publisher_that_ends_is_replaced(tmp_path: Path) -> None:
    async with opened(tmp_path) as lenders:
        content, memory = np.arange(PUBLISHED.size, dtype=np.uint8), os.memfd_create("followed", 0)

        def publication(version: int) -> LoadWeights:
            os.pwrite(lenders.inner.weights, content.data, version % 2 * PUBLISHED.size)
            return LoadWeights(version, version % 2, lenders_sum)

        lenders_sum = zlib.crc32(content.data)
        async with lenders.agent():
            await lenders.launcher.look()
            lenders.launcher.begin(RunWeights(LAYOUT, PUBLISHED.size, publication(3)))
            lost, others = asyncio.Event(), set(psutil.Process().children())
            engine = Handle(await lenders.launcher.spawn("lent-0", 4), lambda name, why: lost.set())
            assert await lenders.launcher.join(engine) == LENT
            asked = lenders.heard[-1]
            assert isinstance(asked, Borrow) and (asked.layout, asked.max_model_len) == (LAYOUT, 64)
            assert asked.weights is not None
            grid = Grid.of(LAYOUT, PUBLISHED.size)
            follower = await WeightsFollower.open(grid, memory, asked.weights, tmp_path / "follower.log")
            assert (await follower.next()).version == 3
            follower.loaded()
            lenders.launcher.publish(publication(4))
            assert (await follower.next()).version == 4
            await follower.close()
            [process] = set(psutil.Process().children()) - others
            process.send_signal(signal.SIGKILL)
            await lost.wait()
            lenders.launcher.kill(engine.link)
            engine = Handle(await lenders.launcher.spawn("lent-0", 4), lambda name, why: None)
            await lenders.launcher.join(engine)
            again = lenders.heard[-1]
            assert (
                isinstance(again, Borrow) and again.weights is not None and again.weights.token != asked.weights.token
            )
            follower = await WeightsFollower.open(grid, memory, again.weights, tmp_path / "follower.log")
            assert (await follower.next()).version == 4
            await follower.close()
        assert lenders.told[-1] == "lent-0 borrows beside chat, up to 2 requests/s there"
        os.close(memory)
