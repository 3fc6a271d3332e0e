"""The numbers of a simulation.

Invariant: latencies and rates are of finished requests; other requests are counted by their status. An undefined number
is None. `DEFINITIONS` defines each field by its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from libra.sim.clock import TICKS, seconds
from libra.sim.engine.config import RoleName
from libra.sim.engine.request import Status
from libra.sim.outcome.result import ENDS, GroupResult, RequestColumns, SimulationResult

Durations = NDArray[np.int64] | NDArray[np.float64]  # ticks

_DIFFERS = re.compile(r"\d[\d,.]*\d|\d")


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of `count` values in seconds. Percentiles are nearest-rank, so each is one of the values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of one simulation: seconds, shares of 1, and counts."""

    requests: int
    finished: int
    interrupted: int
    cancelled: int
    refused: int
    failed: int
    unfinished: int
    makespan: float
    generated_tokens: int
    prompt_tokens: int
    generated_rate: float | None
    prompt_rate: float | None
    request_rate: float | None
    queueing: Spread | None
    ttft_prefill: Spread | None
    ttft: Spread | None
    tpot: Spread | None
    latency: Spread | None
    trajectories: int
    trajectories_completed: int
    trajectory_latency: Spread | None
    busy_share: float | None
    paused_share: float | None
    kv_share: float | None
    kv_peak_share: float | None  # largest over all engines; None: not recorded
    cache_hit_rate: float | None
    preemptions: int
    iterations: int
    events: int
    iterations_per_event: float | None


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Metrics of one engine; fields have the same meaning as in `Metrics`."""

    name: str
    bucket: int
    requests: int
    finished: int
    generated_tokens: int
    busy_share: float | None
    paused_share: float | None
    kv_share: float | None
    kv_peak_share: float | None
    cache_hit_rate: float | None
    preemptions: int
    iterations: int
    events: int
    role: RoleName


_UNSAID: dict[Status, str] = {  # default reasons, for requests that have none of their own
    "interrupted": "the policy stopped it; the rest continued elsewhere",
    "cancelled": "its caller gave it up",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """Requests that did not finish for one kind of reason. In `reason`, an ellipsis replaces numbers."""

    status: Status
    reason: str
    count: int


def metrics_of(result: SimulationResult) -> Metrics:
    requests, engines = result.requests, result.engines
    finished, admitted = requests.ended("finished"), requests.scheduled >= 0
    makespan = result.makespan
    generated = int(requests.generated[finished | requests.ended("interrupted")].sum())
    prompt = int(requests.prompt[finished].sum())
    events, iterations = sum(it.events for it in engines), sum(it.iterations for it in engines)
    blocks = sum(it.config.kv_blocks for it in engines)
    took = durations(requests)
    return Metrics(
        requests=len(requests),
        **{status: int(requests.ended(status).sum()) for status in ENDS},
        makespan=seconds(makespan),
        generated_tokens=generated,
        prompt_tokens=prompt,
        generated_rate=_rate(generated, makespan),
        prompt_rate=_rate(prompt, makespan),
        request_rate=_rate(int(finished.sum()), makespan),
        queueing=spread(took["queueing"]),
        ttft_prefill=spread(took["ttft_prefill"]),
        ttft=spread(took["ttft"]),
        tpot=spread(took["tpot"]),
        latency=spread(took["latency"]),
        trajectories=len(requests.trajectories),
        trajectories_completed=len(took["trajectory_latency"]),
        trajectory_latency=spread(took["trajectory_latency"]),
        busy_share=_share(sum(min(it.busy_ticks, makespan) for it in engines), makespan * len(engines)),
        paused_share=_share(sum(it.paused_ticks for it in engines), makespan * len(engines)),
        kv_share=_share(sum(it.held_ticks for it in engines), 2 * blocks * makespan),
        kv_peak_share=max((_peak(result, index) for index in range(len(result.series))), default=None),
        cache_hit_rate=_share(int(requests.cached[admitted].sum()), int(requests.prompt[admitted].sum())),
        preemptions=sum(it.preemptions for it in engines),
        iterations=iterations,
        events=events,
        iterations_per_event=_share(iterations, events),
    )


def engine_metrics(result: SimulationResult) -> tuple[EngineMetrics, ...]:
    """Metrics of each engine, in the order of the engines."""
    requests, makespan = result.requests, result.makespan
    placed = requests.engine >= 0
    finished, admitted = requests.ended("finished"), requests.scheduled >= 0
    prompts_at, transfers = requests.engine, result.transfers
    if transfers is not None:
        prompts_at = prompts_at.copy()
        prompts_at[transfers.row] = transfers.source
    handed_over = [0] * len(result.engines) if transfers is None else _counts(transfers.source, len(result.engines))

    def by_engine(
        which: NDArray[np.bool_], values: NDArray[np.int64] | None = None, at: NDArray[np.int64] = requests.engine
    ) -> list[int]:
        sums = np.zeros(len(result.engines), np.int64)
        np.add.at(sums, at[which], 1 if values is None else values[which])
        counted: list[int] = sums.tolist()
        return counted

    return tuple(
        EngineMetrics(
            name=engine.name,
            bucket=engine.bucket,
            requests=count + handed,
            finished=done,
            generated_tokens=tokens,
            # An engine that schedules ahead may end a useless iteration after the last request.
            busy_share=_share(min(engine.busy_ticks, makespan), makespan),
            paused_share=_share(engine.paused_ticks, makespan),
            kv_share=_share(engine.held_ticks, 2 * engine.config.kv_blocks * makespan),
            kv_peak_share=_peak(result, index) if result.series else None,
            cache_hit_rate=_share(cached, prompts),
            preemptions=engine.preemptions,
            iterations=engine.iterations,
            events=engine.events,
            role=engine.role,
        )
        for index, (engine, count, handed, done, tokens, cached, prompts) in enumerate(
            zip(
                result.engines,
                by_engine(placed),
                handed_over,
                by_engine(placed & finished),
                by_engine(placed & finished, requests.generated),
                by_engine(admitted, requests.cached, prompts_at),
                by_engine(admitted, requests.prompt, prompts_at),
                strict=True,
            )
        )
    )


def endings(requests: RequestColumns) -> tuple[Ending, ...]:
    """Reasons why requests did not finish, by status, most frequent first."""
    kinds = [_DIFFERS.sub("…", reason) for reason in requests.reasons]
    made = []
    for code, status in enumerate(ENDS):
        if status == "finished":
            continue
        tally: dict[str, int] = {}
        reasons, counts = np.unique(requests.reason[requests.status == code], return_counts=True)
        for reason, count in zip(reasons.tolist(), counts.tolist(), strict=True):
            kind = kinds[reason] if reason >= 0 else _UNSAID[status]
            tally[kind] = tally.get(kind, 0) + count
        made += [Ending(status, kind, tally[kind]) for kind in sorted(tally, key=lambda kind: (-tally[kind], kind))]
    return tuple(made)


def durations(requests: RequestColumns) -> dict[str, Durations]:
    """Ticks of each finished request (or completed trajectory), by metric."""
    finished = requests.ended("finished")
    several = finished & (requests.generated >= 2)
    decoding = (requests.finish - requests.first_token)[several]
    return {
        "queueing": (requests.scheduled - requests.arrival)[finished],
        "ttft_prefill": (requests.prefill_end - requests.arrival)[finished],
        "ttft": (requests.first_token - requests.arrival)[finished],
        "tpot": decoding / (requests.generated[several] - 1),
        "latency": (requests.finish - requests.arrival)[finished],
        "trajectory_latency": _trajectory_ticks(requests),
    }


def _trajectory_ticks(requests: RequestColumns) -> NDArray[np.int64]:
    """Duration in ticks of each completed trajectory, in the order of first arrivals."""
    of = requests.trajectory >= 0
    which = requests.trajectory[of]
    first = np.full(len(requests.trajectories), np.iinfo(np.int64).max)
    last = np.full(len(requests.trajectories), -1)
    completed = np.zeros(len(requests.trajectories), bool)
    np.minimum.at(first, which, requests.arrival[of])
    np.maximum.at(last, which, requests.finish[of])
    completed[requests.trajectory[of & requests.last_call & requests.ended("finished")]] = True
    ticks: NDArray[np.int64] = (last - first)[completed]
    return ticks


def spread(ticks: Durations) -> Spread | None:
    """The spread of durations, which are in ticks; None without durations."""
    count = len(ticks)
    if not count:
        return None
    ordered: list[int] | list[float] = np.sort(ticks).tolist()
    # Python's exact sums: a million durations of an hour exceed an int64 in ticks.
    total = sum(ordered) if ticks.dtype == np.int64 else fsum(ordered)
    p50, p90, p99, most = (ordered[-(-percent * count // 100) - 1] / TICKS for percent in (50, 90, 99, 100))
    return Spread(count, total / (count * TICKS), p50, p90, p99, most)


def _peak(result: SimulationResult, index: int) -> float:
    return result.series[index].most_held / result.engines[index].config.kv_blocks


def _counts(values: NDArray[np.int64], most: int) -> list[int]:
    counted: list[int] = np.bincount(values, minlength=most).tolist()
    return counted


def _rate(count: int, ticks: int) -> float | None:
    return count * TICKS / ticks if ticks else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def bounded_shares(group: GroupResult) -> dict[str, float]:
    """Shares of the time of a group's iterations, by bottleneck, the largest first."""
    total = sum(group.bounded_ticks.values())
    ordered = sorted(group.bounded_ticks.items(), key=lambda it: (-it[1], it[0]))
    return {name: ticks / total for name, ticks in ordered if ticks}
