"""Published cases beside their prices: what counts as met, and what the summary of a group says."""

from __future__ import annotations

import pytest

from benchmarks.public.case import CaseGroup, PublicCase
from benchmarks.public.training import RATES, priced_rate, training_groups


@pytest.mark.parametrize(
    ("priced", "error", "met"), [(110.0, 0.10, True), (89.0, -0.11, False), (100.0, 0.0, True), (None, None, False)]
)
def test_a_case_is_met_within_its_bar(priced: float | None, error: float | None, met: bool) -> None:
    case = PublicCase("one", 100.0, priced, 0.1 + 1e-9)
    assert case.error == (None if error is None else pytest.approx(error))
    assert case.met is met


def test_a_group_has_a_row_a_price_then_the_mean_and_the_refused() -> None:
    cases = [PublicCase("a", 100, 102, 0.1), PublicCase("b", 100, 90, 0.1), PublicCase("c", 100, None, 0.1, "why")]
    rows = list(CaseGroup("KV", "tokens", cases, mean_bar=0.04).rows())
    assert [(row.case, row.metric, row.met) for row in rows] == [
        ("KV: a", "error", True),
        ("KV: b", "error", True),
        ("KV", "mean absolute error", False),
        ("KV", "within their bars", False),
        ("KV", "refused", False),
    ]
    assert [row.value for row in rows] == [pytest.approx(it) for it in (2, -10, 6, 2, 1)]


@pytest.mark.parametrize("row", [row for rows in RATES.values() for row in rows], ids=lambda row: row.name)
def test_each_published_rate_has_a_price(row: object) -> None:
    assert priced_rate(row) > 0  # type: ignore[arg-type]


def test_rates_that_were_looked_at_are_within_their_bars() -> None:
    rows, _, _, adapters = (group.cases for group in training_groups())
    assert len(rows) == 16 and all(case.met for case in rows)
    assert len(adapters) == 9 and all(case.met for case in adapters)
