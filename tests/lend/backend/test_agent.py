"""The agent between a device's page, an engine that comes and goes, and controllers: the engine is a socket here."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

import libra.lend.backend.agent
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import AgentChannel, ControllerChannel
from libra.backends.transport.engine_messages import (
    Borrow,
    ExpectWeights,
    Generate,
    Generated,
    Interrupt,
    KVTransfer,
    Lent,
    Loaded,
    LoadWeights,
    NotNow,
    Piece,
)
from libra.backends.transport.messages import Failure, Message, Ready, Tensor
from libra.backends.transport.shared_memory import BUFFERS, Vector
from libra.backends.weights.grid import Grid
from libra.lend.backend.agent import LendingAgent, LoanEndedError
from libra.lend.backend.borrower_token import BorrowerToken
from libra.lend.backend.device_page import BorrowerTally, LendingError
from libra.lend.backend.lender_token import LenderToken
from libra.lend.backend.rollout_model import RolloutModel
from libra.lend.weights.processes import WeightsPublisher
from tests.fakes.lent_device import TERMS, lent_device

ASKED = Borrow(512, 8, 100)
LAYOUT = (Tensor("a", (1000,), 0, "float32"),)
GRID = Grid.of(LAYOUT, 4032)
LENT = Lent("chat", 2.0, "")


class Launcher:
    """Engines at the other ends of socket pairs; `engines` has them in the order of their start."""

    def __init__(self, memory: int) -> None:
        self.weights = memory
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
        self.order, self.serving = lent_device(directory)
        self.memory = os.memfd_create("weights", 0)
        self.launcher = Launcher(self.memory)
        self.told, self.ended = list[str](), asyncio.Event()

    @cached_property
    def borrower(self) -> BorrowerToken:
        """The device as the engine has it, from when somebody first looks."""
        return BorrowerToken(self.order.device, TERMS.pace)

    async def engine(self) -> AgentChannel:
        """The next one to be started, ready."""
        engine = await self.launcher.engines.get()
        assert await engine.receive() == self.order.start
        engine.send(Ready(0.5))
        while sum("the borrower is ready" in line for line in self.told) < self.launcher.started:
            await asyncio.sleep(0)
        assert self.borrower.lease > time.monotonic()
        return engine

    async def controller(self, wanted: Borrow = ASKED) -> ControllerChannel:
        channel = ControllerChannel(*await asyncio.open_unix_connection(self.order.listen))
        channel.send(wanted)
        return channel


def lend(directory: Path, script: Callable[[Loan, LendingAgent], Any], monkeypatch: pytest.MonkeyPatch) -> Loan:
    """Run the agent until the script has ended; raises what the agent raises."""

    async def run() -> Loan:
        loan = Loan(directory)
        monkeypatch.setattr(libra.lend.backend.agent, "_FIRST_PAUSE", 0.001)
        monkeypatch.setattr(libra.lend.backend.agent, "_LONGEST_PAUSE", 0.004)

        class Opened:
            @staticmethod
            def open(logs: Path) -> Any:
                return _context(loan.launcher)

        monkeypatch.setattr(libra.lend.backend.agent, "LocalLauncher", Opened)
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
        assert await first.receive() == LENT
        first.send(turn("a"))
        name = (await engine.receive()).id  # type: ignore[union-attr]
        engine.send(made(name, 7, 8))
        said = await first.receive()
        assert isinstance(said, Generated) and said.pieces == [Piece("a", 0, [7, 8], [0.0, 0.0])]
        other = await loan.controller()
        assert await other.receive() == NotNow(
            "another controller has this engine; only one controller can have it at a time"
        )
        agent.period()
        assert agent.period().turns == 1
        first.close()
        assert await engine.receive() == Interrupt(name)
        second = await loan.controller()
        assert await second.receive() == LENT
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
        assert await controller.receive() == LENT
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


async def test_a_device_that_another_process_borrows_is_not_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The borrower of an agent that was killed is waited for: it ends, too."""
    monkeypatch.setattr(libra.lend.backend.agent, "_LEAVES", 0.0)
    loan = Loan(tmp_path)
    loan.borrower.look()
    with pytest.raises(LendingError, match="a borrower without an agent has this device; end that process first"):
        async with LendingAgent.open(loan.order, tmp_path / "logs", loan.told.append):
            pass
    monkeypatch.setattr(libra.lend.backend.agent, "_LEAVES", math.inf)
    looked = LenderToken.borrowed.fget
    assert looked is not None

    def ended(token: LenderToken) -> bool:
        borrowed = looked(token)
        if borrowed:
            loan.borrower.close()
        return borrowed

    monkeypatch.setattr(LenderToken, "borrowed", property(ended))
    monkeypatch.setattr(libra.lend.backend.agent.LocalLauncher, "open", lambda logs: _context(loan.launcher))
    async with LendingAgent.open(loan.order, tmp_path / "logs", loan.told.append) as agent:
        assert agent.borrower is None
    loan.serving.close()


