"""The engines of a run while its plan changes: which stop, which go on, which are being started.

Invariant: an engine's name says which GPUs it has, so one of the same name goes on as it is; nobody waits for another
plan but who has to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from libra.plan.plan import Plan
from libra.sim.clock import ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineSpec
from libra.sim.placement import EngineInstance
from libra.sim.planned_engines import planned_engines
from libra.sim.training_run.loan import moved, with_bucket
from libra.sim.training_run.system import System


class Service:
    """Engines of a plan in a cluster that is made by `make` with the first ones and the limits of their buckets.

    Lent engines are in a bucket of their own, and go on whatever the plan."""

    def __init__(self, system: System, make: Callable[[tuple[EngineSpec, ...], tuple[int, ...]], SimCluster]) -> None:
        self._system = system
        self._lent = system.loan.names if system.loan is not None else frozenset[str]()
        self._pending: dict[str, tuple[EngineSpec, int]] = {}  # engines that are being started, until which tick
        self._ticks, self._counted_until = 0, 0  # device ticks of engines in service, until which tick
        self.cluster = make(self._specs(system.plan), self.buckets(system.plan)[0])

    @property
    def devices(self) -> int:
        """Of the plan's engines in service."""
        specs = self.cluster.specs
        return sum(specs[instance.engine.index].devices for instance in self._own())

    @property
    def indices(self) -> frozenset[int]:
        """Of the plan's engines in service."""
        return frozenset(instance.engine.index for instance in self._own())

    def buckets(self, plan: Plan) -> tuple[tuple[int, ...], int]:
        """Largest final context of each bucket, and which of them the lent engines are (past the last if there are
        none)."""
        limits, loan = limits_of(plan), self._system.loan
        return (limits, len(limits)) if loan is None else with_bucket(limits, loan.up_to)

    def device_ticks(self, now: int) -> int:
        """In which engines were in service, until now."""
        self._ticks += self.devices * (now - self._counted_until)
        self._counted_until = now
        return self._ticks

    def change(self, plan: Plan, now: int) -> tuple[int, int, int]:
        """Go over to a plan. Returns how many engines stop, how many start, and the devices of all that it wants."""
        cluster = self.cluster
        wanted = {spec.name: spec for spec in self._specs(plan)}
        here = {instance.id for instance in self._own()}
        self._pending = {name: (wanted[name], ready) for name, (_, ready) in self._pending.items() if name in wanted}
        self.device_ticks(now)
        closing = sorted(here - wanted.keys())
        for name in closing:
            cluster.close(name)
        limits, lent = self.buckets(plan)
        buckets = {name: wanted[name].bucket for name in here & wanted.keys()}
        cluster.reallocate(limits, buckets | dict.fromkeys(self._lent, lent))
        starting = [spec for name, spec in wanted.items() if name not in here and name not in self._pending]
        ready = now + ticks(self._system.switch.engine_start)
        for spec in starting:
            self._pending[spec.name] = (spec, ready)
            cluster.at(ready, partial(self._ready, spec.name))
        return len(closing), len(starting), sum(spec.devices for spec in wanted.values())

    def _ready(self, name: str, now: int) -> None:
        # A later plan may want it in another bucket, or not at all, or again and later.
        if name in self._pending and self._pending[name][1] == now:
            self.device_ticks(now)
            self.cluster.add(self._pending.pop(name)[0])

    def _own(self) -> list[EngineInstance]:
        return [it for it in self.cluster.placer.fleet.instances if it.id not in self._lent]

    def _specs(self, plan: Plan) -> tuple[EngineSpec, ...]:
        _, lent = self.buckets(plan)
        specs = tuple(moved(spec, lent) for spec in planned_engines(plan))
        if not self._system.serve_by_priority:
            return specs
        return tuple(replace(spec, config=replace(spec.config, policy="priority")) for spec in specs)


def limits_of(plan: Plan) -> tuple[int, ...]:
    """Largest final context of each bucket."""
    return tuple(bucket.up_to for bucket in plan.allocation.buckets)
