"""The tables of a run: decisions, evaluations, training health, events, settings.

Invariant: a decision shows what was promised beside what came of it, in the same order and units; what was not
measured is called so. On a narrow screen each row becomes a card, its cells named by `data-label`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from libra.records.run_log import Outcome, RunLog, outcomes
from libra.records.schema import DecisionRecord, StepRecord
from libra.report.markers import named_decisions
from libra.report.markup import NOTHING, Markup, join, tag, text
from libra.report.verdict import edges, why_nothing_was_decided
from libra.report.words import count, duration, percent, plain, plural, signed_duration


def table(columns: Sequence[str], rows: Sequence[Sequence[Markup]], kind: str = "") -> Markup:
    head = tag("tr", *(tag("th", text(column)) for column in columns))
    body = (
        tag("tr", *(tag("td", cell, data_label=column) for column, cell in zip(columns, row, strict=True)))
        for row in rows
    )
    return tag("table", tag("thead", head), tag("tbody", *body), class_=f"rows {kind}".strip())


def decisions_table(log: RunLog) -> Markup:
    pieces = []
    if log.taken:
        taken = [
            (
                _change(f"{name} · after step", outcome.decision),
                _promised(outcome.decision),
                _realised(outcome),
                _why(outcome.decision),
            )
            for (name, _), outcome in zip(named_decisions(log), outcomes(log), strict=True)
        ]
        pieces.append(table(("Change", "Predicted", "Measured", "Why"), taken, "decisions"))
        pieces.append(
            tag(
                "p",
                text(
                    "Measured step: the period before, and the first full period after. Lengths drift between the two, "
                    "so the measured gain is what the allocation that was left would take for the work as it is by "
                    "then, priced by the same model, less what was measured."
                ),
                class_="note",
            )
        )
    else:
        pieces.append(tag("p", text(why_nothing_was_decided(log)), class_="missing"))
    if log.refused:
        rows = [(_change("after step", decision), _promised(decision), _why(decision)) for decision in log.refused]
        summary = f"{plural(len(log.refused), 'plan')} looked at and not carried out"
        refused = table(("Change", "Predicted", "Why not"), rows, "decisions refused")
        pieces.append(tag("details", tag("summary", text(summary)), refused))
    return join(*pieces)


def evaluations_table(log: RunLog) -> Markup:
    if log.summary is None or not log.summary.evaluations:
        why = "the run wrote no summary" if log.summary is None else "the run made none"
        return tag("p", text(f"No evaluation is known: {why}."), class_="missing")
    rows = [
        _texts(
            evaluation.name,
            count(evaluation.step),
            count(evaluation.questions),
            percent(evaluation.sampled_accuracy),
            percent(evaluation.greedy_accuracy),
            plain(evaluation.turns_mean),
        )
        for evaluation in log.summary.evaluations
    ]
    columns = ("Evaluation", "After step", "Questions", "Sampled accuracy", "Greedy accuracy", "Turns of an episode")
    return table(columns, rows, "numbers")


def health_table(log: RunLog) -> Markup:
    """Training quantities at both ends of the run; what moved is what to look at."""
    if not log.steps:
        return tag("p", text("No step was finished, so nothing is known of training."), class_="missing")
    rows = [
        _texts(name, *(write(value) for value in edges(values)), hint)
        for name, values, write, hint in _health(log.steps)
    ]
    tenth = max(1, len(log.steps) // 10)
    over = "step" if tenth == 1 else f"{tenth} steps"
    columns = ("Mean over", f"first {over}", f"last {over}", "Meaning")
    return table(columns, rows, "numbers last-words")


def trajectories_text(log: RunLog) -> str:
    """Where every trajectory went."""
    if log.summary is None:
        return f"{count(sum(step.trajectories for step in log.steps))} trajectories were trained on."
    s = log.summary
    return (
        f"{count(s.trajectories_started)} trajectories were started: {count(s.trajectories_trained)} trained on, "
        f"{count(s.trajectories_unfinished)} unfinished when the run ended."
    )


def events_table(log: RunLog) -> Markup:
    """All events but the weight updates, of which there is one a step and engine."""
    weights = sum(event.kind == "weights" for event in log.events)
    listed = [event for event in log.events if event.kind != "weights"]
    if not log.events:
        return tag("p", text("No event was recorded."), class_="missing")
    updates = (
        tag("p", text(f"{plural(weights, 'weight update')} of engines not listed."), class_="note")
        if weights
        else NOTHING
    )
    rows = [
        _texts(duration(event.time), event.kind.replace("_", " "), event.worker or "–", event.text) for event in listed
    ]
    shown = tag(
        "details",
        tag("summary", text(plural(len(listed), "event"))),
        table(("Time", "What", "Worker", "Text"), rows, "events"),
    )
    return join(shown if listed else NOTHING, updates)


def losses_table(log: RunLog) -> Markup:
    rows = [_texts(duration(event.time), event.worker or "–", event.text) for event in log.losses]
    shown = table(("Time", "Worker", "Why, and what became of its slot"), rows, "events")
    return tag("details", tag("summary", text(plural(len(rows), "loss", "losses"))), shown)


def settings_table(log: RunLog) -> Markup:
    pieces = []
    if log.summary is not None:
        summary = log.summary
        known = {"seed": str(summary.seed), "allocation mode": summary.allocation_mode, **summary.versions}
        if summary.arithmetic is not None:
            known = {"arithmetic": summary.arithmetic, **known}
        pieces.append(table(("Run with", ""), [_texts(key, value) for key, value in known.items()], "settings"))
    if log.config is None:
        pieces.append(tag("p", text("The run wrote no config.json, so its settings are not known."), class_="missing"))
    else:
        rows = [_texts(key, value) for key, value in flatten(log.config)]
        pieces.append(table(("Setting", "Value"), rows, "settings"))
    return join(*pieces)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of a JSON value with their dotted paths.

    >>> list(flatten({"train": {"lr": 3e-5}, "seeds": [1, 2]}))
    [('train.lr', '3e-05'), ('seeds', '[1, 2]')]
    """
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{path}[{index}]")
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def _change(prefix: str, decision: DecisionRecord) -> Markup:
    return join(
        tag("div", text(f"{prefix} {decision.step}, {duration(decision.time)}"), class_="when"),
        tag("div", text(decision.before), class_="change"),
        tag("div", text(f"→ {decision.after}"), class_="change"),
        tag("ul", *(tag("li", text(move)) for move in decision.moves), class_="moves") if decision.moves else NOTHING,
    )


