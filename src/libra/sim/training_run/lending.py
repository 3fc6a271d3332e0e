"""The loan of a simulated run while it goes on: who lends now, who has been recalled, and which weights they have.

Invariant: an engine takes turns only with weights that are not older than those that the turn's group began with, and a
loan that is recalled loses no token: its turns go on elsewhere at the same tick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from libra.sim.clock import seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.state import Pause
from libra.sim.lent_engine import LentDevice, LentEngine
from libra.sim.tenant import ServingTenant, misses
from libra.sim.training_run.loan import Lender, Loan
from libra.sim.training_run.outcome import LenderOutcome


@dataclass(slots=True)
class _Lent:
    lender: Lender
    device: LentDevice
    recalls: int = 0
    away: int = 0  # ticks, of the loans that have been given again
    recalled_at: int | None = None


class Lending:
    """Adds the engines of a loan to a cluster, closes and adds them as lenders recall and give, and brings weights."""

    def __init__(self, loan: Loan, cluster: SimCluster, bucket: Callable[[], int], load: Pause, *, exact: bool) -> None:
        """`bucket` says which one lent engines are now, `load` is the pause in which an engine takes new weights."""
        self._loan, self._cluster, self._bucket, self._load = loan, cluster, bucket, load
        self._devices = {it.name: _Lent(it, _device(it, exact)) for it in loan.lenders}
        self._version = self._newest = 0  # of the weights that lenders have, and that there are
        self._sending = False
        for name in self._devices:
            cluster.at(0, partial(self._lend, name))
        for spec in loan.whole:
            cluster.at(ticks(loan.start), partial(self._add_whole, spec))

    def outcome(self, now: int) -> tuple[LenderOutcome, ...]:
        """Of each lender, once the run is over at tick `now`."""
        return tuple(_outcome(name, it, now) for name, it in self._devices.items())

    # Engines

    def _lend(self, name: str, now: int) -> None:
        it = self._devices[name]
        if it.recalled_at is not None:
            it.away, it.recalled_at = it.away + now - it.recalled_at, None
        make = partial(LentEngine, device=it.device, recalled=partial(self._recall, name))
        self._cluster.add(replace(it.lender.rollout, bucket=self._bucket()), make)

    def _add_whole(self, spec: EngineSpec, now: int) -> None:
        self._cluster.add(replace(spec, bucket=self._bucket()))

    def _recall(self, name: str, now: int) -> None:
        self._cluster.at(now, partial(self._close, name))

    def _close(self, name: str, now: int) -> None:
        it = self._devices[name]
        it.recalls, it.recalled_at = it.recalls + 1, now
        self._cluster.close(name)
        # Nobody else has a say in what serving does now, so that it can be made up to its return at once.
        self._cluster.at(max(now, it.device.returns()), partial(self._lend, name))

    # Weights

    def published(self, version: int, now: int) -> None:
        """A version is made, and sent as soon as the one before it is there; what came in between is skipped."""
        self._newest = version
        self._see()
        if not self._sending:
            self._send(now)

    def _send(self, now: int) -> None:
        self._sending = True
        self._cluster.at(now + ticks(self._loan.weights), partial(self._arrived, self._newest))

    def _arrived(self, version: int, now: int) -> None:
        self._version, self._sending = version, False
        self._see()
        here = frozenset(it.engine.index for it in self._cluster.placer.fleet.instances if it.id in self._loan.names)
        if here:
            self._cluster.update(WeightUpdate(now, self._load.ticks, self._load.refresh, here))
        if version < self._newest:
            self._send(now)

    def _see(self) -> None:
        """Say which engines are behind."""
        late = self._version < self._newest
        self._cluster.placer.behind = dict.fromkeys(self._loan.names, self._version) if late else {}


def _device(lender: Lender, exact: bool) -> LentDevice:
    case = lender.case
    pace = ticks(case.slo.pace(lender.use))
    tenant = ServingTenant(case.spec, case.arrivals(1.0).start(), pace=pace, prompt=case.prompt)
    return LentDevice(tenant, lender.rule(), lender.share, exact=exact)


def _outcome(name: str, it: _Lent, now: int) -> LenderOutcome:
    device, slo = it.device, it.lender.case.slo
    served = device.serve_out(now)
    away = it.away + (now - it.recalled_at if it.recalled_at is not None else 0)
    missed = misses(served, slo.ttft, slo.tpot)
    return LenderOutcome(name, len(served), missed, seconds(device.lent), seconds(away), it.recalls)
