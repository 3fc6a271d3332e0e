"""KV transfers from prefill engines: a row for each prompt, and the use of the links.

Invariant: the use of links and the end of each transfer are those of the simulation, since the same rules are applied
to the same starts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.kv_network import KVNetwork
from libra.sim.link import Link, Network, Transfer, link
from libra.sim.outcome.over_time import Means, Ticks, mean_present_by


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Read-only arrays with one entry per prompt, in the order of `PrefillDecode.handed_over`. Times are ticks; -1: the
    event never happened."""

    row: Ticks  # of the request, in `RequestColumns`
    source: Ticks  # engine that computed the prompt
    target: Ticks  # engine that decoded
    blocks: Ticks  # blocks that the source kept
    computed: Ticks  # when the prompt was computed
    reserved: Ticks  # when the target reserved blocks for the KV
    size: Ticks  # bytes to transfer
    begun: Ticks  # when the transfer began
    sent: Ticks  # when the last byte was sent, or when the transfer was aborted
    came: Ticks  # when the KV arrived
    released: Ticks  # when the source released the KV
    network: KVNetwork
    devices: tuple[int, ...]  # of each engine

    def __len__(self) -> int:
        return len(self.row)

    def alone(self) -> NDArray[np.float64]:
        """Ticks that each transfer would take alone on its links."""
        devices = np.array(self.devices, np.float64)
        rate = self.network.bandwidth * np.minimum(devices[self.source], devices[self.target])
        ticks: NDArray[np.float64] = (self.size / rate + self.network.latency) * TICKS
        return ticks


@dataclass(frozen=True, slots=True, eq=False)
class LinkUse:
    """Mean use of each engine's network in one direction, [engine, interval of time]."""

    used: Means  # share of the bandwidth
    sharing: Means  # number of transfers


def transfers_of(cluster: SimCluster) -> Transfers | None:
    """The transfers of a cluster that has run; None if engines have no roles."""
    pairs = cluster.pairs
    if pairs is None:
        return None
    rows = {request.number: row for row, request in enumerate(cluster.requests)}
    its = pairs.handed_over

    def column(name: str) -> Ticks:
        values = np.fromiter(map(attrgetter(name), its), np.int64, len(its))
        values.flags.writeable = False
        return values

    names = [field.name for field in fields(Transfers) if field.name not in ("row", "network", "devices")]
    return Transfers(
        row=np.fromiter((rows[it.request] for it in its), np.int64, len(its)),
        **{name: column(name) for name in names},
        network=pairs.settings,
        devices=tuple(spec.devices for spec in cluster.specs),
    )


def link_use(transfers: Transfers, edges: Ticks) -> tuple[LinkUse, LinkUse]:
    """(sending, receiving) use of the engines' links between neighbouring `edges`, which rise. Transfers in flight at
    the last edge are cut there."""
    stretches, engines = _stretches(transfers, int(edges[-1])), len(transfers.devices)
    begun = transfers.begun >= 0
    begins, ends = transfers.begun[begun], np.where(transfers.sent < 0, edges[-1], transfers.sent)[begun]
    rates = np.array([link(transfers.network.bandwidth * devices).rate for devices in transfers.devices], np.float64)
    made = []
    for whose, owners in ((stretches[:, 0], transfers.source), (stretches[:, 1], transfers.target)):
        used = stretches[:, 4] / rates[whose]
        made.append(
            LinkUse(
                mean_present_by(whose, engines, stretches[:, 2], stretches[:, 3], edges, used),
                mean_present_by(owners[begun], engines, begins, ends, edges),
            )
        )
    return made[0], made[1]


def _stretches(transfers: Transfers, end: int) -> Ticks:
    """Replay all transfers. Returns (source, target, first tick, last tick, parts of bytes a tick) of each interval in
    which a transfer had one rate."""
    found: list[tuple[int, int, int, int, int]] = []
    source, target = transfers.source.tolist(), transfers.target.tolist()

    def passed(transfer: Transfer, now: int) -> None:
        if transfer.rate and now > transfer.since:
            row = transfer.key
            assert isinstance(row, int)
            sent = min(now, transfer.since + -(-transfer.left // transfer.rate))
            found.append((source[row], target[row], transfer.since, sent, transfer.rate))

    network = Network(passed)
    links: dict[tuple[int, bool], Link] = {}

    def of(engine: int, out: bool) -> Link:
        if (engine, out) not in links:
            links[engine, out] = link(transfers.network.bandwidth * transfers.devices[engine])
        return links[engine, out]

    begins = [(tick, 1, row) for row, tick in enumerate(transfers.begun.tolist()) if tick >= 0]
    ends = [(tick, 0, row) for row, tick in enumerate(transfers.sent.tolist()) if tick >= 0]
    for tick, begins_now, row in [*sorted([*begins, *ends]), (end, 0, -1)]:
        while (following := network.next_end()) is not None and following <= tick:
            network.ended(following)
        if begins_now:
            size = int(transfers.size[row])
            network.begin(row, of(source[row], True), of(target[row], False), size, tick)
        elif row in network:  # the transfer was aborted
            network.drop(row, tick)
    for row in range(len(transfers)):  # transfers that the end cuts
        if row in network:
            network.drop(row, end)
    return np.array(found, np.int64).reshape(-1, 5)
