"""The forgotten ratio that predictions are corrected by."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.exec.ratio import Ratio

NOTHING = (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "observed", "wanted"),
    [
        ("nothing observed", [], 1.0),
        ("nothing to divide by", [(3.0, 0.0)], 1.0),
        ("one observation", [(3.0, 2.0)], 1.5),
        ("an empty observation changes no ratio", [(6.0, 2.0), NOTHING], 3.0),
        # Five observations are half a life.
        ("half a life later it counts half", [(8.0, 4.0), *[NOTHING] * 4, (0.0, 2.0)], 4.0 / (2.0 + 2.0)),
        ("a life later a quarter", [(8.0, 4.0), *[NOTHING] * 9, (5.0, 1.0)], (2.0 + 5.0) / (1.0 + 1.0)),
        ("a ratio of sums, not a mean of ratios", [(2.0, 2.0), *[NOTHING] * 4, (6.0, 2.0)], (1.0 + 6.0) / (1.0 + 2.0)),
    ],
)
def test_ratios(name: str, observed: list[tuple[float, float]], wanted: float) -> None:
    ratio = Ratio()
    for above, below in observed:
        ratio.observe(above, below)
    assert ratio.value == pytest.approx(wanted), name


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10)), min_size=1))
def test_it_lies_between_the_ratios_it_saw(observed: list[tuple[float, float]]) -> None:
    ratio = Ratio()
    for above, below in observed:
        ratio.observe(above, below)
    seen = [above / below for above, below in observed]
    assert min(seen) - 1e-9 <= ratio.value <= max(seen) + 1e-9
