"""The chapter of a page on lending: figures, tables of devices, missed requests and recalls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from libra.lend.pages.lending_figures import extent, lending_figures
from libra.lend.records.loan_history import LoanHistory, MissedRequest
from libra.report.charts import Figure
from libra.report.page import render_chapter
from libra.report.words import count, duration, fine_duration, percent, plural

MOST_ROWS = 40  # of a table
MOST_MISSED = 12  # rows of the table of missed requests
_REASONS = {
    "first token": "a request waits for its first token",
    "due": "a token is due",
    "load": "recalled",
    "owner": "owner",
}
_RULES = {
    "gate": "the gate",
    "serve-first": "serving first",
    "naive": "alternating steps",
    "published": "ROSE's published rule",
    "fixed": "a fixed split of the time",
}


@dataclass(frozen=True, slots=True)
class LendingSection:
    """Content of the chapter; unknown parts are empty."""

    figures: tuple[Figure, ...]
    note: str = ""
    devices: tuple[tuple[str, ...], ...] = ()
    answers: tuple[tuple[str, ...], ...] = ()  # of the gate; the first row holds the names of the columns
    missed: tuple[tuple[str, ...], ...] = ()
    missed_note: str = ""
    recalls: tuple[tuple[str, ...], ...] = ()
    recalls_note: str = ""


def lending_chapter(section: LendingSection | None, words: str = "") -> Markup:
    """The chapter as HTML, opened by `words`; empty without a section and words."""
    if section is None and not words:
        return Markup()
    return render_chapter("lending.html", "libra.lend.pages", lending=section, words=words)


def lending_section(
    histories: Sequence[LoanHistory],
    since: str,
    markers: Sequence[tuple[float, str, str]] = (),
    more: Sequence[Figure] = (),
    seen: str = "",
) -> LendingSection | None:
    """The chapter; None if nothing was lent. `more` figures follow those of `lending_figures`, to which the other
    arguments are passed."""
    found = extent(histories)
    if found is None:
        return None
    missed = [(it, miss) for it in histories for miss in it.missed()]
    missed.sort(key=lambda pair: (pair[1].blamed is False, pair[1].request.came))
    recalls = sorted(((it.name, span) for it in histories for span in it.recalls), key=lambda pair: pair[1].start)
    reasons = [reason for reason in _REASONS if any(it.refusals.get(reason) for it in histories)]
    return LendingSection(
        note=_note(histories),
        figures=(*lending_figures(histories, since, markers, seen), *more),
        devices=tuple(_device(it, found[1] - found[0]) for it in histories[:MOST_ROWS]),
        answers=(
            ("Device", "Granted and used", "Held too long", *(f"Refused: {_REASONS[reason]}" for reason in reasons)),
            *(_answers(it, reasons) for it in histories[:MOST_ROWS]),
        ),
        missed=tuple(_missed(it, miss) for it, miss in missed[:MOST_MISSED]),
        missed_note=_missed_note(histories, missed),
        recalls=tuple(
            (duration(span.start), name, duration(span.end - span.start), span.why)
            for name, span in recalls[:MOST_ROWS]
        ),
        recalls_note=plural(len(recalls), "recall") + (f", the first {MOST_ROWS}" if len(recalls) > MOST_ROWS else ""),
    )


def _device(it: LoanHistory, seconds: float) -> tuple[str, ...]:
    lent, serving = (sum(span.end - span.start for span in spans) for spans in (it.grants, it.serving))
    away = sum(span.end - span.start for span in it.recalls)
    recalled = f"{plural(len(it.recalls), 'time')}, {duration(away)}" if it.recalls else "never"
    missed = count(len(it.missed())) if it.slo is not None and it.requests else "not known"
    requests = count(len(it.requests)) if it.requests else "not recorded"
    return it.name, percent(lent / (seconds or 1.0)), percent(serving / (seconds or 1.0)), recalled, requests, missed


def _answers(it: LoanHistory, reasons: Sequence[str]) -> tuple[str, ...]:
    overstayed = sum(span.overstayed for span in it.grants)
    refused = (count(it.refusals.get(reason, 0)) for reason in reasons)
    return it.name, count(len(it.grants)), count(overstayed), *refused


def _missed(it: LoanHistory, miss: MissedRequest) -> tuple[str, ...]:
    request = miss.request
    ttft, tpot = fine_duration(request.ttft), fine_duration(request.tpot)
    blame = "not known" if miss.blamed is None else "yes: alone it meets its SLO" if miss.blamed else "no"
    return (
        duration(request.came),
        it.name,
        f"{request.number:,}: {request.prompt_tokens:,} + {request.output_tokens:,} tokens",
        f"{ttft} (missed)" if miss.ttft else ttft,
        f"{tpot} (missed)" if miss.tpot else tpot,
        blame,
    )


def _missed_note(histories: Sequence[LoanHistory], missed: Sequence[tuple[LoanHistory, MissedRequest]]) -> str:
    requests = sum(len(it.requests) for it in histories)
    if not requests:
        return "No request of a user is recorded."
    if not missed:
        return f"None of {plural(requests, 'request')} missed its SLO."
    blamed = [miss.blamed for _, miss in missed]
    parts = [f"{plural(len(missed), 'request')} of {count(requests)} missed their SLO"]
    if True in blamed:
        parts.append(f"{count(blamed.count(True))} because of lending: served alone they meet their SLO")
    if False in blamed:
        alone = (
            "served alone they miss their SLO, too"
            if all(it.blamed is not None for it, _ in missed)
            else ("nothing had been lent since serving was last idle")
        )
        parts.append(f"{count(blamed.count(False))} not because of lending: {alone}")
    if None in blamed:
        parts.append(f"{count(blamed.count(None))} perhaps because of lending: the traffic was not also served alone")
    shown = f" The first {MOST_MISSED} are shown." if len(missed) > MOST_MISSED else ""
    return f"{'; '.join(parts)}.{shown}"


def _note(histories: Sequence[LoanHistory]) -> str:
    rules = ", ".join(dict.fromkeys(_RULES.get(it.rule, it.rule) for it in histories))
    slos = dict.fromkeys(it.slo for it in histories if it.slo is not None)
    owed = "; ".join(f"{fine_duration(slo.ttft)} to the first token, {fine_duration(slo.tpot)} a token" for slo in slos)
    pace = ", ".join(dict.fromkeys(fine_duration(it.pace) for it in histories))
    said = f"{plural(len(histories), 'device')} lent by {rules}, at a pace of {pace} a token"
    said += f" (SLO: {owed})" if owed else ""
    return f"{said}; grants of up to {fine_duration(max(it.longest for it in histories))}."
