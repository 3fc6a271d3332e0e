"""A comparison of policies as one HTML page; equal comparisons give equal pages."""

from __future__ import annotations

import altair as alt

from libra.choose.study import Study
from libra.report.charts import Figure
from libra.report.page import render
from libra.report.study_table import cells, over_words, study_sentences, verdict
from libra.report.vega import FULL, Axis, draw, layer, unchecked
from libra.report.words import duration, plural

_ROW = 34  # px, of a policy
_SEED, _MEAN = "#56b4e9", "#0072b2"


def study_page(found: Study, title: str) -> str:
    columns = ["policy"]
    for name in found.metrics:
        columns += [name, f"against {found.policies[0]}", "verdict"]
    return render(
        "study.html",
        title,
        headline=" ".join(study_sentences(found)),
        notices=[],
        tiles=[],
        figures=[metric_figure(found, metric) for metric in range(len(found.metrics))],
        columns=columns,
        rows=[[name, *cells(found, policy)] for policy, name in enumerate(found.policies)],
    )


@unchecked
def metric_figure(found: Study, metric: int) -> Figure:
    """A row for each policy: a dot for each seed, and the mean with its interval."""
    name = found.metrics[metric]
    x = Axis(f"{name} (s)", _ends(found, metric))
    height = _ROW * len(found.policies)
    dots, means, spans, names = [], [], [], []
    for policy, label in enumerate(found.policies):
        y = _ROW * policy + _ROW // 2
        mean, error = found.mean(policy, metric)
        dots.append((y, [{"x": it, "description": duration(it)} for it in found.seconds[policy][metric]]))
        told = f"{label}: {duration(mean)}; {over_words(found, policy, metric)}, {verdict(found, policy, metric)}"
        means.append((y, [{"x": mean, "description": told}]))
        if error is not None:
            spans.append((y, [{"x": mean - error, "x2": mean + error}]))
        names.append((y, [{"x": x.ends[0] if x.ends else 0.0, "text": label, "color": "var(--ink)"}]))
    layers = [
        *(layer("rule", rows, x, y, strokeWidth=2, color=_MEAN, aria=False) for y, rows in spans),
        *(layer("circle", rows, x, y, size=50, opacity=0.6, color=_SEED) for y, rows in dots),
        *(layer("tick", rows, x, y, size=18, thickness=3, color=_MEAN, orient="vertical") for y, rows in means),
        *(layer("text", rows, x, y, align="left", dx=4, dy=-11, fontSize=12, aria=False) for y, rows in names),
    ]
    chart = draw(alt.layer(*layers), "", FULL, height)
    legend = ((f"{plural(len(found.seeds), 'seed')}", _SEED), ("mean and 95 % interval", _MEAN))
    return Figure(name, "Left is better.", chart, legend, wide=True)


def _ends(found: Study, metric: int) -> tuple[float, float]:
    """All values and intervals, with some room at the sides."""
    values = [value for its in found.seconds for value in its[metric]]
    for policy in range(len(found.policies)):
        mean, error = found.mean(policy, metric)
        values += [mean - (error or 0.0), mean + (error or 0.0)]
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.05 * high or 1.0
    return max(0.0, low - room), high + room
