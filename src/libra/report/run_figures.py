"""The charts of a run that has made steps.

A decision has the same name, `D1`, `D2`, ..., in every chart and in the table of decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libra.plan.transition import Role
from libra.records.causes import WAITED_FOR, Cause, total
from libra.records.roles import styles
from libra.records.run_log import RunLog
from libra.records.schema import DecisionRecord, Evaluation, EventRecord, PeriodRecord, StepRecord
from libra.report.charts import (
    MAX_COLUMNS,
    MAX_POINTS,
    Layer,
    Pair,
    Series,
    group_size,
    line_chart,
    notes_fit,
    paired_bars,
    stacked_chart,
    time_unit,
)
from libra.report.colours import BUCKETS, CAUSES, ROLES, ink
from libra.report.lanes import Bar, Lane, lane_chart
from libra.report.page import Figure
from libra.report.vega import ALARM, FULL, HALF, Axis, Marker, ends
from libra.report.words import BOTTLENECK_WORDS, duration, percent, plural, signed_percent

_QUANTILES = (
    ("p99: 99 of 100 are shorter", "context_p99", "var(--deep)"),
    ("p90: 90 of 100 are shorter", "context_p90", "var(--blue)"),
    ("p50: half are shorter", "context_p50", "#56b4e9"),
)
_REWARD, _TOKENS = "var(--blue)", "var(--green)"
_PREDICTED, _MEASURED, _OTHER = "#aab4bf", "var(--blue)", "#8a949e"
_PARTS = (  # of a step: the trainer's seconds add up to it
    ("train", "train_seconds", ROLES[Role.TRAIN]),
    ("exchange gradients", "exchange_seconds", CAUSES[Cause.EXCHANGING]),
    ("publish weights", "publish_seconds", ROLES[Role.DRAINING]),
    ("checkpoint", "checkpoint_seconds", CAUSES[Cause.CHECKPOINTING]),
    ("redone after a loss", "redone_seconds", CAUSES[Cause.REDOING]),
    ("held at a boundary", "held_seconds", CAUSES[Cause.BOUNDARY]),
    ("wait for a batch", "wait_seconds", ROLES[Role.IDLE]),
)
_MARKED_LOSSES = 12  # more would hide what they are drawn over


def learning_figures(log: RunLog) -> tuple[Figure, ...]:
    return _rewards(log), _lengths(log)


def speed_figures(log: RunLog) -> tuple[Figure, ...]:
    return _tokens(log), _seconds(log), _predictions(log)


def device_figures(log: RunLog) -> tuple[Figure, ...]:
    return _devices(log), _devices_over_time(log)


def role_figures(log: RunLog) -> tuple[Figure, ...]:
    return (_roles(log),)


def named_decisions(log: RunLog) -> list[tuple[str, DecisionRecord]]:
    return [(f"D{number}", decision) for number, decision in enumerate(log.taken, start=1)]


def role_spans(steps: Sequence[StepRecord], worker: str) -> list[tuple[str, float, float]]:
    """(role, start, end) in seconds for each time the worker kept one role; steps that do not name it leave a gap."""
    spans: list[tuple[str, float, float]] = []
    last_seen = None
    for index, step in enumerate(steps):
        role = step.roles.get(worker)
        if role is None:
            continue
        start = step.time - step.step_seconds
        if spans and last_seen == index - 1:
            held, since, _ = spans[-1]
            if held == role:
                spans[-1] = (role, since, step.time)
            else:
                spans[-1] = (held, since, start)
                spans.append((role, start, step.time))
        else:
            spans.append((role, start, step.time))
        last_seen = index
    return spans


def running_mean(values: Sequence[float], window: int, parts: Sequence[str]) -> list[float]:
    """Mean of each value and up to `window - 1` before it that belong to the same part; parts are contiguous."""
    means: list[float] = []
    start = 0
    for i in range(len(values)):
        if parts[i] != parts[start]:
            start = i
        recent = values[max(start, i + 1 - window) : i + 1]
        means.append(sum(recent) / len(recent))
    return means


def _rewards(log: RunLog) -> Figure:
    scale, axis = _time_axis(log)
    evaluations = log.summary.evaluations if log.summary else ()
    markers = [_evaluation_marker(evaluation, log.steps, scale) for evaluation in evaluations]
    points = [(step.time / scale, step.reward_mean) for step in log.steps]
    series = _with_running_mean("mean reward of a step", _REWARD, points, [""] * len(points))
    note = "Dashed lines: accuracy on held-out questions (sampled)." if markers else "No accuracy was recorded."
    return _lines("Reward", note + _thinned(log, MAX_POINTS), series, axis, "mean reward of a trajectory", markers)


def _lengths(log: RunLog) -> Figure:
    series = [
        Series(name, colour, [(step.step, getattr(step, field)) for step in log.steps])
        for name, field, colour in _QUANTILES
    ]
    note = "Final context of the trajectories trained on." + _thinned(log, MAX_POINTS)
    axis = Axis("optimiser step", ends(log.steps[0].step, log.steps[-1].step))
    return _lines("Length of trajectories", note, series, axis, "tokens", [])


def _tokens(log: RunLog) -> Figure:
    scale, axis = _time_axis(log)
    points = [(step.time / scale, step.generated_tokens / step.step_seconds) for step in log.steps]
    # A mean across a change of allocation would show neither what was before nor what came after.
    series = _with_running_mean("all engines, in one step", _TOKENS, points, [step.allocation for step in log.steps])
    markers, note = _decision_markers(log, scale), _marker_note(log)
    if len(log.losses) <= _MARKED_LOSSES:
        markers += [Marker(event.time / scale, "lost", _loss(event), ALARM) for event in log.losses]
    else:
        note += f" The {plural(len(log.losses), 'loss', 'losses')} of workers are not marked."
    note += _thinned(log, MAX_POINTS)
    return _lines("Generation speed", note, series, axis, "generated tokens per second", markers)


def _seconds(log: RunLog) -> Figure:
    """The engines work beside the trainer, so their seconds are a line, not a layer."""
    layers = [Layer(name, colour, [getattr(step, field) for step in log.steps]) for name, field, colour in _PARTS]
    known = [sum(layer.values[index] for layer in layers) for index in range(len(log.steps))]
    others = [max(0.0, step.step_seconds - seconds) for step, seconds in zip(log.steps, known, strict=True)]
    layers = [layer for layer in (*layers, Layer("other", _OTHER, others)) if any(layer.values)]
    busiest = [(step.step, step.generate_seconds) for step in log.steps]
    overlay = Series("busiest engine generates (meanwhile)", _MEASURED, busiest)
    note = "Columns: the trainer's time. Line: engines, which work beside it." + _thinned(log, MAX_COLUMNS, "column")
    return _columns("Where a step's seconds go", note, log, layers, overlay, Axis("seconds of one step"))


def _predictions(log: RunLog) -> Figure:
    title = "Step time, predicted and measured"
    if not log.periods:
        why = "No planning period was completed, so no prediction can be held against a measurement."
        return Figure(title, why, wide=True)
    pairs = [_pair(period) for period in log.periods]
    note = f"{'Above' if notes_fit(pairs) else 'Under the pointer on'} each pair: error of the prediction in %."
    if any(period.switching for period in log.periods):
        note += " Pale: a worker changed role in that period, which no prediction covers."
    chart = paired_bars(pairs, (_PREDICTED, _MEASURED), "steps of the planning period", Axis("seconds of one step"))
    return Figure(title, note, chart, (("predicted", _PREDICTED), ("measured", _MEASURED)), wide=True)


def _pair(period: PeriodRecord) -> Pair:
    first, last = period.first_step, period.last_step
    steps = f"{first}" if first == last else f"{first}–{last}"
    title = (
        f"period {period.period}, steps {steps}, {period.allocation}: predicted {duration(period.predicted_seconds)}, "
        f"measured {duration(period.measured_seconds)} ({signed_percent(period.relative_error, 1)}); "
        f"predicted bottleneck: {BOTTLENECK_WORDS[period.predicted_bottleneck]}"
    )
    return Pair(
        label=steps,
        left=period.predicted_seconds,
        right=period.measured_seconds,
        note="" if period.switching else f"{100 * period.relative_error:+.0f}",
        title=title + ("; a worker changed role in it" if period.switching else ""),
        faded=period.switching,
    )


def _devices(log: RunLog) -> Figure:
    """One bar a worker, and one for all of them: shares of the time in which steps were made."""
    title = "Where the device time went"
    names = sorted({worker for step in log.steps for worker in step.device_seconds})
    if not names:
        return Figure(title, "The steps do not say what the time of devices went to.", wide=True)
    workers = {name: total(step.device_seconds.get(name, {}) for step in log.steps) for name in names}
    everybody = total(workers.values())
    lanes = [Lane(name, _shares(name, causes)) for name, causes in (("all devices", everybody), *workers.items())]
    waits = (f"{cause.words.capitalize()}: {cause.meaning}." for cause in everybody if cause in WAITED_FOR)
    note = " ".join(("Full colours make tokens or gradients, or are needed for it; pale ones wait.", *waits))
    chart = lane_chart(lanes, Axis("% of the time in which steps were made", (0.0, 100.0)))
    return Figure(title, note, chart, tuple((cause.words, CAUSES[cause]) for cause in everybody), wide=True)


def _devices_over_time(log: RunLog) -> Figure:
    title = "Where the device time went, step by step"
    sums = [total(step.device_seconds.values()) for step in log.steps]
    if not any(sums):
        return Figure(title, "The steps do not say what the time of devices went to.", wide=True)
    wholes = [sum(row.values()) or 1.0 for row in sums]
    layers = [
        Layer(
            cause.words,
            CAUSES[cause],
            [100 * row.get(cause, 0.0) / whole for row, whole in zip(sums, wholes, strict=True)],
        )
        for cause in total(sums)
    ]
    note = _marker_note(log) + _thinned(log, MAX_COLUMNS, "column")
    return _columns(title, note, log, layers, None, Axis("% of the device time of a step", (0.0, 100.0)), wide=True)


def _roles(log: RunLog) -> Figure:
    title = "Who did what"
    scale, axis = _time_axis(log)
    workers = sorted({worker for step in log.steps for worker in step.roles})
    if not workers:
        return Figure(title, "The steps name no workers, so there is no one to show.", wide=True)
    colours = styles((role for step in log.steps for role in step.roles.values()), ROLES, BUCKETS)
    lanes = [
        Lane(
            worker,
            [
                Bar(
                    start / scale,
                    end / scale,
                    role.removeprefix("rollout:"),
                    f"{worker}: {role}, {duration(start)} – {duration(end)}",
                    colours[role],
                    ink(colours[role]),
                )
                for role, start, end in role_spans(log.steps, worker)
            ],
            [(event.time / scale, _loss(event)) for event in log.losses if event.worker == worker],
        )
        for worker in workers
    ]
    legend = tuple((role.replace("rollout:", "rollout, "), colour) for role, colour in colours.items())
    note = "One lane a worker. " + _marker_note(log) + (" Crosses: it was lost." if log.losses else "")
    return Figure(title, note, lane_chart(lanes, axis, _decision_markers(log, scale)), legend, wide=True)


def _shares(name: str, causes: Mapping[Cause, float]) -> list[Bar]:
    """A bar of 100 %, a part for each cause."""
    whole, at, spans = sum(causes.values()), 0.0, []
    for cause, seconds in causes.items():
        share, colour = seconds / whole, CAUSES[cause]
        title = f"{name}: {percent(share)} {cause.words} ({cause.meaning}), {duration(seconds)}"
        spans.append(Bar(at, at + 100 * share, percent(share, 0), title, colour, ink(colour)))
        at += 100 * share
    return spans


def _lines(title: str, note: str, series: list[Series], x: Axis, y_label: str, markers: Sequence[Marker]) -> Figure:
    legend = tuple((one.name + (" (dots)" if one.dots else ""), one.colour) for one in series)
    return Figure(title, note, line_chart(series, x, Axis(y_label), markers), legend)


def _columns(
    title: str, note: str, log: RunLog, layers: list[Layer], overlay: Series | None, y: Axis, wide: bool = False
) -> Figure:
    """A column a step."""
    steps = [float(step.step) for step in log.steps]
    x = Axis("optimiser step", (steps[0] - 0.5, steps[-1] + 0.5))
    chart = stacked_chart(steps, layers, overlay, x, y, _decision_markers(log, None), FULL if wide else HALF)
    lines = [] if overlay is None else [(overlay.name, overlay.colour)]
    return Figure(title, note, chart, (*((layer.name, layer.colour) for layer in layers), *lines), wide)


def _with_running_mean(name: str, colour: str, points: list[tuple[float, float]], parts: Sequence[str]) -> list[Series]:
    window = min(8, len(points) // 10)
    if window < 2:
        return [Series(name, colour, points)]
    smooth = running_mean([y for _, y in points], window, parts)
    line = [(x, y) for (x, _), y in zip(points, smooth, strict=True)]
    return [Series(name, colour, points, dots=True), Series(f"mean of {window} steps", colour, line)]


def _evaluation_marker(evaluation: Evaluation, steps: Sequence[StepRecord], scale: float) -> Marker:
    times = [step.time for step in steps if step.step <= evaluation.step]
    title = (
        f"{evaluation.name}, after step {evaluation.step}: sampled {percent(evaluation.sampled_accuracy)}, "
        f"greedy {percent(evaluation.greedy_accuracy)} of {plural(evaluation.questions, 'question')}"
    )
    return Marker(times[-1] / scale if times else 0.0, percent(evaluation.sampled_accuracy, 0), title)


def _decision_markers(log: RunLog, scale: float | None) -> list[Marker]:
    """Taken decisions, on a time axis of this scale, or on the step axis if it is None."""
    return [
        Marker(
            decision.step if scale is None else decision.time / scale,
            name,
            f"after step {decision.step}: {decision.before} → {decision.after}",
        )
        for name, decision in named_decisions(log)
    ]


def _marker_note(log: RunLog) -> str:
    if not log.taken:
        return "The allocation never changed."
    names = "D1" if len(log.taken) == 1 else f"D1 … D{len(log.taken)}"
    return f"{names}: the allocation changed, see below."


def _loss(event: EventRecord) -> str:
    return f"{event.worker or 'a worker'} lost after {duration(event.time)}: {event.text}"


def _thinned(log: RunLog, limit: int, mark: str = "mark") -> str:
    """What a reader must be told of a chart that has no room for every step."""
    together = group_size(len(log.steps), limit)
    return "" if together == 1 else f" Each {mark} is the mean of {together} steps."


def _time_axis(log: RunLog) -> tuple[float, Axis]:
    first = log.steps[0]
    start, end = min(0.0, first.time - first.step_seconds), log.steps[-1].time
    scale, unit = time_unit(end - start)
    return scale, Axis(f"time since the RL loop began ({unit})", (start / scale, end / scale))
