"""Growth of a batch's rollout and training time with the length of its trajectories.

Invariant: published numbers are those of Libra (arXiv 2606.03077), and only stand beside ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import shape_file
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Line, heights, lines
from benchmarks.evaluation.intervals import Interval, mean_interval, ratio_interval
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.scale import doubling_axis, log_axis
from benchmarks.evaluation.time_by_length_cell import MODEL, rollout, training
from benchmarks.rows import Row

MEANS = (1024, 2048, 4096, 8192, 16384, 32768)  # tokens of final context
DEGREES = (1, 2, 4, 8)
TRAJECTORIES = 512
PUBLISHED = {"rollout": 95.0, "training": 3.9}  # times as long at 32K tokens as at 1K
_SEEDS, _QUICK_SEEDS = 3, 2

Times = Mapping[str, Mapping[int, list[float]]]  # seconds of the seeds, by what is done and mean length


def _cells(quick: bool) -> list[Cell]:
    shape = (shape_file(MODEL),)
    cells = []
    for mean in MEANS:
        for seed in range(_QUICK_SEEDS if quick else _SEEDS):
            batch = {"mean": mean, "trajectories": TRAJECTORIES, "seed": seed}
            where = f"mean {mean:,}, seed {seed}"
            cells.append(Cell(f"training, {where}", training, batch, shape, cost=1e9))
            for tp in DEGREES:
                cells.append(Cell(f"rollout tp{tp}, {where}", rollout, {"tp": tp, **batch}, shape, cost=mean))
    return cells


def _times(results: Sequence[Result]) -> Times:
    times: dict[str, dict[int, list[float]]] = {}
    for result in results:
        asked = result.cell.arguments
        what = f"rollout, tp {asked['tp']}" if "tp" in asked else "training"
        times.setdefault(what, {}).setdefault(asked["mean"], []).append(result.values["seconds"])
    return {what: times[what] for what in sorted(times)}


def _growth(by_mean: Mapping[int, list[float]]) -> Interval:
    return ratio_interval(by_mean[MEANS[-1]], by_mean[MEANS[0]])


def _published(what: str) -> float:
    return PUBLISHED[what.partition(",")[0]]


def _rows(results: Sequence[Result]) -> list[Row]:
    rows = []
    for what, by_mean in _times(results).items():
        for mean, seconds in by_mean.items():
            rows.append(Row(what, f"mean of {mean:,} tokens", mean_interval(seconds).value, "s"))
        rows.append(Row(what, "32K over 1K tokens", _growth(by_mean).value, "x"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    header = [
        "seconds, by mean final context",
        *(f"{mean // 1024}K" for mean in MEANS),
        "32K / 1K",
        "published 32K / 1K",
    ]
    body = []
    for what, by_mean in _times(results).items():
        seconds = [f"{mean_interval(by_mean[mean]).value:,.1f}" for mean in MEANS]
        grown = _growth(by_mean)
        ratio = f"{grown.value:.1f} ({grown.low:.1f} to {grown.high:.1f})"
        body.append([what, *seconds, ratio, f"{_published(what):g}"])
    return {"seconds": markdown_table(header, body)}


def _figures(results: Sequence[Result]) -> dict[str, str]:
    series = []
    for what, by_mean in _times(results).items():
        first = by_mean[MEANS[0]]
        found = {mean: ratio_interval(seconds, first) for mean, seconds in by_mean.items()}
        points = tuple((float(mean), one.value) for mean, one in found.items())
        series.append(Line(what, points, tuple((one.low, one.high) for one in found.values())))
    for number, what in ((0, "rollout"), (len(series) - 1, "training")):
        ends = ((float(MEANS[0]), 1.0), (float(MEANS[-1]), PUBLISHED[what]))
        series.append(Line(f"{what}, published", ends, hollow=True, like=number))
    return {
        "growth": lines(
            f"Time of a batch by length: 48 A800, {MODEL.partition('/')[2]}, {TRAJECTORIES} trajectories",
            "Seconds of rollout, for four tensor-parallel degrees, and of training in the fastest layout, as multiples"
            " of those at a mean final context of 1K tokens; simulated and priced, and as published in arXiv"
            " 2606.03077 for 1K and 32K (dashes only join these).",
            series,
            doubling_axis("mean final context, tokens", MEANS[0], MEANS[-1]),
            log_axis("times as long as at 1K tokens", heights(series)),
        )
    }


EXPERIMENT = Experiment(
    name="time-by-length",
    title="Rollout and training by length of trajectories",
    question="On 48 A800 with Qwen3-14B: how do the rollout of a batch and a training step grow with its lengths?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
