"""Devices that a simulated run borrows: the interface through which lending adds engines on them to a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.messages import Pause


class BorrowedOutcome(Protocol):
    """The outcome of one device."""

    def document(self, seconds: float) -> dict[str, object]:
        """The outcome as JSON, for a run of `seconds`."""
        ...


class BorrowedService(Protocol):
    """The engines on borrowed devices, in a cluster."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all engines that were ever lent."""
        ...

    def want(self, specs: Iterable[EngineSpec], now: int) -> None:
        """Borrow exactly these engines from now on."""
        ...

    def made(self, version: int, now: int) -> None:
        """Note a new version of the weights, which is then sent to the borrowed engines."""
        ...

    def outcome(self, now: int) -> Sequence[BorrowedOutcome]:
        """The outcome of each device, once the run is over at tick `now`."""
        ...


class BorrowedDevices(Protocol):
    """Devices that a plan borrows."""

    def service(self, cluster: SimCluster, load: Pause, *, exact: bool) -> BorrowedService:
        """Add the engines on these devices to a cluster. `load` is the pause in which an engine loads new weights."""
        ...
