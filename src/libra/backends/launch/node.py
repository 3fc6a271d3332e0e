"""One node of a cluster: the shared memory of its workers, the fork server that forks them, and their connection to the
controller.

Invariant: all processes started here have ended when this process has ended. Methods are called from the controller's
machine, so they take and return plain values. At the controller a connection becomes a worker's channel only if it
begins with an expected token, and each token is valid once. Any other connection is closed without an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from libra.backends.devices import SlotDevice, hardware_name
from libra.backends.launch.fork_server import ForkServer, LaunchError
from libra.backends.machine import Bf16Speed
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import Vector, WeightBuffer
from libra.backends.weights.copying import add_difference, difference

_CONNECT_SECONDS = 20.0
_TOKEN_BYTES = 32
_TOKEN_SECONDS = 10.0  # in which a connection must send its token
# Seconds of silence before the first probe, seconds between two probes, and number of probes without an answer.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    host: str  # address at which the other nodes reach it
    cores: tuple[int, ...]
    hardware: str
    fork_server: int  # process id
    import_seconds: float  # to import the workers' libraries
    bf16: Bf16Speed
    gpus: tuple[str, ...] = ()  # one per slot; none if slots are CPU slots


class ClusterNode:
    """A node. `devices` are the GPUs that this process may use, one per slot; none if slots are CPU slots."""

    def __init__(self, host: str, logs: Path, name: str, devices: tuple[str, ...] = ()) -> None:
        self._host, self._logs, self._name, self._devices = host, logs, name, devices
        self._fork_server: ForkServer | None = None

    async def start(self, marks: Mapping[str, str]) -> NodeFacts:
        """Start the fork server. `marks` are files with their contents, which the controller wrote on its machine and
        which must exist here. Raises `LaunchError`."""
        for path, text in marks.items():
            if not Path(path).is_file() or Path(path).read_text() != text:
                raise LaunchError(
                    f"node {self._host} cannot see the controller's {Path(path).parent}: keep it on a file system that"
                    " all nodes share, under the same path"
                )
        self._fork_server = ForkServer(self._logs, self._name, kind="cuda" if self._devices else "cpu")
        seconds = await self._fork_server.ready()
        cores = tuple(sorted(os.sched_getaffinity(0)))
        facts = hardware_name(bool(self._devices)), self._fork_server.pid, seconds, self._fork_server.bf16
        return NodeFacts(self._host, cores, *facts, self._devices)

    async def fork(self, name: str, slot: int, controller: tuple[str, int], token: bytes) -> int:
        """Fork a worker that connects to the controller and identifies itself by the token. Returns its process id.
        Raises `ForkError`, `LaunchError`, `OSError`."""
        connection = await asyncio.to_thread(_connect, controller, token)
        environment = SlotDevice("cuda", (self._devices[slot],)).environment if self._devices else {}
        return await self._started.fork(name, connection, environment)

    def kill(self, pid: int) -> None:
        self._started.kill(pid)

    async def gone(self, pid: int) -> None:
        """See `ForkServer.gone`."""
        await self._started.gone(pid)

    async def read(self, order: LoadWeights, size: int, base: LoadWeights | None) -> Vector:
        """The weights stored here, or their changes since `base`. Raises `WeightUpdateError` if either is missing
        here."""
        weights = WeightBuffer(self._started.weights, size)
        return await asyncio.to_thread(_read, weights, order, base)

    async def write(self, order: LoadWeights, size: int, base: LoadWeights | None, content: Vector) -> None:
        """Store weights here; `content` is the result of `read`. Raises `WeightUpdateError` if they did not arrive
        whole, or `base` is missing here."""
        weights = WeightBuffer(self._started.weights, size)
        await asyncio.to_thread(_write, weights, order, base, content)

    async def ended(self) -> str:
        """Wait until the fork server ends, so that no worker can be forked here any more; returns the reason."""
        await self._started.ended()
        return f"the process that starts its workers ended: see {self._started.log}"

    def close(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    @property
    def _started(self) -> ForkServer:
        assert self._fork_server is not None
        return self._fork_server


def _read(weights: WeightBuffer, order: LoadWeights, base: LoadWeights | None) -> Vector:
    weights.verify(order.buffer, order.checksum)
    if base is None:
        return weights.content(order.buffer)
    weights.verify(base.buffer, base.checksum)
    return difference(weights.content(base.buffer), weights.content(order.buffer))


def _write(weights: WeightBuffer, order: LoadWeights, base: LoadWeights | None, content: Vector) -> None:
    if base is None:
        weights.store(order.buffer, content, order.checksum)
        return
    weights.verify(base.buffer, base.checksum)
    add_difference(content, weights.content(base.buffer), weights.content(order.buffer))
    weights.verify(order.buffer, order.checksum)


class NodeLostError(ConnectionError):
    """The node is lost, or the process on it that starts workers has ended."""


class RemoteNode(Protocol):
    """A `ClusterNode` on another machine, with the same methods."""

    async def start(self, marks: Mapping[str, str]) -> NodeFacts: ...
    async def fork(self, name: str, slot: int, controller: tuple[str, int], token: bytes) -> int: ...
    def kill(self, pid: int) -> None: ...
    async def gone(self, pid: int) -> None: ...

    async def read(self, order: LoadWeights, size: int, base: LoadWeights | None) -> Any:
        """The weights, or a reference to them, in the form that `write` of another node accepts."""
        ...

    async def write(self, order: LoadWeights, size: int, base: LoadWeights | None, content: Any) -> None: ...
    async def ended(self) -> str: ...

    def close(self) -> None:
        """End the node and all its processes; no error if it is lost."""
        ...


class Nodes(Protocol):
    """Source of nodes. `host` is the controller's address in their network."""

    @property
    def host(self) -> str: ...

    def open(self, number: int) -> RemoteNode:
        """A node for place `number`. It starts as soon as a machine is available for it."""
        ...


