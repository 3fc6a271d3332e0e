"""Figures: well-formed files that load nothing, with every mark where its number belongs."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.evaluation.figures import Bars, Line, Range, grouped_bars, heights, lines, ranges
from benchmarks.evaluation.palette import PALETTE, PAPER, colour
from benchmarks.evaluation.scale import LogAxis, doubling_axis, log_axis, measured_axis

HEIGHTS = st.just(0.0) | st.floats(1e-6, 1e7)
SVG = "{http://www.w3.org/2000/svg}"
BARS = [
    Bars("ours", (1.0, 4.0, None), ((0.5, 1.5), (3.0, 5.0), None)),
    Bars("theirs <b>", (2.0, 0.0, 3.0), hollow=True, like=0),
]


def _bars(series: list[Bars] = BARS, **changes: object) -> str:
    given_: dict[str, object] = {"title": "T & U", "description": "D", "groups": ["a", "b", "c"], "y_label": "tokens/s"}
    return grouped_bars(series=series, **(given_ | changes))  # type: ignore[arg-type]


def _lines(*series: Line) -> str:
    return lines("T", "D", series, doubling_axis("tokens", 1024, 32768), log_axis("seconds", heights(series)))


def _ranges(*rows: Range) -> str:
    return ranges("T", "D", rows, "x of static", 1.0, "as it is")


FIGURES = {
    "bars": _bars(),
    "lines": _lines(
        Line("one", ((1024, 1), (4096, 5)), ((0.9, 1.2), (4, 6))), Line("two", ((1024, 2), (32768, 95)), hollow=True)
    ),
    "ranges": _ranges(Range("latency", ("1 s", "60 s"), (0.8, 1.4)), Range("share", ("0.1", "0.9"), (1.1, 0.9))),
}


@pytest.mark.parametrize("svg", FIGURES.values(), ids=FIGURES)
def test_a_file_stands_alone_and_says_what_it_shows(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and desc is not None and title.text and desc.text == "D"
    assert root.get("role") == "img"
    assert (root.get("aria-labelledby") or "").split() == [title.get("id"), desc.get("id")]
    assert not {element.tag for element in root.iter()} & {f"{SVG}{name}" for name in ("script", "image", "use", "a")}
    assert not re.search(r"url\(|href|@import|font-family", svg)
    assert svg.count("http") == 1  # the name space


@pytest.mark.parametrize("svg", FIGURES.values(), ids=FIGURES)
def test_everything_is_on_the_sheet(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width") or 0), float(root.get("height") or 0)
    assert width == 720
    for element in root.iter():
        for keys, most in ((("x", "x1", "x2", "cx"), width), (("y", "y1", "y2", "cy"), height)):
            assert all(0 <= float(element.get(key) or 0) <= most for key in keys)
        for pair in (element.get("points") or "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width and 0 <= y <= height


def test_the_same_numbers_are_the_same_text() -> None:
    assert _bars() == FIGURES["bars"]


def _marked(svg: str) -> dict[str, ElementTree.Element]:
    """Elements with a title of their own, by its words."""
    found = {}
    for element in ElementTree.fromstring(svg).iter():
        title = element.find(f"{SVG}title")
        if title is not None and element.tag != f"{SVG}svg":
            found[str(title.text)] = element
    return found


def test_bars_are_as_high_as_their_values_and_say_them() -> None:
    marked = _marked(_bars())
    assert set(marked) == {
        "ours, a: 1 (0 to 2)",
        "ours, b: 4 (3 to 5)",
        "theirs <b>, a: 2",
        "theirs <b>, b: 0",
        "theirs <b>, c: 3",
    }
    tall = {words: float(element.get("height") or -1) for words, element in marked.items()}
    one = tall["ours, a: 1 (0 to 2)"]
    assert one > 20
    assert tall["ours, b: 4 (3 to 5)"] == pytest.approx(4 * one, abs=0.05)
    assert tall["theirs <b>, c: 3"] == pytest.approx(3 * one, abs=0.05)
    assert tall["theirs <b>, b: 0"] == 0
    bottoms = {
        round(float(element.get("y") or 0) + float(element.get("height") or 0), 1) for element in marked.values()
    }
    assert len(bottoms) == 1


def test_numbers_of_others_look_different_in_the_same_colour() -> None:
    marked = _marked(_bars())
    ours, theirs = marked["ours, a: 1 (0 to 2)"], marked["theirs <b>, a: 2"]
    assert ours.get("stroke") == theirs.get("stroke") == PALETTE[0]
    assert ours.get("fill-opacity") is None and theirs.get("fill-opacity") is not None
    marks = _marked(FIGURES["lines"])
    assert marks["two: 95 (tokens: 32,768)"].get("fill") == PAPER
    assert marks["one: 5 (tokens: 4,096)"].get("fill") == PALETTE[0]


def test_series_differ_in_more_than_colour() -> None:
    marks = _marked(_lines(*(Line(f"line {number}", ((1024, number + 1),)) for number in range(len(PALETTE)))))
    shapes = set()
    for number in range(len(PALETTE)):
        mark = marks[f"line {number}: {number + 1} (tokens: 1,024)"]
        points = [tuple(map(float, pair.split(","))) for pair in (mark.get("points") or "").split()]
        shapes.add(tuple((round(x - points[0][0], 1), round(y - points[0][1], 1)) for x, y in points))
    assert len(shapes) == len(PALETTE)


def test_ranges_come_widest_first() -> None:
    words = re.findall(
        r">(latency|share|both)<",
        _ranges(
            Range("share", ("0.1", "0.9"), (1.1, 1.0)),
            Range("latency", ("1 s", "60 s"), (1.6, 0.8)),
            Range("both", ("a", "b"), (0.8, 1.2)),
        ),
    )
    assert words == ["latency", "both", "share"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=6))
def test_a_logarithmic_axis_holds_its_values_between_round_numbers(values: list[float]) -> None:
    axis = log_axis("s", values)
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert 1 <= len(axis.ticks) <= 16
    assert len(set(axis.tick_labels())) == len(axis.ticks)
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert (axis.low * 5 >= min(values) / 1.0001 and axis.high <= max(values) * 5.0001) or len(set(values)) == 1


def test_equal_factors_are_equal_steps() -> None:
    axis = doubling_axis("tokens", 1024, 32768)
    assert axis.tick_labels() == ("1K", "2K", "4K", "8K", "16K", "32K")
    assert [axis.place(tick, 0, 100) for tick in axis.ticks] == pytest.approx([0, 20, 40, 60, 80, 100])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(HEIGHTS, HEIGHTS), min_size=1, max_size=12), st.integers(0, 3))
def test_bars_stay_below_the_label_of_their_axis(values: list[tuple[float, float]], decimals: int) -> None:
    one, other = zip(*values, strict=True)
    svg = _bars([Bars("a", one), Bars("b", other)], groups=[f"g{i}" for i in range(len(one))], decimals=decimals)
    root = ElementTree.fromstring(svg)
    label = next(element for element in root.iter(f"{SVG}text") if element.text == "tokens/s")
    for element in root.iter(f"{SVG}text"):
        if element.get("class") == "value":
            length = 6.4 * len(element.text or "") if element.get("transform") else 11
            assert float(element.get("y") or 0) - length > float(label.get("y") or 0) - 4


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: _bars([]), "there is no series"),
    (lambda: _bars([Bars("a", (1.0,))]), "a: there are 1 values for 3 groups"),
    (lambda: _bars([Bars("a", (1.0, 2.0, 3.0), ((1.0, 2.0),))]), "a: there are 1 intervals for 3 groups"),
    (lambda: _bars([Bars("a", (1.0, -2.0, 3.0))]), "bars start at 0"),
    (lambda: _bars([Bars("a", (None, None, None))]), "missing"),
    (lambda: _bars([Bars("a", (1.0, 2.0, 3.0))] * 2), "give each its own name"),
    (lambda: _bars([Bars(str(it), (1.0, 2.0, 3.0)) for it in range(8)]), "series 8 has no colour of its own"),
    (lambda: _bars(title=" "), "title or description is empty"),
    (lambda: _bars(title="long " * 40), "too long for 720 px"),
    (lambda: _lines(Line("a", ((1.0, 2.0),))), "a: 1 is not on the axis 'tokens'"),
    (lambda: _lines(Line("a", ((1024.0, 2.0),), ((1.0, 3.0),) * 2)), "1 points and 2 ends"),
    (lambda: lines("T", "D", [Line("a", ())], measured_axis("x", [1]), measured_axis("y", [1])), "0 points"),
    (lambda: _lines(Line("a", ((1024.0, 0.0),))), "a logarithm needs positive"),
    (lambda: _ranges(), "there is no row"),
    (lambda: _ranges(Range("l" * 60, ("a", "b"), (1.0, 2.0))), "shorten it to 300 or less"),
    (lambda: LogAxis("x", 0.0, 1.0, ()), "needs 0 < low"),
    (lambda: log_axis("x", [1.0, 2.0]).place(0, 0, 1), "no place on a logarithmic axis"),
    (lambda: colour(-1), "no colour"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_drawn_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def _luminance(code: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = (int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_neighbouring_colours_differ_in_lightness_and_all_differ_from_the_paper() -> None:
    light = [_luminance(code) for code in PALETTE]
    assert all(abs(one - other) > 0.05 for one, other in pairwise(light))
    assert all((1.05) / (one + 0.05) > 2 for one in light)


def test_of_many_points_a_few_have_marks() -> None:
    many = Line("one", tuple((1024.0 + number, 1.0 + number) for number in range(200)))
    few = Line("one", many.points[:30])
    assert [_lines(line).count("<title>") - 1 for line in (few, many)] == [30, 29]  # the figure has one, too
