"""The result of a run, as a paragraph and a few numbers.

Every statement follows from the log; missing facts are reported as unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from libra.plan.solution import Bottleneck
from libra.records.causes import WAITED_FOR, WORK, total
from libra.records.run_log import RunLog, outcomes, prediction_error
from libra.records.schema import Evaluation, PeriodRecord, StepRecord
from libra.report.page import Tile
from libra.report.words import BOTTLENECK_WORDS, count, duration, percent, plain, plural, signed_duration, size

LOSSES = "Lost workers"  # title of their table


def headline(log: RunLog) -> str:
    """The run in one short paragraph."""
    if not log.steps:
        return "No step was finished, so there is no result yet."
    return " ".join(said for said in (_learned(log), _speed(log), _devices(log), _lent(log), _decided(log)) if said)


def tiles(log: RunLog) -> tuple[Tile, ...]:
    steps, summary = log.steps, log.summary
    state = "interrupted" if summary is None else "finished" if summary.finished else "ended early"
    lasted = f"{state} after {duration(wall_seconds(log))}"
    made = [_accuracy_tile(log), Tile("Steps", count(len(steps)), lasted, alarming=state != "finished")]
    if steps:
        rate, tokens = count(tokens_per_second(steps)), count(sum(step.generated_tokens for step in steps))
        before, after = (duration(seconds) for seconds in edges([step.step_seconds for step in steps]))
        waited = f"trainer waited {percent(wait_share(steps), 0)} of the time"
        bound = "not predicted"
        if found := predicted_bottleneck(log.periods):
            bound, waited = BOTTLENECK_WORDS[found[0]], f"predicted for {percent(found[1], 0)} of the time; {waited}"
        made += [
            Tile("Generated", f"{rate} tokens/s", f"{tokens} in all"),
            Tile("Seconds of a step", f"{before} → {after}", "measured; means of the first and the last tenth"),
            Tile("Bottleneck", bound, waited),
        ]
    named = {event.worker or "unnamed" for event in log.losses} | set(summary.lost_workers if summary else ())
    lost = Tile("Workers lost", str(len(named) or "none"), ", ".join(sorted(named)), alarming=bool(named))
    made += [_decisions_tile(log), _prediction_tile(log), lost]
    memory, gap = "Peak memory", "Largest log-prob gap"
    if summary is None:
        return (*made, *(Tile(label, "unknown", "the run wrote no summary") for label in (memory, gap)))
    compared = "never compared" if summary.logprob_gap is None else plain(summary.logprob_gap)
    return (
        *made,
        Tile(memory, size(summary.peak_memory_bytes), "all processes together"),
        Tile(gap, compared, "maximum over tokens, engine against trainer"),
    )


def notices(log: RunLog) -> tuple[str, ...]:
    """Caveats for the reader: an unfinished run, lost workers, files cut off."""
    said = []
    last = f"until step {log.steps[-1].step}" if log.steps else "before its first step ended"
    if log.summary is None:
        said.append(
            f"Interrupted, or still running: the run has written no summary. The page shows its records {last}."
        )
    elif not log.summary.finished:
        said.append(f"The run ended before its last step. The page shows its records {last}.")
    said += _losses(log)
    said += [f"The last line of {name} was cut off and is left out." for name in log.cut_off]
    return tuple(said)


def _losses(log: RunLog) -> Iterator[str]:
    """A line for all recorded losses, which a table lists, and a line for unrecorded losses."""
    told = {event.worker for event in log.losses}
    if len(log.losses) == 1:
        [event] = log.losses
        yield f"{event.worker or 'A worker'} was lost after {duration(event.time)}: {event.text}"
    elif log.losses:
        who = f"{plural(len(told), 'worker')} {'was' if len(told) == 1 else 'were'} lost"
        yield f"{who}, {count(len(log.losses))} times in all: “{LOSSES}” below says when and why."
    silent = sorted(set(log.summary.lost_workers if log.summary else ()) - told)
    if silent:
        yield f"{', '.join(silent)} {'was' if len(silent) == 1 else 'were'} lost; time and reason were not recorded."


def why_nothing_was_decided(log: RunLog) -> str:
    """The reason why the run kept its first allocation, as far as the log contains it."""
    mode = f" The allocation mode was “{log.summary.allocation_mode}”." if log.summary else ""
    if not log.decisions:
        return (
            "No decision was taken, since the run recorded no planning result: it was shorter than a planning "
            f"period, or its allocation was fixed.{mode}"
        )
    reasons = Counter(decision.reason for decision in log.decisions)
    most, times = reasons.most_common(1)[0]
    return (
        "No decision was taken because no other allocation was worth its switch:"
        f" {plural(len(log.decisions), 'plan was', 'plans were')} considered."
        f" Most frequent reason ({times} of {len(log.decisions)}): {most}"
    )


def tokens_per_second(steps: Sequence[StepRecord]) -> float:
    return sum(step.generated_tokens for step in steps) / sum(step.step_seconds for step in steps)


def wait_share(steps: Sequence[StepRecord]) -> float:
    """Share of the time in which the trainer waited for a batch."""
    return sum(step.wait_seconds for step in steps) / sum(step.step_seconds for step in steps)


def predicted_bottleneck(periods: Sequence[PeriodRecord]) -> tuple[Bottleneck, float] | None:
    """The bottleneck predicted for most of the time, and its share of the time; None without periods."""
    seconds: Counter[Bottleneck] = Counter()
    for period in periods:
        seconds[period.predicted_bottleneck] += round(
            1e6 * period.measured_seconds * (period.last_step - period.first_step + 1)
        )
    if not seconds:
        return None
    name, most = seconds.most_common(1)[0]
    return name, most / seconds.total()


def first_and_last(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """The evaluations with the earliest and the latest weights; None if there are fewer than two."""
    if len({evaluation.step for evaluation in evaluations}) < 2:
        return None
    by_step = sorted(evaluations, key=lambda evaluation: evaluation.step)
    first = by_step[0]
    same = [evaluation for evaluation in by_step if evaluation.name == first.name and evaluation.step > first.step]
    return first, (same or by_step)[-1]


def edges(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last tenth, of at least one value each."""
    tenth = max(1, len(values) // 10)
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def wall_seconds(log: RunLog) -> float:
    if log.summary is not None:
        return log.summary.wall_seconds
    return max([step.time for step in log.steps] + [event.time for event in log.events], default=0.0)


def _learned(log: RunLog) -> str:
    made = f"in {plural(len(log.steps), 'step')} and {duration(wall_seconds(log))}"
    ends = first_and_last(log.summary.evaluations) if log.summary else None
    if ends is not None:
        before, after = (percent(evaluation.sampled_accuracy) for evaluation in ends)
        return f"Accuracy on held-out questions went from {before} to {after} {made}."
    before, after = (plain(value) for value in edges([step.reward_mean for step in log.steps]))
    return f"Mean reward went from {before} to {after} {made}; accuracy was not measured at both ends."


def _speed(log: RunLog) -> str:
    rate = f"The engines generated {count(tokens_per_second(log.steps))} tokens/s"
    found = predicted_bottleneck(log.periods)
    waited = f"the trainer waited for batches {percent(wait_share(log.steps), 0)} of the time"
    if found is None:
        return f"{rate}; {waited}."
    name, share = found
    bound = f"the predicted bottleneck was {BOTTLENECK_WORDS[name]} {percent(share, 0)} of the time"
    return f"{rate}; {bound}, and {waited}."


def _devices(log: RunLog) -> str:
    """The share of work in the device time, and the largest cause of waiting. Empty if steps have no device time."""
    seconds = total(row for step in log.steps for row in step.device_seconds.values())
    whole = sum(seconds.values())
    if not whole:
        return ""
    work = sum(seconds.get(cause, 0.0) for cause in WORK)
    waits = {cause: seconds[cause] for cause in WAITED_FOR if cause in seconds}
    said = f"Devices generated or computed {percent(work / whole, 0)} of the time"
    if not waits:
        return f"{said}."
    most = max(waits, key=lambda cause: waits[cause])
    return f"{said}; the main wait was for {WAITED_FOR[most]} ({percent(waits[most] / whole, 0)})."


def _lent(log: RunLog) -> str:
    """A sentence on lending; empty if the run has no lent devices."""
    lending = log.summary.lending if log.summary is not None else None
    if lending is None:
        return ""
    had = "Nothing was lent"
    if lending.rule != "off":
        had = f"Rollout had the lent devices for {percent(lending.share, 0)} of the time it wanted them"
    if (users := lending.users) is None:
        return f"{had}."
    return f"{had}; {count(users.missed)} of {plural(users.requests, 'request')} of users missed their SLO."


def _net(log: RunLog) -> tuple[int, float, str]:
    """Taken decisions with a known gain: their number, the total of saved seconds, and the error of this total."""
    known = [it for it in outcomes(log) if it.net_seconds is not None]
    errors = [it.error_seconds for it in known if it.error_seconds is not None]
    error = f" (± {duration(sum(errors))})" if len(errors) == len(known) else " (error unknown)"
    return len(known), sum(it.net_seconds or 0.0 for it in known), error


def _decided(log: RunLog) -> str:
    if not log.taken:
        return "The allocation never changed."
    judged, net, error = _net(log)
    changed = f"Libra changed the allocation {'once' if len(log.taken) == 1 else f'{len(log.taken)} times'}"
    if not judged:
        return f"{changed}; the gain is not known."
    which = ", which" if judged == len(log.taken) else f"; the {judged} with a known gain"
    verb = "saved" if net >= 0 else "cost"
    return f"{changed}{which} {verb} an estimated {duration(abs(net))}{error}, net of the switch."


def _accuracy_tile(log: RunLog) -> Tile:
    ends = first_and_last(log.summary.evaluations) if log.summary else None
    if ends is None:
        return Tile("Accuracy", "not measured", "needs an evaluation before and after")
    first, last = ends
    value = f"{percent(first.sampled_accuracy)} → {percent(last.sampled_accuracy)}"
    greedy = f"greedy {percent(first.greedy_accuracy)} → {percent(last.greedy_accuracy)}"
    return Tile("Accuracy, sampled", value, f"{greedy}; {plural(last.questions, 'question')}")


def _decisions_tile(log: RunLog) -> Tile:
    value = f"{len(log.taken)} taken, {len(log.refused)} not"
    if not log.taken:
        return Tile("Decisions", value, "the first allocation stayed")
    judged, net, error = _net(log)
    gain = f"net gain, estimated: {signed_duration(net)}{error}" if judged else "gain not known"
    unknown = len(log.taken) - judged
    return Tile("Decisions", value, f"{gain}; {unknown} not known" if judged and unknown else gain)


def _prediction_tile(log: RunLog) -> Tile:
    error = log.summary.prediction_error if log.summary else prediction_error(log.periods)
    if error is None:
        return Tile("Prediction error", "unknown", "no period without a role change")
    settled = sum(not period.switching for period in log.periods)
    return Tile("Prediction error", percent(error), f"of step time, mean over {plural(settled, 'settled period')}")
