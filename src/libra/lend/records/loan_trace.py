"""Lent devices on a timeline: steps of rollout and serving, recalls, margins of tokens, and requests that missed.

Invariant: the number of events is bounded, whatever the length of the history. The steps closest to each other are
merged into one slice first, and the smallest margin of consecutive steps is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from libra.lend.records.loan_history import Clock, GrantSpan, LoanHistory, RecallSpan, ServingSpan, run_loans
from libra.records.trace import MAX_EVENTS, TraceFile

Span = TypeVar("Span", GrantSpan, ServingSpan)

GROUP_NAME = "lent devices"
_LANES = ("rollout", "serving", "recalled")  # of a device, from top to bottom
_COLOURS = ("rail_response", "thread_state_iowait", "thread_state_uninterruptible")
_KINDS = 5  # kinds of events of a device whose number is limited: slices of two lanes, and three counters


def draw_loans(trace: TraceFile, group: int, histories: Sequence[LoanHistory]) -> None:
    """Draw histories in a group of their own, with at most half of the events that the trace has room for. Nothing is
    drawn if nothing was lent."""
    if not histories:
        return
    trace.name_group(group, GROUP_NAME, group)
    most = max(1, trace.room // 2 // (_KINDS * len(histories)))
    for number, history in enumerate(histories):
        _draw(trace, group, number * len(_LANES) + 1, history, most)


def draw_run_loans(
    trace: TraceFile,
    group: int,
    *,
    directory: Path,
    clock: Clock,
    recalls: Mapping[str, Sequence[tuple[float, float, str]]],
) -> None:
    """Draw the loans of a run, from their borrowers' records in its directory and the recalls of each engine."""
    found = run_loans(directory, clock, ())
    spans = {name: [RecallSpan(*span) for span in its] for name, its in recalls.items()}
    draw_loans(trace, group, [replace(it, recalls=spans.get(it.name, [])) for it in found])


def write_loan_trace(history: LoanHistory, path: Path, max_events: int = MAX_EVENTS) -> None:
    """Write a trace of one loan."""
    with closing(TraceFile(path, max_events)) as trace:
        draw_loans(trace, 1, [history])


def _draw(trace: TraceFile, group: int, first: int, history: LoanHistory, most: int) -> None:
    for lane, name in enumerate(_LANES):
        trace.name_lane(group, first + lane, f"{history.name}: {name}", first + lane)
    rollout, serving, recalled = range(first, first + len(_LANES))
    for granted in closest_together(history.grants, most):
        details = {
            "lent_ms": _ms(sum(it.end - it.start for it in granted)),
            "granted_ms": _ms(sum(it.granted for it in granted)),
            "tokens": sum(it.tokens for it in granted),
            "overstayed": sum(it.overstayed for it in granted),
        }
        _slice(trace, group, rollout, "grant", granted, details, _COLOURS[0])
    for served in closest_together(history.serving, most):
        owed = [it.margin for it in served if it.margin is not None]
        details = {"computed_ms": _ms(sum(it.end - it.start for it in served)), "sequences": served[-1].sequences}
        if owed:
            details["margin_ms"] = _ms(min(owed))
        _slice(trace, group, serving, "serving step", served, details, _COLOURS[1])
    for recall in history.recalls:
        start, end = _microseconds(recall.start), _microseconds(recall.end)
        trace.slice(group, recalled, recall.why, start, end - start, {}, _COLOURS[2])
    margins = [(it.end, 1e3 * it.margin) for it in history.serving if it.margin is not None]
    for at, margin in _thinned(margins, most, smallest=True):
        trace.counter(group, f"{history.name}: due margin", _microseconds(at), {"ms": round(margin, 3)})
    for at, used in _thinned(history.load, most, smallest=False):
        trace.counter(group, f"{history.name}: load", _microseconds(at), {"% of envelope": round(100 * used, 1)})
    for at, held in history.quotas[-most:]:
        trace.counter(group, f"{history.name}: KV lent", _microseconds(at), {"MiB": round(held / 2**20, 3)})
    for miss in history.missed():
        request = miss.request
        blamed = "not known" if miss.blamed is None else "yes" if miss.blamed else "no"
        about = {"ttft_ms": _ms(request.ttft), "tpot_ms": _ms(request.tpot), "lending_to_blame": blamed}
        at = request.ended if miss.tpot else request.came + request.ttft
        trace.instant(group, serving, f"request {request.number} missed its SLO", _microseconds(at), about)


def closest_together(spans: Sequence[Span], most: int) -> list[Sequence[Span]]:
    """At most `most` runs of consecutive spans; spans with the smallest gaps are merged."""
    if not spans:
        return []
    cuts: list[int] = list(range(1, len(spans)))
    if len(spans) > most:
        gaps = [after.start - before.end for before, after in pairwise(spans)]
        cuts.sort(key=lambda cut: -gaps[cut - 1])
        cuts = sorted(cuts[: most - 1])
    return [spans[start:end] for start, end in pairwise((0, *cuts, len(spans)))]


def _thinned(points: Sequence[tuple[float, float]], most: int, *, smallest: bool) -> list[tuple[float, float]]:
    together = -(-len(points) // most)
    pick = min if smallest else max
    groups = (points[at : at + together] for at in range(0, len(points), together or 1))
    return [pick(group, key=lambda point: point[1]) for group in groups]


def _slice(
    trace: TraceFile,
    group: int,
    lane: int,
    name: str,
    spans: Sequence[GrantSpan | ServingSpan],
    details: Mapping[str, float],
    colour: str,
) -> None:
    start, end = _microseconds(spans[0].start), _microseconds(spans[-1].end)
    trace.slice(group, lane, name if len(spans) == 1 else f"{len(spans)} {name}s", start, end - start, details, colour)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
