"""Weights from the node that published them to the nodes of other engines.

Invariant: weights are brought to a node whole, or with an error; never older ones. A node is sent a version once,
however many of its engines ask, and the source is read once for all nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from libra.backends.launch.launcher import CopyError, SourceLostError
from libra.backends.launch.node import NodeLostError, RemoteNode
from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import WeightUpdateError

COPY_SECONDS = 120.0  # for each end of a copy

Found = TypeVar("Found")


class HangingNodeError(CopyError):
    """The node that was to have the weights does not take them, and says nothing."""


class WeightCopies:
    """What is being copied of one version, or was; by the name of the node."""

    def __init__(self) -> None:
        self._weights: LoadWeights | None = None
        self._reads: dict[str, asyncio.Task[Any]] = {}
        self._writes: dict[str, asyncio.Task[None]] = {}

    async def bring(
        self,
        weights: LoadWeights,
        size: int,
        source: tuple[str, RemoteNode | None],
        target: tuple[str, RemoteNode | None],
    ) -> None:
        """From one node, by name, to another; None is a node that is lost. Raises `SourceLostError`,
        `HangingNodeError`, `CopyError`."""
        if weights != self._weights:
            self._weights, self._reads, self._writes = weights, {}, {}
        await _once(self._writes, target[0], lambda: self._copy(weights, size, source, target))

    def close(self) -> None:
        for task in (*self._reads.values(), *self._writes.values()):
            task.cancel()

    async def _copy(
        self,
        weights: LoadWeights,
        size: int,
        source: tuple[str, RemoteNode | None],
        target: tuple[str, RemoteNode | None],
    ) -> None:
        what = f"weights v{weights.version} from {source[0]} to {target[0]}"
        try:
            async with asyncio.timeout(COPY_SECONDS):
                content = await self._read(weights, size, *source)
        except TimeoutError:
            raise CopyError(f"{what}: not read in {COPY_SECONDS:.0f} s") from None
        try:
            if target[1] is None:
                raise NodeLostError("the node is gone")
            async with asyncio.timeout(COPY_SECONDS):
                await target[1].write(weights.buffer, size, weights.checksum, content)
        except TimeoutError:
            raise HangingNodeError(f"{what}: not there in {COPY_SECONDS:.0f} s") from None
        except (OSError, WeightUpdateError) as error:
            raise CopyError(f"{what}: {error}") from None

    async def _read(self, weights: LoadWeights, size: int, name: str, node: RemoteNode | None) -> Any:
        if node is None:
            raise SourceLostError(f"weights v{weights.version} are lost with {name}")
        try:
            return await _once(self._reads, name, lambda: node.read(weights.buffer, size, weights.checksum))
        except (OSError, WeightUpdateError) as error:
            raise SourceLostError(f"weights v{weights.version} are not on {name}: {error}") from None


async def _once(
    tasks: dict[str, asyncio.Task[Found]], name: str, begin: Callable[[], Coroutine[Any, Any, Found]]
) -> Found:
    """The result of the task of that name, which is begun if there is none, or if it failed."""
    task = tasks.get(name)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = tasks[name] = asyncio.create_task(begin())
    return await asyncio.shield(task)
