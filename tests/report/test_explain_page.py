"""The page of an explanation: complete in itself, saying the numbers, drawing what there is."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from made_explanation import CLASSES, EXPLANATION, plan
from pages import Page, figure, marks, needs_nothing

from libra.plan.explain.explanation import Otherwise, RejectedKind, Split
from libra.report.explain_page import MOST_REJECTED, below, bucket_figure, explain_page, split_figures
from libra.report.explain_table import alternation, headline, routing_sentence

PAGE = explain_page(EXPLANATION, "Qwen3 <14B>", CLASSES)


def test_a_page_needs_nothing_but_itself() -> None:
    needs_nothing(PAGE)
    assert explain_page(EXPLANATION, "Qwen3 <14B>", CLASSES) == PAGE


def test_a_page_says_what_was_explained() -> None:
    said = Page(PAGE).text
    for words in (
        "Qwen3 <14B>",
        headline(EXPLANATION),
        routing_sentence(EXPLANATION),
        "32 devices of a",
        "11 devices 4 engines, 2 buckets",
        "13 devices 5 of 48 a (others suffice), 8 of 8 [b] (too slow)",
        "Up to 24 training devices, training alone determines the step; from 32 on, generation and the phases "
        "after it do.",
        "this plan: 32 train",
        "3 × a/tp1 · 3 devices · 75.0 % of the step",
        "1 × a/tp8 · 8 devices · the whole step",
        "up to 8,000 tokens: 30.0 %",
        "no. 3 +10.0 % 1 min 50 s 24 of a train, 3 a/tp1 + 1 a/tp8 generate",
        "no a/tp8 - - no plan",
        "one more node of a (8 devices) 12.5 % 1 min 28 s",
        "at most 3 buckets instead of 2 nothing -",
        "5 of 6 a 8 4.00 s longer (4.0 %)",
        "the fewest: 0 of 1 [b] 8 the same step",
        "Rejected options, and reasons (2)",
        "2 × needs … GB",
        "tp1 needs 200 GB; [80] are there",
    ):
        assert words in said, words


def test_a_page_says_between_which_seconds_steps_alternate() -> None:
    predicted = replace(EXPLANATION.plan.predicted, step_range=(80.0, 120.0))
    said = Page(explain_page(replace(EXPLANATION, plan=replace(EXPLANATION.plan, predicted=predicted)), "a")).text
    assert f"{alternation(predicted)}." in said
    assert "alternate" not in Page(PAGE).text


def test_bars_have_one_scale_over_both_tables_of_plans_and_ties_have_none() -> None:
    losses = [int(width) for width in re.findall(r"width:(\d+)px;background:#d55e00", PAGE)]
    assert losses == [24, 120]
    assert re.findall(r"width:(\d+)px;background:#00795a", PAGE) == ["120"]


def test_a_loss_within_the_tolerance_has_no_bar_even_where_all_have_such() -> None:
    tied = replace(EXPLANATION, runners_up=(plan(32, {"a/tp4": 2}, 100.01),), otherwise=())
    assert re.findall(r"width:(\d+)px;background:#d55e00", explain_page(tied, "tied")) == []


def test_of_thousands_of_rejected_options_the_first_are_shown() -> None:
    many = tuple((f"option {k}", "too large") for k in range(MOST_REJECTED + 1200))
    said = Page(explain_page(replace(EXPLANATION, rejected=(RejectedKind("too large", many),)), "many")).text
    assert f"option {MOST_REJECTED - 1} " in said and f"option {MOST_REJECTED} " not in said
    assert "and 1,200 more" in said and "1,250 × too large" in said
    assert "libra explain --json" not in Page(PAGE).text


def test_a_page_without_alternatives_rejections_and_classes_says_less_and_stands() -> None:
    lone = replace(EXPLANATION, runners_up=(), otherwise=(Otherwise("no a/tp8", None),), rejected=(), reliefs=())
    said = Page(explain_page(lone, "alone")).text
    assert "There is no other plan." in said
    assert "Rejected options" not in said
    assert "distribution of trajectories over length" not in said


RECT = r'd="M([\d.-]+),([\d.-]+)h([\d.-]+)v([\d.-]+)h[^"]*" fill="([^"]+)"[^>]*><title>([^<]*)</title>'


def rects(chart: str, of: str) -> list[tuple[float, float, float, str]]:
    """(left, width, height, colour) of the rectangles whose title has this in it."""
    found = re.findall(RECT, chart)
    return [(float(x), float(w), abs(float(h)), fill) for x, _, w, h, fill, title in found if of in title]


def test_a_bucket_that_bounds_the_step_has_its_own_colour() -> None:
    (_, _, _, busy), (_, _, _, bounding) = rects(bucket_figure(EXPLANATION, ()).chart, " to ")
    assert busy != bounding == "#d55e00"


def test_every_range_is_drawn_to_scale_on_a_logarithmic_axis() -> None:
    """Neighbours touch, and ranges of equal ratio are equally wide."""
    first = EXPLANATION.buckets[0]
    ends = [(0, 1_000), (1_000, 4_000), (4_000, 16_000)]
    buckets = tuple(replace(first, above=above, up_to=up_to) for above, up_to in ends)
    drawn = rects(bucket_figure(replace(EXPLANATION, buckets=buckets), ()).chart, " to ")
    assert len(drawn) == 3
    for (x, width, _, _), (after, *_) in pairwise(drawn):
        assert x + width == pytest.approx(after, abs=0.02)
    assert drawn[1][1] == pytest.approx(drawn[2][1], abs=0.02)


def test_areas_of_the_distribution_are_shares() -> None:
    chart = bucket_figure(EXPLANATION, CLASSES).chart
    areas = [width * height for _, width, height, _ in rects(chart, "up to ")]
    assert [area / share for area, (_, share) in zip(areas, CLASSES, strict=True)] == pytest.approx(
        [areas[0] / CLASSES[0][1]] * 3, rel=1e-3
    )


def test_each_pool_that_could_train_has_a_figure_and_the_plan_is_marked_on_its_own() -> None:
    other = (Split("t", "[b]", 4, 10.0, 90.0, 90.0), Split("t", "[b]", 8, 5.0, 95.0, 95.0))
    own, second = split_figures(replace(EXPLANATION, splits=(*other, *EXPLANATION.splits)))
    assert own.title.endswith("training on a") and "this plan" in own.chart
    assert second.title.endswith("training on [b]") and "this plan" not in second.chart
    assert "With every split, generation, with what follows it, determines the step." in second.note
    slow = tuple(replace(split, training=150.0) for split in other)
    assert (
        "With every split, training by itself determines the step."
        in split_figures(replace(EXPLANATION, splits=slow))[0].note
    )


def test_a_synchronous_step_is_drawn_beside_its_parts() -> None:
    title = "Time against the split, training on a"
    assert "their sum" not in figure(PAGE, title)
    source = explain_page(replace(EXPLANATION, synchronous=True), "sync")
    assert "their sum" in figure(source, title)
    assert marks(figure(source, title), "line") == marks(figure(PAGE, title), "line") + 1 == 3


CURVES = [
    ("all below", [(1, 5.0), (2, 6.0)], ((1, 5.0), (2, 6.0))),
    ("falls below", [(1, 20.0), (3, 5.0)], ((1 + 2 * 10 / 15, 10.0), (3, 5.0))),
    ("rises above", [(1, 5.0), (3, 20.0), (4, 90.0)], ((1, 5.0), (1 + 2 * 5 / 15, 10.0))),
    ("both", [(0, 99.0), (1, 20.0), (2, 0.0), (3, 20.0)], ((1.5, 10.0), (2, 0.0), (2.5, 10.0))),
    ("never", [(1, 20.0), (2, 11.0)], ()),
]


@pytest.mark.parametrize(("points", "wanted"), [row[1:] for row in CURVES], ids=[row[0] for row in CURVES])
def test_curves_are_cut_where_they_cross_the_limit(
    points: list[tuple[float, float]], wanted: tuple[tuple[float, float], ...]
) -> None:
    found = below(points, 10.0)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in wanted])
    assert [y for _, y in found] == pytest.approx([y for _, y in wanted])


def test_a_name_with_a_tag_in_it_stays_text() -> None:
    evil = replace(EXPLANATION, otherwise=(Otherwise("<script>", plan(24, {"<b>": 1}, 110.0)),))
    page = Page(explain_page(evil, "x"))
    assert page.count("script") == 0
    assert "<script>" in page.text and "1 <b> generate" in page.text
