"""The charts of a run.

Invariant: a figure is a chart with something in it, or a sentence that says what is missing and why; never an empty
plot. Roles and what they do have the same colour in every figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libra.records.causes import WAITED_FOR, Cause, total
from libra.records.roles import Role, styles
from libra.records.run_log import RunLog
from libra.records.schema import StepRecord
from libra.report.axes import Axis, measured_axis, running_axis, time_unit
from libra.report.charts import (
    MAX_COLUMNS,
    MAX_POINTS,
    Layer,
    Pair,
    Series,
    group_size,
    legend,
    line_chart,
    notes_fit,
    paired_bars,
    stacked_chart,
)
from libra.report.colours import BUCKETS, CAUSES, ROLES, ink
from libra.report.lanes import Lane, Span, lane_chart
from libra.report.markers import decision_markers, evaluation_marker, loss_markers, loss_text, marker_note
from libra.report.markup import Markup, join, tag, text
from libra.report.paper import FULL, Marker
from libra.report.verdict import BOTTLENECK_WORDS
from libra.report.words import duration, percent, plural, signed_percent

_QUANTILES = ("#56b4e9", "#0072b2", "#003f63")
_REWARD, _TOKENS = "#0072b2", "#00795a"
_PREDICTED, _MEASURED = "#aab4bf", "#0072b2"
_CHECKPOINT, _REDONE, _HELD = (CAUSES[cause] for cause in (Cause.CHECKPOINTING, Cause.REDOING, Cause.BOUNDARY))
_STEP_AXIS = "optimiser step"
_MARKED_LOSSES = 12  # more would hide what they are drawn over


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    note: str
    body: Markup
    wide: bool = False


def device_figures(log: RunLog) -> tuple[Figure, ...]:
    return devices_figure(log), devices_over_time_figure(log)


def learning_figures(log: RunLog) -> tuple[Figure, ...]:
    return reward_figure(log), length_figure(log)


def speed_figures(log: RunLog) -> tuple[Figure, ...]:
    return tokens_figure(log), seconds_figure(log), prediction_figure(log)


def reward_figure(log: RunLog) -> Figure:
    title = "Reward"
    if not log.steps:
        return _missing(title, "No step was finished, so no reward is known.")
    scale, axis = _time_axis(log)
    evaluations = log.summary.evaluations if log.summary else ()
    markers = [evaluation_marker(evaluation, log.steps, scale) for evaluation in evaluations]
    points = [(step.time / scale, step.reward_mean) for step in log.steps]
    series = _with_running_mean("mean reward of a step", _REWARD, points, [""] * len(points))
    note = "Dashed lines: accuracy on held-out questions (sampled)." if markers else "No accuracy was recorded."
    note += _thinned(log, MAX_POINTS)
    return _lines(title, note, series, axis, "mean reward of a trajectory", markers)


def length_figure(log: RunLog) -> Figure:
    title = "Length of trajectories"
    if not log.steps:
        return _missing(title, "No step was finished, so no length is known.")
    quantiles = [("half", "p50"), ("90 of 100", "p90"), ("99 of 100", "p99")]
    values = [
        [step.context_p50 for step in log.steps],
        [step.context_p90 for step in log.steps],
        [step.context_p99 for step in log.steps],
    ]
    series = [
        Series(
            f"{name}: {share} are shorter",
            colour,
            tuple((float(s.step), y) for s, y in zip(log.steps, column, strict=True)),
        )
        for (share, name), colour, column in zip(quantiles, _QUANTILES, values, strict=True)
    ]
    note = "Final context of the trajectories trained on." + _thinned(log, MAX_POINTS)
    return _lines(title, note, series[::-1], _step_axis(log), "tokens", [])


def tokens_figure(log: RunLog) -> Figure:
    title = "Generation speed"
    if not log.steps:
        return _missing(title, "No step was finished, so no speed is known.")
    scale, axis = _time_axis(log)
    points = [(step.time / scale, step.generated_tokens / step.step_seconds) for step in log.steps]
    # A mean across a change of allocation would show neither what was before nor what came after.
    series = _with_running_mean("all engines, in one step", _TOKENS, points, [step.allocation for step in log.steps])
    markers, note = decision_markers(log, scale), marker_note(log)
    if len(log.losses) <= _MARKED_LOSSES:
        markers += loss_markers(log, scale)
    else:
        note += f" The {plural(len(log.losses), 'loss', 'losses')} of workers are not marked."
    note += _thinned(log, MAX_POINTS)
    return _lines(title, note, series, axis, "generated tokens per second", markers)


def seconds_figure(log: RunLog) -> Figure:
    """The trainer's seconds add up to the step; the engines work beside it, so theirs are a line, not a layer."""
    title = "Where a step's seconds go"
    if not log.steps:
        return _missing(title, "No step was finished, so there is nothing to divide.")
    layers = [
        Layer("train", ROLES[Role.TRAIN], tuple(step.train_seconds for step in log.steps)),
        Layer("exchange gradients", "#8c5a00", tuple(step.exchange_seconds for step in log.steps)),
        Layer("publish weights", ROLES[Role.DRAINING], tuple(step.publish_seconds for step in log.steps)),
        Layer("checkpoint", _CHECKPOINT, tuple(step.checkpoint_seconds for step in log.steps)),
        Layer("made again after a loss", _REDONE, tuple(step.redone_seconds for step in log.steps)),
        Layer("held at a boundary", _HELD, tuple(step.held_seconds for step in log.steps)),
        Layer("wait for a batch", ROLES[Role.IDLE], tuple(step.wait_seconds for step in log.steps)),
        Layer("other", "#8a949e", tuple(_other_seconds(step) for step in log.steps)),
    ]
    layers = [layer for layer in layers if any(layer.values)]
    busiest = tuple((float(step.step), step.generate_seconds) for step in log.steps)
    overlay = Series("busiest engine generates (meanwhile)", _MEASURED, busiest)
    steps = [float(step.step) for step in log.steps]
    top = [max(step.step_seconds, step.generate_seconds) for step in log.steps]
    chart = stacked_chart(
        steps,
        layers,
        overlay,
        running_axis(_STEP_AXIS, steps[0] - 0.5, steps[-1] + 0.5, whole=True),
        measured_axis("seconds of one step", top),
        decision_markers(log, None),
    )
    shown = legend([(layer.name, layer.colour) for layer in layers] + [(overlay.name, overlay.colour)])
    note = "Columns: the trainer's time. Line: engines, which work beside it." + _thinned(log, MAX_COLUMNS, "column")
    return Figure(title, note, join(shown, chart))


