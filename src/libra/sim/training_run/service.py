"""The engines of a run while its plan changes: some stop, some continue, and some start.

Invariant: an engine's name determines its GPUs, so an engine named in both plans continues. A change of plan interrupts
only engines that stop, start or change their role.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from libra.plan.plan import Plan
from libra.sim.clock import ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineSpec
from libra.sim.instances import EngineInstance
from libra.sim.planned_engines import lent_engines, planned_engines
from libra.sim.training_run.borrowed import BorrowedDevices, BorrowedService
from libra.sim.training_run.system import System

_NEVER = -1  # instead of a tick: the engine has not drained yet


class Service:
    """The engines of a changing plan, in a cluster that `make` creates with the first plan's engines. Engines on
    serving devices belong to a `BorrowedService`, which `lend` creates for the cluster."""

    def __init__(
        self,
        system: System,
        make: Callable[[tuple[EngineSpec, ...]], SimCluster],
        lend: Callable[[BorrowedDevices, SimCluster], BorrowedService],
    ) -> None:
        self._system = system
        self._pending: dict[str, tuple[EngineSpec, int]] = {}  # starting engines, with the tick at which they are ready
        self._draining: dict[str, int] = {}  # GPUs of engines that drain before they change their role
        self._ticks, self._counted_until = 0, 0  # device ticks of engines in service, counted up to this tick
        own, lent = self._specs(system.plan)
        self.cluster = make(own)
        self.lending: BorrowedService | None = None
        if system.tenancy is not None:
            self.lending = lend(system.tenancy, self.cluster)
            self.lending.want(lent, 0)

    @property
    def devices(self) -> int:
        """Number of GPUs of engines in service, without lent engines."""
        specs = self.cluster.specs
        return sum(specs[instance.engine.index].devices for instance in self.own) + sum(self._draining.values())

    @property
    def indices(self) -> frozenset[int]:
        """Indices of engines in service, without lent engines."""
        return frozenset(instance.engine.index for instance in self.own)

    @property
    def own(self) -> list[EngineInstance]:
        """Engines in service, without lent engines."""
        lent = () if self.lending is None else self.lending.names
        return [it for it in self.cluster.instances if it.id not in lent]

    def device_ticks(self, now: int) -> int:
        """GPUs in service times ticks, summed until `now`. Lent engines are not counted."""
        self._ticks += self.devices * (now - self._counted_until)
        self._counted_until = now
        return self._ticks

    def change(self, plan: Plan, now: int) -> tuple[int, int, int]:
        """Change to a plan. Returns the numbers of (stopping engines, starting engines, devices of the plan)."""
        cluster = self.cluster
        own, lent = self._specs(plan)
        wanted = {spec.name: spec for spec in own}
        here = {instance.id: cluster.specs[instance.engine.index] for instance in self.own}
        self._pending = {name: (wanted[name], ready) for name, (_, ready) in self._pending.items() if name in wanted}
        self.device_ticks(now)
        closing = sorted(here.keys() - wanted.keys())
        for name in closing:
            cluster.close(name)
        changing = [name for name, spec in here.items() if name in wanted and wanted[name].role is not spec.role]
        if self.lending is not None:
            self.lending.want(lent, now)
        cluster.reallocate(limits_of(plan), {spec.name: spec.bucket for spec in (*own, *lent)})
        for name in changing:
            self._change_role(wanted[name], now)
        starting = [spec for name, spec in wanted.items() if name not in here and name not in self._pending]
        for spec in starting:
            self._start(spec, now, self._system.switch.engine_start)
        changed = len(changing)
        return len(closing) + changed, len(starting) + changed, sum(spec.devices for spec in wanted.values())

    def _start(self, spec: EngineSpec, now: int, seconds: float) -> None:
        ready = _NEVER if spec.name in self._draining else now + ticks(seconds)
        self._pending[spec.name] = (spec, ready)
        if ready is not _NEVER:
            self.cluster.at(ready, partial(self._ready, spec.name))

    def _change_role(self, spec: EngineSpec, now: int) -> None:
        """Restart an engine with another role. Its requests finish first, or continue on other engines."""
        if not self._system.drain:
            self.cluster.close(spec.name)
            self._start(spec, now, self._system.role_change)
            return
        self._draining[spec.name] = spec.devices
        self._start(spec, now, self._system.role_change)
        self.cluster.drain(spec.name, partial(self._drained, spec.name))

    def _drained(self, name: str, now: int) -> None:
        self.device_ticks(now)
        del self._draining[name]
        if name in self._pending:  # the plan still has this engine
            self._start(self._pending[name][0], now, self._system.role_change)

    def _ready(self, name: str, now: int) -> None:
        # Meanwhile, a later plan may have dropped this engine, or started it again at a later tick.
        if name in self._pending and self._pending[name][1] == now:
            self.device_ticks(now)
            self.cluster.add(self._pending.pop(name)[0])

    def _specs(self, plan: Plan) -> tuple[tuple[EngineSpec, ...], tuple[EngineSpec, ...]]:
        """(specs of the run's own engines, specs of the engines on serving devices)."""
        granted = self._system.tenancy is not None
        specs = planned_engines(plan, granted=granted)
        if self._system.serve_by_priority:
            specs = tuple(replace(spec, config=replace(spec.config, policy="priority")) for spec in specs)
        lent = lent_engines(plan) if granted else frozenset[str]()
        return tuple(it for it in specs if it.name not in lent), tuple(it for it in specs if it.name in lent)


def limits_of(plan: Plan) -> tuple[int, ...]:
    """Largest final context of each bucket."""
    return tuple(bucket.up_to for bucket in plan.allocation.buckets)