def test_a_device_whose_file_was_replaced_is_not_lent_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libra.lend.backend.agent, "_WORDS", 1e6)

    async def script(loan: Loan, agent: LendingAgent) -> None:
        await loan.engine()
        loan.order.device.rename(tmp_path / "before")
        await asyncio.sleep(math.inf)

    with pytest.raises(LoanEndedError, match="was replaced by another file"):
        lend(tmp_path, script, monkeypatch)


def test_what_an_agent_does_not_lend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(loan: Loan, agent: LendingAgent) -> None:
        async def answer(wanted: Borrow) -> Message:
            return await (await loan.controller(wanted)).receive()

        assert await answer(ASKED) == NotNow("the engine is not ready yet; try again")
        await loan.engine()
        assert await answer(replace(ASKED, max_model_len=4096)) == Failure(
            "max_model_len is 512 in the lent engine, but the run needs 4096"
        )
        assert await answer(replace(ASKED, kv_tokens=10_000)) == Failure(
            "kv_tokens is 2048 in the lent engine, but the run needs 10000"
        )
        other = await answer(replace(ASKED, layout=(Tensor("a", (2,), 0, "float32"),), buffer_bytes=8))
        assert isinstance(other, Failure) and "holds no *.safetensors" in other.error
        stranger = ControllerChannel(*await asyncio.open_unix_connection(loan.order.listen))
        stranger.send(turn("a"))
        assert await stranger.receive() == Failure("an agent got Generate; a controller begins with Borrow")

    lend(tmp_path, script, monkeypatch)


def test_a_configuration_nested_too_deeply_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutModel, "read", lambda *_: RolloutModel("float32", {}, {}))

    async def script(loan: Loan, agent: LendingAgent) -> None:
        await loan.engine()
        layout = (Tensor("a", (2,), 0, "float32"),)
        controller = await loan.controller(replace(ASKED, layout=layout, buffer_bytes=8, config="[" * 100_000))
        answer = await controller.receive()
        assert isinstance(answer, Failure) and "recursion" in answer.error

    lend(tmp_path, script, monkeypatch)


