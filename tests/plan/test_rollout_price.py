"""The price of a synchronous rollout against the simulator, on a few cases of the benchmark that reports on many."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path

import pytest

from benchmarks.rollout_price import TABLE, price_case, write_table
from benchmarks.rollout_price_cases import FITTED, TESTED, Case, make_case
from benchmarks.rollout_price_fit import fit
from benchmarks.rollout_price_simulation import roll_out
from libra.cost.corrections import BATCH, UNCORRECTED, BatchFactors

SEEDS = [("proof", 1000), ("terminal", 1000), ("blend", 1000)]


def test_no_family_is_fitted_and_tested() -> None:
    assert not set(FITTED) & set(TESTED)


@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_a_price_is_near_what_is_simulated(family: str, seed: int) -> None:
    priced = price_case(make_case(family, seed), (3, 3))
    assert abs(priced.error) <= 0.15
    uncorrected = price_case(priced.case, (1, 1), UNCORRECTED)
    assert uncorrected.predicted != priced.predicted


def small() -> Case:
    return make_case("reasoning", 2)


def test_a_case_is_told_by_its_seed() -> None:
    first, again = small(), small()
    assert (first.cluster, first.recipe, first.profiles) == (again.cluster, again.recipe, again.profiles)
    assert first.batch(0) == again.batch(0) != first.batch(1)
    assert len(first.batch(0)) == first.recipe.batch


def test_the_same_samples_give_the_same_factors_and_a_smaller_error() -> None:
    priced = price_case(small(), (2, 2), UNCORRECTED)
    found = fit([priced.sample])
    assert found == fit([price_case(small(), (2, 2), UNCORRECTED).sample])
    assert found != UNCORRECTED
    before, after = (abs(priced.sample.price(factors) / priced.simulated - 1) for factors in (UNCORRECTED, found))
    assert after < before
    assert priced.sample.price(UNCORRECTED) == pytest.approx(priced.predicted)


def test_a_router_that_knows_nothing_at_first_is_no_faster() -> None:
    case = make_case("blend", 1000)
    plan = price_case(case, (1, 1)).plan
    assert len(plan.allocation.buckets) > 1
    known, unknown = (roll_out(plan, case.batch(0), unknown_at_first=it) for it in (False, True))
    assert unknown.seconds > known.seconds


def test_the_table_is_written_where_it_is_read(tmp_path: Path) -> None:
    copy = tmp_path / "corrections.py"
    copy.write_text(TABLE.read_text(encoding="utf-8"), encoding="utf-8")
    write_table(BATCH, copy)
    assert copy.read_text(encoding="utf-8") == TABLE.read_text(encoding="utf-8")
    others = BatchFactors(*(round(factor + 0.5, 2) for factor in astuple(BATCH)))
    write_table(others, copy)
    text = copy.read_text(encoding="utf-8")
    table = text[text.index("\nBATCH = ") :]
    assert all(f"    {name}={factor!r},\n" in table for name, factor in asdict(others).items())
    assert text.startswith(TABLE.read_text(encoding="utf-8").partition("\nBATCH = ")[0])
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="defines BATCH 0 times"):
        write_table(BATCH, tmp_path / "empty.py")
