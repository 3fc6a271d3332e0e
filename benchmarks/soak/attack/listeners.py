"""Idle connections, slow frames and bombs on every port, while another client uses it.

Invariant: a listener is attacked with no more than a stranger has: neither token nor secret. The other client connects
anew for each request, and its seconds are measured before the attack and in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import struct
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.rows import Row, below, never
from tests.fakes.servers import Server, emulate, http, route, started

ATTACK = "idle, slow and large"
_FILES = 256  # limit of open files of each process that is attacked
_IDLE = 400  # connections
_AWAY = (2.0, 6.0)  # seconds until a connection that was closed is opened again
_SLOW = 40  # connections that send a byte at a time
_BOMBERS = 4  # connections that send bodies or frames beyond limits, one after the other
_MOST_TIMES = 2.0
_TAIL = 0.99
_PAUSE = 0.05  # seconds between two requests of the other client
_PATIENCE = 30.0  # seconds for one
_NICE = 19
_MOST_MEGABYTES = 30.0
_RETURN_SECONDS = 3.0  # after the attack, for memory to be free again

Ask = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Target:
    """A listener. `ask`: one request of another client, true where it is answered. `slow` and `bombs`: bytes that a
    stranger sends, a byte at a time or at once."""

    name: str
    server: Server
    ask: Ask
    slow: bytes
    bombs: tuple[bytes, ...]


def attack_listeners(folder: Path, seconds: float, say: Callable[[str], None]) -> Iterator[Row]:
    """Attack one listener after the other for `seconds` each."""
    with ExitStack() as stack:
        for target in _targets(folder, stack):
            name, server = target.name, target.server
            alone, attacked, before, wrong = _attack(target, seconds)
            say(f"{name}: {1e3 * alone:.1f} ms alone, {1e3 * attacked:.1f} ms attacked")
            ended = [] if server.alive else ["it ended"]
            yield never(ATTACK, f"ends of the {name}, and requests of others without an answer", ended + wrong, "")
            what = f"P99 of others at the {name}, {1e3 * alone:.1f} ms before"
            yield below(ATTACK, what, attacked / alone, "times", _MOST_TIMES)
            if server.alive:
                grown = server.megabytes - before
                yield below(ATTACK, f"memory that the {name} keeps", grown, "MB", _MOST_MEGABYTES)
            server.end()


def _targets(folder: Path, stack: ExitStack) -> Iterator[Target]:
    engine = stack.enter_context(started(*emulate(folder / "behind.yaml", "--port", 0)))
    gateway = stack.enter_context(started(*route(folder / "gateway.yaml", [engine]), files=_FILES))
    yield _http("gateway", gateway, _turn(gateway.port), "/v1/completions")
    engine.end()
    alone = stack.enter_context(started(*emulate(folder / "alone.yaml", "--port", 0), files=_FILES))
    yield _http("emulated engine", alone, _turn(alone.port), "/v1/completions")
    for kind in ("metrics", "weights", "rendezvous"):
        (folder / kind).mkdir()
        server = stack.enter_context(started("benchmarks.soak.attack.listening", kind, folder / kind, files=_FILES))
        token = server.said["token"]
        match kind:
            case "metrics":
                yield _http("metrics", server, _get(server.port, "/metrics", token), "/metrics")
            case "weights":
                yield Target("publisher of weights", server, _follow(server.port, token), _first_frame(), _frames())
            case _:
                yield Target("store of replicas", server, _meet(server.port, token), b"0" * 1000, _frames())


def _http(name: str, server: Server, ask: Ask, path: str) -> Target:
    slow = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 4000
    return Target(name, server, ask, slow, _bodies(path))


def _attack(target: Target, seconds: float) -> tuple[float, float, float, list[str]]:
    """Seconds of the other client's slowest percent, alone and in the attack, megabytes of the listener between the
    two, and the requests without an answer."""
    wrong: list[str] = []
    asyncio.run(_ask(target.ask, seconds / 4, []))  # what is loaded at first
    alone = asyncio.run(_ask(target.ask, seconds / 2, wrong))
    before = target.server.megabytes
    strangers = get_context("fork").Process(target=_strangers, args=(target,), daemon=True)
    strangers.start()
    try:
        attacked = asyncio.run(_ask(target.ask, seconds, wrong))
    finally:
        strangers.terminate()
        strangers.join()
    time.sleep(_RETURN_SECONDS)
    asyncio.run(_ask(target.ask, 1.0, wrong))
    alone_tail, attacked_tail = (float(np.quantile(it, _TAIL, method="lower")) for it in (alone, attacked))
    return alone_tail, attacked_tail, before, wrong


def _strangers(target: Target) -> None:
    """All of them, in a process of the lowest priority: the listener is measured, not a machine that two processes
    share."""
    os.nice(_NICE)

    async def attack() -> None:
        async with asyncio.TaskGroup() as strangers:
            for number in range(_IDLE):
                strangers.create_task(_idle(target.server.port, number))
            for number in range(_SLOW):
                strangers.create_task(_drip(target.server.port, target.slow, number))
            for number in range(_BOMBERS):
                strangers.create_task(_bomb(target.server.port, target.bombs, number))

    asyncio.run(attack())


async def _ask(ask: Ask, seconds: float, wrong: list[str]) -> list[float]:
    """Ask one request after the other; the seconds of each."""
    took, ends = list[float](), time.monotonic() + seconds
    while not took or time.monotonic() < ends:
        began = time.monotonic()
        try:
            if not await asyncio.wait_for(ask(), _PATIENCE):
                wrong.append("another answer")
        except (OSError, TimeoutError, EOFError) as error:
            wrong.append(repr(error))
        took.append(time.monotonic() - began)
        await asyncio.sleep(_PAUSE)
    return took


# Strangers


async def _idle(port: int, number: int) -> None:
    """A connection that says nothing; when it is closed it is opened again some seconds later."""
    rng = random.Random(number)
    while True:
        with contextlib.suppress(OSError):
            async with _connected(port) as (reader, _):
                await reader.read()
        await asyncio.sleep(rng.uniform(*_AWAY))


async def _drip(port: int, sent: bytes, number: int) -> None:
    """A connection that sends ten bytes a second; likewise opened again."""
    rng = random.Random(-number)
    while True:
        with contextlib.suppress(OSError):
            async with _connected(port) as (reader, writer):
                for byte in sent:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.1)
                    if reader.at_eof():
                        break
        await asyncio.sleep(rng.uniform(*_AWAY))


async def _bomb(port: int, bombs: tuple[bytes, ...], first: int) -> None:
    number = first
    while True:
        with contextlib.suppress(OSError, TimeoutError):
            async with _connected(port) as (reader, writer), asyncio.timeout(_PATIENCE):
                writer.write(bombs[number % len(bombs)])
                await writer.drain()
                await reader.read(1000)
        number += 1
        await asyncio.sleep(0.2)


@asynccontextmanager
async def _connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


# What is sent


def _bodies(path: str) -> tuple[bytes, ...]:
    """Bodies that are little as they are sent, or nest deeply, or have large fields."""
    compressed = "Content-Encoding: gzip"
    nested = b"[" * 10**7
    options = b'{"prompt": [1], "stream_options": ' + b"[" * 500 + b"]" * 500 + b"}"
    many = b'{"prompt": [1], "stream": true, "stream_options": [' + b"[]," * 5_000_000 + b"[]]}"
    named = b'{"prompt": [1], "libra": {"trajectory": "' + b"x" * 12_000_000 + b'"}}'
    return (
        http(path, gzip.compress(bytes(1 << 30), 1), compressed),
        http(path, gzip.compress(nested), compressed),
        http(path, gzip.compress(many), compressed),
        http(path, gzip.compress(named), compressed),
        http(path, nested),
        http(path, options),
    )


def _first_frame() -> bytes:
    head = struct.pack("!II", 4000, 0)
    return head + struct.pack("!I", zlib.crc32(head)) + bytes(4000)


def _frames() -> tuple[bytes, ...]:
    """Frames that promise much and bring some of it, and bytes that are none."""
    head = struct.pack("!II", 63 << 20, 0)
    promised = head + struct.pack("!I", zlib.crc32(head)) + bytes(1 << 20)
    body = b"\x91" * 3000
    small = struct.pack("!II", len(body), zlib.crc32(body))
    nested = small + struct.pack("!I", zlib.crc32(small)) + body
    return promised, nested, b"\xff" * (1 << 20), b"GET / HTTP/1.1\r\n\r\n"


# The other client


def _turn(port: int) -> Ask:
    body = json.dumps({"prompt": [1] * 40, "max_tokens": 16}).encode()
    return _answered(port, http("/v1/completions", body, "Connection: close"))


def _get(port: int, path: str, token: str) -> Ask:
    return _answered(port, http(path, b"", f"Authorization: Bearer {token}", "Connection: close"))


def _answered(port: int, asked: bytes) -> Ask:
    async def ask() -> bool:
        async with _connected(port) as (reader, writer):
            writer.write(asked)
            return (await reader.read()).startswith(b"HTTP/1.1 200")

    return ask


def _follow(port: int, token: str) -> Ask:
    from libra.backends.weights.grid import Grid
    from libra.lend.weights.wire import Hello, Welcome, pack, receive, runs

    grid = Grid(1 << 22, "bfloat16")
    nothing, everything = runs(np.full(len(grid), -1)), runs(np.ones(len(grid), np.bool_))
    hello = pack(Hello(token, grid, "", nothing, everything))

    async def ask() -> bool:
        async with _connected(port) as (reader, writer):
            writer.write(hello)
            message, _ = await receive(reader, _PATIENCE)
            return isinstance(message, Welcome)

    return ask


def _meet(port: int, token: str) -> Ask:
    from datetime import timedelta

    from libra.backends.grpo.rendezvous import RendezvousStore

    def meet() -> bool:
        store = RendezvousStore("127.0.0.1", port, token, "a/", timedelta(seconds=5))
        try:
            store.set("0", b"address")
            return bytes(store.get("0")) == b"address"
        finally:
            store.close()

    async def ask() -> bool:
        return await asyncio.to_thread(meet)

    return ask
