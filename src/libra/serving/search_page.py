"""The HTML page of a search. Equal answers give equal pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import altair as alt

from libra.report.charts import Figure
from libra.report.page import Tile, render
from libra.report.vega import HALF, Axis, draw, layer, unchecked
from libra.report.words import count, fine_duration, per_second, percent, plural
from libra.serving.answer import Point, SizingAnswer
from libra.serving.search_table import (
    alike,
    columns,
    counts,
    engine_files,
    headline,
    label,
    rejections,
    row,
    unit_words,
    value_words,
)
from libra.serving.verdict import SHOWN, statistic

MOST_REJECTED = 60  # most rows of one kind of rejection, of which there may be thousands
_COLOURS = {"colocated": "#e69f00", "prefill-decode": "#0072b2", "attention-ffn": "#009e73"}
_HEIGHT = 260


def search_page(answer: SizingAnswer, title: str, files: Sequence[Path] = ()) -> str:
    """The page of a search; `files` are the engines files of the points."""
    return render(
        "search.html",
        title,
        headline=headline(answer),
        notices=[caution] if (caution := answer.caution()) is not None else [],
        counts=counts(answer),
        tiles=list(_tiles(answer)),
        figures=[pareto_figure(answer, metric) for metric in SHOWN] if answer.told else [],
        asked=answer.question.rate is not None,
        columns=columns(answer),
        points=[row(answer, points, files) for points in alike(answer) if answer.told],
        files=engine_files(answer, files) if files else [],
        rejected=[
            (kind, len(its), [(str(it.candidate), it.reason) for it in its[:MOST_REJECTED]])
            for kind, its in rejections(answer)
        ],
    )


def _tiles(answer: SizingAnswer) -> Iterator[Tile]:
    if answer.told:
        best = answer.points[0]
        yield Tile("Best", value_words(answer, best), per_second(best.trial.rate))
        yield Tile("Takes", plural(best.candidate.devices, "GPU"), best.candidate.architecture)
    for objective in answer.question.objectives:
        reached = fine_duration(answer.points[0].trial.latency[objective.name]) if answer.told else "-"
        yield Tile(objective.name, reached, f"limit {fine_duration(objective.limit)}", alarming=not answer.told)
    yield Tile(
        "Ruled out by the bound",
        percent(answer.out_by_bound / answer.candidates),
        f"of {answer.candidates:,} candidates",
    )
    yield Tile("Simulated", count(answer.runs), f"runs of {plural(len(answer.question.requests), 'request')}")
    yield Tile("On the Pareto set", count(len(answer.points)), f"{count(len(answer.rejected))} rejected")
    yield Tile("Proof", "bound" if answer.proven else "none", answer.claim())


@unchecked
def pareto_figure(answer: SizingAnswer, metric: str) -> Figure:
    """Goodput against `metric`, with a dot for each point of the Pareto set."""
    objective = statistic(answer.question, "ttft" if metric == "ttft" else "tpot")

    def latency(point: Point) -> float:
        return point.trial.ttft if metric == "ttft" else point.trial.tpot

    rows = [
        {
            "x": 1e3 * latency(point),
            "y": point.value,
            "color": _COLOURS[point.candidate.architecture],
            "label": label(point.candidate),
            "description": f"{point.candidate}: {value_words(answer, point)}, {objective.name}"
            f" {fine_duration(latency(point))}; {point.bottleneck}",
        }
        for point in answer.points
    ]
    x, y = Axis(f"{objective.name} (ms)"), Axis(f"requests/s per {unit_words(answer)}")
    edge, best = [], 0.0
    for one in sorted(rows, key=lambda it: (it["x"], -float(it["y"]))):  # type: ignore[arg-type]
        if float(one["y"]) > best:  # type: ignore[arg-type]
            best = float(one["y"])  # type: ignore[arg-type]
            edge.append({"x": one["x"], "y": best})
    line = layer("line", edge, x, y, color="var(--axis)", interpolate="step-after", strokeDash=[4, 3], aria=False)
    dots = layer("circle", rows, x, y, size=90, opacity=0.85)
    named = {(it["x"], it["y"]): {**it, "text": it["label"], "color": "var(--soft)"} for it in rows}
    names = layer("text", list(named.values()), x, y, dy=-10, fontSize=11, aria=False)
    note = "The line joins the best points in these two quantities; the others are better in the other latency."
    legend = tuple((name, colour) for name, colour in _COLOURS.items() if any(it["color"] == colour for it in rows))
    chart = draw(alt.layer(line, dots, names), y.label, HALF, _HEIGHT)
    return Figure(f"Goodput against {objective.name}", note, chart, legend)
