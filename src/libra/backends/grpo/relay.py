"""A process beside a core replica that lets one joiner of another node read what the core publishes.

Invariant: the core does not wait for it: the relay reads shared memory like any joiner of the core's own node. It
listens at the address that it is given, serves the one who shows the token, and ends with that reader or with its core.
It needs no torch, so it is there in tenths of a second.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import subprocess
import sys
import time

import msgspec

from libra.backends.grpo.publication import OverrunError, Shape, SharedPublication
from libra.backends.grpo.state_stream import StateRequest, StateStream, Verdict
from libra.backends.launch.worker import die_with
from libra.backends.transport.shared_vectors import LayoutError
from libra.backends.transport.trainer_messages import Serve, StatePlace

READER_SECONDS = 60.0  # for the reader to come
GREETING_SECONDS = 5.0  # for one who came, and holds up all others, to say who it is
_NICE = 10  # neighbours on its cores go first
IDLE_SECONDS = 300.0  # between two requests; a reader may wait for the next membership meanwhile


class RelayOrder(msgspec.Struct, frozen=True):
    """What a relay reads from its standard input; other users of the machine can see a command line."""

    listener: int  # file descriptor
    serve: Serve
    place: StatePlace
    shape: Shape


class Relay:
    """The core's handle on its relay. The socket listens when this is made; who connects waits for the process."""

    def __init__(self, serve: Serve, place: StatePlace, shape: Shape) -> None:
        """Raises `OSError` when the process cannot be started, or the address is none of this node."""
        with socket.create_server((serve.host, 0)) as listener:
            self.port: int = listener.getsockname()[1]
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, pass_fds=[listener.fileno()]
            )
            order = RelayOrder(listener.fileno(), serve, place, shape)
        assert self._process.stdin is not None
        # Killed before it read its order is like killed later: its reader finds nobody, and asks again.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as standard_input:
            standard_input.write(msgspec.json.encode(order))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(stream: StateStream, publication: SharedPublication) -> None:
    """Answer a reader's requests until it goes, which raises `OSError`."""
    while True:
        request, number = stream.asked(IDLE_SECONDS)
        match request:
            case StateRequest.AT_REST:
                stream.answer(Verdict.YES if publication.at_rest() else Verdict.NO)
            case StateRequest.COPY_STATE:
                _send_state(stream, publication)
            case StateRequest.HAS_UPDATE:
                try:
                    stream.answer(Verdict.YES if publication.has_update(number) else Verdict.NO)
                except OverrunError:
                    stream.answer(Verdict.OVERRUN)
            case StateRequest.COPY_UPDATE:
                _send_update(stream, publication, number)


def _send_state(stream: StateStream, publication: SharedPublication) -> None:
    state = publication.state()
    if state is None:
        stream.answer(Verdict.NO)
        return
    stream.answer(Verdict.YES)
    stream.send_state(state)
    stream.send_vectors(publication.vectors, lambda: publication.holds_state(state.number))


def _send_update(stream: StateStream, publication: SharedPublication, number: int) -> None:
    stream.send_update(publication.update(number))
    stream.send_vectors([publication.gradient(number)], lambda: publication.holds_update(number))


def await_reader(listener: socket.socket, token: str, shape: Shape, seconds: float) -> StateStream:
    """The first who shows the token. Raises `TimeoutError` when none comes, `ValueError` when it expects another
    shape, which it is told."""
    ends = time.monotonic() + seconds
    while True:
        listener.settimeout(max(0.001, ends - time.monotonic()))
        connection, address = listener.accept()
        stream = StateStream(connection)
        try:
            shown, expected = stream.greeting(GREETING_SECONDS)
        except OSError as error:
            print(f"{address} did not greet: {error}", file=sys.stderr)
        else:
            if hmac.compare_digest(shown, token.encode()):
                if expected == shape:
                    stream.answer(Verdict.YES)
                    return stream
                stream.answer(Verdict.OTHER_SHAPE)
                raise ValueError(f"{address} expects {expected}, the core publishes {shape}")
            print(f"{address} did not show the token", file=sys.stderr)
        stream.close()


def main() -> None:
    die_with(os.getppid())
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=RelayOrder)
    os.sched_setaffinity(0, order.serve.cores)
    os.nice(_NICE)
    publication = SharedPublication(order.place, order.shape)
    with socket.socket(fileno=order.listener) as listener:
        stream = await_reader(listener, order.serve.token, order.shape, READER_SECONDS)
    serve(stream, publication)


if __name__ == "__main__":
    try:
        main()
    except ConnectionResetError:
        pass  # the reader has joined, or is gone
    except (OSError, ValueError, LayoutError) as error:
        sys.exit(f"relay: {error}")
