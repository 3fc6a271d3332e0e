"""Messages as frames over a real socket pair: every one arrives as it was sent, whole, and nothing else arrives."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

import libra.backends.transport.channel
from libra.backends.transport.channel import ControllerChannel, FromWorker, ToWorker, WorkerChannel
from libra.backends.transport.engine_messages import Generate, Interrupt, LoadWeights
from libra.backends.transport.messages import Acknowledged, Failure, Message, Stop
from libra.backends.transport.trainer_messages import Published

PATIENCE = 20.0  # seconds after which a test that would hang fails

ORDERS, ANSWERS = get_args(ToWorker), get_args(FromWorker)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Anything of the type of a field."""
    match kind:
        case inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.StrType():
            return st.text()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.UnionType():
            return st.one_of(*map(values, kind.types))
        case inspect.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case inspect.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case inspect.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3).map(tuple)
        case inspect.StructType():
            return st.builds(kind.cls, **{field.name: values(field.type) for field in kind.fields})
        case inspect.DictType():
            return st.dictionaries(st.text(), st.integers(-(2**63), 2**63 - 1), max_size=3)
        case _:
            raise TypeError(kind)


def test_every_message_is_an_order_or_an_answer() -> None:
    assert {*ORDERS, *ANSWERS} == set(Message.__subclasses__())


@pytest.mark.parametrize("kind", [*ORDERS, *ANSWERS], ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=20)
@given(st.data())
def test_every_message_arrives_as_it_was_sent(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(values(inspect.type_info(kind)))
    direction = ToWorker if kind in ORDERS else FromWorker
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=direction) == message


def socket_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE)
    return ours, theirs


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


@asynccontextmanager
async def controller() -> AsyncIterator[tuple[ControllerChannel, socket.socket]]:
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


End = tuple[Callable[[], Awaitable[Message]], socket.socket]


@asynccontextmanager
async def end(kind: str) -> AsyncIterator[End]:
    """How one end receives, and the bare socket at the other."""
    if kind == "controller":
        async with controller() as (channel, peer):
            yield channel.receive, peer
        return
    ours, peer = socket_pair()
    ours.settimeout(PATIENCE)
    yield lambda: asyncio.to_thread(WorkerChannel(ours).receive), peer
    peer.close()


both_ends = pytest.mark.parametrize("kind", ["worker", "controller"])


async def test_messages_cross_both_ways_in_order() -> None:
    orders: list[Message] = [Generate("a", [1, 2], 16, 1.0, 3, 0), LoadWeights(1, 1, 7), Interrupt("a"), Stop()]
    answers: list[Message] = [Published(1, 7), Failure("no"), Acknowledged()]
    async with controller() as (channel, theirs):
        worker = WorkerChannel(theirs)
        for order in orders:
            channel.send(order)
        for answer in answers:
            worker.send(answer)
        assert [await asyncio.to_thread(worker.receive) for _ in orders] == orders
        assert [await channel.receive() for _ in answers] == answers


async def test_a_message_larger_than_the_sockets_buffer() -> None:
    order = Generate("long", list(range(300_000)), 16, 1.0, 3, 0)
    answer = Failure("x" * 1_000_000)
    async with controller() as (channel, theirs):
        worker = WorkerChannel(theirs)
        channel.send(order)
        assert await asyncio.to_thread(worker.receive) == order
        received, _ = await asyncio.gather(channel.receive(), asyncio.to_thread(worker.send, answer))
        assert received == answer


def test_a_frame_may_come_in_pieces(worker: tuple[WorkerChannel, socket.socket]) -> None:
    channel, peer = worker
    for byte in frame(msgspec.msgpack.encode(Interrupt("a"))):
        peer.send(bytes([byte]))
    assert channel.receive() == Interrupt("a")


def test_poll_says_whether_something_waits(worker: tuple[WorkerChannel, socket.socket]) -> None:
    channel, peer = worker
    assert not channel.poll()
    peer.sendall(frame(msgspec.msgpack.encode(Stop())))
    assert channel.poll()
    assert channel.receive() == Stop()
    assert not channel.poll()
    peer.close()
    assert channel.poll()


@both_ends
@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"type":"Exec","code":"1"}', msgspec.ValidationError),
        (b'{"type":"Interrupt","id":"a","extra":1}', msgspec.ValidationError),
        (b'{"type":"Interrupt"}', msgspec.ValidationError),
        (b'{"type":"Interrupt","id":7}', msgspec.ValidationError),
        (b'{"id":"a"}', msgspec.ValidationError),
        (b"[]", msgspec.ValidationError),
        (b"null", msgspec.ValidationError),
        (b"", msgspec.DecodeError),
        (b"not JSON", msgspec.DecodeError),
        (b"\xff", msgspec.DecodeError),
        (b"\x82\xa4type\xa9Interrupt\xa2id\xa1\xff", msgspec.DecodeError),  # a text that is not UTF-8
        (b"\x82\xa4type\xa9Interrupt\xa2id" + b"\x91" * 100_000, msgspec.DecodeError),
        (b"\x82\xa4type\xa9Interrupt\xa1x" + b"\x91" * 100_000, msgspec.DecodeError),
    ],
)
async def test_what_is_no_message_is_refused(kind: str, body: bytes, error: type[Exception]) -> None:
    async with end(kind) as (receive, peer):
        peer.sendall(frame(body))
        with pytest.raises(error):
            await receive()


@pytest.mark.parametrize(("kind", "message"), [("worker", Acknowledged()), ("controller", Stop())])
async def test_an_answer_is_no_order_and_an_order_no_answer(kind: str, message: Message) -> None:
    async with end(kind) as (receive, peer):
        peer.sendall(frame(msgspec.msgpack.encode(message)))
        with pytest.raises(msgspec.ValidationError):
            await receive()


def test_a_message_that_is_too_long_is_not_sent(
    worker: tuple[WorkerChannel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, peer = worker
    monkeypatch.setattr(libra.backends.transport.channel, "LARGEST_FRAME", 100)
    with pytest.raises(ValueError, match=r"Failure of \d+ bytes exceeds the frame limit of 100"):
        channel.send(Failure("x" * 100))
    channel.send(Acknowledged())
    assert peer.recv(1000) == frame(msgspec.msgpack.encode(Acknowledged()))


@both_ends
async def test_a_frame_that_is_too_long_is_refused(kind: str) -> None:
    async with end(kind) as (receive, peer):
        peer.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ConnectionError, match="4294967295 bytes"):
            await receive()


@both_ends
@pytest.mark.parametrize(
    "sent",
    [b"", b"\0\0", frame(msgspec.msgpack.encode(Acknowledged()))[:-1]],
    ids=["before a frame", "in its length", "in its body"],
)
async def test_a_peer_that_went_away_is_a_connection_error(kind: str, sent: bytes) -> None:
    async with end(kind) as (receive, peer):
        peer.sendall(sent)
        peer.close()
        with pytest.raises(ConnectionError):
            await receive()


async def test_sending_to_a_worker_that_went_away_is_reported_by_receive() -> None:
    async with controller() as (channel, theirs):
        theirs.close()
        for _ in range(3):
            channel.send(Stop())
        with pytest.raises(ConnectionError):
            await channel.receive()
