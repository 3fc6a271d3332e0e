"""The rollout engines that are in service, as the router sees them.

Invariant: an engine is in the view from the moment it holds current weights until it is retired or lost; every change
of the fleet wakes all that wait for one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from libra.backends.vllm.engine_handle import EngineHandle
from libra.backends.vllm.kv_handover import KVHandover
from libra.plan.allocation import Allocation
from libra.route.policy import InstanceView, Policy, View


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """One engine in service."""

    handle: EngineHandle
    shape: str
    capacity_tokens: int


class ServingFleet:
    """`handover` brings KV from one engine to another; None: they compute contexts that come to them."""

    def __init__(self, policy: Policy, allocation: Allocation, handover: KVHandover | None = None) -> None:
        self.policy = policy
        self.handover = handover
        self._allocation = allocation
        self._instances: dict[str, ServingEngine] = {}
        self._changed = asyncio.Event()

    @property
    def allocation(self) -> Allocation:
        return self._allocation

    def instances(self) -> tuple[ServingEngine, ...]:
        return tuple(self._instances.values())

    def handle(self, instance: str) -> EngineHandle:
        return self._instances[instance].handle

    def serves(self, handle: EngineHandle) -> bool:
        """Whether this very engine is in service, not another one of its name."""
        entry = self._instances.get(handle.name)
        return entry is not None and entry.handle is handle

    def view(self, turn_tokens: int) -> View:
        """What the router may use now, for a turn that needs room for `turn_tokens` more. An engine whose shape has no
        bucket in the allocation is left out."""
        buckets = {bucket.shape: index for index, bucket in enumerate(self._allocation.buckets)}
        return View(
            instances=tuple(
                InstanceView(name, buckets[entry.shape], entry.capacity_tokens, entry.handle.load_tokens)
                for name, entry in self._instances.items()
                if entry.shape in buckets
            ),
            limits=tuple(bucket.up_to for bucket in self._allocation.buckets),
            turn_tokens=turn_tokens,
        )

    def add(self, instance: ServingEngine) -> None:
        self._instances[instance.handle.name] = instance
        self._announce()

    def remove(self, name: str) -> ServingEngine | None:
        """Take an engine out of service; None when it was not in it."""
        instance = self._instances.pop(name, None)
        if instance is not None:
            self.policy.instance_gone(name)
            self._announce()
        return instance

    def reallocate(self, allocation: Allocation) -> None:
        """Route by these buckets from now on."""
        self._allocation = allocation
        self._announce()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
