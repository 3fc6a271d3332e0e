"""The figures of a run that has made steps.

A decision has the same name, `D1`, `D2`, ..., in every figure and in the table of decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libra.plan.transition import Role
from libra.records.causes import WAITED_FOR, Cause, total
from libra.records.run_log import RunLog
from libra.records.schema import DecisionRecord, EventRecord, PeriodRecord, StepRecord, styles
from libra.report.charts import (
    MAX_COLUMNS,
    MAX_POINTS,
    Figure,
    Pair,
    Series,
    column_figure,
    group_size,
    line_figure,
    pair_figure,
    time_unit,
)
from libra.report.lanes import Lane, LaneSpan, lane_figure
from libra.report.page import BUCKETS, CAUSES, ROLES
from libra.report.vega import ALARM, Axis, Marker, ends
from libra.report.words import BOTTLENECK_WORDS, duration, percent, plural, signed_percent

_QUANTILES = (
    ("p99: 99 of 100 are shorter", "context_p99", "var(--deep)"),
    ("p90: 90 of 100 are shorter", "context_p90", "var(--blue)"),
    ("p50: half are shorter", "context_p50", "#56b4e9"),
)
_REWARD, _TOKENS = "var(--blue)", "var(--green)"
_PREDICTED, _MEASURED, _OTHER = "#aab4bf", "var(--blue)", "#8a949e"
_PARTS = (  # the trainer's seconds, which add up to a step
    ("train", "train_seconds", ROLES[Role.TRAIN]),
    ("exchange gradients", "exchange_seconds", CAUSES[Cause.EXCHANGING]),
    ("publish weights", "publish_seconds", ROLES[Role.DRAINING]),
    ("checkpoint", "checkpoint_seconds", CAUSES[Cause.CHECKPOINTING]),
    ("redone after a loss", "redone_seconds", CAUSES[Cause.REDOING]),
    ("held at a boundary", "held_seconds", CAUSES[Cause.BOUNDARY]),
    ("wait for a batch", "wait_seconds", ROLES[Role.IDLE]),
)
_MARKED_LOSSES = 12  # more markers would hide the curves


def run_figures(log: RunLog) -> dict[str, tuple[Figure, ...]]:
    """The figures, by chapter of the page."""
    return {
        "learning": (_rewards(log), _lengths(log)),
        "speed": (_tokens(log), _seconds(log), _predictions(log)),
        "devices": (_devices(log), _devices_over_time(log)),
        "roles": (_roles(log),),
    }


def named_decisions(log: RunLog) -> list[tuple[str, DecisionRecord]]:
    return [(f"D{number}", decision) for number, decision in enumerate(log.taken, start=1)]


def role_spans(steps: Sequence[StepRecord], worker: str) -> list[tuple[str, float, float]]:
    """(role, start, end) in seconds for each period in which the worker kept one role; steps that do not name the
    worker leave a gap.
    """
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
    """Mean of each value and up to `window - 1` previous values of the same part; parts are contiguous."""
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
    markers = []
    for it in log.summary.evaluations if log.summary else ():
        times = [step.time for step in log.steps if step.step <= it.step]
        title = (
            f"{it.name}, after step {it.step}: sampled {percent(it.sampled_accuracy)}, greedy"
            f" {percent(it.greedy_accuracy)} of {plural(it.questions, 'question')}"
        )
        markers.append(Marker(times[-1] / scale if times else 0.0, percent(it.sampled_accuracy, 0), title))
    points = [(step.time / scale, step.reward_mean) for step in log.steps]
    series = _with_running_mean("mean reward of a step", _REWARD, points, [""] * len(points))
    note = "Dashed lines: accuracy on held-out questions (sampled)." if markers else "No accuracy was recorded."
    note += _thinned(log, MAX_POINTS)
    return line_figure("Reward", note, series, axis, Axis("mean reward of a trajectory"), markers)


def _lengths(log: RunLog) -> Figure:
    series = [Series(name, colour, _by_step(log, field)) for name, field, colour in _QUANTILES]
    note = "Final context of the trajectories trained on." + _thinned(log, MAX_POINTS)
    axis = Axis("optimiser step", ends(log.steps[0].step, log.steps[-1].step))
    return line_figure("Length of trajectories", note, series, axis, Axis("tokens"))


def _tokens(log: RunLog) -> Figure:
    scale, axis = _time_axis(log)
    points = [(step.time / scale, step.generated_tokens / step.step_seconds) for step in log.steps]
    # A mean across a change of allocation would show neither the old steps nor the new ones.
    series = _with_running_mean("all engines, in one step", _TOKENS, points, [step.allocation for step in log.steps])
    markers, note = _decision_markers(log, scale), _marker_note(log)
    if len(log.losses) <= _MARKED_LOSSES:
        markers += [Marker(event.time / scale, "lost", _loss(event), ALARM) for event in log.losses]
    else:
        note += f" The {plural(len(log.losses), 'loss', 'losses')} of workers are not marked."
    note += _thinned(log, MAX_POINTS)
    return line_figure("Generation speed", note, series, axis, Axis("generated tokens per second"), markers)


def _seconds(log: RunLog) -> Figure:
    """Seconds of steps. Engines and trainers work in parallel, so the engines' seconds are a line, not part of the
    column."""
    parts = [Series(name, colour, _by_step(log, field)) for name, field, colour in _PARTS]
    known = [sum(seconds for _, seconds in column) for column in zip(*(part.points for part in parts), strict=True)]
    other = [(it.step, max(0.0, it.step_seconds - seconds)) for it, seconds in zip(log.steps, known, strict=True)]
    parts = [part for part in (*parts, Series("other", _OTHER, other)) if any(seconds for _, seconds in part.points)]
    busiest = Series("busiest engine generates (meanwhile)", _MEASURED, _by_step(log, "generate_seconds"))
    note = "Columns: the trainer's time. Line: engines, which work at the same time." + _thinned(
        log, MAX_COLUMNS, "column"
    )
    title, y = "Where a step's seconds go", Axis("seconds of one step")
    return column_figure(title, note, parts, _step_axis(log), y, _decision_markers(log), overlay=busiest)


def _predictions(log: RunLog) -> Figure:
    title = "Step time, predicted and measured"
    if not log.periods:
        why = "No planning period was completed, so no prediction can be compared with a measurement."
        return Figure(title, why, wide=True)
    note = "Above each pair, if there is room, and under the pointer: the error of the prediction in %."
    if any(period.switching for period in log.periods):
        note += " Pale: a worker changed role in that period, which no prediction covers."
    sides, y = (("predicted", _PREDICTED), ("measured", _MEASURED)), Axis("seconds of one step")
    return pair_figure(title, note, [_pair(it) for it in log.periods], sides, "steps of the planning period", y)


def _pair(period: PeriodRecord) -> Pair:
    first, last = period.first_step, period.last_step
    steps = f"{first}" if first == last else f"{first}–{last}"
    title = (
        f"period {period.period}, steps {steps}, {period.allocation}: predicted {duration(period.predicted_seconds)}, "
        f"measured {duration(period.measured_seconds)} ({signed_percent(period.relative_error, 1)}); "
        f"predicted bottleneck: {BOTTLENECK_WORDS[period.predicted_bottleneck]}"
    )
    if period.priced_seconds is not None:
        title += f"; priced {duration(period.priced_seconds)} before it was corrected"
    title += "; a worker changed role in it" if period.switching else ""
    note = "" if period.switching else f"{100 * period.relative_error:+.0f}"
    return Pair(steps, period.predicted_seconds, period.measured_seconds, note, title, faded=period.switching)


def _devices(log: RunLog) -> Figure:
    """A bar for each worker, and one for all workers: shares of the time in which steps were made."""
    title = "Where the device time went"
    names = sorted({worker for step in log.steps for worker in step.device_seconds})
    if not names:
        return Figure(title, "The steps have no device time by cause.", wide=True)
    workers = {name: total(step.device_seconds.get(name, {}) for step in log.steps) for name in names}
    everybody = total(workers.values())
    lanes = [Lane(name, _shares(name, causes)) for name, causes in (("all devices", everybody), *workers.items())]
    waits = (f"{cause.words.capitalize()}: {cause.meaning}." for cause in everybody if cause in WAITED_FOR)
    note = " ".join(("Full colours: making tokens or gradients, and its overhead. Pale colours: waiting.", *waits))
    legend = tuple((cause.words, CAUSES[cause]) for cause in everybody)
    return lane_figure(title, note, lanes, Axis("% of the time in which steps were made", (0.0, 100.0)), legend)


def _devices_over_time(log: RunLog) -> Figure:
    title = "Where the device time went, step by step"
    sums = [total(step.device_seconds.values()) for step in log.steps]
    if not any(sums):
        return Figure(title, "The steps have no device time by cause.", wide=True)
    parts = []
    for cause in total(sums):
        shares = [100 * row.get(cause, 0.0) / (sum(row.values()) or 1.0) for row in sums]
        points = [(step.step, share) for step, share in zip(log.steps, shares, strict=True)]
        parts.append(Series(cause.words, CAUSES[cause], points))
    note = _marker_note(log) + _thinned(log, MAX_COLUMNS, "column")
    y = Axis("% of the device time of a step", (0.0, 100.0))
    return column_figure(title, note, parts, _step_axis(log), y, _decision_markers(log), wide=True)


def _roles(log: RunLog) -> Figure:
    title = "Roles of the workers"
    scale, axis = _time_axis(log)
    workers = sorted({worker for step in log.steps for worker in step.roles})
    if not workers:
        return Figure(title, "The steps name no workers, so none can be shown.", wide=True)
    colours = styles((role for step in log.steps for role in step.roles.values()), ROLES, BUCKETS)
    lanes = []
    for worker in workers:
        bars = []
        for role, start, end in role_spans(log.steps, worker):
            words = f"{worker}: {role}, {duration(start)} – {duration(end)}"
            bars.append(LaneSpan(start / scale, end / scale, role.removeprefix("rollout:"), words, colours[role]))
        lost = [(event.time / scale, _loss(event)) for event in log.losses if event.worker == worker]
        lanes.append(Lane(worker, bars, lost))
    legend = tuple((role.replace("rollout:", "rollout, "), colour) for role, colour in colours.items())
    note = "One lane a worker. " + _marker_note(log) + (" Crosses: it was lost." if log.losses else "")
    return lane_figure(title, note, lanes, axis, legend, _decision_markers(log, scale))


def _shares(name: str, causes: Mapping[Cause, float]) -> list[LaneSpan]:
    """A bar of 100 %, a part for each cause."""
    whole, at, spans = sum(causes.values()), 0.0, []
    for cause, seconds in causes.items():
        share = seconds / whole
        title = f"{name}: {percent(share)} {cause.words} ({cause.meaning}), {duration(seconds)}"
        spans.append(LaneSpan(at, at + 100 * share, percent(share, 0), title, CAUSES[cause]))
        at += 100 * share
    return spans


def _with_running_mean(name: str, colour: str, points: list[tuple[float, float]], parts: Sequence[str]) -> list[Series]:
    window = min(8, len(points) // 10)
    if window < 2:
        return [Series(name, colour, points)]
    smooth = running_mean([y for _, y in points], window, parts)
    line = [(x, y) for (x, _), y in zip(points, smooth, strict=True)]
    return [Series(name, colour, points, dots=True), Series(f"mean of {window} steps", colour, line)]


def _decision_markers(log: RunLog, scale: float | None = None) -> list[Marker]:
    """Markers of taken decisions, on a time axis of this scale; on the step axis if the scale is None."""
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
    return f"{names}: changes of the allocation, see below."


def _loss(event: EventRecord) -> str:
    return f"{event.worker or 'a worker'} lost after {duration(event.time)}: {event.text}"


def _thinned(log: RunLog, limit: int, mark: str = "mark") -> str:
    """Note for a chart without room for every step; empty with enough room."""
    together = group_size(len(log.steps), limit)
    return "" if together == 1 else f" Each {mark} is the mean of {together} steps."


def _time_axis(log: RunLog) -> tuple[float, Axis]:
    first = log.steps[0]
    start, end = min(0.0, first.time - first.step_seconds), log.steps[-1].time
    scale, unit = time_unit(end - start)
    return scale, Axis(f"time since the RL loop began ({unit})", (start / scale, end / scale))


def _step_axis(log: RunLog) -> Axis:
    """The axis of figures with one column per step."""
    return Axis("optimiser step", (log.steps[0].step - 0.5, log.steps[-1].step + 0.5))


def _by_step(log: RunLog, field: str) -> list[tuple[float, float]]:
    return [(step.step, getattr(step, field)) for step in log.steps]
