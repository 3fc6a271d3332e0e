"""The relay as a process beside its core: what reaches a joiner through it, who may read, and how either end goes."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from fakes.states import HOST, PATIENCE, RATE, TOKEN, make_state, parameters, step

import libra.backends.grpo.relay
from libra.backends.grpo.elastic import ElasticReplica
from libra.backends.grpo.publication import Shape, UnreachableError, Update
from libra.backends.grpo.relay import (
    YES,
    Greeting,
    Relay,
    RelayAnswer,
    RelayRequest,
    RemotePublication,
    StateStream,
    await_reader,
)
from libra.backends.grpo.train_state import BehindError, FlatLayout, Follower, TrainState
from libra.backends.launch.worker import Pacer
from libra.backends.transport.shared_memory import LayoutError
from libra.backends.transport.trainer_messages import RelayPlace, Serve, Serving

LARGE = (4 << 20,)  # numbers: more bytes than sockets hold, so that the relay is in the middle when its reader is

# A core without torch: it only has the memory, starts a relay for it and says where.
CORE = """
import os, sys
from libra.backends.grpo.publication import Shape
from libra.backends.grpo.relay import Relay
from libra.backends.transport.shared_memory import make_memory
from libra.backends.transport.trainer_messages import Serve, StatePlace
shape = Shape(64, "float32", 0)
descriptor, memory = make_memory(Shape, "core", shape.size)
serve = Serve(sys.argv[1], sys.argv[2], tuple(os.sched_getaffinity(0)))
relay = Relay(serve, StatePlace(os.getpid(), descriptor), shape)
print(relay._process.pid, relay.port, flush=True)
sys.stdin.read()
"""


def large_state(seed: int) -> TrainState:
    made = parameters(seed, (LARGE,))
    return TrainState(made, torch.optim.AdamW(made.values(), lr=RATE))


def order(host: str = HOST, token: str = TOKEN) -> Serve:
    return Serve(host, token, tuple(os.sched_getaffinity(0)))


@contextmanager
def relay_of(core: TrainState) -> Iterator[Relay]:
    relay = Relay(order(), core.place, core.shape)
    try:
        yield relay
    finally:
        relay.end()


def place(relay: Relay, token: str = TOKEN) -> RelayPlace:
    return RelayPlace(HOST, relay.port, token)


def during_copies(publication: RemotePublication, acts: Sequence[Callable[[], object]]) -> None:
    """Do these one after another, each time that a piece has arrived."""
    left, fill = list(acts), publication._stream._fill

    def filled(room: memoryview, ends: float) -> None:
        fill(room, ends)
        if len(room) > 1000 and left:
            left.pop(0)()

    publication._stream._fill = filled  # type: ignore[method-assign]


def same(joiner: TrainState, core: TrainState) -> bool:
    return all(torch.equal(a, b) for a, b in zip(joiner._board.vectors, core._board.vectors, strict=True))


def test_a_joiner_of_another_node_takes_the_state_and_the_steps() -> None:
    core, joiner = make_state(0), make_state(1)
    step(core)
    with relay_of(core) as relay:
        follower = Follower(joiner.publication_at(place(relay)), joiner)
        for _ in range(2):
            follower.advance()
            assert follower.number == core.number and same(joiner, core)
            step(core, rate=0.25)
            step(core, rate=0.125)
        follower.advance()
        assert joiner.learning_rate == 0.125 and same(joiner, core)
        del follower  # it has joined
        assert relay._process.wait(PATIENCE) == 0


def test_beside_a_core_that_steps_at_any_moment_only_whole_states_are_held() -> None:
    core, joiner, stop = make_state(0), make_state(1), Event()
    history = {core.number: core.keep().vectors}

    def live() -> None:
        random = np.random.default_rng(0)
        while not stop.is_set():
            step(core)
            history[core.number] = core.keep().vectors
            stop.wait(random.exponential(0.0005))

    thread = Thread(target=live)
    with relay_of(core) as relay:
        follower = Follower(joiner.publication_at(place(relay)), joiner)
        held = set()
        thread.start()
        try:
            ends = time.monotonic() + PATIENCE
            while len(held) < 200 and time.monotonic() < ends:
                try:
                    follower.advance()
                except BehindError:
                    follower = Follower(follower._publication, joiner)
                number = follower.number
                if number is not None:
                    while number not in history:  # a joiner may be there before the core
                        time.sleep(0)
                    assert all(torch.equal(*pair) for pair in zip(joiner._board.vectors, history[number], strict=True))
                    held.add(number)
        finally:
            stop.set()
            thread.join()
        assert len(held) == 200
        while follower.number != core.number:
            follower.advance()
        assert same(joiner, core)


# --- who may read --------------------------------------------------------------------------------------------------


def test_who_does_not_know_the_token_is_not_answered_and_keeps_nobody_out() -> None:
    core, joiner = make_state(0), make_state(1)
    with relay_of(core) as relay:
        with pytest.raises(ConnectionResetError):
            joiner.publication_at(place(relay, TOKEN[::-1]))
        assert joiner.take_state(joiner.publication_at(place(relay))) == core.number


def test_a_stranger_who_says_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libra.backends.grpo.relay, "GREETING_SECONDS", 0.1)
    shape = Shape(64, "float32", 7)
    with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()):
        relay = Thread(target=lambda: await_reader(listener, TOKEN, shape, PATIENCE).close())
        relay.start()
        RemotePublication(RelayPlace(*listener.getsockname(), TOKEN), shape)
        relay.join(PATIENCE)


def test_nobody_is_waited_for_without_end() -> None:
    with socket.create_server((HOST, 0)) as listener, pytest.raises(TimeoutError):
        await_reader(listener, TOKEN, Shape(64, "float32", 7), 0.05)


def test_it_has_one_reader() -> None:
    core, joiner = make_state(0), make_state(1)
    with relay_of(core) as relay:
        publication = joiner.publication_at(place(relay))
        with pytest.raises(OSError):
            joiner.publication_at(place(relay))
        assert joiner.take_state(publication) == core.number


def test_a_joiner_of_another_model_is_refused() -> None:
    core = make_state(0)
    turned = FlatLayout.of({"p0": (5, 3), "p1": (5,), "p2": (2, 2)}, 4)
    for shape in (Shape(turned.length, "float32", turned.signature()), Shape(7, "float64", core.shape.signature)):
        with relay_of(core) as relay:
            with pytest.raises(LayoutError, match="another model or precision"):
                RemotePublication(place(relay), shape)
            assert relay._process.wait(PATIENCE) == 1


def test_it_listens_at_the_given_address_for_its_reader_only() -> None:
    core, joiner = make_state(0), make_state(1)
    with relay_of(core) as relay:
        publication = joiner.publication_at(place(relay))
        publication.at_rest()
        process = psutil.Process(relay._process.pid)
        assert [(c.laddr.ip, c.laddr.port, c.status) for c in process.net_connections()] == [
            (HOST, relay.port, psutil.CONN_ESTABLISHED)
        ]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", relay.port))
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        assert TOKEN not in " ".join(process.cmdline())


def test_an_address_of_another_machine_is_told() -> None:
    core = make_state(0)
    with pytest.raises(OSError, match="assign requested address"):
        Relay(order("192.0.2.1"), core.place, core.shape)


def test_a_core_serves_its_latest_joiner_or_says_why_not() -> None:
    core = ElasticReplica(make_state(0), Pacer(1.0, order().cores))
    first, refused = core.answer(order()), core.answer(order("192.0.2.1"))
    assert isinstance(first, Serving) and isinstance(refused, Serving)
    assert refused.ports == [] and "assign requested address" in refused.failure
    [port] = first.ports
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))


# --- ends that go --------------------------------------------------------------------------------------------------


def test_one_that_is_killed_before_it_reads_its_order_is_gone_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    core, joiner = make_state(0), make_state(1)
    start = subprocess.Popen

    def start_and_kill(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        started = start(*command, **options)
        started.kill()
        started.wait()
        return started

    monkeypatch.setattr(subprocess, "Popen", start_and_kill)
    with relay_of(core) as relay, pytest.raises(ConnectionRefusedError):
        joiner.publication_at(place(relay))


def test_it_ends_with_its_core() -> None:
    command = [sys.executable, "-c", CORE, HOST, TOKEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as core:
        assert core.stdout is not None
        pid, port = map(int, core.stdout.readline().split())
        publication = RemotePublication(RelayPlace(HOST, port, TOKEN), Shape(64, "float32", 0))
        assert publication.at_rest()
        relay = psutil.Process(pid)
        core.kill()
        relay.wait(PATIENCE)
        with pytest.raises(UnreachableError, match="cannot be reached"):
            publication.at_rest()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_relay_that_dies_or_hangs_in_the_middle_of_a_copy(
    end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, joiner = large_state(0), large_state(1)
    with relay_of(core) as relay:
        publication = joiner.publication_at(place(relay))
        assert publication.at_rest()
        monkeypatch.setattr(libra.backends.grpo.relay, "SILENT_SECONDS", 0.3)
        during_copies(publication, [lambda: os.kill(relay._process.pid, end)])  # type: ignore[arg-type]
        follower = Follower(publication, joiner)
        with pytest.raises(UnreachableError, match="cannot be reached"):
            follower.advance()
        assert follower.number is None
        with pytest.raises(UnreachableError):  # for good
            publication.at_rest()
    monkeypatch.undo()
    with relay_of(core) as another:
        Follower(joiner.publication_at(place(another)), joiner).advance()
        assert same(joiner, core)


def test_an_update_that_breaks_off_leaves_the_joiner_as_it_was() -> None:
    core, joiner = large_state(0), large_state(1)
    with relay_of(core) as relay:
        publication = joiner.publication_at(place(relay))
        follower = Follower(publication, joiner)
        follower.advance()
        before = follower.number, joiner.checksum
        step(core)
        during_copies(publication, [relay.end])  # type: ignore[arg-type]
        with pytest.raises(UnreachableError):
            follower.advance()
        assert (follower.number, joiner.checksum) == before


class Impostor:
    """A peer that has the token and answers a copy of an update (of 64 float32) as the test says."""

    def __init__(self, answer: Callable[[socket.socket], object]) -> None:
        self.gradient = np.zeros(64, np.float32)
        self._answer = answer
        self._listener = socket.create_server((HOST, 0))
        self._done = Event()
        self._thread = Thread(target=self._live)

    def __enter__(self) -> RemotePublication:
        self._thread.start()
        return RemotePublication(RelayPlace(*self._listener.getsockname(), TOKEN), Shape(64, "float32", 0))

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join(PATIENCE)
        self._listener.close()

    def _live(self) -> None:
        connection, _ = self._listener.accept()
        stream = StateStream(connection)
        stream.receive(Greeting)
        stream.send(YES)
        stream.receive(RelayRequest)
        with suppress(OSError):  # it was heard to the end of the other's patience
            self._answer(connection)
        self._done.wait(PATIENCE)
        stream.close()


def frame(body: bytes, checksum: int | None = None) -> bytes:
    return struct.pack("!II", len(body), zlib.crc32(body) if checksum is None else checksum) + body


def piece(count: int) -> bytes:
    return frame(bytes(count))


UPDATE = frame(msgspec.msgpack.encode(RelayAnswer("yes", Update(5, 0.1, 1.0, 2.0))))
WHOLE = frame(b"") + frame(msgspec.msgpack.encode(YES))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (UPDATE + frame(bytes(256), checksum=1) + WHOLE, "a frame arrived damaged"),
        (UPDATE + piece(200) + piece(100) + WHOLE, "more was sent than requested"),
        (UPDATE + piece(256) + piece(4) + WHOLE, "more was sent than requested"),
        (UPDATE + piece(1 << 31 >> 4)[:1000], "more was sent than requested"),
        (UPDATE + piece(200) + WHOLE, "less was sent than requested"),
        (
            frame(msgspec.msgpack.encode(RelayRequest("state"))),
            "this is not a RelayAnswer: Object missing",
        ),
        (frame(b"\xc1"), "this is not a RelayAnswer"),
        (piece(5000)[:1000], "5000 bytes are not a RelayAnswer"),
        (UPDATE + piece(256)[:100], "the other end is silent"),
        (b"", "the other end is silent"),
    ],
)
def test_an_answer_that_is_not_understood_ends_the_connection(
    answer: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libra.backends.grpo.relay, "SILENT_SECONDS", 0.2)
    with (
        Impostor(lambda connection: connection.sendall(answer)) as publication,
        pytest.raises(UnreachableError, match=why),
    ):
        publication.copy_update(5, np.zeros(64, np.float32))


def test_a_right_answer_in_odd_pieces_is_taken() -> None:
    answer, into = UPDATE + piece(4) + piece(251) + piece(1) + WHOLE, np.ones(64, np.float32)
    with Impostor(lambda connection: connection.sendall(answer)) as publication:
        assert publication.copy_update(5, into) == Update(5, 0.1, 1.0, 2.0)
        assert not into.any()


def test_a_peer_that_trickles_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libra.backends.grpo.relay, "SILENT_SECONDS", 0.3)

    def trickle(connection: socket.socket) -> None:
        connection.sendall(UPDATE)
        for byte in piece(256) + WHOLE:
            connection.sendall(bytes([byte]))
            time.sleep(0.005)

    with Impostor(trickle) as publication, pytest.raises(UnreachableError, match="silent"):
        publication.copy_update(5, np.zeros(64, np.float32))