def prediction_figure(log: RunLog) -> Figure:
    title = "Step time, predicted and measured"
    if not log.periods:
        return _missing(
            title, "No planning period was completed, so no prediction can be held against a measurement.", wide=True
        )
    pairs = [
        Pair(
            label=_steps(period.first_step, period.last_step),
            left=period.predicted_seconds,
            right=period.measured_seconds,
            note="" if period.switching else f"{100 * period.relative_error:+.0f}",
            title=(
                f"period {period.period}, steps {_steps(period.first_step, period.last_step)}, {period.allocation}: "
                f"predicted {duration(period.predicted_seconds)}, measured {duration(period.measured_seconds)} "
                f"({signed_percent(period.relative_error, 1)}); predicted bottleneck: "
                f"{BOTTLENECK_WORDS[period.predicted_bottleneck]}"
                + ("; a worker changed role in it" if period.switching else "")
            ),
            faded=period.switching,
        )
        for period in log.periods
    ]
    both = [seconds for pair in pairs for seconds in (pair.left, pair.right)]
    headroom = max(both) * 1.04  # room for the notes above the bars
    chart = paired_bars(
        pairs,
        (_PREDICTED, _MEASURED),
        "steps of the planning period",
        measured_axis("seconds of one step", [*both, headroom]),
    )
    switching = any(period.switching for period in log.periods)
    note = f"{'Above' if notes_fit(pairs) else 'Under the pointer on'} each pair: error of the prediction in %."
    if switching:
        note += " Pale: a worker changed role in that period, which no prediction covers."
    shown = legend([("predicted", _PREDICTED), ("measured", _MEASURED)])
    return Figure(title, note, join(shown, chart), wide=True)


def devices_figure(log: RunLog) -> Figure:
    """One bar a worker, and one for all of them: shares of the time in which steps were made."""
    title = "Where the device time went"
    workers = device_time(log.steps)
    if not workers:
        return _missing(title, "No step was finished, so no device time is known.", wide=True)
    everybody = total(workers.values())
    lanes = [Lane(name, _shares(name, causes), ()) for name, causes in (("all devices", everybody), *workers.items())]
    axis = running_axis("% of the time in which steps were made", 0.0, 100.0)
    shown = legend((cause.words, CAUSES[cause]) for cause in everybody)
    note = "Full colours make tokens or gradients, or are needed for it; pale ones wait. " + " ".join(
        f"{cause.words.capitalize()}: {cause.meaning}." for cause in everybody if cause in WAITED_FOR
    )
    return Figure(title, note, join(shown, lane_chart(lanes, axis)), wide=True)


def devices_over_time_figure(log: RunLog) -> Figure:
    title = "Where the device time went, step by step"
    if not device_time(log.steps):
        return _missing(title, "No step was finished, so no device time is known.", wide=True)
    sums = [total(step.device_seconds.values()) for step in log.steps]
    wholes = [sum(row.values()) or 1.0 for row in sums]
    layers = [
        Layer(
            cause.words,
            CAUSES[cause],
            tuple(100 * row.get(cause, 0.0) / whole for row, whole in zip(sums, wholes, strict=True)),
        )
        for cause in total(sums)
    ]
    steps = [float(step.step) for step in log.steps]
    chart = stacked_chart(
        steps,
        layers,
        None,
        running_axis(_STEP_AXIS, steps[0] - 0.5, steps[-1] + 0.5, whole=True),
        measured_axis("% of the device time of a step", [100.0]),
        decision_markers(log, None),
        FULL,
    )
    shown = legend((layer.name, layer.colour) for layer in layers)
    note = marker_note(log) + _thinned(log, MAX_COLUMNS, "column")
    return Figure(title, note, join(shown, chart), wide=True)


