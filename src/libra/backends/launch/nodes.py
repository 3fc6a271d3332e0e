"""What a launcher needs of the nodes of a cluster, whoever manages them.

Invariant: a verb of a node returns, or raises; when the node is gone, each of them raises `NodeLostError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from libra.backends.launch.node import NodeFacts


class NodeLostError(ConnectionError):
    """The node is gone, or the process on it that starts workers."""


class RemoteNode(Protocol):
    """A `Node` elsewhere; its verbs are described there."""

    async def start(self, marks: Mapping[str, str]) -> NodeFacts: ...
    async def fork(self, name: str, seat: int, controller: tuple[str, int], token: bytes) -> int: ...
    def kill(self, pid: int) -> None: ...
    async def gone(self, pid: int) -> None: ...

    async def read(self, buffer: int, size: int, checksum: int) -> Any:
        """The weights, or where they can be had: what `write` of another node takes."""
        ...

    async def write(self, buffer: int, size: int, checksum: int, content: Any) -> None: ...
    async def ended(self) -> str: ...

    def close(self) -> None:
        """End it with all that it started; no error where it is gone."""
        ...


class Nodes(Protocol):
    """Where nodes come from. `host` is the controller's address in their network."""

    @property
    def host(self) -> str: ...

    def open(self, number: int) -> RemoteNode:
        """A node for place `number`. It starts as soon as there is a machine for it."""
        ...
