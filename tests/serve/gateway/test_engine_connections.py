"""Connections to engines: whatever way an answer is cut into packets, its bytes arrive, and errors are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.config.listeners import EMULATOR
from libra.serve.connections import Connections
from libra.serve.gateway import engine_connections
from libra.serve.gateway.engine_connections import EngineAddress, EngineConnection, EngineConnections
from libra.serve.http import run

BODY = b"some words " * 9
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=utf-8\r\nContent-Length: 99\r\n\r\n" + BODY
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (11, b"some words ") for _ in range(9))
    + b"0\r\n\r\n"
)
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + BODY
INFORMED = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE


@dataclass
class Script:
    """Answers each request with `packets`, and closes the connection after it if `closes`."""

    packets: list[bytes]
    closes: bool = False
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
                self.requests.append(head + await reader.readexactly(size))
                packets, closes = self.packets, self.closes
                for packet in packets:
                    writer.write(packet)
                    await writer.drain()
                    await asyncio.sleep(0)
                if closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def engine(script: Script) -> AsyncIterator[tuple[EngineConnections, EngineAddress]]:
    server = await asyncio.start_server(script.connected, "127.0.0.1", 0)
    connections = EngineConnections(Connections(EMULATOR))
    try:
        yield connections, EngineAddress.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/at")
    finally:
        connections.close()
        server.close()


async def turn(
    connections: EngineConnections, address: EngineAddress, taken: Callable[[bytes], bool] | None = None
) -> tuple[int, str, bytes]:
    """Status, type and body of an answer."""
    async with await connections.post(address, "/v1/x", {}, b"{}") as answer:
        pieces = []
        while piece := await answer.readany(taken):
            pieces.append(piece)
        return answer.status, answer.content_type, b"".join(pieces)


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % len(whole) for place in places} | {len(whole)})
    return [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@given(
    st.sampled_from([WHOLE, CHUNKED, UNTIL_CLOSED, INFORMED]),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.booleans(),
)
def test_an_answer_is_the_same_however_it_is_cut(answer: bytes, places: list[int], at_once: bool) -> None:
    async def main() -> None:
        passed: list[bytes] = []

        def taken(piece: bytes) -> bool:
            if at_once:
                passed.append(piece)
            return at_once

        async with engine(Script(cut(answer, places), closes=answer is UNTIL_CLOSED)) as (connections, address):
            for _ in range(2):
                passed.clear()
                status, content_type, body = await turn(connections, address, taken)
                # What comes before the reader waits is returned, and all that comes later is taken.
                assert body + b"".join(passed) == BODY and (status, content_type) == (200, "text/plain")

    run(main())


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    script = Script([CHUNKED])
    async with engine(script) as (connections, address):
        for _ in range(3):
            await turn(connections, address)
        assert script.connections == 1
        assert script.requests[0] == b"POST /at/v1/x HTTP/1.1\r\nHost: %b\r\nContent-Length: 2\r\n\r\n{}" % (
            address.host.encode()
        )
        await asyncio.gather(*(turn(connections, address) for _ in range(3)))
        assert script.connections == 3  # one turn at a time on each


@pytest.mark.parametrize("whole", [False, True], ids=["part of it", "all but its end"])
async def test_a_connection_is_not_used_again_after_a_part_of_an_answer(whole: bool) -> None:
    script = Script([CHUNKED[: -5 if whole else 90], b""])
    async with engine(script) as (connections, address):
        for _ in range(2):
            async with await connections.post(address, "/", {}, b"") as answer:
                await answer.readany()
        assert script.connections == 2


@pytest.mark.parametrize("heard", [False, True], ids=["at once", "after a part of an answer"])
async def test_a_request_whose_idle_connection_is_being_closed_is_sent_again(heard: bool) -> None:
    script = Script([WHOLE])
    async with engine(script) as (connections, address):
        await turn(connections, address)
        script.packets, script.closes = [WHOLE[:20]] if heard else [], True  # what the open connection says next
        following = asyncio.create_task(turn(connections, address))
        while len(script.requests) < 2:
            await asyncio.sleep(0)
        script.packets, script.closes = [WHOLE], False
        if heard:
            with pytest.raises(ConnectionError):
                await following
        else:
            assert (await following)[2] == BODY
        assert script.connections == (1 if heard else 2)


async def test_a_connection_that_asks_to_be_closed_is() -> None:
    script = Script([WHOLE.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)])
    async with engine(script) as (connections, address):
        for _ in range(2):
            assert (await turn(connections, address))[2] == BODY
        assert script.connections == 2


async def test_a_connection_idle_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_connections, "KEEPALIVE_SECONDS", 0.1)
    script = Script([WHOLE])
    async with engine(script) as (connections, address):
        await turn(connections, address)
        await asyncio.sleep(0.15)
        await turn(connections, address)
        assert script.connections == 2
        closing = asyncio.create_task(connections.keep_closing())
        await asyncio.sleep(0.3)
        closing.cancel()
        assert not any(connections._idle.values())


@pytest.mark.parametrize("answer", [CHUNKED[:-5], WHOLE[:-1], WHOLE[:20], b""], ids=["chunks", "body", "head", "none"])
async def test_an_answer_that_ends_early_is_an_error(answer: bytes) -> None:
    async with engine(Script([answer], closes=True)) as (connections, address):
        with pytest.raises(ConnectionError):
            await turn(connections, address)


@pytest.mark.parametrize(
    "answer",
    [
        b"what?\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 100_000,
        b"HTTP/1.1 099 What\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    ],
    ids=["no HTTP", "two lengths", "a head without end", "an unknown status", "another protocol"],
)
async def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    async with engine(Script([answer])) as (connections, address):
        with pytest.raises(ValueError, match="an answer"):
            await turn(connections, address)


async def test_an_answer_that_nobody_asked_for_closes_the_connection() -> None:
    script = Script([WHOLE + WHOLE])
    async with engine(script) as (connections, address):
        assert (await turn(connections, address))[2] == BODY
        script.packets = [WHOLE]
        assert (await turn(connections, address))[2] == BODY
        assert script.connections == 2


async def test_a_header_has_one_line() -> None:
    async with engine(Script([WHOLE])) as (connections, address):
        for value in ("a\r\nb: c", "a\nb", "a\rb"):
            with pytest.raises(ValueError, match="more than one line"):
                await connections.post(address, "/", {"x": value}, b"")


async def test_a_socket_is_not_read_while_too_much_is_unread() -> None:
    size = 40 * 2**20  # bytes, more than the kernel holds
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    script = Script([head, bytes(size)])
    async with engine(script) as (connections, address), await connections.post(address, "/", {}, b"") as answer:
        await asyncio.sleep(0.3)
        assert _unread(answer) < 2**21
        total = 0
        while piece := await answer.readany():
            total += len(piece)
        assert total == size


def _unread(answer: EngineConnection) -> int:
    return sum(map(len, answer._pieces))


async def test_no_connection_is_an_error() -> None:
    script = Script([WHOLE])
    async with engine(script) as (connections, address):
        pass
    with pytest.raises(OSError):
        await connections.post(address, "/", {}, b"")


def test_an_address_is_what_its_url_says() -> None:
    plain = EngineAddress.of("http://[::1]:8000/a/b/")
    assert (plain.endpoint.host, plain.endpoint.port, plain.endpoint.secure) == ("::1", 8000, False)
    assert (plain.host, plain.path) == ("[::1]:8000", "/a/b")
    secure = EngineAddress.of("https://engines.example")
    assert (secure.endpoint.port, secure.endpoint.secure, secure.host, secure.path) == (
        443,
        True,
        "engines.example",
        "",
    )
