from __future__ import annotations

import doctest
import importlib
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import marks, titles

from libra.report.charts import (
    MAX_POINTS,
    Pair,
    Series,
    column_figure,
    line_figure,
    pair_figure,
    thin,
    time_unit,
)
from libra.report.lanes import Lane, LaneSpan, lane_figure
from libra.report.vega import Axis, Marker, ends
from libra.report.words import duration, plain

TIME = Axis("time (s)", (0.0, 10.0))


@pytest.mark.parametrize("module", ["report.words", "report.charts", "report.page", "report.live", "records.causes"])
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"libra.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_axes_have_a_fitting_unit_and_a_length() -> None:
    assert [time_unit(seconds)[1] for seconds in (100, 181, 3 * 3600 + 1)] == ["s", "min", "h"]
    assert (ends(3, 3), ends(3, 4)) == ((2.5, 3.5), (3, 4))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60), st.integers(1, 12))
def test_thinning_keeps_the_count_and_the_sum(rows: list[tuple[float, float]], limit: int) -> None:
    thinned = thin(rows, limit)
    assert len(thinned) <= limit
    if len(rows) <= limit:
        assert thinned == rows
    elif len(rows) % -(-len(rows) // limit) == 0:  # all groups of one size: the mean is that of all
        assert sum(row[1] for row in thinned) / len(thinned) == pytest.approx(sum(r[1] for r in rows) / len(rows))


@settings(max_examples=8)
@given(st.lists(st.tuples(st.floats(0, 10), st.text("Dx%", min_size=1, max_size=9)), max_size=12))
def test_labels_of_markers_never_cover_each_other(placed: list[tuple[float, str]]) -> None:
    line = Series("reward", "#000000", [(0.0, 1.0), (10.0, 1.0)])
    markers = [Marker(x, label, f"marker {label}") for x, label in placed]
    drawn = line_figure("", "", [line], TIME, Axis("reward"), markers).chart
    rows: dict[str, list[tuple[float, float]]] = {}
    for x, y, label in re.findall(
        r'<text[^>]*translate\(([\d.]+),(-[\d.]+)\)[^>]*font-weight="600"[^>]*>([^<]*)<', drawn
    ):
        half = 6.5 * len(label) / 2
        rows.setdefault(y, []).append((float(x) - half, float(x) + half))
    assert len(rows) <= 2
    for row in rows.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(sorted(row)))
    assert sum(title.startswith("marker ") for title in titles(drawn)) == len(placed)


@pytest.mark.parametrize(
    ("points", "drawn"), [(1, 1), (50, 50), (MAX_POINTS, MAX_POINTS), (MAX_POINTS * 10, MAX_POINTS)]
)
def test_a_line_explains_each_point_up_to_its_limit(points: int, drawn: int) -> None:
    series = Series("reward", "#000000", [(float(i), 1.0) for i in range(points)])
    chart = line_figure("", "", [series], Axis("step", (0, points)), Axis("reward")).chart
    assert sum(title.startswith("reward: 1 (step: ") for title in titles(chart)) == drawn
    assert marks(chart, "line") == (points > 1)


def test_numbers_under_the_pointer_keep_their_digits() -> None:
    series = Series("gap", "#000000", [(0.0, 0.00132), (1.0, 0.00254)])
    chart = line_figure("", "", [series], Axis("step", (0, 1)), Axis("gap")).chart
    assert {"gap: 0.00132 (step: 0)", "gap: 0.00254 (step: 1)"} <= set(titles(chart))


def test_columns_are_as_high_as_their_parts_together() -> None:
    parts = [Series("train", "#aa0000", [(1, 1.0), (2, 2.0)]), Series("wait", "#00aa00", [(1, 2.0), (2, 1.0)])]
    line = Series("busy", "#0000aa", ((1.0, 2.5), (2.0, 2.5)))
    figure = column_figure("", "", parts, Axis("step", (0.5, 2.5)), Axis("seconds", (0, 4)), overlay=line)
    chart = figure.chart
    heights = re.findall(r"v([\d.]+)h-[^>]*><title>(step [^<]*)<", chart)
    assert [(title, round(float(height) / 175 * 4, 2)) for height, title in heights] == [
        ("step 1: train 1", 1.0),
        ("step 1: wait 2", 2.0),
        ("step 2: train 2", 2.0),
        ("step 2: wait 1", 1.0),
    ]
    assert marks(chart, "line") == 1
    assert [name for name, _ in figure.legend] == ["train", "wait", "busy"]


def test_a_crowd_of_pairs_leaves_out_labels_but_no_bars() -> None:
    pairs = [Pair(f"{i}0–{i}9", 1.0, 2.0, "+50 %", f"period {i}", i % 2 == 0) for i in range(150)]
    sides = (("predicted", "#aaaaaa"), ("measured", "#0000aa"))
    chart = pair_figure("", "", pairs, sides, "steps", Axis("seconds")).chart
    assert sum(title.startswith("period ") for title in titles(chart)) == 300
    written = re.findall(r'<text[^>]*opacity="1"[^>]*>\d+0–\d+9<', chart)
    assert 5 < len(written) < 30
    assert "+50 %" not in chart


def test_lanes_show_spans_and_losses_and_shorten_long_names() -> None:
    name = "datacentre-7/rack-12/node-0031/gpu-3"
    lane = Lane(name, [LaneSpan(0, 5, "train", "w: train", "#e69f00")], [(5.0, "w lost")])
    chart = lane_figure("", "", [lane] * 20, TIME, ()).chart
    assert titles(chart).count("w: train") == titles(chart).count("w lost") == titles(chart).count(name) == 20
    assert ">…" in chart and "node-0031/gpu-3</text>" in chart


def test_names_never_become_tags() -> None:
    lane = Lane("<b>", [LaneSpan(0, 5, "</svg>", "<i> & co", "#e69f00")])
    chart = lane_figure("", "", [lane], TIME, ()).chart
    assert "<b>" not in chart and "<i>" not in chart and chart.count("</svg>") == 1
    assert "<i> & co" in titles(chart) and "&lt;b&gt;" in chart


@given(st.floats(-1e6, 1e6))
def test_no_number_is_written_with_an_exponent_or_without_its_sign(seconds: float) -> None:
    words = duration(seconds)
    assert words.startswith("-") == (seconds < 0)
    assert "e" not in words
    assert plain(round(seconds)) == "0" or "e" not in plain(round(seconds))
