from __future__ import annotations

import doctest
import importlib
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.report.axes import Axis, measured_axis, round_step, running_axis, time_unit
from libra.report.charts import MAX_POINTS, Layer, Pair, Series, line_chart, paired_bars, stacked_chart, thin
from libra.report.lanes import Lane, Span, lane_chart
from libra.report.markup import tag, text
from libra.report.paper import HALF, Marker, draw_markers, text_width
from libra.report.words import duration, plain

numbers = st.floats(-1e9, 1e9, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-6)


def read_tick(label: str) -> float:
    scale = {"k": 1e3, "M": 1e6}.get(label[-1], 1.0)
    return float(label.rstrip("kM").replace(",", "")) * scale


@pytest.mark.parametrize("module", ["words", "charts", "tables", "live"])
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"libra.report.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


@given(st.lists(numbers, max_size=20))
def test_a_measured_axis_holds_zero_and_all_values_between_round_ticks(values: list[float]) -> None:
    axis = measured_axis("seconds", values)
    slack = 1e-9 * (axis.high - axis.low)
    assert all(axis.low - slack <= value <= axis.high + slack for value in [0.0, *values])
    assert 2 <= len(axis.ticks) <= 8
    step = axis.ticks[1] - axis.ticks[0]
    for tick, label in zip(axis.ticks, axis.tick_labels(), strict=True):
        assert read_tick(label) == pytest.approx(tick, abs=step / 100)
    assert len(set(axis.tick_labels())) == len(axis.ticks)


@given(st.floats(-1e5, 1e5), st.just(0.0) | st.floats(0.01, 1e6), st.booleans())
def test_a_running_axis_keeps_its_ticks_inside(low: float, span: float, whole: bool) -> None:
    axis = running_axis("step", low, low + span, whole=whole)
    slack = 1e-6 * (axis.high - axis.low)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in axis.ticks)
    assert all(later > earlier for earlier, later in pairwise(axis.ticks))
    if whole:
        assert all(tick == round(tick) for tick in axis.ticks)


@given(st.floats(1e-6, 1e9), st.integers(1, 10))
def test_a_round_step_is_the_smallest_that_suffices(span: float, wanted: int) -> None:
    step = round_step(span, wanted)
    assert step * wanted >= span * (1 - 1e-6)
    assert span / (step / 2.5) > wanted * (1 - 1e-6)


def test_an_axis_cannot_be_empty() -> None:
    with pytest.raises(ValueError, match="'tokens': low 1 must be below high 1"):
        Axis("tokens", 1, 1, ())


@pytest.mark.parametrize(("seconds", "unit"), [(100, "s"), (181, "min"), (3 * 3600 + 1, "h")])
def test_time_is_read_in_a_fitting_unit(seconds: float, unit: str) -> None:
    assert time_unit(seconds)[1] == unit


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60), st.integers(1, 12))
def test_thinning_keeps_the_count_and_the_sum(rows: list[tuple[float, float]], limit: int) -> None:
    thinned = thin(rows, limit)
    assert len(thinned) <= limit
    if len(rows) <= limit:
        assert thinned == tuple(rows)
    elif len(rows) % -(-len(rows) // limit) == 0:  # all groups of one size: the mean is that of all
        assert sum(row[1] for row in thinned) / len(thinned) == pytest.approx(sum(r[1] for r in rows) / len(rows))


@given(st.lists(st.tuples(st.floats(0, 100), st.text("Dx%", min_size=1, max_size=9)), max_size=12))
def test_labels_of_markers_never_cover_each_other(placed: list[tuple[float, str]]) -> None:
    markers = [Marker(x, label, "", "#000") for x, label in placed]
    drawn = draw_markers(markers, Axis("x", 0, 100, ()), HALF)
    found = re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)"[^>]*>([^<]*)<', drawn)
    by_row: dict[str, list[tuple[float, float]]] = {}
    for x, y, label in found:
        half = text_width(label) / 2
        by_row.setdefault(y, []).append((float(x) - half, float(x) + half))
    for row in by_row.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(sorted(row)))
    assert drawn.count("<title>") == len(markers)


@pytest.mark.parametrize(
    ("points", "drawn"), [(1, 1), (50, 50), (MAX_POINTS, MAX_POINTS), (MAX_POINTS * 10, MAX_POINTS)]
)
def test_a_line_has_one_mark_a_point_up_to_its_limit(points: int, drawn: int) -> None:
    series = Series("reward", "#000", tuple((float(i), 1.0) for i in range(points)))
    chart = line_chart([series], running_axis("step", 0, points), measured_axis("reward", [1.0]))
    assert chart.count("<circle") == drawn
    assert len(re.findall(r'points="([^"]*)"', chart)[0].split()) == drawn


def test_columns_are_as_high_as_their_parts_together() -> None:
    layers = [Layer("train", "#a00", (1.0, 2.0)), Layer("wait", "#0a0", (2.0, 1.0))]
    line = Series("busy", "#00a", ((1.0, 2.5), (2.0, 2.5)))
    chart = stacked_chart([1.0, 2.0], layers, line, Axis("step", 0.5, 2.5, (1, 2)), Axis("seconds", 0, 4, (0, 4)))
    heights = [float(height) for height in re.findall(r'height="([\d.]+)" fill', chart)]
    unit = (HALF.y_end - HALF.top) / 4
    assert heights == pytest.approx([unit, 2 * unit, 2 * unit, unit])
    assert "step 1: train 1, wait 2" in chart


def test_a_crowd_of_pairs_leaves_out_labels_but_no_bars() -> None:
    pairs = [Pair(f"{i}0–{i}9", 1.0, 2.0, "+50 %", f"period {i}", i % 2 == 0) for i in range(150)]
    chart = paired_bars(pairs, ("#aaa", "#00a"), "steps", Axis("seconds", 0, 2, (0, 1, 2)))
    assert chart.count('class="pair"') == 150
    assert chart.count("<rect") == 300
    assert 5 < chart.count("<text") < 30
    assert "+50 %" not in chart


def test_lanes_show_spans_and_losses_and_shorten_long_names() -> None:
    lane = Lane(
        "datacentre-7/rack-12/node-0031/gpu-3",
        (Span(0, 5, "train", "w: train", "#e69f00", "#000"),),
        ((5.0, "w lost"),),
    )
    chart = lane_chart([lane] * 20, running_axis("time (s)", 0, 10))
    assert chart.count('class="role"') == 20
    assert chart.count('class="cross"') == 20
    assert ">…" in chart
    assert "<title>datacentre-7/rack-12/node-0031/gpu-3</title>" in chart


def test_text_is_escaped_on_its_way_into_markup() -> None:
    assert tag("p", text("<b> & co"), title='say "x"') == '<p title="say &quot;x&quot;">&lt;b&gt; &amp; co</p>'


@given(st.floats(-1e6, 1e6))
def test_no_number_is_written_with_an_exponent_or_without_its_sign(seconds: float) -> None:
    words = duration(seconds)
    assert words.startswith("-") == (seconds < 0)
    assert "e" not in words
    assert plain(round(seconds)) == "0" or "e" not in plain(round(seconds))
