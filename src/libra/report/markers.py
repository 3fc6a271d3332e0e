"""Moments of a run that its charts mark: decisions, losses, evaluations.

Invariant: a decision has the same name, `D1`, `D2`, ..., in every chart and in the table of decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra.records.run_log import RunLog
from libra.records.schema import DecisionRecord, Evaluation, EventRecord, StepRecord
from libra.report.paper import Marker
from libra.report.words import duration, percent, plural

_NEUTRAL, _ALARM = "#46525f", "#b3261e"


def evaluation_marker(evaluation: Evaluation, steps: Sequence[StepRecord], scale: float) -> Marker:
    times = [step.time for step in steps if step.step <= evaluation.step]
    accuracy = percent(evaluation.sampled_accuracy, 0)
    title = (
        f"{evaluation.name}, after step {evaluation.step}: sampled {percent(evaluation.sampled_accuracy)}, "
        f"greedy {percent(evaluation.greedy_accuracy)} of {plural(evaluation.questions, 'question')}"
    )
    return Marker(times[-1] / scale if times else 0.0, accuracy, title, _NEUTRAL)


def decision_markers(log: RunLog, scale: float | None) -> list[Marker]:
    """Taken decisions, named as in the table; on a time axis of this scale, or on the step axis if it is None."""
    return [
        Marker(decision.step if scale is None else decision.time / scale, name, _change(decision), _NEUTRAL)
        for name, decision in named_decisions(log)
    ]


def named_decisions(log: RunLog) -> list[tuple[str, DecisionRecord]]:
    return [(f"D{number}", decision) for number, decision in enumerate(log.taken, start=1)]


def _change(decision: DecisionRecord) -> str:
    return f"after step {decision.step}: {decision.before} → {decision.after}"


def loss_markers(log: RunLog, scale: float) -> list[Marker]:
    return [Marker(event.time / scale, "lost", loss_text(event), _ALARM) for event in log.losses]


def loss_text(event: EventRecord) -> str:
    return f"{event.worker or 'a worker'} lost after {duration(event.time)}: {event.text}"


def marker_note(log: RunLog) -> str:
    if not log.taken:
        return "The allocation never changed."
    first, last = (name for name, _ in (named_decisions(log)[0], named_decisions(log)[-1]))
    return f"{first if first == last else f'{first} … {last}'}: the allocation changed, see below."
