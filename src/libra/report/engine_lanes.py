"""Figure and table of a simulated post-training run: engines and trainer over time, and the busy time of each bucket's
engines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from libra.plan.transition import Role
from libra.report.charts import Figure, time_unit
from libra.report.lanes import Lane, LaneSpan, lane_figure
from libra.report.page import BUCKETS, ROLES
from libra.report.vega import Axis
from libra.report.words import count, duration, percent
from libra.sim.training_run.outcome import EngineSpan, SimulatedRun, SimulatedStep

MAX_ENGINES = 47  # lanes of engines, evenly from all buckets; with the trainer's lane they fill a page
MAX_STEPS = 60  # spans of a lane: more are narrower than a line


def engine_lanes(outcome: SimulatedRun) -> Figure:
    """A lane for the trainer and one for each engine, up to `MAX_ENGINES`. The stronger the colour of a step, the
    busier the engine."""
    scale, unit = time_unit(outcome.seconds)
    colours = _colours(outcome.engines)
    by_engine = defaultdict[tuple[int, str], list[EngineSpan]](list)
    for span in outcome.engines:
        by_engine[span.up_to, span.engine].append(span)
    every = -(-len(by_engine) // MAX_ENGINES)
    chosen = sorted(by_engine)[::every]
    lanes = [_trainer(outcome.steps, scale)]
    for up_to, name in chosen:
        spans = _merged(by_engine[up_to, name])
        lanes.append(Lane(name, [_span(it, colours[up_to], scale) for it in spans]))
    note = "Each lane is an engine, in the colour of its bucket. Paler: the engine had work for less of the step."
    if every > 1:
        note += f" {len(chosen)} of {len(by_engine)} engines are shown."
    legend = (
        ("trains", ROLES[Role.TRAIN]),
        ("waits", ROLES[Role.IDLE]),
        *((f"contexts up to {count(up_to)}", colour) for up_to, colour in colours.items()),
    )
    x = Axis(f"time since the run began ({unit})", (0.0, outcome.seconds / scale))
    return lane_figure("Engines and trainer", note, lanes, x, legend)


def bucket_rows(spans: Sequence[EngineSpan]) -> tuple[tuple[str, ...], ...]:
    """A row for each bucket: its limit, its engines, and their busy share of the time."""
    busy = defaultdict[int, dict[str, list[EngineSpan]]](lambda: defaultdict(list))
    for span in spans:
        busy[span.up_to][span.engine].append(span)
    rows = []
    for up_to, engines in sorted(busy.items()):
        shares = [sum(it.busy for it in its) / sum(it.end - it.start for it in its) for its in engines.values()]
        words = (percent(share, 0) for share in (fmean(shares), min(shares), max(shares)))
        rows.append((f"up to {count(up_to)}", count(len(engines)), *words))
    return tuple(rows)


def _colours(spans: Sequence[EngineSpan]) -> dict[int, str]:
    limits = sorted({span.up_to for span in spans})
    return {up_to: BUCKETS[min(at, len(BUCKETS) - 1)] for at, up_to in enumerate(limits)}


def _trainer(steps: Sequence[SimulatedStep], scale: float) -> Lane:
    spans = []
    for step in steps:
        begins, words = step.ended - step.training, f"step {step.version}"
        if step.waited:
            about = f"trainer: waits {duration(step.waited)} before {words}"
            spans.append(LaneSpan((begins - step.waited) / scale, begins / scale, "", about, ROLES[Role.IDLE]))
        about = f"trainer: {words}, {duration(step.training)}"
        spans.append(LaneSpan(begins / scale, step.ended / scale, words, about, ROLES[Role.TRAIN]))
    return Lane("trainer", spans)


def _merged(spans: Sequence[EngineSpan]) -> list[EngineSpan]:
    """At most `MAX_STEPS` spans; consecutive spans are added up."""
    size = -(-len(spans) // MAX_STEPS)
    groups = (spans[at : at + size] for at in range(0, len(spans), size))
    return [
        EngineSpan(its[0].engine, its[0].up_to, its[0].start, its[-1].end, sum(it.busy for it in its)) for its in groups
    ]


def _span(span: EngineSpan, colour: str, scale: float) -> LaneSpan:
    share = span.busy / (span.end - span.start) if span.end > span.start else 0.0
    shade = f"{colour}{round(40 + 215 * share):02x}"
    who = f"{span.engine}, contexts up to {count(span.up_to)}"
    title = f"{who}: {percent(share, 0)} busy from {duration(span.start)} to {duration(span.end)}"
    return LaneSpan(span.start / scale, span.end / scale, percent(share, 0), title, shade)
