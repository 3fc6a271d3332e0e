"""Latency limits with and without units."""

from __future__ import annotations

import pytest

from libra.config.units import PLAUSIBLE, duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50ms", 0.05), ("1s", 1.0), ("1", 1.0), (" 1.5 s ", 1.5), ("200us", 2e-4), ("2min", 120.0), ("1e-3", 1e-3)],
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert duration("ttft", text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize("text", ["", "soon", "ms", "5 parsecs", "nan", "inf", "1,5s", "0x10"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ttft is .*; give seconds, or a number and one of us, ms, s, min"):
        duration("ttft", text)


@pytest.mark.parametrize(("metric", "text"), [("ttft", "1000"), ("tpot", "50"), ("tpot", "2.5"), ("latency", "40000")])
def test_an_implausible_bare_number_is_asked_back(metric: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"{metric} is {text} seconds, .*; write {text}ms or {text}s"):
        duration(metric, text, PLAUSIBLE[metric])
    assert duration(metric, f"{text}s", PLAUSIBLE[metric]) == float(text)
