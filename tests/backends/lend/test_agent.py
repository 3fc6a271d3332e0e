"""The agent between a device's page, an engine that comes and goes, and controllers: the engine is a socket here."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import libra.backends.lend.agent
from libra.backends.launch.launcher import WorkerLink
from libra.backends.lend.agent import LendingAgent, LoanEndedError
from libra.backends.lend.borrower_token import BorrowerToken
from libra.backends.lend.device_page import BorrowerTally, EngineFacts
from libra.backends.lend.lender_file import LoanOrder
from libra.backends.lend.serving_token import ServingToken
from libra.backends.transport.channel import AgentChannel, ControllerChannel
from libra.backends.transport.engine_messages import DeviceLoan, Generate, Generated, Interrupt, Piece, StartEngine
from libra.backends.transport.messages import Failure, Ready
from libra.lend.recall import RecallPolicy
from libra.records.lending import LendingTerms
from libra.traffic.envelope import Envelope

TERMS = LendingTerms("chat", "policy", 0.08, 0.03, 0.002, Envelope(2.0, 900, 6, 4000, 5.0), RecallPolicy(1.0, 8.0))
CHAT = EngineFacts("chat", 2048, 64, 128)


class Launcher:
    """Engines at the other ends of socket pairs; `engines` has them in the order of their start."""

    def __init__(self) -> None:
        self.engines: asyncio.Queue[AgentChannel] = asyncio.Queue()
        self.all: list[AgentChannel] = []  # a channel that nobody holds is closed
        self.started = 0

    async def ready(self) -> float:
        return 0.0

    async def spawn(self, name: str, slot: int) -> WorkerLink:
        ours, theirs = socket.socketpair()
        self.started += 1
        self.all.append(AgentChannel(*await asyncio.open_unix_connection(sock=theirs)))
        self.engines.put_nowait(self.all[-1])
        return WorkerLink(name, self.started, await ControllerChannel.open(ours), (0,), 0)

    def kill(self, link: WorkerLink) -> None:
        pass

    async def gone(self, link: WorkerLink) -> None:
        pass


class Loan:
    """An agent beside a server that this process is."""

    def __init__(self, directory: Path) -> None:
        device = directory / "device"
        start = StartEngine("", 512, 8, "float32", 1, (), 1, 0, 1.0, (0,), False, loan=DeviceLoan("", TERMS, None))
        self.order = LoanOrder(device, directory / "agent", "chat", 1000.0, start)
        self.serving = ServingToken(device, CHAT)
        self.borrower = BorrowerToken(device, TERMS.pace)
        self.launcher, self.told, self.ended = Launcher(), list[str](), asyncio.Event()

    async def engine(self) -> AgentChannel:
        """The next one to be started, ready."""
        engine = await self.launcher.engines.get()
        assert await engine.receive() == self.order.start
        engine.send(Ready(0.5))
        while self.borrower.lease < time.monotonic():
            await asyncio.sleep(0)
        return engine

    async def controller(self) -> ControllerChannel:
        channel = ControllerChannel(*await asyncio.open_unix_connection(self.order.listen))
        channel.send(self.order.start)
        return channel


def lend(directory: Path, script: Callable[[Loan, LendingAgent], Any], monkeypatch: pytest.MonkeyPatch) -> Loan:
    """Run the agent until the script has ended; raises what the agent raises."""

    async def run() -> Loan:
        loan = Loan(directory)
        monkeypatch.setattr(libra.backends.lend.agent, "_FIRST_PAUSE", 0.001)
        monkeypatch.setattr(libra.backends.lend.agent, "_LONGEST_PAUSE", 0.004)

        class Opened:
            @staticmethod
            def open(logs: Path) -> Any:
                return _context(loan.launcher)

        monkeypatch.setattr(libra.backends.lend.agent, "LocalLauncher", Opened)
        async with asyncio.timeout(60), LendingAgent.open(loan.order, directory / "logs", loan.told.append) as agent:
            running = asyncio.create_task(agent.run(loan.ended))
            scripted = asyncio.create_task(script(loan, agent))
            await asyncio.wait([running, scripted], return_when=asyncio.FIRST_COMPLETED)
            if scripted.done():
                await scripted
                loan.ended.set()
            else:
                scripted.cancel()
            await running
        assert loan.borrower.lease == 0.0  # whatever happened
        assert not loan.order.listen.exists()
        return loan

    return asyncio.run(run())


class _context:  # noqa: N801 - a context manager of one value
    def __init__(self, value: Any) -> None:
        self.value = value

    async def __aenter__(self) -> Any:
        return self.value

    async def __aexit__(self, *_: object) -> None:
        pass


def turn(name: str) -> Generate:
    return Generate(name, [1, 2, 3], 5, 1.0, -1, 0)


def made(name: str, *tokens: int, ended: bool = False) -> Generated:
    return Generated([Piece(name, 0, list(tokens), [0.0] * len(tokens))], [name] if ended else [], 0.0, 0, 1, 1)


def test_turns_pass_through_and_stay_with_the_controller_that_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(loan: Loan, agent: LendingAgent) -> None:
        engine = await loan.engine()
        first = await loan.controller()
        assert await first.receive() == Ready(0.5)
        first.send(turn("a"))
        name = (await engine.receive()).id  # type: ignore[union-attr]
        engine.send(made(name, 7, 8))
        said = await first.receive()
        assert isinstance(said, Generated) and said.pieces == [Piece("a", 0, [7, 8], [0.0, 0.0])]
        other = await loan.controller()
        assert await other.receive() == Failure("another controller has this engine; one at a time can")
        agent.period()
        assert agent.period().turns == 1
        first.close()
        assert await engine.receive() == Interrupt(name)
        second = await loan.controller()
        assert await second.receive() == Ready(0.5)
        second.send(turn("a"))  # by the same name
        again = await engine.receive()
        engine.send(made(name, 9, ended=True))  # what is left of the first
        engine.send(made(again.id, 5, ended=True))  # type: ignore[union-attr]
        assert (await second.receive()).pieces == []  # type: ignore[union-attr]
        said = await second.receive()
        assert isinstance(said, Generated)
        assert (said.pieces[0].tokens, said.ended) == ([5], ["a"])

    assert lend(tmp_path, script, monkeypatch).launcher.started == 1


def test_an_engine_that_is_lost_is_started_again_and_its_controller_learns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(loan: Loan, agent: LendingAgent) -> None:
        engine = await loan.engine()
        controller = await loan.controller()
        assert await controller.receive() == Ready(0.5)
        loan.borrower.tell(BorrowerTally(grants=3))
        engine.send(Failure("out of memory"))
        engine.close()
        with pytest.raises(ConnectionError):
            await controller.receive()
        assert loan.borrower.lease == 0.0
        await loan.engine()

    loan = lend(tmp_path, script, monkeypatch)
    assert loan.launcher.started == 2
    assert any("the borrower ended: out of memory; it is started again" in line for line in loan.told)


def test_an_engine_that_never_works_ends_the_loan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(loan: Loan, agent: LendingAgent) -> None:
        while True:
            engine = await loan.launcher.engines.get()
            assert await engine.receive() == loan.order.start
            engine.send(Failure("no such model"))
            engine.close()

    with pytest.raises(LoanEndedError, match="the borrower ended 5 times without a grant: no such model"):
        lend(tmp_path, script, monkeypatch)


def test_a_device_whose_file_was_replaced_is_not_lent_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libra.backends.lend.agent, "_WORDS", 1e6)

    async def script(loan: Loan, agent: LendingAgent) -> None:
        await loan.engine()
        loan.order.device.rename(tmp_path / "before")
        await asyncio.sleep(math.inf)

    with pytest.raises(LoanEndedError, match="is another file by now"):
        lend(tmp_path, script, monkeypatch)


def test_what_an_engine_behind_an_agent_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(loan: Loan, agent: LendingAgent) -> None:
        early = await loan.controller()
        assert await early.receive() == Failure("the engine is not ready yet; come back")
        await loan.engine()
        longer = ControllerChannel(*await asyncio.open_unix_connection(loan.order.listen))
        longer.send(StartEngine("", 4096, 8, "float32", 1, (), 1, 0, 1.0, (0,), False))
        assert await longer.receive() == Failure("max_model_len is 512 here, 4096 is wanted")

    lend(tmp_path, script, monkeypatch)
