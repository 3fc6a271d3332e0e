"""The result of one simulation: columns of its requests' facts, and each engine's counts.

Invariant: a result keeps no reference to the cluster it was made from. Equal simulations give equal results. Rows of
requests are in the order of arrival; a value that never happened, or is unknown, is -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, RoleName
from libra.sim.engine.request import Request, Status
from libra.sim.engine.tier_transfers import Shelf
from libra.sim.outcome.occupancy import EngineSeries, OccupancyRecorder
from libra.sim.outcome.transfers import Transfers, transfers_of
from libra.sim.workload.caller import Caller

ENDS: tuple[Status, ...] = ("finished", "interrupted", "cancelled", "refused", "unfinished", "failed")

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RequestColumns:
    """Read-only arrays with one entry a request. Times are ticks, lengths are tokens."""

    number: Column
    arrival: Column
    scheduled: Column  # start of its first iteration
    prefill_end: Column
    first_token: Column
    finish: Column  # also of cancelled and refused requests
    prompt: Column
    output: Column  # to generate; fewer than requested if the model length cuts them
    generated: Column  # so far, if it did not finish
    cached: Column  # of the prompt, found in the prefix cache when it was first admitted
    preemptions: Column
    engine: Column  # index
    status: Column  # index into `ENDS`
    reason: Column  # index into `reasons`
    trajectory: Column  # index into `trajectories`
    turn: Column  # of the trajectory, from 0
    last_call: NDArray[np.bool_]  # the trajectory makes no request after this one
    reasons: tuple[str, ...]
    trajectories: tuple[str, ...]  # ids

    def __len__(self) -> int:
        return len(self.number)

    def ended(self, status: Status) -> NDArray[np.bool_]:
        """Mask of the requests with this end `status`."""
        return np.equal(self.status, ENDS.index(status))


@dataclass(frozen=True, slots=True)
class EngineResult:
    """Counts of one engine. Iterations cut short by a time limit count up to it, except a single one."""

    name: str
    bucket: int
    config: EngineConfig
    busy_ticks: int
    paused_ticks: int
    held_ticks: int  # KV blocks held, times ticks, times 2
    iterations: int
    events: int
    preemptions: int
    role: RoleName = "colocated"


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Ranks that began each iteration together."""

    name: str
    ranks: int
    bounded_ticks: Mapping[str, int]  # of iterations that ended, by bottleneck; empty if the cost does not name it


@dataclass(frozen=True, slots=True)
class TierResult:
    """Counts of one tier, over all engines with a tier of this name."""

    name: str
    engines: int
    loads: int  # transfers from it
    loaded_tokens: int
    loaded_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    workload: Mapping[str, Any]  # its description, as JSON values
    requests: RequestColumns
    engines: tuple[EngineResult, ...]
    series: tuple[EngineSeries, ...]  # one an engine, or none without a recorder
    partial: bool  # the time limit came before the end
    end: int  # tick of the last event, or the time limit
    groups: tuple[GroupResult, ...] = ()
    transfers: Transfers | None = None  # of KV, if engines have roles
    tiers: tuple[TierResult, ...] = ()  # of KV, if engines have any

    @property
    def start(self) -> int:
        """Tick of the first arrival."""
        return int(self.requests.arrival.min()) if len(self.requests) else 0

    @property
    def makespan(self) -> int:
        """Ticks from the first arrival to the last end of a request, or to the time limit."""
        if not len(self.requests):
            return 0
        last = self.end if self.partial else int(self.requests.finish.max())
        return max(0, last - self.start)


