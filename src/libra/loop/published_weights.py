"""The weights that the trainers published last, and how an engine comes to hold them.

Invariant: an engine loads a version whole, from its own node's memory, or is not in service. What is lost with a node
is published again, as long as a core replica holds the same.
"""

from __future__ import annotations

from typing import Protocol

from libra.backends.grpo.trainers import Trainers
from libra.backends.launch.launcher import CopyError, SourceLostError, WorkerLink
from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.vllm.engine_handle import EngineHandle
from libra.exec.protocols import WeightStore, WorkerFailedError


class WeightsObserver(Protocol):
    """Told of engines that take new weights."""

    def load(self, worker: str) -> None:
        """An engine is told to take them."""
        ...

    def weights(self, worker: str, version: int, seconds: float) -> None:
        """It has taken them; `seconds` is how long it stood still."""
        ...


class PublishedWeights:
    """`size` are the bytes of one buffer, `current` is what lies in it on the node of `trainers.publisher`."""

    def __init__(
        self,
        store: WeightStore[WorkerLink],
        trainers: Trainers,
        size: int,
        current: LoadWeights,
        observer: WeightsObserver,
    ) -> None:
        self._store, self._trainers, self._size, self._observer = store, trainers, size, observer
        self.current = current

    async def load(self, engine: EngineHandle) -> float:
        """The engine takes the current weights between two iterations; returns the seconds it stood still. Raises
        `WorkerLostError`, `WorkerFailedError` or `TimeoutError`."""
        order = self.current
        await self._bring(order, engine.link)
        self._observer.load(engine.name)
        seconds = await engine.load(order)
        self._observer.weights(engine.name, order.version, seconds)
        return seconds

    async def _bring(self, order: LoadWeights, target: WorkerLink) -> None:
        """The worker's node holds the weights when this returns."""
        trainers = self._trainers
        try:
            try:
                await self._store.bring(order, self._size, trainers.publisher.link, target)
            except SourceLostError as error:
                # Every core replica holds the same, until the next step is made.
                if await trainers.publish(order.version, order.buffer) != order.checksum:
                    raise CopyError(f"{error}, and the core replica {trainers.publisher.name} is ahead") from None
                await self._store.bring(order, self._size, trainers.publisher.link, target)
        except CopyError as error:
            raise WorkerFailedError(str(error)) from None
