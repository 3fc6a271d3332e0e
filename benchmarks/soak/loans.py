"""Whether loans were kept to, from what borrowers and servers wrote.

Invariant: what a gate must not grant is said anew here, and so is whose fault it is that a request missed its SLO. A
miss is lending's where its request would have been in time without the seconds that a borrower had the device, but
not without those in which its server waited for a core that other processes had.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.soak.accounts import Check, checked
from benchmarks.soak.faults import IN_GRANT, OWNED, Kind
from benchmarks.soak.lenders import Lenders, Served
from benchmarks.soak.storm import Struck
from benchmarks.soak.survival import Recovery, Seen, summed
from benchmarks.soak.written import Row, read_rows
from libra.lend.records.lending import replay

_LEASE = 2.0  # seconds for which a loan outlives the word of its lender
_SETTLES = 2.0  # seconds after a fault in which serving catches up
_LONG = 45.0  # seconds in which an engine that is lent a device borrows it
_ROUNDING = 1e-6
_ENDS = frozenset({Kind.KILL_SERVER})


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of the monotonic clock, of one session."""

    session: int
    begin: float
    end: float


def loans(
    slo: Slo,
    lenders: Lenders,
    struck: Sequence[Struck],
    seen: Sequence[Seen],
    sessions: Mapping[int, Window],
) -> Iterator[Check]:
    """All checks on the loans of a run."""
    count = lenders.count
    paths = [lenders.record(f"lent-{number}") for number in range(count)]
    records = [read_rows(path) for path in paths]
    steps = [[row for row in rows if row["kind"] == "step"] for rows in records]
    granted = sum(map(len, steps))
    yield checked(
        "no rollout step began while a request waited for its first token, or one would have been late",
        (f"lending-{number}: {what}" for number, rows in enumerate(records) for what in against_the_gate(rows)),
        f"{granted:,} steps, {sum(row['overstayed'] for rows in steps for row in rows):,} overstayed",
    )
    yield checked("each device was lent", (f"device {n} never" for n in range(count) if not steps[n]), f"{granted:,}")
    different = [f"{path.name}:{line}" for path in paths for line in replay(path).different]
    yield checked("the rule gives all its answers again", different, f"{sum(map(len, records)):,} lines")
    found = [(request, whose(request, steps[request.server], slo, struck)) for request in lenders.served]
    counts = Counter(why for _, why in found if why)
    yield checked(
        "no request missed its SLO for lending, but beside a grant that was overstayed by a fault",
        (
            f"session {it.session}: {it.ttft:.2f} and {it.tpot:.3f} s at server {it.server}, come at {it.arrival:.1f}"
            for it, why in found
            if why == LENDING
        ),
        f"{len(found):,} requests; missed: {', '.join(f'{n} {why}' for why, n in counts.items()) or 'none'}",
    )
    back = {it: min(lenders.back(it.worker, it.time), sessions[it.session].end) for it in struck if it.kind in _ENDS}
    yield checked("no loan outlived its lender's word", _outlived(steps, back), f"after {len(back)} ends of servers")
    if lenders.owners:
        moved = sum(row["kind"] == "quota" for rows in records for row in rows)
        yield checked(
            "no request was preempted, whatever memory rollout had",
            (f"session {it.session}: {it.preempted} at server {it.server}" for it, _ in found if it.preempted),
            f"memory changed hands {moved:,} times",
        )
        return
    yield checked("no server was started again by the run", lenders.started_again, f"{len(sessions)} sessions")
    spans = list(_in_service(count, struck, seen, sessions))
    yield checked(
        "whoever is lent a device borrows it",
        (
            f"session {span.session}: lent-{number} made no step from {span.begin:.1f} to {span.end:.1f}"
            for number, span in spans
            if not any(span.begin <= row["at"] <= span.end for row in steps[number])
        ),
        f"{len(spans)} times {_LONG:.0f} s",
    )


def against_the_gate(rows: Sequence[Row]) -> Iterator[str]:
    """Steps that no answer allows: the one before it in the file is its grant."""
    terms: Row = {}
    answer: Row | None = None
    for number, row in enumerate(rows, start=1):
        match row["kind"]:
            case "terms":
                terms, answer = row, None
            case "answer":
                answer = row
                if row["granted"] is not None:
                    due = math.inf if row["due"] is None else row["due"]
                    longest = math.inf if row["longest_step"] is None else row["longest_step"]
                    if row["waiting"]:
                        yield f"line {number}: granted while {row['waiting']} wait"
                    if row["granted"] > terms["longest"] + _ROUNDING:
                        yield f"line {number}: granted {row['granted']} s"
                    if row["live"] > row["waiting"] and row["at"] + row["granted"] + longest > due + _ROUNDING:
                        yield f"line {number}: a token would be late"
            case "step":
                if answer is None or answer["granted"] is None:
                    yield f"line {number}: a step without a grant"
                elif not answer["at"] <= row["at"] <= answer["at"] + answer["granted"]:
                    yield f"line {number}: a step that begins outside its grant"
                answer = None  # one step a grant