WRONG = [
    ({"tokens": []}, "tokens is empty"),
    ({"tokens": [1, -1]}, "tokens has an id outside the vocabulary"),
    ({"tokens": [10**9]}, "tokens has an id outside the vocabulary"),
    ({"tokens": [1] * 512}, "tokens has 512; the engine's contexts have at most 512, the next token"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": -(2**40)}, "max_tokens is -1099511627776"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"temperature": 2.1}, "temperature is 2.1"),
    ({"stop_token": 10**9}, "stop_token is 1000000000"),
    ({"priority": 2**60}, "priority is"),
    ({"id": ""}, "id has 0 characters"),
    ({"salt": "x" * 1000}, "salt exceeds"),
    ({"transfer": KVTransfer(0, [0])}, "transfer is given"),
]


def test_a_malformed_turn_is_answered_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(loan: Loan, agent: LendingAgent) -> None:
        engine = await loan.engine()
        for change, why in WRONG:
            controller = await loan.controller()
            assert await controller.receive() == LENT
            controller.send(replace(turn("a"), **change))
            answer = await controller.receive()
            assert isinstance(answer, Failure) and why in answer.error
        twice = await loan.controller()
        assert await twice.receive() == LENT
        twice.send(turn("b"))
        twice.send(turn("b"))
        answer = await twice.receive()
        assert isinstance(answer, Failure) and "a turn with this id is in flight" in answer.error
        order = await engine.receive()  # the first that it got of all these
        assert isinstance(order, Generate) and order.id.endswith(".b")
        assert loan.launcher.started == 1

    lend(tmp_path, script, monkeypatch)


def test_what_is_no_message_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(loan: Loan, agent: LendingAgent) -> None:
        await loan.engine()
        reader, writer = await asyncio.open_unix_connection(loan.order.listen)
        writer.write(struct.pack("!I", 4) + b"junk")
        answer = await ControllerChannel(reader, writer).receive()
        assert isinstance(answer, Failure) and "not a message to an agent of this version" in answer.error

    lend(tmp_path, script, monkeypatch)


CONNECTING = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    try:
        connection.connect(sys.argv[1])
        print(len(connection.recv(10)))
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_another_user_reaches_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        Path(shared).chmod(0o755)

        async def script(loan: Loan, agent: LendingAgent) -> None:
            await loan.engine()
            assert loan.order.listen.stat().st_mode & 0o777 == 0o600
            loan.order.listen.chmod(mode)
            command = [sys.executable, "-S", "-c", CONNECTING, str(loan.order.listen)]
            stranger = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            said, _ = await stranger.communicate()
            assert said.decode().strip() == ("refused" if mode == 0o600 else "0")

        lend(Path(shared), script, monkeypatch)


def content_of(version: int) -> Vector:
    content = np.zeros(GRID.size, np.uint8)
    content[: 4 * version : 4] = 1
    return content


def test_an_engine_takes_what_a_run_publishes_and_makes_no_turn_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(loan: Loan, agent: LendingAgent) -> None:
        memory = os.memfd_create("published", 0)
        os.ftruncate(memory, BUFFERS * GRID.size)
        save_file({"a": np.zeros(1000, np.float32)}, tmp_path / "policy" / "model.safetensors")

        def publish(version: int) -> None:
            os.pwrite(memory, content_of(version).data, version % BUFFERS * GRID.size)
            publisher.tell(LoadWeights(version, version % BUFFERS, zlib.crc32(content_of(version).data)))

        async def takes(engine: AgentChannel, version: int) -> None:
            """It is told of this version, which lies in its memory; and takes it."""
            order = await engine.receive()
            assert isinstance(order, LoadWeights) and order.version == version
            found = os.pread(loan.memory, GRID.size, order.buffer * GRID.size)
            assert found == content_of(version).tobytes() and zlib.crc32(found) == order.checksum
            engine.send(Loaded(version, 0.25))

        def begun(run: WeightsPublisher) -> Borrow:
            return replace(ASKED, layout=LAYOUT, buffer_bytes=GRID.size, weights=run.place)

        publisher = await WeightsPublisher.open(GRID, memory, "127.0.0.1", 0, tmp_path / "publisher.log")
        engine = await loan.engine()
        early = await loan.controller(begun(publisher))
        assert await early.receive() == LENT
        early.send(turn("a"))
        assert await early.receive() == Failure("a turn arrived before weights of this run")
        assert await engine.receive() == ExpectWeights(LAYOUT, GRID.size)

        controller = await loan.controller(begun(publisher))
        assert await controller.receive() == LENT
        assert await engine.receive() == ExpectWeights(LAYOUT, GRID.size)
        for version in (3, 4):
            publish(version)
            await takes(engine, version)
            assert await controller.receive() == Loaded(version, 0.25)
        controller.send(turn("a"))
        first = await engine.receive()
        assert isinstance(first, Generate)
        controller.close()
        assert await engine.receive() == Interrupt(first.id)

        again = await loan.controller(begun(publisher))  # the same run: the engine has what it needs
        assert [await again.receive(), await again.receive()] == [LENT, Loaded(4, 0.0)]
        again.close()

        other = await WeightsPublisher.open(GRID, memory, "127.0.0.1", 0, tmp_path / "other.log")  # the same numbers
        next_run = await loan.controller(begun(other))
        assert await next_run.receive() == LENT
        next_run.send(turn("a"))
        assert await next_run.receive() == Failure("a turn arrived before weights of this run")
        next_run = await loan.controller(begun(other))
        assert await next_run.receive() == LENT
        assert [await engine.receive(), await engine.receive()] == 2 * [ExpectWeights(LAYOUT, GRID.size)]
        await publisher.close()
        publisher = other
        publish(4)
        await takes(engine, 4)
        assert await next_run.receive() == Loaded(4, 0.25)
        next_run.send(turn("a"))
        second = await engine.receive()
        assert isinstance(second, Generate) and second.salt != first.salt  # KV of other weights is of no use

        engine.close()  # another one takes what lies here, and a run hears of it when it comes
        engine = await loan.engine()
        last = await loan.controller(begun(other))
        assert await last.receive() == LENT
        assert await engine.receive() == ExpectWeights(LAYOUT, GRID.size)
        await takes(engine, 4)
        assert await last.receive() == Loaded(4, 0.25)

        publish(5)
        assert isinstance(await engine.receive(), LoadWeights)
        engine.send(Failure("weight update to version 5: checksum"))
        assert await last.receive() == Failure("weight update to version 5: checksum")
        with pytest.raises(ConnectionError):
            await last.receive()
        await other.close()
        os.close(memory)

    loan = lend(tmp_path, script, monkeypatch)
    assert loan.told[-1] == "no weights: weight update to version 5: checksum"


def test_what_an_agent_that_was_killed_left_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "agent"))
        killed.listen()
    assert (tmp_path / "agent").is_socket()

    async def script(loan: Loan, agent: LendingAgent) -> None:
        await loan.engine()
        assert await (await loan.controller()).receive() == LENT

    lend(tmp_path, script, monkeypatch)