def _promised(decision: DecisionRecord) -> Markup:
    return _facts(
        ("step", f"{duration(decision.before_seconds)} → {duration(decision.after_seconds)}"),
        ("gain a step", f"{signed_duration(decision.gain_per_step)} (± {duration(decision.uncertainty)})"),
        ("switch", duration(decision.cost)),
        ("net", f"{signed_duration(decision.predicted_net)} over {plural(decision.horizon_steps, 'step')}"),
    )


def _realised(outcome: Outcome) -> Markup:
    decision, net, gain = outcome.decision, outcome.net_seconds, outcome.decision.realised_gain_per_step
    over = plural(outcome.steps, "step")
    return _facts(
        ("step", _measured_change(decision)),
        ("gain a step", "not measured" if gain is None else signed_duration(gain)),
        ("switch", _measured(decision.measured_cost)),
        ("net", "not measured" if net is None else f"{signed_duration(net)} over {over}"),
    )


def _measured_change(decision: DecisionRecord) -> str:
    if decision.measured_before is None and decision.measured_after is None:
        return "not measured"
    return f"{_measured(decision.measured_before)} → {_measured(decision.measured_after)}"


def _measured(seconds: float | None) -> str:
    return "not measured" if seconds is None else duration(seconds)


def _why(decision: DecisionRecord) -> Markup:
    solver = (
        f"solver: {decision.solver_status}, gap {percent(decision.solver_gap)}, {duration(decision.solver_seconds)}"
    )
    return join(text(decision.reason), tag("div", text(solver), class_="note"))


def _facts(*facts: tuple[str, str]) -> Markup:
    return tag("dl", *(join(tag("dt", text(name)), tag("dd", text(value))) for name, value in facts))


def _texts(*cells: str) -> tuple[Markup, ...]:
    return tuple(text(cell) for cell in cells)


def _health(steps: Sequence[StepRecord]) -> list[tuple[str, list[float], Any, str]]:
    return [
        ("Reward", [s.reward_mean for s in steps], plain, "of a trajectory"),
        ("Turns", [s.turns_mean for s in steps], plain, "of a trajectory"),
        (
            "Groups without signal",
            [s.groups_without_signal / max(1, s.groups) for s in steps],
            percent,
            "all samples of a prompt earned the same",
        ),
        ("Staleness", [s.staleness_mean for s in steps], plain, "versions between generation and training"),
        ("Largest staleness", [float(s.staleness_max) for s in steps], plain, "versions"),
        (
            "Behaviour weight",
            [s.behaviour_weight_mean for s in steps],
            plain,
            "min(π_prox/μ, 2); 1 where data are fresh",
        ),
        ("Moved since generation", [s.prox_gap_mean for s in steps], plain, "mean |log π_prox − log μ| of a token"),
        ("Clipped", [s.clip_share for s in steps], percent, "tokens whose probability ratio left the trust region"),
        ("Gradient norm", [s.grad_norm for s in steps], plain, "before clipping"),
        ("Trained tokens", [float(s.trained_tokens) for s in steps], count, "in one step"),
        ("Weight load", [s.load_seconds for s in steps], duration, "of one engine"),
    ]
