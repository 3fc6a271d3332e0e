"""The metrics of KV transfers: the parts of the time to a first token, and the outcome of transfers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.sim.outcome.metrics import Spread, spread
from libra.sim.outcome.over_time import Ticks, mean_present
from libra.sim.outcome.result import RequestColumns, SimulationResult
from libra.sim.outcome.transfers import Transfers

PULLED_TTFT = ("queueing", "prefill", "waiting to pull", "KV transfer", "first decode")
PUSHED_TTFT = ("waiting for decode", "waiting for prefill", "prefill", "KV transfer", "first decode")


@dataclass(frozen=True, slots=True)
class TransferMetrics:
    """Metrics of KV transfers. `ttft` and `transfer_alone` are of finished requests with a transfer; they are empty and
    None if there are none."""

    begun: int
    broken: int  # aborted transfers, of which nothing arrived
    bytes: int  # of transfers that arrived
    kept_share: (
        float  # of prefill engines' blocks that keep computed prompts until their transfer, mean over the makespan
    )
    ttft: dict[str, Spread]  # by the parts `PULLED_TTFT` or `PUSHED_TTFT`, which add up to the TTFT
    transfer_alone: Spread | None  # duration of a transfer with its links to itself

    @property
    def decode_wait(self) -> Spread:
        """Wait for a place in the decode engine's batch and for its blocks. `ttft` must not be empty."""
        return self.ttft["waiting for decode" if self.pushed else "waiting to pull"]

    @property
    def prefill_wait(self) -> Spread:
        """Wait for the prefill engine. `ttft` must not be empty."""
        return self.ttft["waiting for prefill" if self.pushed else "queueing"]

    @property
    def pushed(self) -> bool:
        """Whether KV was pushed. `ttft` must not be empty."""
        return "waiting for decode" in self.ttft


def transfer_metrics(result: SimulationResult) -> TransferMetrics | None:
    """The metrics of a result's KV transfers; None if engines have no roles."""
    transfers = result.transfers
    if transfers is None:
        return None
    came = transfers.came >= 0
    handed = finished_transfers(result.requests, transfers)
    return TransferMetrics(
        begun=int((transfers.begun >= 0).sum()),
        broken=int(((transfers.sent >= 0) & ~came).sum()),
        bytes=int(transfers.size[came].sum()),
        kept_share=_kept_share(result, transfers),
        ttft={
            name: found
            for name, ticks in ttft_parts(result.requests, transfers, handed).items()
            if (found := spread(ticks)) is not None
        },
        transfer_alone=spread(transfers.alone()[handed]),
    )


def finished_transfers(requests: RequestColumns, transfers: Transfers) -> Ticks:
    """Rows of `transfers`: the last arrived transfer of each finished request."""
    last = np.full(len(requests), -1)
    came = np.flatnonzero(transfers.came >= 0)
    last[transfers.row[came]] = came  # the last of several transfers remains
    handed = last[requests.ended("finished")]
    return handed[handed >= 0]


def ttft_parts(requests: RequestColumns, transfers: Transfers, handed: Ticks) -> dict[str, NDArray[np.int64]]:
    """Ticks of each part of the TTFT, for each row of `transfers` in `handed`."""
    its, pushed = transfers.row[handed], transfers.network.push
    moments = [
        requests.arrival[its],
        requests.scheduled[its],
        requests.prefill_end[its],
        transfers.came[handed],
        requests.first_token[its],
    ]
    moments.insert(1 if pushed else 3, transfers.reserved[handed])
    names = PUSHED_TTFT if pushed else PULLED_TTFT
    return {name: after - before for name, before, after in zip(names, moments[:-1], moments[1:], strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks:
    """KV blocks of engines, each entry from a tick `since` to a tick `until`. Blocks that prompts share count once per
    prompt."""

    engine: Ticks
    since: Ticks
    until: Ticks
    blocks: NDArray[np.float64]

    def over(self, edges: Ticks, engine: int) -> NDArray[np.float64]:
        """Mean number of blocks of an engine between neighbouring edges."""
        its = self.engine == engine
        return mean_present(self.since[its], self.until[its], edges, self.blocks[its])


def kept_blocks(transfers: Transfers, end: int) -> HeldBlocks:
    """Blocks that prefill engines keep until their KV is transferred, or until tick `end`."""
    its = np.flatnonzero(transfers.computed >= 0)
    released = transfers.released[its]
    until = np.where(released < 0, end, released)
    return HeldBlocks(transfers.source[its], transfers.computed[its], until, transfers.blocks[its].astype(np.float64))


def reserved_blocks(transfers: Transfers, end: int) -> HeldBlocks:
    """Blocks that decode engines reserve for KV in transfer, or until tick `end`."""
    pushed = transfers.network.push
    its = np.flatnonzero((transfers.reserved if pushed else transfers.begun) >= 0)
    over = transfers.released if pushed else np.where(transfers.came < 0, transfers.sent, transfers.came)
    until = np.where(over[its] < 0, end, over[its])
    return HeldBlocks(transfers.target[its], transfers.reserved[its], until, transfers.blocks[its].astype(np.float64))


def _kept_share(result: SimulationResult, transfers: Transfers) -> float:
    blocks = sum(engine.config.kv_blocks for engine in result.engines if engine.role == "prefill")
    if not result.makespan or not blocks:
        return 0.0
    kept = kept_blocks(transfers, result.end)
    edges = np.array([result.start, result.start + result.makespan])
    return float(mean_present(kept.since, kept.until, edges, kept.blocks).sum()) / blocks
