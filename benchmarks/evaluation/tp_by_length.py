"""Which tensor-parallel degree generates most, by the length of the requests.

Invariant: published numbers are those of Libra (arXiv 2606.03077), and only stand beside ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import shape_file
from benchmarks.evaluation.estimates import Estimate, mean, ratio
from benchmarks.evaluation.experiment import Experiment, Found
from benchmarks.evaluation.figures import Axis, Line, LineChart
from benchmarks.evaluation.generation import MODEL, throughput
from benchmarks.evaluation.table import Column, Table, Value

RANGES = ((0, 2048), (2048, 4096), (4096, 8192), (8192, 16384), (16384, 32768))  # tokens of final context
DEGREES = (1, 2, 4, 8)
LOADS = {"batch": 512, "full": 4096}  # requests: those of the paper; enough to keep all engines full
PUBLISHED = {(1, (0, 2048)): 1852, (8, (0, 2048)): 591, (1, (16384, 32768)): 430, (8, (16384, 32768)): 1220}
_SEEDS, _QUICK_SEEDS = 3, 2

Span = tuple[int, int]
Runs = Mapping[tuple[int, int, Span], list[float]]  # tokens/s of the seeds, by requests, degree and range


def _cells(quick: bool) -> list[Cell]:
    return [
        Cell(
            f"tp{tp}, {name_of(span)}, {requests} requests, seed {seed}",
            throughput,
            {"tp": tp, "low": span[0], "high": span[1], "requests": requests, "seed": seed},
            inputs=(shape_file(MODEL),),
            cost=requests * span[1] / tp,
        )
        for requests in LOADS.values()
        for span in RANGES
        for tp in DEGREES
        for seed in range(_QUICK_SEEDS if quick else _SEEDS)
    ]


def _found(results: Sequence[Result]) -> Found:
    runs: dict[tuple[int, int, Span], list[float]] = {}
    for result in results:
        asked = result.cell.arguments
        case = (asked["requests"], asked["tp"], (asked["low"], asked["high"]))
        runs.setdefault(case, []).append(result.values["tokens_per_second"])
    return Found(
        {load: _table(runs, requests) for load, requests in LOADS.items()},
        {load: _figure(runs, requests) for load, requests in LOADS.items()},
    )


def _table(runs: Runs, requests: int) -> Table:
    columns = [Column(f"{8 // tp} x tp {tp}", ",.0f", "tokens/s", around=True) for tp in DEGREES]
    columns.append(Column("tp 8 / tp 1", ".2f", "x", around=True))
    columns += [Column(f"published {what}") for what in ("8 x tp 1", "1 x tp 8", "tp 8 / tp 1")]
    body: dict[str, tuple[Value, ...]] = {}
    for span in RANGES:
        one, eight = (PUBLISHED.get((tp, span)) for tp in (1, 8))
        theirs = ("", "", "") if one is None or eight is None else (f"{one:,}", f"{eight:,}", f"{eight / one:.2f}")
        ours = (mean(runs[requests, tp, span]) for tp in DEGREES)
        body[name_of(span)] = (*ours, _advantage(runs, requests, span), *theirs)
    said = _crossing([(middle(span), _advantage(runs, requests, span).value) for span in RANGES])
    return Table("final context, tokens", tuple(columns), body, said, f"{requests} requests")


def _crossing(advantages: Sequence[tuple[float, float]]) -> str:
    length = crossover(advantages)
    if length is not None:
        return f"One engine of tp 8 overtakes eight of tp 1 at a mean final context of {length:,.0f} tokens."
    if advantages[-1][1] < 1:
        return "One engine of tp 8 is behind eight of tp 1 at the longest requests, and does not overtake them."
    return "One engine of tp 8 is never behind eight of tp 1, so there is no length at which it overtakes them."


def _figure(runs: Runs, requests: int) -> LineChart:
    series = [
        Line(f"{8 // tp} x tp {tp}", [(middle(span), mean(runs[requests, tp, span])) for span in RANGES])
        for tp in DEGREES
    ]
    for tp in (1, 8):
        theirs = [(middle(span), float(value)) for (degree, span), value in PUBLISHED.items() if degree == tp]
        series.append(Line(f"{8 // tp} x tp {tp}, published", theirs, hollow=True, like=DEGREES.index(tp)))
    return LineChart(
        f"Throughput by length: 8 A800, {MODEL.partition('/')[2]}, {requests:,} requests at once",
        "Generated tokens per second against the middle of the range of final contexts: four tensor-parallel degrees as"
        " simulated (bands: 95 % intervals of the mean over seeds), two of them as published in arXiv 2606.03077 for"
        " the shortest and the longest range (dashes only join these).",
        series,
        Axis("middle of the range of final contexts, tokens", doubling=True),
        Axis("generated tokens per second", logarithmic=True),
    )


def crossover(advantages: Sequence[tuple[float, float]]) -> float | None:
    """The length at which an advantage, given as (length, ratio) by rising length, goes from below 1 to 1 or more for
    good: on a straight line between two logarithms. None where it is never below 1, or is so at the end."""
    below = [index for index, (_, ratio) in enumerate(advantages) if ratio < 1]
    if not below or below[-1] == len(advantages) - 1:
        return None
    (x, before), (next_x, after) = advantages[below[-1] : below[-1] + 2]
    share = math.log(before) / (math.log(before) - math.log(after))
    return float(x * (next_x / x) ** share)


def middle(span: Span) -> float:
    return (span[0] + span[1]) / 2


def name_of(span: Span) -> str:
    return f"{span[0] // 1024}–{span[1] // 1024}K"


def _advantage(runs: Runs, requests: int, span: Span) -> Estimate:
    """Throughput ratio of one engine of tp 8 over eight of tp 1."""
    return ratio(runs[requests, 8, span], runs[requests, 1, span])


EXPERIMENT = Experiment(
    "tp-by-length",
    "Tensor-parallel degree by length of requests",
    "On 8 A800 with Qwen3-14B: which degree generates most tokens per second, at which lengths?",
    _cells,
    _found,
)
