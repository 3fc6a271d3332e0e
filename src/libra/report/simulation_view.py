"""The result of a simulation as text: its speed, its bottleneck, and caveats.

Every claim compares metrics with a threshold of this module. No claim names a cause that was not observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from libra.report.roles_view import RolesView, roles_view
from libra.report.words import count, fine_duration, percent, plain, plural, worded
from libra.sim.clock import seconds
from libra.sim.outcome.metrics import (
    Ending,
    EngineMetrics,
    Metrics,
    bounded_shares,
    endings,
    engine_metrics,
    metrics_of,
)
from libra.sim.outcome.result import SimulationResult

LONG_QUEUE = 0.25  # share of the mean latency from which queueing bounds a request
IDLE = 0.6  # busy share below which engines lack work
PAUSED = 0.2  # share of paused time from which pauses are the bottleneck
UNEVEN = 1.25  # busiest engine over the mean
LONG_TAIL = 0.25  # of the makespan, after nine in ten requests have finished
FULL = 0.95  # share of `max_num_seqs` or blocks from which they count as full
MOST_GROUPS = 4  # groups that the text mentions


@dataclass(frozen=True, slots=True)
class LatencyPart:
    """A part of the mean latency of finished requests."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """Shares of the total waiting time of requests in which each resource of the request's engine was full."""

    max_num_seqs: float
    blocks: float


@dataclass(frozen=True, slots=True)
class SimulationView:
    """A result with its numbers, computed once for page and terminal."""

    result: SimulationResult
    metrics: Metrics
    engines: tuple[EngineMetrics, ...]
    endings: tuple[Ending, ...]
    phases: tuple[LatencyPart, ...]  # empty if no request finished
    waiting: Waiting | None  # None: not recorded, or nothing waited
    roles: RolesView | None  # None: engines have no roles
    tail: float | None  # share of the makespan after nine in ten of the finished requests had finished


def simulation_view(result: SimulationResult) -> SimulationView:
    metrics = metrics_of(result)
    roles = roles_view(result, metrics)
    return SimulationView(
        result=result,
        metrics=metrics,
        engines=engine_metrics(result),
        endings=endings(result.requests),
        phases=_phases(metrics, roles),
        waiting=_waiting(result),
        roles=roles,
        tail=_tail(result),
    )


def headline(view: SimulationView) -> str:
    """The speed of the simulated engines and their bottleneck, in a few sentences."""
    metrics = view.metrics
    if not metrics.requests:
        return "No request arrived, so there is no result."
    if not metrics.finished:
        return f"None of {plural(metrics.requests, 'request')} finished, so there is no result."
    said = [
        f"{count(metrics.finished)} of {plural(metrics.requests, 'request')} finished in"
        f" {fine_duration(metrics.makespan)}: {worded(metrics.generated_rate, 'tokens/s')} generated.",
        _bound(view),
        *_uneven(view.engines),
        *_groups(view),
        *_memory(view),
        *_tiers(view),
        *_tail_end(view),
    ]
    return " ".join(said)


def _groups(view: SimulationView) -> list[str]:
    """Sentences on the bottleneck of iterations with attention and FFN on separate ranks."""
    said = []
    for group in view.result.groups[:MOST_GROUPS]:
        shares = bounded_shares(group)
        if shares:
            parts = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
            said.append(
                f"Iterations of {group.name} ({plural(group.ranks, 'attention rank')}) are bounded by: {parts}."
            )
    return said


def notices(view: SimulationView) -> tuple[str, ...]:
    """Caveats for the reader: an early stop, refused requests."""
    metrics, result = view.metrics, view.result
    said = []
    if result.partial:
        said.append(
            f"Stopped by the time limit at {fine_duration(seconds(result.end))}:"
            f" {plural(metrics.unfinished, 'request is', 'requests are')} not finished. Latencies cover only"
            " finished requests, which tend to be the shorter ones."
        )
    said += [
        f"{plural(ending.count, 'request was', 'requests were')} refused: {ending.reason}."
        for ending in view.endings
        if ending.status == "refused"
    ]
    return tuple(said)


def _phases(metrics: Metrics, roles: RolesView | None) -> tuple[LatencyPart, ...]:
    if metrics.queueing is None or metrics.ttft_prefill is None or metrics.ttft is None or metrics.latency is None:
        return ()
    ends = [("queueing", metrics.queueing.mean), ("prefill", metrics.ttft_prefill.mean)]
    if roles is not None and roles.metrics.ttft:
        waiting, first = roles.metrics.decode_wait, roles.metrics.ttft["first decode"]
        waited = waiting.mean * waiting.count / metrics.finished
        if roles.metrics.pushed:
            ends[0] = "waiting for prefill", metrics.queueing.mean
            ends.insert(0, ("waiting for decode", waited))
        else:
            ends.append(("waiting to pull", ends[-1][1] + waited))
        ends.append(("KV transfer", metrics.ttft.mean - first.mean * first.count / metrics.finished))
    ends += [("first decode", metrics.ttft.mean), ("decode", metrics.latency.mean)]
    made, before = [], 0.0
    for name, end in ends:
        if end > before or name != "first decode":
            share = (end - before) / metrics.latency.mean if metrics.latency.mean else 0.0
            made.append(LatencyPart(name, end - before, share))
        before = end
    return tuple(made)


