"""Frames over a real socket pair: whole, or not at all."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

import libra.backends.transport.channel
from libra.backends.transport.channel import ControllerChannel, WorkerChannel
from libra.backends.transport.engine_messages import Generate, Interrupt, LoadWeights
from libra.backends.transport.messages import Acknowledged, Failure, Message, Stop
from libra.backends.transport.trainer_messages import Published

PATIENCE = 20.0  # seconds after which a test that would hang fails


def socket_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE)
    return ours, theirs


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


Controller = tuple[ControllerChannel, socket.socket]


@pytest.fixture
@asynccontextmanager
async def controller() -> AsyncIterator[Controller]:
    """The controller's channel and the bare socket at its other end."""
    ours, theirs = socket_pair()
    channel = await ControllerChannel.open(ours)
    try:
        yield channel, theirs
    finally:
        channel.close()
        theirs.close()


@pytest.fixture
def worker() -> tuple[WorkerChannel, socket.socket]:
    """A worker's channel and the bare socket at its other end."""
    ours, theirs = socket_pair()
    ours.settimeout(PATIENCE)
    return WorkerChannel(ours), theirs


async def test_messages_cross_both_ways_in_order(controller: Controller) -> None:
    channel, theirs = controller
    orders: list[Message] = [Generate("a", [1, 2], 16, 1.0, 3, 0), LoadWeights(1, 1, 7), Interrupt("a"), Stop()]
    answers: list[Message] = [Published(1, 7), Failure("no"), Acknowledged()]
    worker = WorkerChannel(theirs)
    for order in orders:
        channel.send(order)
    for answer in answers:
        worker.send(answer)
    assert [await asyncio.to_thread(worker.receive) for _ in orders] == orders
    assert [await channel.receive() for _ in answers] == answers


async def test_a_message_larger_than_the_sockets_buffer(controller: Controller) -> None:
    channel, theirs = controller
    order = Generate("long", list(range(300_000)), 16, 1.0, 3, 0)
    answer = Failure("x" * 1_000_000)
    worker = WorkerChannel(theirs)
    channel.send(order)
    assert await asyncio.to_thread(worker.receive) == order
    received, _ = await asyncio.gather(channel.receive(), asyncio.to_thread(worker.send, answer))
    assert received == answer


def test_a_frame_may_come_in_pieces(worker: tuple[WorkerChannel, socket.socket]) -> None:
    channel, peer = worker
    for byte in frame(msgspec.json.encode(Interrupt("a"))):
        peer.send(bytes([byte]))
    assert channel.receive() == Interrupt("a")


def test_poll_says_whether_something_waits(worker: tuple[WorkerChannel, socket.socket]) -> None:
    channel, peer = worker
    assert not channel.poll()
    peer.sendall(frame(msgspec.json.encode(Stop())))
    assert channel.poll()
    assert channel.receive() == Stop()
    assert not channel.poll()
    peer.close()
    assert channel.poll()


REFUSED = [
    (b'{"type":"Nonsense"}', msgspec.ValidationError),
    (b'{"type":"Interrupt","id":"a","extra":1}', msgspec.ValidationError),
    (b"", msgspec.DecodeError),
    (b"not JSON", msgspec.DecodeError),
    (b"\xff", msgspec.DecodeError),
]


@pytest.mark.parametrize(("body", "error"), REFUSED)
def test_a_worker_refuses_what_is_not_an_order(
    body: bytes, error: type[Exception], worker: tuple[WorkerChannel, socket.socket]
) -> None:
    channel, peer = worker
    peer.sendall(frame(body))
    with pytest.raises(error):
        channel.receive()


@pytest.mark.parametrize(("body", "error"), [*REFUSED, (b'{"type":"Stop"}', msgspec.ValidationError)])
async def test_a_controller_refuses_what_is_not_an_answer(
    controller: Controller, body: bytes, error: type[Exception]
) -> None:
    channel, theirs = controller
    theirs.sendall(frame(body))
    with pytest.raises(error):
        await channel.receive()


def test_a_message_that_is_too_long_is_not_sent(
    worker: tuple[WorkerChannel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, peer = worker
    monkeypatch.setattr(libra.backends.transport.channel, "LARGEST_FRAME", 100)
    with pytest.raises(ValueError, match=r"Failure of \d+ bytes exceeds the frame limit of 100"):
        channel.send(Failure("x" * 100))
    channel.send(Acknowledged())
    assert peer.recv(1000) == frame(b'{"type":"Acknowledged"}')


def test_a_worker_refuses_a_frame_that_is_too_long(worker: tuple[WorkerChannel, socket.socket]) -> None:
    channel, peer = worker
    peer.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionError, match="4294967295 bytes"):
        channel.receive()


async def test_a_controller_refuses_a_frame_that_is_too_long(controller: Controller) -> None:
    channel, theirs = controller
    theirs.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionError, match="4294967295 bytes"):
        await channel.receive()


CUT = [b"", b"\0\0", frame(b'{"type":"Acknowledged"}')[:-1]]


@pytest.mark.parametrize("sent", CUT, ids=["before a frame", "in its length", "in its body"])
async def test_a_peer_that_went_away_is_a_connection_error(
    controller: Controller, sent: bytes, worker: tuple[WorkerChannel, socket.socket]
) -> None:
    channel, theirs = controller
    channel, peer = worker
    peer.sendall(sent)
    peer.close()
    with pytest.raises(ConnectionError):
        channel.receive()
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(ConnectionError):
        await channel.receive()


async def test_sending_to_a_worker_that_went_away_is_reported_by_receive(controller: Controller) -> None:
    channel, theirs = controller
    theirs.close()
    for _ in range(3):
        channel.send(Stop())
    with pytest.raises(ConnectionError):
        await channel.receive()
