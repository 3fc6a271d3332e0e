"""Steps predicted and simulated: which cases there are, and what is counted."""

from __future__ import annotations

import pytest
from oracles.evaluation_page import require_found, require_places

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.predicted_step import FIRST_SEED, step
from benchmarks.evaluation.step_price import EXPERIMENT as STEP_PRICE
from benchmarks.evaluation.step_price import STALENESS, error
from tests.oracles.random_clusters import FITTED, TESTED


def priced(cell: Cell, predicted: float, simulated: float, buckets: int = 1, experts: bool = False) -> Result:
    values = {
        "predicted": predicted,
        "simulated": simulated,
        "each": [
            it for it in (simulated - 1, simulated, simulated + 1) for _ in range(1 + cell.arguments["staleness"])
        ],
        "predicted_training": 10.0,
        "simulated_training": 8.0,
        "buckets": [["a800/tp1", 1, 100]] * buckets,
        "experts": experts,
    }
    return Result(cell, values, 1.0, found=False)


def steps(errors: list[float]) -> list[Result]:
    cells = STEP_PRICE.cells(True)
    return [priced(cell, 100 + it, 100.0) for cell, it in zip(cells, errors, strict=False)]


def test_each_staleness_meets_each_family_and_no_case_comes_twice() -> None:
    for quick, count in ((True, 9), (False, 100)):
        cells = STEP_PRICE.cells(quick)
        asked = [(it.arguments["family"], it.arguments["seed"], it.arguments["staleness"]) for it in cells]
        assert len(asked) == len({(family, seed) for family, seed, _ in asked}) == count
        assert {(family, staleness) for family, _, staleness in asked} == {(f, s) for f in TESTED for s in STALENESS}


@pytest.mark.parametrize(("family", "seed"), [(FITTED[0], FIRST_SEED), (TESTED[0], FIRST_SEED - 1)])
def test_what_may_have_been_fitted_to_is_no_case(family: str, seed: int) -> None:
    with pytest.raises(ValueError, match="may have been fitted to"):
        step(family, seed, 0)


def test_a_cell_predicts_and_simulates_and_is_the_same_again() -> None:
    found = step("proof", FIRST_SEED, 1)
    assert found == step("proof", FIRST_SEED, 1)
    assert found["drawn"] == f"proof {FIRST_SEED}, staleness 1"
    assert found["simulated"] == pytest.approx(sum(found["each"]) / len(found["each"]))
    # Nobody is faster than the trainer.
    assert found["simulated"] >= found["simulated_training"] * (1 - 1e-9)
    assert found["predicted"] >= found["predicted_training"]


def test_errors_are_counted_by_size_and_by_sign() -> None:
    errors = [10.0, -20.0, 3.0, 0.0, 0.0, -3.0, 4.0, -4.0, 1.0]
    results = steps(errors)
    assert [error(it) for it in results] == pytest.approx(errors)
    rows = {(row.case, row.metric): row for row in STEP_PRICE.found(results).rows}
    assert rows["all", "mean abs. error"].value == rows["goals", "mean |error|"].value == pytest.approx(5.0)
    assert rows["goals", "mean |error|"].met is True
    assert rows["all", "largest abs. error"].value == pytest.approx(20.0)
    assert rows["goals", "largest |error|"].met is False
    assert rows["all", "mean error"].value == pytest.approx(-1.0)
    assert rows["all", "beyond 15 %"].value == 1
    assert rows["all", "training: mean |error|"].value == pytest.approx(25.0)
    # Staleness comes in turn: 0, 1, 4, 0, ...
    for first, staleness in enumerate(STALENESS):
        assert rows[f"staleness {staleness}", "mean error"].value == pytest.approx(sum(errors[first::3]) / 3)
    # Student's t of two degrees of freedom at 95 % is 4.303; means of steps that start together are 99, 100 and 101.
    width = rows["all", "half width of a simulated mean's 95 % interval"]
    assert width.value == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_what_is_found_has_its_places_on_the_page() -> None:
    results = [priced(it, 90.0 + n, 100.0, 1 + n % 2, n % 3 == 0) for n, it in enumerate(STEP_PRICE.cells(True))]
    found = require_found(STEP_PRICE, results)
    assert "published, end to end" in found.tables["errors"].markdown()
    require_places(STEP_PRICE, found)
