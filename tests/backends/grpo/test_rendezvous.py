"""The store at which replicas meet, and what strangers do to it."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from fakes.replicas import HOST, TOKEN

from libra.backends.grpo.rendezvous import RendezvousServer, RendezvousStore

SHORT = timedelta(seconds=0.2)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    made = RendezvousServer(HOST, 0, TOKEN)
    yield made
    made.close()


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def store(server: RendezvousServer, prefix: str = "a/", timeout: timedelta = SHORT) -> RendezvousStore:
    return RendezvousStore(HOST, server.port, TOKEN, prefix, timeout)


def test_replicas_find_what_others_of_their_membership_say(server: RendezvousServer) -> None:
    first, second, other = store(server), store(server), store(server, "b/")
    first.set("0", b"address")
    second.wait(["0"], SHORT)
    assert second.get("0") == b"address"
    assert second.check(["0"]) and not other.check(["0"])
    with pytest.raises(TimeoutError, match=r"no replica has set 0 within"):
        other.get("0")


@pytest.mark.parametrize("shown", [b"", b"x", TOKEN[:-1].encode() + b"1", b"\0" * 64, b"\xff" * 4096])
def test_without_the_secret_nothing_is_read_or_set(server: RendezvousServer, shown: bytes) -> None:
    store(server).set("0", b"address")
    with socket.create_connection((HOST, server.port)) as stranger:
        body = msgspec.msgpack.encode(["a/0", 0.0, b"mine"])
        stranger.sendall(shown + struct.pack("!I", len(body)) + body)
        with contextlib.suppress(OSError):  # it is closed already
            stranger.shutdown(socket.SHUT_WR)
        assert read(stranger) == b""
    assert store(server).get("0") == b"address"


def read(connection: socket.socket) -> bytes:
    """What is sent until the other end closes, or resets the connection because it did not read all."""
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def test_malformed_frames_of_those_who_know_it_end_nothing(server: RendezvousServer) -> None:
    draw = random.Random(0)
    frames = [b"\xff" * 8, struct.pack("!I", 0), struct.pack("!I", 5) + b"\x93" * 5, struct.pack("!I", 1 << 31)]
    frames += [struct.pack("!I", 5) + b"\x93\xa1\xff\x00\xc0"]  # a key that is not UTF-8
    frames += [struct.pack("!I", 20) + draw.randbytes(20) for _ in range(100)]
    for frame in frames:
        with socket.create_connection((HOST, server.port)) as one:
            one.sendall(TOKEN.encode() + frame)
            with contextlib.suppress(OSError):  # it is closed already
                one.shutdown(socket.SHUT_WR)
            while read(one):
                pass
    good = store(server)
    with pytest.raises(ConnectionError, match="has no room for big"):
        good.set("big", bytes(1 << 16) + b"x")
    good.set("0", b"address")
    assert good.get("0") == b"address"


def test_visitors_who_say_nothing_keep_no_replica_out(server: RendezvousServer) -> None:
    before = descriptors()
    idle = [socket.create_connection((HOST, server.port)) for _ in range(200)]
    good = store(server)
    good.set("0", b"address")
    assert good.get("0") == b"address"
    while any(read_now(one) is None for one in idle[:160]):
        pass  # the first gave way to the last
    assert descriptors() - before < 200 + 60
    for one in idle:
        one.close()


def read_now(connection: socket.socket) -> bytes | None:
    """None while the connection is open and silent."""
    connection.setblocking(False)
    try:
        return connection.recv(1)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""
