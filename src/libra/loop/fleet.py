"""The rollout engines in service, for the router, and the weights that they hold.

Invariant: an engine is in service from the moment it has weights until it is retired or lost. An engine on a lent
device is in service even before it has weights. A turn's view includes an engine only while its weights are new enough
for the turn. Every change of the fleet wakes all its waiters. An engine loads a complete version from its own node's
memory, or none. Weights lost with a node are published again, if a core replica still has the same version.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from libra.backends.launch.launcher import CopyError, SourceLostError, WeightStore, WorkerLink
from libra.backends.protocols import Engine, Trainer
from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.vllm.kv_handover import KVHandover
from libra.exec.protocols import PoolObserver, WorkerFailedError
from libra.live.server import ServerPaces
from libra.plan.allocation import Allocation
from libra.route.policy import InstanceView, Policy, View


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """One engine in service."""

    handle: Engine
    shape: str
    capacity_tokens: int


class ServingFleet:
    """The engines in service. `handover` transfers KV between engines; None: engines recompute contexts."""

    def __init__(self, policy: Policy, allocation: Allocation, handover: KVHandover | None = None) -> None:
        self.policy = policy
        self.handover = handover
        self._allocation = allocation
        self._instances: dict[str, ServingEngine] = {}
        self._paces = ServerPaces()
        self._changed = asyncio.Event()

    @property
    def allocation(self) -> Allocation:
        return self._allocation

    @property
    def limits(self) -> tuple[int, ...]:
        """The longest context that each bucket serves."""
        return tuple(bucket.up_to for bucket in self._allocation.buckets)

    def instances(self) -> tuple[ServingEngine, ...]:
        return tuple(self._instances.values())

    def handle(self, instance: str) -> Engine:
        return self._instances[instance].handle

    def serves(self, handle: Engine) -> bool:
        """Whether this very engine is in service, not another engine of the same name."""
        entry = self._instances.get(handle.name)
        return entry is not None and entry.handle is handle

    def view(self, turn_tokens: int, version: int, seeded: bool = False) -> View:
        """The router's view for a turn that generates up to `turn_tokens` tokens with weights of `version` or newer.
        The view excludes engines with older weights, with a shape that has no bucket in the allocation, or on a
        recalled device. A `seeded` turn, which samples from its own seed, gets no engine on a lent device. Those
        engines prefill prompts in chunks, and vLLM on CPUs then does not reproduce a seed."""
        buckets = {bucket.shape: index for index, bucket in enumerate(self._allocation.buckets)}
        return View(
            instances=tuple(
                InstanceView(
                    name,
                    buckets[entry.shape],
                    entry.capacity_tokens,
                    entry.handle.work.load_tokens,
                    entry.handle.work.token_seconds,
                    recall_rate=entry.handle.recall_rate,
                )
                for name, entry in self._instances.items()
                if entry.shape in buckets and entry.handle.version >= version and _serves(entry.handle, seeded)
            ),
            limits=self.limits,
            turn_tokens=turn_tokens,
        )

    def add(self, instance: ServingEngine) -> None:
        self._instances[instance.handle.name] = instance
        instance.handle.work.pace.like = self._paces.of_kind(instance.shape)
        self._announce()

    def remove(self, name: str) -> ServingEngine | None:
        """Take an engine out of service; None if it is not in service."""
        instance = self._instances.pop(name, None)
        if instance is not None:
            self.policy.instance_gone(name)
            self._announce()
        return instance

    def reallocate(self, allocation: Allocation) -> None:
        """Route by the buckets of `allocation` from now on."""
        self._allocation = allocation
        self._announce()

    def renewed(self) -> None:
        """Wake the waiting turns after an engine gets newer weights, or after its device is lent again or recalled."""
        self._announce()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _serves(engine: Engine, seeded: bool) -> bool:
    return not engine.lent or (engine.version >= 0 and not seeded and not engine.away)


class RunObserver(PoolObserver, Protocol):
    """Observer of all changes of a run's workers."""

    def joined(self, worker: str, seconds: float, held_seconds: float) -> None:
        """A replica has joined training, `seconds` after its start; a step waited `held_seconds` for it to enter."""
        ...

    def load(self, worker: str) -> None:
        """An engine begins to load new weights."""
        ...

    def recalled(self, worker: str, why: str) -> None:
        """The device of an engine is recalled, with the reason `why`; an empty `why` means that it is lent again."""
        ...

    def weights(self, worker: str, version: int, seconds: float) -> None:
        """An engine has loaded new weights, and paused for `seconds`."""
        ...


class PublishedWeights:
    """The weights that engines load. Each buffer has `size` bytes; `current` is in a buffer on the node of
    `trainers.publisher`."""

    def __init__(
        self,
        store: WeightStore,
        trainers: Trainer,
        size: int,
        current: LoadWeights,
        observer: RunObserver,
    ) -> None:
        self._store, self._trainers, self._size, self._observer = store, trainers, size, observer
        self.current = current

    async def load(self, engine: Engine) -> float:
        """Have the engine load the current weights between two iterations; returns the seconds of the pause. Raises
        `WorkerLostError`, `WorkerFailedError` or `TimeoutError`."""
        order = self.current
        await self._bring(order, engine.link)
        self._observer.load(engine.name)
        seconds = await engine.load(order)
        self._observer.weights(engine.name, order.version, seconds)
        return seconds

    async def _bring(self, order: LoadWeights, target: WorkerLink) -> None:
        """Copy the weights to the worker's node."""
        trainers = self._trainers
        try:
            try:
                await self._store.bring(order, self._size, trainers.publisher.link, target)
            except SourceLostError as error:
                # Until the next step, every core replica has the same weights.
                if await trainers.publish(order.version, order.buffer) != order.checksum:
                    raise CopyError(f"{error}, and the core replica {trainers.publisher.name} is ahead") from None
                await self._store.bring(order, self._size, trainers.publisher.link, target)
        except CopyError as error:
            raise WorkerFailedError(str(error)) from None