LENDING, ALONE, OTHERS, FAULT = "for lending", "alone, too", "waiting for a core", "beside a fault"


def whose(request: Served, steps: Sequence[Row], slo: Slo, struck: Iterable[Struck]) -> str | None:
    """Why a request missed its SLO; None where it did not. `steps` are those of the borrower of its device, by time."""
    later = max(1, request.tokens - 1)
    if request.ttft <= slo.ttft and request.tpot <= slo.tpot:
        return None
    first, rest = _lent(steps, request.arrival, request.first), _lent(steps, request.first, request.end)
    if request.ttft - first > slo.ttft or request.tpot - rest / later > slo.tpot:
        return ALONE
    beside = [f"{who}-{request.server}" for who in ("lent", "server", "agent", "follower")]
    for it in struck:
        if it.session != request.session or (it.worker not in beside and it.kind is not Kind.HOG):
            continue
        if it.time < request.end and request.arrival < it.time + it.seconds + _SETTLES:
            return FAULT
    waited = request.waited
    if request.ttft - waited <= slo.ttft and request.tpot - waited / later <= slo.tpot:
        return OTHERS
    return LENDING


def _lent(steps: Sequence[Row], begin: float, end: float) -> float:
    """Seconds in which a borrower had the device."""
    low = max(0, bisect_left(steps, begin, key=lambda row: row["at"]) - 1)
    high = bisect_right(steps, end, key=lambda row: row["at"])
    spans: Iterable[tuple[float, float]] = ((row["at"], row["at"] + row["seconds"]) for row in steps[low:high])
    return sum(max(0.0, min(end, over) - max(begin, at)) for at, over in spans)


def _outlived(steps: Sequence[Sequence[Row]], back: Mapping[Struck, float]) -> Iterator[str]:
    """Steps on a device whose server had been killed for longer than its word is good, and was not `back`."""
    for it, end in back.items():
        for row in steps[int(it.worker.removeprefix("server-"))]:
            if it.time + _LEASE + 0.1 < row["at"] < end:
                yield f"session {it.session}: {row['at'] - it.time:.1f} s after {it.worker} was killed"
                break


def _in_service(
    count: int, struck: Sequence[Struck], seen: Sequence[Seen], sessions: Mapping[int, Window]
) -> Iterator[tuple[int, Window]]:
    """Whenever a lent engine was in service for long while steps were made, with its server and without a fault: pieces
    of `_LONG`."""
    for session, number in ((session, number) for session in sessions.values() for number in range(count)):
        changes: list[tuple[float, str]] = [(session.end, "out")]
        for it in (it for it in struck if it.session == session.session and _concerns(it, number)):
            if it.kind is Kind.KILL_SERVER:
                changes.append((it.time, "gone"))
            elif it.kind is Kind.FULL_DISK:
                changes.append((it.time, "out"))  # it may borrow, but its record ends
            else:
                changes += [(it.time, "disturbed"), (it.time + it.seconds, "disturbed")]
        after = ""
        for entry in (it for it in seen if it.session == session.session):
            row = entry.row
            if row["kind"] == "step":
                changes.append((entry.time, "step"))
            elif row.get("worker") == f"lent-{number}":
                after = row["after"]["role"] if row["kind"] == "intend" else after
                changes.append((entry.time, "in" if row["kind"] == "done" and after == "rollout" else "out"))
        for begin, end in _pieces(sorted(changes)):
            yield number, Window(session.session, begin, end)


def _pieces(changes: Sequence[tuple[float, str]]) -> Iterator[tuple[float, float]]:
    serves, steps = False, False
    since = math.inf
    for time, change in changes:
        if change == "step" and steps:
            continue
        if serves and steps:
            for piece in range(int((time - since) / _LONG)):
                yield since + piece * _LONG, since + (piece + 1) * _LONG
        if change == "gone":
            return
        serves = change == "in" or (serves and change != "out")
        steps, since = steps or change == "step", time


def _concerns(it: Struck, number: int) -> bool:
    return it.worker in (f"lent-{number}", f"server-{number}") or it.kind is Kind.SLOW_CONTROLLER


def returns(lenders: Lenders, struck: Sequence[Struck], sessions: Mapping[int, Window]) -> Iterator[Recovery]:
    """Seconds from a fault of a borrower or its lender to the next step on that device, in the same session."""
    begins = [
        [row["at"] for row in read_rows(lenders.record(f"lent-{number}")) if row["kind"] == "step"]
        for number in range(lenders.count)
    ]
    for kind in sorted(IN_GRANT | OWNED - {Kind.KILL_PUBLISHER}):
        found = []
        for it in (it for it in struck if it.kind is kind and it.session in sessions):
            steps = begins[int(it.worker.rpartition("-")[2])]
            place = bisect_right(steps, it.time + it.seconds)
            if place < len(steps) and steps[place] < sessions[it.session].end:
                found.append(steps[place] - it.time - it.seconds)
        yield from summed(f"{kind}: it borrows again", found)