class Reception:
    """A listening socket at `address`, to which workers connect."""

    def __init__(self) -> None:
        self._expected: dict[bytes, asyncio.Future[ControllerChannel]] = {}
        self.address = ("", 0)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, host: str) -> AsyncIterator[Reception]:
        """Context that listens only on the interface of `host`, on any free port."""
        reception = cls()
        server = await asyncio.start_server(reception._arrived, host, 0)
        name = server.sockets[0].getsockname()
        reception.address = (name[0], name[1])
        try:
            yield reception
        finally:
            server.close()

    @contextlib.contextmanager
    def expect(self) -> Iterator[tuple[bytes, asyncio.Future[ControllerChannel]]]:
        """Context with a token for one worker, and a future for its channel. The token is invalid afterwards. The
        caller owns the channel. If the context ends with an error, the channel is closed, which ends a worker at its
        other end."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        arrival: asyncio.Future[ControllerChannel] = asyncio.get_running_loop().create_future()
        self._expected[token] = arrival
        try:
            yield token, arrival
        except BaseException:
            if arrival.done() and not arrival.cancelled():
                arrival.result().close()
            raise
        finally:
            self._expected.pop(token, None)

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            token = await asyncio.wait_for(reader.readexactly(_TOKEN_BYTES), _TOKEN_SECONDS)
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            token = b""
        arrival = self._expected.pop(token, None)
        if arrival is None or arrival.done():
            writer.close()
            return
        connection: socket.socket = writer.get_extra_info("socket")
        _keep_alive(connection)
        arrival.set_result(ControllerChannel(reader, writer))


def _connect(controller: tuple[str, int], token: bytes) -> socket.socket:
    connection = socket.create_connection(controller, timeout=_CONNECT_SECONDS)
    _keep_alive(connection)
    connection.sendall(token)
    connection.settimeout(None)
    return connection


def _keep_alive(connection: socket.socket) -> None:
    """Have small messages sent at once, and a machine detected that vanished without closing the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
