"""Figures: well-formed files that load nothing, with every mark where its number belongs."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from benchmarks.evaluation.estimates import Estimate
from benchmarks.evaluation.figures import PALETTE, BarChart, Bars

SVG = "{http://www.w3.org/2000/svg}"
BARS = [
    Bars("ours", (Estimate(1.0, (0.5, 1.5)), Estimate(4.0, (3.0, 5.0)), None)),
    Bars("theirs <b>", (2.0, 0.0, 3.0), hollow=True, like=0),
]


def bars(series: list[Bars] = BARS) -> BarChart:
    return BarChart("T & U", "D", ("a", "b", "c d"), series, "tokens/s", decimals=1)


def test_a_file_stands_alone_says_what_it_shows_and_is_the_same_again() -> None:
    svg = bars().svg()
    assert svg == bars().svg()
    root = ElementTree.fromstring(svg)
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and desc is not None and title.text and desc.text == "D"
    assert not {element.tag for element in root.iter()} & {f"{SVG}{name}" for name in ("script", "image", "use", "a")}
    assert not re.search(r"url\(http|href=|@import", svg)
    width, height = re.findall(r"viewBox=\"0 0 (\S+) (\S+)\"", svg)[0]
    assert re.search(rf'<rect width="{width}" height="{height}" fill="#ffffff"', svg)


def test_bars_say_their_values_and_name_their_series() -> None:
    words = [element.text for element in ElementTree.fromstring(bars().svg()).iter(f"{SVG}text")]
    assert {"1.0", "4.0", "2.0", "0.0", "3.0"} <= set(words)
    assert {"ours", "theirs <b>", "tokens/s"} <= set(words)


def test_numbers_of_others_look_different_in_the_same_colour() -> None:
    svg = bars().svg()
    filled, hollow = (re.findall(rf'fill="{fill}" stroke="{PALETTE[0]}"', svg) for fill in (PALETTE[0], "#d9eaf3"))
    assert len(filled) == 2 and len(hollow) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [((1.0,), "shorter"), ((1.0, -2.0, 3.0), "bars start at 0"), ((None, None, None), "no figure of none")],
)
def test_what_cannot_be_drawn_is_refused(values: tuple[float | None, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bars([Bars("a", values)]).svg()


def _luminance(code: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = (int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_neighbouring_colours_differ_in_lightness_and_all_differ_from_the_paper() -> None:
    light = [_luminance(code) for code in PALETTE]
    assert all(abs(one - other) > 0.05 for one, other in pairwise(light))
    assert all((1.05) / (one + 0.05) > 2 for one in light)
