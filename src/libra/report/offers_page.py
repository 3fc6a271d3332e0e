"""A comparison of clusters as one HTML page; equal comparisons give equal pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

import altair as alt

from libra.choose.offers import Comparison, OfferedCluster
from libra.report.charts import Figure
from libra.report.offers_table import CAPTION, COLUMNS, UNPRICED, cost_words, offer_rows, offer_sentences
from libra.report.page import Tile, render
from libra.report.vega import FULL, Axis, draw, layer, unchecked
from libra.report.words import days, plural

_HEIGHT = 320
_ON_FRONT, _OTHER = "#0072b2", "#9aa5b1"
_HOUR = 3_600.0


def offers_page(found: Comparison, title: str) -> str:
    return render(
        "offers.html",
        title,
        headline=" ".join(offer_sentences(found)),
        notices=[] if found.priced else [UNPRICED],
        tiles=list(_tiles(found)),
        figures=[front_figure(found)] if found.fastest is not None else [],
        columns=COLUMNS,
        rows=offer_rows(found),
        caption=CAPTION,
    )


def _tiles(found: Comparison) -> Iterator[Tile]:
    limit = f"of {days(found.job.deadline)}" if isfinite(found.job.deadline) else "no deadline"
    for label, offer in (("Cheapest in time", found.cheapest), ("Fastest", found.fastest)):
        if offer is None:
            yield Tile(label, "none", limit, alarming=True)
        else:
            yield Tile(label, offer.name, f"{days(offer.seconds(found.job))}, {cost_words(offer, found)}")
    yield Tile("Offers", str(len(found.offers)), f"{plural(len(found.in_time), 'is', 'are')} in time, {limit}")


@unchecked
def front_figure(found: Comparison) -> Figure:
    """Cost against time: a dot for each cluster, and the Pareto front as a line."""
    job, front = found.job, found.front
    in_days = max(it.seconds(job) for it in front) >= 48 * _HOUR
    unit, name = (24 * _HOUR, "days") if in_days else (_HOUR, "hours")
    planned = [it for it in found.offers if it.plan is not None]
    late = [job.deadline / unit] if isfinite(job.deadline) else []
    x = Axis(f"{name} for {plural(job.steps, 'step')}", _around([*(it.seconds(job) / unit for it in planned), *late]))
    y = Axis("dollars" if found.priced else "GPU-hours", _around([found.cost(it) for it in planned]))

    def place(offer: OfferedCluster) -> dict[str, float]:
        return {"x": offer.seconds(job) / unit, "y": found.cost(offer)}

    rows = [
        {
            **place(it),
            "color": _ON_FRONT if it in front else _OTHER,
            "text": it.name,
            "description": f"{it.name}: {days(it.seconds(job))}, {cost_words(it, found)}",
        }
        for it in planned
    ]
    named = [{**it, "color": "var(--soft)"} for it in rows if it["color"] == _ON_FRONT]
    line = layer("line", [place(it) for it in front], x, y, color="var(--axis)", strokeDash=[4, 3], aria=False)
    dots = layer("circle", rows, x, y, size=110, opacity=0.9)
    names = layer("text", named, x, y, dy=-12, fontSize=11, aria=False)
    layers = [line, dots, names]
    if late:
        rule = {"x": late[0], "color": "var(--alarm)", "description": f"deadline, {days(job.deadline)}"}
        layers.insert(0, layer("rule", [rule], x, strokeDash=[2, 2]))
    chart = draw(alt.layer(*layers), y.label, FULL, _HEIGHT)
    note = "Lower left is better. The line connects the clusters for which no other is better in both cost and time."
    return Figure(
        "What each cluster takes", note, chart, (("on the front", _ON_FRONT), ("dominated", _OTHER)), wide=True
    )


def _around(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis with some room around the values."""
    low, high = min(values), max(values)
    room = 0.1 * (high - low) or 0.1 * high
    return max(0.0, low - room), high + room