def roles_figure(log: RunLog) -> Figure:
    title = "Who did what"
    if not log.steps:
        return _missing(title, "No step was finished, so no roles are known.", wide=True)
    scale, axis = _time_axis(log)
    colours = styles((role for step in log.steps for role in step.roles.values()), ROLES, BUCKETS)
    workers = sorted({worker for step in log.steps for worker in step.roles})
    crosses = {worker: [event for event in log.losses if event.worker == worker] for worker in workers}
    if not workers:
        return _missing(title, "The steps name no workers, so there is no one to show.", wide=True)
    lanes = [
        Lane(
            worker,
            tuple(
                Span(
                    start / scale,
                    end / scale,
                    role.removeprefix("rollout:"),
                    f"{worker}: {role}, {duration(start)} – {duration(end)}",
                    colours[role],
                    ink(colours[role]),
                )
                for role, start, end in role_spans(log.steps, worker)
            ),
            tuple((event.time / scale, loss_text(event)) for event in crosses[worker]),
        )
        for worker in workers
    ]
    shown = legend((role.replace("rollout:", "rollout, "), colour) for role, colour in colours.items())
    note = "One lane a worker. " + marker_note(log) + (" Crosses: it was lost." if log.losses else "")
    return Figure(title, note, join(shown, lane_chart(lanes, axis, decision_markers(log, scale))), wide=True)


def device_time(steps: Sequence[StepRecord]) -> dict[str, dict[Cause, float]]:
    """What the time of each worker went to, over these steps."""
    workers = sorted({worker for step in steps for worker in step.device_seconds})
    return {worker: total(step.device_seconds.get(worker, {}) for step in steps) for worker in workers}


def _shares(name: str, causes: Mapping[Cause, float]) -> tuple[Span, ...]:
    """A bar of 100 %, a part for each cause."""
    whole, at, spans = sum(causes.values()), 0.0, []
    for cause, seconds in causes.items():
        share, colour = seconds / whole, CAUSES[cause]
        title = f"{name}: {percent(share)} {cause.words} ({cause.meaning}), {duration(seconds)}"
        spans.append(Span(at, at + 100 * share, percent(share, 0), title, colour, ink(colour)))
        at += 100 * share
    return tuple(spans)


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


def _with_running_mean(name: str, colour: str, points: list[tuple[float, float]], parts: Sequence[str]) -> list[Series]:
    window = min(8, len(points) // 10)
    if window < 2:
        return [Series(name, colour, tuple(points))]
    smooth = running_mean([y for _, y in points], window, parts)
    line = tuple((x, y) for (x, _), y in zip(points, smooth, strict=True))
    return [Series(name, colour, tuple(points), "dots"), Series(f"mean of {window} steps", colour, line)]


def _steps(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}–{last}"


def _lines(
    title: str, note: str, series: list[Series], x_axis: Axis, y_label: str, markers: Sequence[Marker]
) -> Figure:
    y_axis = measured_axis(y_label, (y for one in series for _, y in one.points))
    shown = legend((one.name + (" (dots)" if one.style == "dots" else ""), one.colour) for one in series)
    return Figure(title, note, join(shown, line_chart(series, x_axis, y_axis, markers)))


def _thinned(log: RunLog, limit: int, mark: str = "mark") -> str:
    """What a reader must be told of a chart that has no room for every step."""
    together = group_size(len(log.steps), limit)
    return "" if together == 1 else f" Each {mark} is the mean of {together} steps."


def _missing(title: str, why: str, wide: bool = False) -> Figure:
    return Figure(title, "", tag("p", text(why), class_="missing"), wide)


def _time_axis(log: RunLog) -> tuple[float, Axis]:
    first = log.steps[0]
    start, end = min(0.0, first.time - first.step_seconds), log.steps[-1].time
    scale, unit = time_unit(end - start)
    return scale, running_axis(f"time since the RL loop began ({unit})", start / scale, end / scale)


def _step_axis(log: RunLog) -> Axis:
    return running_axis(_STEP_AXIS, log.steps[0].step, log.steps[-1].step, whole=True)


def _other_seconds(step: StepRecord) -> float:
    known = step.train_seconds + step.exchange_seconds + step.publish_seconds + step.wait_seconds
    known += step.checkpoint_seconds + step.redone_seconds + step.held_seconds
    return max(0.0, step.step_seconds - known)
