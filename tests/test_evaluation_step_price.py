"""Steps predicted and simulated, and the neighbourhood of a plan: what is counted, and which plans are neighbours."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.evaluation_page import require_places
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_06B, RECIPE

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.neighbourhood import EXPERIMENT as NEIGHBOURHOOD
from benchmarks.evaluation.neighbourhood import behind, behind_afresh, best
from benchmarks.evaluation.neighbours import neighbours
from benchmarks.evaluation.page import with_tables
from benchmarks.evaluation.step_price import EXPERIMENT as STEP_PRICE
from benchmarks.evaluation.step_price import STALENESS, error
from benchmarks.evaluation.step_price_cell import FIRST_SEED, step
from benchmarks.rollout_price_cases import FITTED, TESTED
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.price import devices_used, infeasibility, price
from libra.plan.planner import Planner
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption

# Steps


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
    rows = {(row.case.partition(":")[0], row.metric): row for row in STEP_PRICE.rows(results)}
    assert rows["all", "mean |error|"].value == pytest.approx(5.0)
    assert rows["all", "mean |error|"].met is True
    assert rows["all", "largest |error|"].value == pytest.approx(20.0)
    assert rows["all", "largest |error|"].met is False
    assert rows["all", "mean error"].value == pytest.approx(-1.0)
    assert rows["all", "cases beyond 15 %"].value == 1
    assert rows["all", "training: mean |error|"].value == pytest.approx(25.0)
    # Staleness comes in turn: 0, 1, 4, 0, ...
    for first, staleness in enumerate(STALENESS):
        assert rows[f"staleness {staleness}", "mean error"].value == pytest.approx(sum(errors[first::3]) / 3)
    # Student's t of two degrees of freedom at 95 % is 4.303; means of steps that start together are 99, 100 and 101.
    width = next(row for row in STEP_PRICE.rows(results) if "half width" in row.metric)
    assert width.value == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_the_figure_has_a_mark_for_each_case() -> None:
    results = steps([10.0, -20.0, 3.0, 0.0, 0.0, -3.0, 4.0, -4.0, 1.0])
    svg = STEP_PRICE.figures(results)["seconds"]
    for result in results:
        assert f"{result.cell.name}: {error(result):+.1f} %" in svg
    assert "published, end to end" in STEP_PRICE.tables(results)["errors"]


# Neighbourhoods


def near(cell: Cell, plan: float, others: list[float], fresh: tuple[float, float]) -> Result:
    values: dict[str, Any] = {
        "devices": 16,
        "plan": {"training": 8, "engines": [["a800/tp1", 8]]},
        "predicted": plan,
        "simulated": plan,
        "neighbours": [
            {"what": f"change {number}", "predicted": it, "simulated": it} for number, it in enumerate(others)
        ],
        "fresh": {"plan": fresh[0], "best": fresh[1]},
    }
    return Result(cell, values, 1.0, found=False)


@pytest.mark.parametrize(
    ("plan", "others", "fresh", "wanted", "afresh"),
    [
        (102.0, [110.0, 100.0], (101.0, 100.0), 2.0, 1.0),
        (102.0, [110.0, 100.0], (99.0, 100.0), 2.0, -1.0),
        (100.0, [110.0, 101.0], (99.0, 100.0), 0.0, 0.0),  # none is better: there is nothing to hold it against
    ],
)
def test_a_plan_is_as_far_behind_as_the_best_neighbour_is_ahead(
    plan: float, others: list[float], fresh: tuple[float, float], wanted: float, afresh: float
) -> None:
    values = near(NEIGHBOURHOOD.cells(True)[0], plan, others, fresh).values
    assert best(values)["what"] == "change 1"
    assert behind(values) == pytest.approx(wanted)
    assert behind_afresh(values) == pytest.approx(afresh)


@pytest.mark.parametrize("experiment", [STEP_PRICE, NEIGHBOURHOOD], ids=lambda one: one.name)
def test_rows_tables_and_figures_are_made_of_the_results(experiment: Experiment) -> None:
    cells = experiment.cells(True)
    if experiment is STEP_PRICE:
        results = [priced(cell, 90.0 + n, 100.0, 1 + n % 2, n % 3 == 0) for n, cell in enumerate(cells)]
    else:
        results = [near(cell, 101.0, [100.0, 102.0 + n], (101.0, 100.0)) for n, cell in enumerate(cells)]
    rows, tables, figures = experiment.rows(results), experiment.tables(results), experiment.figures(results)
    assert len({(row.case, row.metric) for row in rows}) == len(rows)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in (*tables, *figures))
    page = "".join(f"<!-- table: {experiment.name}/{name} -->\n<!-- end -->\n" for name in tables)
    assert with_tables(page, {f"{experiment.name}/{name}": text for name, text in tables.items()}, [experiment.name])
    assert figures and all(svg.startswith("<svg") for svg in figures.values())
    require_places(experiment.name, tables, figures)


def option(shape: str, devices: int) -> EngineOption:
    return EngineOption(shape, "a", devices, 8, 400, 0.0, ((1.0, 1.0, 1.0),), (0.0,) * 3, (1.0, 1.0, 1.0))


# Training on 5 devices is slower than on 4.
SMALL = Problem(
    pools=(Pool("a", 1, 12),),
    engines=(option("one", 1), option("two", 2)),
    training=tuple(
        TrainingOption(f"on {devices}", "a", devices, 1, seconds, 0.0)
        for devices, seconds in ((2, 20.0), (4, 10.0), (5, 11.0), (6, 8.0))
    ),
    peaks=(100, 200, 300),
    expected=(True,) * 3,
    longest_context=400,
    recall_known=((1.0,) * 3,),
    recall_possible=((1.0,) * 3,),
    staleness=1,
)


def small(train: int, short: int, long: int, limit: int = 200) -> Allocation:
    return Allocation(1, (Bucket("one", short, 0, limit), Bucket("two", long, limit, 400)), f"on {train}")


def test_neighbours_by_hand() -> None:
    # 12 devices: all are used.
    found = {it.allocation: it.what for it in neighbours(SMALL, small(4, 4, 2))}
    assert set(found) == {
        small(4, 3, 2),  # one engine of bucket 0 less, and its device idle: nothing is faster with 5, a pair needs 2
        small(4, 4, 1),  # one of bucket 1 less, its devices idle,
        small(6, 4, 1),  # for training,
        small(4, 6, 1),  # or for bucket 0
        small(2, 5, 2),  # one more in bucket 0, from training,
        small(4, 5, 1),  # or from bucket 1
        small(2, 4, 3),  # one more in bucket 1, from training,
        small(4, 2, 3),  # or from bucket 0
        small(2, 4, 2),  # training on 2: the others idle,
        small(2, 6, 2),  # for bucket 0,
        # (bucket 1 with 3 is there already)
        small(6, 2, 2),  # and on 6, as 5 are slower than 4: from bucket 0
        # (and from bucket 1 is there already)
        small(4, 4, 2, limit=100),
        small(4, 4, 2, limit=300),
    }
    assert found[small(6, 4, 1)] == "-1 engine in bucket 1, training on 6"
    assert found[small(6, 2, 2)] == "train on 6 devices, -2 in bucket 0"
    assert found[small(4, 4, 2, limit=100)] == "bucket 0 up to 100"


@given(st.sampled_from((2, 4, 5, 6)), st.integers(1, 9), st.integers(1, 5), st.sampled_from((100, 200, 300)))
@settings(max_examples=100)
def test_neighbours_fit_differ_and_are_one_step_away(train: int, short: int, long: int, limit: int) -> None:
    here = small(train, short, long, limit)
    if infeasibility(SMALL, here) is not None:
        with pytest.raises(ValueError, match="does not fit has no neighbours"):
            neighbours(SMALL, here)
        return
    found = [it.allocation for it in neighbours(SMALL, here)]
    assert len(set(found)) == len(found)
    assert here not in found
    for other in found:
        assert infeasibility(SMALL, other) is None
        moved = other.buckets[0].up_to != limit
        changes = [
            other.layout != here.layout,
            other.buckets[0].engines != short,
            other.buckets[1].engines != long,
        ]
        # A limit alone, or one role that changes and at most one that makes up for it.
        assert (moved and not any(changes)) or (not moved and 1 <= sum(changes) <= 2)
        if sum(changes) == 2:
            devices = sum(devices_used(SMALL, here)["a"])
            assert sum(devices_used(SMALL, other)["a"]) <= max(devices, 12)


def test_by_their_price_no_neighbour_is_better_than_the_plan() -> None:
    planner = Planner(CLUSTER, QWEN_06B, RECIPE)
    problem, plan = planner.problem(CLASSES), planner.plan(CLASSES)
    found = neighbours(problem, plan.allocation)
    assert found
    assert all(price(problem, it.allocation).step >= plan.proof.bound * (1 - 1e-9) for it in found)