def _waiting(result: SimulationResult) -> Waiting | None:
    waited = max_num_seqs = blocks = 0.0
    for engine, series in zip(result.engines, result.series, strict=bool(result.series)):
        requests = series.waiting * np.diff(series.edges)
        waited += float(requests.sum())
        max_num_seqs += float(requests[series.running >= FULL * engine.config.max_num_seqs].sum())
        blocks += float(requests[series.held >= FULL * engine.config.kv_blocks].sum())
    return Waiting(max_num_seqs / waited, blocks / waited) if waited else None


def _tail(result: SimulationResult) -> float | None:
    ends = np.sort(result.requests.finish[result.requests.ended("finished")])
    if not len(ends) or not result.makespan:
        return None
    return float(ends[-1] - ends[-(-9 * len(ends) // 10) - 1]) / result.makespan


def _bound(view: SimulationView) -> str:
    metrics = view.metrics
    if view.roles is not None and view.roles.metrics.ttft:
        return view.roles.why
    busy = metrics.busy_share or 0.0
    share = f"{percent(busy, 0)} of the time"
    works = f"the engines work {share} on average" if len(view.engines) > 1 else f"the engine works {share}"
    paused = metrics.paused_share or 0.0
    if paused >= PAUSED and paused >= busy:
        return f"New weights are the bottleneck: engines pause for {percent(paused, 0)} of the time, and {works}."
    queueing = view.phases[0]
    longest = max(view.phases, key=lambda phase: phase.seconds)
    if queueing.share >= LONG_QUEUE:
        mean = fine_duration(sum(phase.seconds for phase in view.phases))
        took = f"it takes {percent(queueing.share, 0)} of a request's mean {mean}{_full(view.waiting)}"
        return f"Queueing is the bottleneck: {took}, and {works}."
    if busy < IDLE:
        return f"Too few requests: {works}, and requests hardly queue ({_of_time(queueing)})."
    return f"{longest.name[0].upper()}{longest.name[1:]} is the bottleneck: {_of_time(longest)}, and {works}."


def _of_time(phase: LatencyPart) -> str:
    return f"{percent(phase.share, 0)} of a request's time"


def _full(waiting: Waiting | None) -> str:
    if waiting is None:
        return ""
    share, what = max((waiting.blocks, "KV blocks"), (waiting.max_num_seqs, "seats (max_num_seqs)"))
    return f", {percent(share, 0)} of it while {what} were taken" if share >= 0.5 else ""


def _tiers(view: SimulationView) -> list[str]:
    """Sentences on KV that was loaded from, and stored to, KV tiers."""
    return [
        f"{tier.name}: {count(tier.loaded_tokens)} tokens of KV loaded in {plural(tier.loads, 'transfer')},"
        f" {tier.loaded_bytes / 2**30:.1f} GiB; {tier.stored_bytes / 2**30:.1f} GiB stored."
        for tier in view.result.tiers
    ]


def _memory(view: SimulationView) -> list[str]:
    metrics = view.metrics
    full = metrics.kv_peak_share is not None and metrics.kv_peak_share >= FULL
    if not metrics.preemptions:
        return ["KV was full at times, but no request was preempted."] if full else []
    each = plain(metrics.preemptions / metrics.finished)
    why = " KV was full at times." if full else ""
    return [f"{plural(metrics.preemptions, 'preemption')}, {each} for each finished request.{why}"]


def _uneven(engines: Sequence[EngineMetrics]) -> list[str]:
    """A sentence that compares the busiest engine with others of its role, if one is busy while the others lack
    requests.
    """
    busiest = max(engines, key=lambda engine: engine.busy_share or 0.0)
    others = [it for it in engines if it.role == busiest.role and it is not busiest]
    if not others or not busiest.busy_share:
        return []
    rest = [it.busy_share or 0.0 for it in others]
    if busiest.busy_share < UNEVEN * fmean([busiest.busy_share, *rest]):
        return []
    noun = "engine" if busiest.role == "colocated" else f"{busiest.role} engine"
    them = noun if len(others) == 1 else f"{plural(len(others), noun)} on average"
    without = sum(not it.requests for it in others)
    idle = f"; {count(without)} of them had no request" if without else ""
    return [
        f"Load is uneven: {busiest.name} works {percent(busiest.busy_share, 0)} of the time, the other {them}"
        f" {percent(fmean(rest), 0)}{idle}."
    ]


def _tail_end(view: SimulationView) -> list[str]:
    if view.tail is None or view.tail < LONG_TAIL or view.result.partial or view.metrics.finished < 10:
        return []
    return [f"The last tenth of the requests takes {percent(view.tail, 0)} of the makespan."]
