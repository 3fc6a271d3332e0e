"""The bottleneck of a run with prefill engines and decode engines.

If requests wait for a quarter of their time or more, the bottleneck is the part with the longest wait. Otherwise it is
the part that takes longest or, if engines of both roles are mostly idle, a lack of requests. If requests that wait for
another part hold most blocks, a wait for blocks counts as a wait for that part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from libra.report.words import fine_duration, percent
from libra.sim.clock import seconds
from libra.sim.engine.config import RoleName
from libra.sim.outcome.metrics import Metrics
from libra.sim.outcome.result import SimulationResult
from libra.sim.outcome.transfer_metrics import (
    HeldBlocks,
    TransferMetrics,
    kept_blocks,
    reserved_blocks,
    transfer_metrics,
)
from libra.sim.outcome.transfers import Transfers

WAITS = 0.25  # share of a request's mean time from which waiting bounds a run
IDLE = 0.6  # busy share of the busier role below which a lack of requests bounds a run
FULL = 0.95  # share of `max_num_seqs` from which an engine counts as full
MOST = 0.5  # share of blocks, or of the waiting, that decides
_ROLES: tuple[RoleName, ...] = ("prefill", "decode")

Bottleneck = Literal["prefill", "link", "decode", "decode blocks", "requests", "unknown"]
NAMES: dict[Bottleneck, str] = {
    "prefill": "prefill engines",
    "link": "links",
    "decode": "decode engines",
    "decode blocks": "KV blocks of decode engines",
    "requests": "a lack of requests",
    "unknown": "unknown",
}


@dataclass(frozen=True, slots=True)
class RolesView:
    metrics: TransferMetrics
    engines: dict[RoleName, int]
    busy: dict[RoleName, float]  # mean over the engines of each role
    links: float  # used share of the bandwidth of prefill engines or decode engines: the larger
    waits: dict[Bottleneck, float]  # mean seconds for which a request waits for prefill, the link, decode
    waited_seats: float | None  # share of the waiting for decode engines at full `max_num_seqs`; None: not recorded
    waited_kept: float | None  # share of prefill engines' blocks kept for transfers, mean over waiting requests
    waited_pulls: float | None  # share of decode engines' blocks reserved for incoming KV, the same mean
    bottleneck: Bottleneck
    why: str  # a sentence


def roles_view(result: SimulationResult, metrics: Metrics) -> RolesView | None:
    """The view of a result; None if its engines have no roles."""
    transfers, found = result.transfers, transfer_metrics(result)
    if transfers is None or found is None:
        return None
    busy, waits = _busy(result), _waits(found)
    seats = _waited_seats(result)
    kept = _waited_beside(result, "prefill", kept_blocks(transfers, result.end))
    pulls = _waited_beside(result, "decode", reserved_blocks(transfers, result.end))
    pushed = transfers.network.push
    charged = _charged(waits, kept, pulls, pushed=pushed)
    bottleneck, why = _bottleneck(found, metrics, busy, charged, seats, "pushes" if pushed else "pulls")
    if waits and bottleneck in ("link", "decode", "decode blocks") and kept is not None and kept >= MOST:
        why += f" KV that is kept for {'pushes' if pushed else 'pulls'} fills the prefill engines."
    return RolesView(
        metrics=found,
        engines={role: sum(engine.role == role for engine in result.engines) for role in _ROLES},
        busy=busy,
        links=max(_share(result, transfers, "prefill"), _share(result, transfers, "decode")),
        waits=waits,
        waited_seats=seats,
        waited_kept=kept,
        waited_pulls=pulls,
        bottleneck=bottleneck,
        why=why,
    )


def _waits(found: TransferMetrics) -> dict[Bottleneck, float]:
    if not found.ttft or found.transfer_alone is None:
        return {}
    shared = max(0.0, found.ttft["KV transfer"].mean - found.transfer_alone.mean)
    return {"prefill": found.prefill_wait.mean, "link": shared, "decode": found.decode_wait.mean}


def _charged(
    waits: dict[Bottleneck, float], kept: float | None, pulls: float | None, *, pushed: bool
) -> dict[Bottleneck, float]:
    """Seconds of waiting by the part that causes them. Blocks for pushes are also held while prompts wait."""
    if not waits:
        return {}
    prefill, link, decode = waits["prefill"], waits["link"], waits["decode"]
    if pulls is not None and pulls >= MOST:
        if pushed and prefill >= link:
            prefill, decode = prefill + decode, 0.0
        else:
            link, decode = link + decode, 0.0
    if kept is not None and kept >= MOST:
        link, decode, prefill = (link + prefill, decode, 0.0) if link >= decode else (link, decode + prefill, 0.0)
    return {"prefill": prefill, "link": link, "decode": decode}


def _bottleneck(
    found: TransferMetrics,
    metrics: Metrics,
    busy: dict[RoleName, float],
    waits: dict[Bottleneck, float],
    seats: float | None,
    transfers: str,
) -> tuple[Bottleneck, str]:
    if not waits or metrics.latency is None:
        return "unknown", "No transferred request finished, so the bottleneck is unknown."
    works = (
        f"on average a prefill engine works {percent(busy['prefill'], 0)} of the time,"
        f" a decode engine {percent(busy['decode'], 0)}"
    )
    whole, waited = metrics.latency.mean, sum(waits.values())
    if waited >= WAITS * whole:
        most = max(waits, key=lambda name: waits[name])
        what = f"for {_of(waits[most], whole)}, and {works}."
        if most == "link":
            return most, f"The links are the bottleneck: requests wait for {transfers} {what}"
        if most == "decode" and seats is not None and seats < MOST:
            return "decode blocks", f"KV blocks of decode engines are the bottleneck: {transfers} wait {what}"
        return most, f"The {NAMES[most]} are the bottleneck: requests wait for them {what}"
    if max(busy.values()) < IDLE:
        return "requests", f"Too few requests: {works}, and requests hardly wait ({_of(waited, whole)})."
    takes: dict[Bottleneck, float] = {
        "prefill": found.ttft["prefill"].mean,
        "link": found.ttft["KV transfer"].mean,
        "decode": whole - sum(part.mean for part in found.ttft.values()),
    }
    most = max(takes, key=lambda name: takes[name])
    return most, f"The {NAMES[most]} are the bottleneck: requests spend {_of(takes[most], whole)} there, and {works}."


def _of(part: float, whole: float) -> str:
    return f"{fine_duration(part)} of their mean {fine_duration(whole)}"


def _busy(result: SimulationResult) -> dict[RoleName, float]:
    made: dict[RoleName, float] = {}
    for role in _ROLES:
        its = [engine.busy_ticks for engine in result.engines if engine.role == role]
        made[role] = sum(its) / (len(its) * result.makespan) if its and result.makespan else 0.0
    return made


def _share(result: SimulationResult, transfers: Transfers, role: RoleName) -> float:
    devices = sum(count for count, engine in zip(transfers.devices, result.engines, strict=True) if engine.role == role)
    most = transfers.network.bandwidth * devices * seconds(result.makespan)
    return int(transfers.size[transfers.came >= 0].sum()) / most if most else 0.0


def _waited_seats(result: SimulationResult) -> float | None:
    waited = full = 0.0
    for engine, series in zip(result.engines, result.series, strict=bool(result.series)):
        if engine.role == "decode":
            requests = series.waiting * np.diff(series.edges)
            waited += float(requests.sum())
            full += float(requests[series.running >= FULL * engine.config.max_num_seqs].sum())
    return full / waited if waited else None


def _waited_beside(result: SimulationResult, role: RoleName, blocks: HeldBlocks) -> float | None:
    """Mean share of `blocks` in an engine's blocks, over the time in which requests wait there."""
    waited = beside = 0.0
    for index, (engine, series) in enumerate(zip(result.engines, result.series, strict=bool(result.series))):
        if engine.role == role and len(series):
            requests = series.waiting * np.diff(series.edges)
            waited += float(requests.sum())
            beside += float((requests * blocks.over(series.edges, index)).sum()) / engine.config.kv_blocks
    return beside / waited if waited else None
