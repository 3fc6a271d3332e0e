"""Who is let in as a worker, and who is not."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fakes.far_end import PATIENCE

from libra.backends.launch.reception import Reception
from libra.backends.transport.channel import WorkerChannel
from libra.backends.transport.messages import Acknowledged


async def knock(reception: Reception, *words: bytes) -> socket.socket:
    connection = await asyncio.to_thread(socket.create_connection, reception.address)
    connection.settimeout(PATIENCE)
    for word in words:
        connection.sendall(word)
    return connection


async def is_closed(connection: socket.socket) -> bool:
    with connection:
        return await asyncio.to_thread(connection.recv, 1) == b""


async def test_a_worker_with_its_token_is_let_in_once_and_nobody_else() -> None:
    broken: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: broken.append(context))
    async with Reception.open("127.0.0.1") as reception:
        assert reception.address[0] == "127.0.0.1"
        with reception.expect() as (token, arrival):
            assert await is_closed(await knock(reception, bytes(32)))
            assert not arrival.done()
            worker = await knock(reception, token[:5], token[5:])
            channel = await asyncio.wait_for(arrival, PATIENCE)
            with worker:
                WorkerChannel(worker).send(Acknowledged())
                assert await channel.receive() == Acknowledged()
                assert await is_closed(await knock(reception, token))
            channel.close()
        with reception.expect() as (token, arrival):
            pass
        assert await is_closed(await knock(reception, token))  # nobody expects it any more
        assert not arrival.done()
        half = await knock(reception, b"half a token")
        half.close()
    assert not broken


async def test_silence_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.backends.launch.reception._TOKEN_SECONDS", 0.05)
    async with Reception.open("127.0.0.1") as reception:
        assert await is_closed(await knock(reception))
