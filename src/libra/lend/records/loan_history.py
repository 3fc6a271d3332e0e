"""The history of one lent device for pages and timelines, read from the records of a run or of a borrower.

Invariant: spans of one kind follow each other without overlap. Times are seconds since the run began (negative before
it), unless stated otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libra.lend.gate import Slo
from libra.lend.records.lending import LendingAnswer, LendingTerms, LentStep, QuotaChange, ServedStep, read_lending
from libra.lend.records.served import ServedRequest, read_served
from libra.lend.traffic.envelope import Load, RateWindow
from libra.records.schema import EventRecord


@dataclass(frozen=True, slots=True)
class GrantSpan:
    """A step of rollout, or several that were simulated together."""

    start: float
    end: float
    granted: float  # seconds of the grant
    tokens: int = 0  # computed
    overstayed: bool = False


@dataclass(frozen=True, slots=True)
class ServingSpan:
    """A step of serving, or several that were simulated together."""

    start: float
    end: float
    sequences: int
    margin: float | None  # seconds from the earliest due token to its due time; None: no token was due


@dataclass(frozen=True, slots=True)
class RecallSpan:
    """A time in which nothing was lent."""

    start: float
    end: float
    why: str


@dataclass(frozen=True, slots=True)
class UserRequest:
    """One ended request of the device's users."""

    number: int
    came: float
    ended: float
    prompt_tokens: int
    output_tokens: int
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class MissedRequest:
    """A request that missed its SLO. `blamed`: whether the request would have met its SLO without lending; None:
    unknown."""

    request: UserRequest
    ttft: bool  # the first token was too late
    tpot: bool  # later tokens were too slow
    blamed: bool | None


@dataclass(frozen=True, slots=True)
class LoanHistory:
    """The history of a lent device. `load` is (time, largest ratio of the load to the envelope); above 1 nothing is
    lent."""

    name: str  # of the engine that borrows the device
    rule: str
    slo: Slo | None  # None: the record does not say
    pace: float  # seconds a token (tau)
    longest: float  # seconds of a grant (B)
    grants: Sequence[GrantSpan] = ()
    serving: Sequence[ServingSpan] = ()
    load: Sequence[tuple[float, float]] = ()
    refusals: Mapping[str, int] = field(default_factory=dict)  # reason -> answers of the gate
    recalls: Sequence[RecallSpan] = ()
    quotas: Sequence[tuple[float, int]] = ()  # (start, bytes of KV memory that rollout has from then on)
    requests: Sequence[UserRequest] = ()  # in the order of their arrival
    blamed: frozenset[int] | None = None  # numbers of requests that met their SLO alone; None: not known

    @property
    def seconds(self) -> float:
        """Seconds from the first known step to the last."""
        edges = [at for spans in (self.grants, self.serving) if spans for at in (spans[0].start, spans[-1].end)]
        return max(edges) - min(edges) if edges else 0.0

    @property
    def late_words(self) -> str:
        """Text on known steps of serving with a token after its due time."""
        margins = [it.margin for it in self.serving if it.margin is not None]
        if not margins:
            return "no step of serving with a due token is known"
        late = sum(margin < 0 for margin in margins)
        return f"at {late:,} of {len(margins):,} steps of serving a token came after it was due"

    def missed(self) -> list[MissedRequest]:
        """Requests that missed their SLO. If the same traffic was also served alone, `blamed` tells whether lending is
        to blame. Otherwise, lending is not to blame if nothing was lent from the last idle time of serving to the
        miss."""
        if self.slo is None:
            return []
        found, since, busy_until = [], 0.0, float("-inf")
        for it in self.requests:
            since, busy_until = it.came if it.came > busy_until else since, max(busy_until, it.ended)
            late, slow = it.ttft > self.slo.ttft, it.tpot > self.slo.tpot
            if late or slow:
                until = it.ended if slow else it.came + it.ttft
                alone = False if self.blamed is None and not self._lent(since, until) else None
                blamed = alone if self.blamed is None else it.number in self.blamed
                found.append(MissedRequest(it, late, slow, blamed))
        return found

    def _lent(self, start: float, end: float) -> bool:
        at = bisect_left(self.grants, start, key=lambda span: span.end)
        return at < len(self.grants) and self.grants[at].start < end