def result_of(cluster: SimCluster, watcher: OccupancyRecorder | None = None) -> SimulationResult:
    """The result of a cluster that has run. `watcher` is its `watch`, and adds the peaks and the series over time.
    Raises ValueError for a cluster that has not run to its end."""
    return SimulationResult(
        workload=cluster.workload.describe(),
        requests=request_columns(cluster.requests),
        engines=tuple(
            EngineResult(
                name=spec.name,
                bucket=spec.bucket,
                config=spec.config,
                busy_ticks=engine.busy_ticks,
                paused_ticks=engine.paused_ticks,
                held_ticks=engine.held_ticks,
                iterations=engine.iterations,
                events=engine.events,
                preemptions=engine.preemptions,
                role=spec.role.name,
            )
            for spec, engine in zip(cluster.specs, cluster.engines, strict=True)
        ),
        series=() if watcher is None else tuple(watcher.series(it.index, cluster.now) for it in cluster.engines),
        partial=cluster.partial,
        end=cluster.now,
        groups=tuple(GroupResult(it.spec.name, len(it.ranks), dict(it.bounded(cluster.now))) for it in cluster.groups),
        transfers=transfers_of(cluster),
        tiers=_tiers(cluster),
    )


def _tiers(cluster: SimCluster) -> tuple[TierResult, ...]:
    of: dict[str, list[tuple[Shelf, int]]] = {}
    for engine in cluster.engines:
        for shelf in [] if engine.tiers is None else engine.tiers.transfers.shelves:
            of.setdefault(shelf.tier.name, []).append((shelf, engine.config.block_size))
    return tuple(
        TierResult(
            name,
            len(shelves),
            sum(it.loads for it, _ in shelves),
            sum(round(it.loaded / it.tier.block_bytes) * size for it, size in shelves),
            round(sum(it.loaded for it, _ in shelves)),
            round(sum(it.stored for it, _ in shelves)),
        )
        for name, shelves in of.items()
    )


def request_columns(requests: Sequence[Request]) -> RequestColumns:
    """The columns of requests that a cluster has run. Raises ValueError if one is still in flight, or a time does not
    fit: an int64 holds 106 days of ticks."""
    reasons: dict[str, int] = {}
    trajectories: dict[str, int] = {}
    codes = {status: code for code, status in enumerate(ENDS)}

    def column(values: Iterable[int]) -> Column:
        return np.fromiter(values, np.int64, len(requests))

    def all_of(field: str) -> Column:
        return column(map(attrgetter(field), requests))

    def where_any(field: str) -> Column:
        of: Callable[[Request], int | None] = attrgetter(field)
        return column(-1 if (value := of(request)) is None else value for request in requests)

    callers = [it if isinstance(it := request.owner, Caller) else None for request in requests]
    try:
        columns = RequestColumns(
            number=all_of("number"),
            arrival=all_of("arrival"),
            scheduled=where_any("scheduled"),
            prefill_end=where_any("prefill_end"),
            first_token=where_any("first_token"),
            finish=where_any("finish"),
            prompt=all_of("prompt_tokens"),
            output=all_of("output_tokens"),
            generated=all_of("generated"),
            cached=all_of("cached_tokens"),
            preemptions=all_of("preemptions"),
            engine=where_any("engine"),
            status=column(codes[request.status] for request in requests),
            reason=column(
                -1 if request.reason is None else reasons.setdefault(request.reason, len(reasons))
                for request in requests
            ),
            trajectory=column(
                -1 if caller is None else trajectories.setdefault(caller.trajectory.id, len(trajectories))
                for caller in callers
            ),
            turn=column(-1 if caller is None else caller.call.turn for caller in callers),
            last_call=np.fromiter((caller is not None and caller.last for caller in callers), bool, len(requests)),
            reasons=tuple(reasons),
            trajectories=tuple(trajectories),
        )
    except KeyError as error:
        raise ValueError(f"a request is {error.args[0]}: run the cluster to its end before looking at it") from None
    except OverflowError:
        raise ValueError("a request has a time after tick 2^63 - 1, 106 days: set a time limit before that") from None
    for field in fields(columns):
        values = getattr(columns, field.name)
        if isinstance(values, np.ndarray):
            values.flags.writeable = False
    return columns
