"""Connections to a port that sends weights, by those who do not have its token or do not speak its language."""

from __future__ import annotations

import asyncio
import logging
import struct
import zlib
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from libra.backends.weights.grid import Grid
from libra.config.listeners import WEIGHTS
from libra.lend.weights.feed import Feed
from libra.lend.weights.node import LinkPatience, served
from libra.lend.weights.source import Source
from libra.lend.weights.wire import Beat, Complete, Hello, Welcome, pack, receive, runs

GRID = Grid(20_000, "bfloat16", 1024)
PATIENCE = LinkPatience(beat=0.2, silence=5.0)
TOKEN = "word"


async def feed() -> Feed:
    published = Feed(GRID, np.ones(len(GRID), np.bool_))
    content = np.zeros(GRID.size, np.uint8)
    await Source(published, "first").publish(0, content, zlib.crc32(content.data))
    return published


def hello(**changed: Any) -> Hello:
    nothing = runs(np.full(len(GRID), -1))
    everything = runs(np.ones(len(GRID), np.bool_))
    return msgspec.structs.replace(Hello(TOKEN, GRID, "", nothing, everything), **changed)


def framed(body: bytes) -> bytes:
    head = struct.pack("!II", len(body), zlib.crc32(body))
    return head + struct.pack("!I", zlib.crc32(head)) + body


async def answered(port: int, sent: bytes) -> bytes:
    """What comes until the other end closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 10.0)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def as_array(message: Hello, **changed: Any) -> bytes:
    """The message as others would pack it, with fields of any kind."""
    fields = [type(message).__name__, *(changed.get(it, getattr(message, it)) for it in message.__struct_fields__)]
    return framed(msgspec.msgpack.encode(fields))


MALFORMED: dict[str, bytes] = {
    "no frame": b"GET / HTTP/1.1\r\n\r\n",
    "not a message": framed(b"\xc1"),
    "nothing": framed(b""),
    "nested": framed(b"\x91" * 3000 + b"\xc0"),
    "another message": pack(Beat(1)),
    "a sender's message": pack(Welcome("x", [(1, len(GRID))])),
    "complete": pack(Complete(0, 0, 1, None)),
    "another token": pack(hello(token="")),
    "a token that is no text": as_array(hello(), token=b"\xff"),
    "a token that is not UTF-8": framed(
        msgspec.msgpack.encode(hello(token="\x7f" * 5)).replace(b"\x7f" * 5, b"\xff" * 5)
    ),
    "a version that no number holds": as_array(hello(), have=[[2**64 - 1, len(GRID)]]),
    "a version of before": as_array(hello(), have=[[-(2**63), len(GRID)]]),
    "a wish that no number holds": as_array(hello(), wanted=[[2**63, len(GRID)]]),
    "chunks that no memory holds": as_array(hello(), wanted=[[1, 2**62], [1, len(GRID) - 2**62]]),
    "too few chunks": as_array(hello(), have=[[1, 3]]),
    "no chunks": as_array(hello(), have=[]),
    "no pair": as_array(hello(), have=[[1]]),
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_malformed_leaves_a_line_at_most(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with served(await feed(), "127.0.0.1", TOKEN, PATIENCE) as address:
        assert len(await answered(address.port, sent)) < 200
        assert await follows(address.port)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def follows(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(pack(hello()))
    message, _ = await receive(reader, 5.0)
    writer.close()
    return isinstance(message, Welcome)


async def test_a_large_frame_is_refused_before_the_token_was_shown() -> None:
    async with served(await feed(), "127.0.0.1", TOKEN, PATIENCE) as address:
        assert await answered(address.port, pack(hello(lineage="x" * 2**16))) == b""


async def test_a_first_frame_that_comes_byte_by_byte_is_not_waited_for() -> None:
    limits = replace(WEIGHTS, hello_seconds=0.5)
    async with served(await feed(), "127.0.0.1", TOKEN, PATIENCE, limits=limits) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
        for byte in pack(hello()):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
            if reader.at_eof():
                break
        assert await asyncio.wait_for(reader.read(), 10.0) == b""
        writer.close()


async def test_strangers_that_wait_make_room_for_a_follower() -> None:
    async with served(await feed(), "127.0.0.1", TOKEN, PATIENCE) as address:
        strangers = [await asyncio.open_connection("127.0.0.1", address.port) for _ in range(3 * WEIGHTS.strangers)]
        assert await follows(address.port)
        assert await asyncio.wait_for(strangers[0][0].read(), 5.0) == b""
        for _, writer in strangers:
            writer.close()