class RunClock:
    """Converts the machine's monotonic clock to seconds of a run, by the `began` event of each session."""

    def __init__(self, events: Iterable[EventRecord]) -> None:
        self._began = sorted((it.clock, it.time) for it in events if it.kind == "began" and it.clock is not None)

    @property
    def known(self) -> bool:
        return bool(self._began)

    def seconds(self, clock: float) -> float | None:
        """Seconds of the run. None: an interruption of the run lost that time, or a resumed session was starting."""
        session = max(bisect_left(self._began, (clock, float("inf"))) - 1, 0)
        began, before = self._began[session]
        at = before + clock - began
        over = session + 1 < len(self._began) and at > self._began[session + 1][1]
        return None if over else at


Clock = Callable[[float], float | None]  # seconds of the run from the machine's clock; None: no time of the run


def run_loans(directory: Path, clock: Clock, events: Sequence[EventRecord]) -> list[LoanHistory]:
    """Histories of the devices that a run borrowed, from the records in its directory. Records that `clock` cannot
    place are left out. Raises `RecordFormatError`."""
    files = sorted(directory.glob("lending-*.jsonl"), key=lambda path: (len(path.name), path.name))
    found = []
    for path in files:
        number = path.stem.removeprefix("lending-")
        name, served = f"lent-{number}", directory / f"served-{number}.jsonl"
        found.append(_history(name, path, read_served(served), clock, _recalls(name, events)))
    return [it for it in found if it is not None]


def recorded_loan(path: Path) -> LoanHistory | None:
    """The history from the record of a borrower alone, such as an agent's, in seconds since its first question. None if
    the record has no terms. Raises `RecordFormatError`."""
    began = next((line.at for line in read_lending(path) if not isinstance(line, LendingTerms)), 0.0)
    return _history(path.stem, path, (), lambda at: at - began, None)


def _history(
    name: str, lending: Path, served: Iterable[ServedRequest], clock: Clock, recalls: Sequence[RecallSpan] | None
) -> LoanHistory | None:
    """The history of a device; without `recalls` they are derived from the answers."""
    terms: LendingTerms | None = None
    grants, serving = list[GrantSpan](), list[ServingSpan]()
    load, quotas = list[tuple[float, float]](), list[tuple[float, int]]()
    refusals, granted, told = Counter[str](), 0.0, list[RecallSpan]()
    away: tuple[float, str] | None = None  # since when nothing is lent, and why
    for line in read_lending(lending):
        if isinstance(line, LendingTerms):
            terms, window = line, RateWindow(line.envelope.window)
            continue
        assert terms is not None
        at = clock(line.at)
        if at is None:
            continue
        match line:
            case LendingAnswer():
                granted = line.granted or 0.0
                if line.refused is not None:
                    refusals[line.refused] += 1
                asked = Load(window.rate(line.at, line.came), line.queued, line.live, line.context)
                load.append((at, terms.envelope.used(asked)))
                if line.refused != "load" and away is not None:
                    told.append(RecallSpan(away[0], at, away[1]))
                    away = None
                elif line.refused == "load" and away is None:
                    away = at, line.breach or terms.envelope.breach(asked) or "its load was outside the envelope"
            case LentStep():
                grants.append(GrantSpan(at, at + line.seconds, granted, line.tokens, line.overstayed))
            case ServedStep():
                serving.append(ServingSpan(at, at + line.seconds, line.sequences, line.margin))
            case QuotaChange():
                quotas.append((at, line.held))
    if terms is None:
        return None
    if away is not None:
        told.append(RecallSpan(away[0], load[-1][0], away[1]))
    requests = sorted(_requests(served, clock), key=lambda it: it.came)
    return LoanHistory(
        name,
        terms.sharing,
        terms.slo,
        terms.pace,
        terms.longest,
        grants,
        serving,
        load,
        refusals,
        told if recalls is None else recalls,
        quotas,
        requests,
    )


def _requests(served: Iterable[ServedRequest], clock: Clock) -> Iterable[UserRequest]:
    for it in served:
        came = None if it.came is None else clock(it.came)
        if came is not None:
            ended = came + it.ttft + it.tpot * (it.output_tokens - 1)
            yield UserRequest(it.number, came, ended, it.prompt_tokens, it.output_tokens, it.ttft, it.tpot)


def _recalls(name: str, events: Sequence[EventRecord]) -> list[RecallSpan]:
    """Spans from `recalled` to `lent_again`; a span without `lent_again` lasts to the last event."""
    spans, since = list[RecallSpan](), None
    for it in events:
        if it.worker == name and it.kind in ("recalled", "lent_again"):
            if since is not None:
                spans.append(RecallSpan(since.time, it.time, since.text))
            since = it if it.kind == "recalled" else None
    if since is not None:
        spans.append(RecallSpan(since.time, events[-1].time, since.text))
    return spans
