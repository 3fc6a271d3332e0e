"""The lent engines of a simulated run: the current loans, the recalls, and the weights of the engines.

Invariant: an engine takes only turns whose group began with its weights or older ones. No version waits for lent
engines. A recall loses no token: turns continue on other engines at the same tick.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from libra.lend.records.loan_history import LoanHistory
from libra.lend.sim.granted_engine import GrantedEngine, LenderDevice
from libra.lend.sim.kv_loan import KVLoan
from libra.lend.sim.tenant import Misses, ServingTenant, latencies, misses
from libra.sim.clock import seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.messages import Pause
from libra.sim.engine.request import Request
from libra.sim.training_run.outcome import SimulatedRun
from libra.sim.workload.requests import Requests

if TYPE_CHECKING:
    from libra.lend.sim.tenancy import ServingDevice, Tenancy


@dataclass(frozen=True, slots=True)
class LenderOutcome:
    """Outcome of one lender in a run, for the requests that arrived before the end of the run."""

    name: str
    requests: int
    missed: Misses
    attributable: frozenset[int]  # missed requests that meet the SLO if nothing is lent
    lent: float  # seconds that rollout computed
    away: float  # seconds in which nothing was lent, because of recalls
    recalls: int
    put_out: int  # turns that were stopped because serving needed memory
    uncovered: frozenset[int]  # requests that were present while the load was outside its envelope
    ttft: float  # seconds, at the 99th percentile
    tpot: float  # seconds, at the 99th percentile
    margin: float | None  # seconds, least from a token after the first to its due time; None: no such token
    history: LoanHistory | None = None  # None: the device was not watched

    def document(self, seconds: float) -> dict[str, object]:
        """The outcome as JSON; requests are given by number, times in seconds."""
        return {
            "name": self.name,
            "lent": self.lent / seconds,
            "away": self.away / seconds,
            "recalls": self.recalls,
            "requests": self.requests,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "due_margin": self.margin,
            "missed": sorted(self.missed.any),
            "attributable": sorted(self.attributable),
            "inside_envelope": sorted(self.attributable - self.uncovered),
        }


def lender_outcomes(run: SimulatedRun) -> tuple[LenderOutcome, ...]:
    """The outcomes of the lenders of a run."""
    return tuple(it for it in run.lenders if isinstance(it, LenderOutcome))


@dataclass(slots=True)
class _Lender:
    serving: ServingDevice
    device: LenderDevice
    recalls: int = 0
    away: int = 0  # ticks, of the recalls that are over
    recalled_at: int | None = None
    recalled: str = ""  # why

    def tell_recall(self, now: int) -> None:
        """Note in the device's history that a recall is over."""
        if self.device.watch is not None and self.recalled_at is not None:
            self.device.watch.recalled(self.recalled_at, now, self.recalled)


