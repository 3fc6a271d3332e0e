"""Which tensor-parallel degree generates most, by the length of the requests.

Invariant: published numbers are those of Libra (arXiv 2606.03077), and only stand beside ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import shape_file
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Line, heights, lines
from benchmarks.evaluation.intervals import Interval, mean_interval, ratio_interval
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.scale import doubling_axis, log_axis
from benchmarks.evaluation.tp_by_length_cell import MODEL, throughput
from benchmarks.rows import Row

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


def _runs(results: Sequence[Result]) -> Runs:
    runs: dict[tuple[int, int, Span], list[float]] = {}
    for result in results:
        asked = result.cell.arguments
        case = (asked["requests"], asked["tp"], (asked["low"], asked["high"]))
        runs.setdefault(case, []).append(result.values["tokens_per_second"])
    return runs


def _rows(results: Sequence[Result]) -> list[Row]:
    runs = _runs(results)
    rows = []
    for requests in LOADS.values():
        for span in RANGES:
            case = f"{requests} requests, {name_of(span)} tokens"
            for tp in DEGREES:
                value = mean_interval(runs[requests, tp, span]).value
                rows.append(Row(case, f"{8 // tp} engines of tp {tp}", value, "generated tokens/s"))
            rows.append(Row(case, "tp 8 over tp 1", _advantage(runs, requests, span).value, "x"))
        length = crossover(_advantages(runs, requests))
        if length is not None:
            rows.append(Row(f"{requests} requests", "tp 8 overtakes tp 1 at", length, "tokens, mean final context"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    runs = _runs(results)
    return {load: _table(runs, requests) for load, requests in LOADS.items()}


def _table(runs: Runs, requests: int) -> str:
    header = ["final context, tokens", *(f"{8 // tp} x tp {tp}" for tp in DEGREES), "tp 8 / tp 1"]
    header += ["published 8 x tp 1", "published 1 x tp 8", "published tp 8 / tp 1"]
    body = []
    for span in RANGES:
        ours = [_written(mean_interval(runs[requests, tp, span]), ",.0f") for tp in DEGREES]
        known = [PUBLISHED.get((tp, span)) for tp in (1, 8)]
        theirs = ["" if value is None else f"{value:,}" for value in known]
        theirs.append("" if known[0] is None or known[1] is None else f"{known[1] / known[0]:.2f}")
        body.append([name_of(span), *ours, _written(_advantage(runs, requests, span), ".2f"), *theirs])
    advantages = _advantages(runs, requests)
    length = crossover(advantages)
    if length is not None:
        said = f"One engine of tp 8 overtakes eight of tp 1 at a mean final context of {length:,.0f} tokens."
    elif advantages[-1][1] < 1:
        said = "One engine of tp 8 is behind eight of tp 1 at the longest requests, and does not overtake them."
    else:
        said = "One engine of tp 8 is never behind eight of tp 1, so there is no length at which it overtakes them."
    return f"{markdown_table(header, body)}\n\n{said}"


def _figures(results: Sequence[Result]) -> dict[str, str]:
    runs = _runs(results)
    return {load: _figure(runs, requests) for load, requests in LOADS.items()}


def _figure(runs: Runs, requests: int) -> str:
    series = []
    for tp in DEGREES:
        found = {middle(span): mean_interval(runs[requests, tp, span]) for span in RANGES}
        band = tuple((max(one.low, 1.0), one.high) for one in found.values())
        series.append(Line(f"{8 // tp} x tp {tp}", tuple((x, one.value) for x, one in found.items()), band))
    for tp in (1, 8):
        theirs = tuple((middle(span), float(value)) for (degree, span), value in PUBLISHED.items() if degree == tp)
        series.append(Line(f"{8 // tp} x tp {tp}, published", theirs, hollow=True, like=DEGREES.index(tp)))
    return lines(
        f"Throughput by length: 8 A800, {MODEL.partition('/')[2]}, {requests:,} requests at once",
        "Generated tokens per second against the middle of the range of final contexts: four tensor-parallel degrees as"
        " simulated (bands: 95 % intervals of the mean over seeds), two of them as published in arXiv 2606.03077 for"
        " the shortest and the longest range (dashes only join these).",
        series,
        doubling_axis("middle of the range of final contexts, tokens", 1024, RANGES[-1][1]),
        log_axis("generated tokens per second", heights(series)),
    )


def crossover(advantages: Sequence[tuple[float, float]]) -> float | None:
    """The length at which an advantage, given as (length, ratio) by rising length, goes from below 1 to 1 or more for
    good: on a straight line between two logarithms. None where it is never below 1, or is so at the end."""
    below = [index for index, (_, ratio) in enumerate(advantages) if ratio < 1]
    if not below or below[-1] == len(advantages) - 1:
        return None
    (x, ratio), (next_x, next_ratio) = advantages[below[-1] : below[-1] + 2]
    share = math.log(ratio) / (math.log(ratio) - math.log(next_ratio))
    return float(x * (next_x / x) ** share)


def middle(span: Span) -> float:
    return (span[0] + span[1]) / 2


def name_of(span: Span) -> str:
    return f"{span[0] // 1024}–{span[1] // 1024}K"


def _advantages(runs: Runs, requests: int) -> list[tuple[float, float]]:
    return [(middle(span), _advantage(runs, requests, span).value) for span in RANGES]


def _advantage(runs: Runs, requests: int, span: Span) -> Interval:
    """Throughput ratio of one engine of tp 8 over eight of tp 1."""
    return ratio_interval(runs[requests, 8, span], runs[requests, 1, span])


def _written(one: Interval, form: str) -> str:
    return f"{one.value:{form}} ± {max(one.high - one.value, one.value - one.low):{form}}"


EXPERIMENT = Experiment(
    name="tp-by-length",
    title="Tensor-parallel degree by length of requests",
    question="On 8 A800 with Qwen3-14B: which degree generates most tokens per second, at which lengths?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