class Lending:
    """Adds the lent engines to a cluster, closes an engine when its device is recalled, adds it again when the device
    is lent, and sends the engines weights."""

    def __init__(self, tenancy: Tenancy, cluster: SimCluster, load: Pause, *, exact: bool) -> None:
        """`load` is the pause in which an engine loads new weights."""
        self._tenancy, self._cluster, self._load, self._exact = tenancy, cluster, load, exact
        self._wanted: dict[str, EngineSpec] = {}
        self._named: set[str] = set()  # all names that were ever wanted
        self._lenders: dict[str, _Lender] = {}  # by the name of the borrowing engine
        self._version = self._newest = 0  # version that lent engines have, and the newest version
        self._sending = False
        self._starved: list[str] = []  # devices without memory to lend until the next version

    def outcome(self, now: int) -> tuple[LenderOutcome, ...]:
        """The outcome of each lender, once the run is over at tick `now`."""
        return tuple(_outcome(name, it, now) for name, it in self._lenders.items())

    # Engines

    @property
    def names(self) -> frozenset[str]:
        """Names of all engines that were ever lent."""
        return frozenset(self._named)

    def want(self, specs: Iterable[EngineSpec], now: int) -> None:
        """Borrow exactly these engines from now on."""
        before, self._wanted = self._wanted, {spec.name: spec for spec in specs}
        self._named |= self._wanted.keys()
        here = self._here()
        for name in sorted(here.keys() - self._wanted.keys()):
            self._cluster.close(name)
        for name in self._wanted:
            if name in before or name in here:
                continue
            if name not in self._tenancy.devices:
                self._cluster.at(now + ticks(self._tenancy.start), partial(self._lend, name))
            elif name not in self._lenders or self._lenders[name].recalled_at is None:
                self._cluster.at(now, partial(self._lend, name))
        self._see()

    def _lend(self, name: str, now: int) -> None:
        if name not in self._wanted or name in self._here():
            return
        spec, serving = self._wanted[name], self._tenancy.devices.get(name)
        if serving is None:
            self._cluster.add(spec)
            return
        if name not in self._lenders:
            device = _device(serving, spec, self._exact, self._tenancy.watched)
            self._lenders[name] = _Lender(serving, device)
        make = partial(GrantedEngine, device=self._lenders[name].device, recalled=partial(self._recall, name))
        self._cluster.add(spec, make)

    def _recall(self, name: str, now: int) -> None:
        self._cluster.at(now + 1, partial(self._close, name))  # after all other decisions of this tick

    def _close(self, name: str, now: int) -> None:
        if name not in self._here():
            return
        it = self._lenders[name]
        it.recalls, it.recalled_at, it.recalled = (
            it.recalls + 1,
            now,
            it.device.recalled or "no KV memory for a context",
        )
        self._cluster.close(name)
        kv = it.device.tenant.kv
        if kv is not None and not kv.useful and it.device.recalled is None:
            self._starved.append(name)
            return
        # Until the device is lent again, serving depends on nothing else, so `returns` makes all these steps at once.
        self._cluster.at(max(now, it.device.returns()), partial(self._return, name))

    def _return(self, name: str, now: int) -> None:
        it = self._lenders[name]
        assert it.recalled_at is not None
        it.tell_recall(now)
        it.away, it.recalled_at = it.away + now - it.recalled_at, None
        self._lend(name, now)

    def _here(self) -> dict[str, int]:
        """Index of each lent engine in service."""
        instances = self._cluster.placer.fleet.instances
        return {it.id: it.engine.index for it in instances if it.id in self._named}

    # Weights

    def made(self, version: int, now: int) -> None:
        """Note a new version. Engines get it after the version that is being sent; versions in between are skipped."""
        self._newest = version
        for it in self._lenders.values():
            if it.device.tenant.kv is not None:
                it.device.tenant.kv.quota.trained()
        starved, self._starved = self._starved, []
        for name in starved:
            kv = self._lenders[name].device.tenant.kv
            assert kv is not None
            back = max(now + ticks(kv.quota.limits.quiet), self._lenders[name].device.at)
            self._cluster.at(back, partial(self._return, name))
        self._see()
        if not self._sending:
            self._send(now)

    def _send(self, now: int) -> None:
        self._sending = True
        self._cluster.at(now + ticks(self._tenancy.weights), partial(self._arrived, self._newest))

    def _arrived(self, version: int, now: int) -> None:
        self._version, self._sending = version, False
        self._see()
        here = self._here()
        if here:
            update = WeightUpdate(now, self._load.ticks, self._load.refresh, frozenset(here.values()))
            self._cluster.update(update)
        if version < self._newest:
            self._send(now)

    def _see(self) -> None:
        """Tell the placer which engines are behind."""
        late = self._version < self._newest
        self._cluster.placer.behind = dict.fromkeys(self._wanted, self._version) if late else {}


def _device(serving: ServingDevice, spec: EngineSpec, exact: bool, watched: bool) -> LenderDevice:
    """The device of a lender. `spec` describes the engine that borrows it."""
    case = serving.case
    pace = ticks(case.slo.pace(serving.use))
    tenant = ServingTenant(case.spec, serving.arrivals(), pace=pace, prompt=case.prompt)
    if serving.kv is not None:
        tenant.kv = KVLoan(serving.kv, tenant.engine, spec.config)
    return LenderDevice(tenant, serving.rule(), serving.share, exact=exact, watched=watched)


def _outcome(name: str, it: _Lender, now: int) -> LenderOutcome:
    slo = it.serving.case.slo
    served = it.device.serve_out(now)
    away = it.away + (now - it.recalled_at if it.recalled_at is not None else 0)
    missed = misses(served, slo.ttft, slo.tpot)
    alone = _missed_alone(it.serving, len(it.device.tenant.came)) if missed.any else missed.any
    ttft, tpot = latencies(served)
    margin = it.device.tenant.margin
    return LenderOutcome(
        name,
        len(served),
        missed,
        missed.any - alone,
        seconds(it.device.lent),
        seconds(away),
        it.recalls,
        it.device.put_out,
        frozenset(it.device.tenant.uncovered),
        ttft,
        tpot,
        None if margin == math.inf else seconds(int(margin)),
        history=_history(name, it, served, missed.any - alone, now),
    )


def _missed_alone(serving: ServingDevice, came: int) -> frozenset[int]:
    """Numbers of the requests, among the first `came`, that miss their SLO without lending."""
    case = serving.case
    cluster = SimCluster([case.spec], Requests(lambda: islice(serving.arrivals(), came), {}))
    cluster.run()
    return misses(cluster.requests, case.slo.ttft, case.slo.tpot).any


def _history(name: str, it: _Lender, served: Sequence[Request], blamed: frozenset[int], now: int) -> LoanHistory | None:
    """The history of a lender; None: the device was not watched."""
    it.tell_recall(now)
    watch, case = it.device.watch, it.serving.case
    if watch is None:
        return None
    return watch.history(name, case.slo, case.slo.pace(it.serving.use), case.longest_grant, served, blamed)
