"""The price of rollouts and steps against the simulator, on a few cases of the benchmarks that report on many."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.rollout_price import TABLE, Sample, fit, price_case, write_table
from libra.cost.corrections import BATCH, UNCORRECTED, BatchFactors
from tests.oracles.random_clusters import (
    FITTED,
    TESTED,
    Case,
    CaseEpisodes,
    make_case,
    measured_steps,
    plan_case,
    request_of,
    roll_out,
    simulate_steps,
)

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


def test_the_table_is_written_where_it_is_read(tmp_path: Path) -> None:
    copy = tmp_path / "corrections.py"
    copy.write_text(TABLE.read_text(encoding="utf-8"), encoding="utf-8")
    write_table(BATCH, copy)
    assert copy.read_text(encoding="utf-8") == TABLE.read_text(encoding="utf-8")
    others = changed(BATCH)
    write_table(others, copy)
    text = copy.read_text(encoding="utf-8")
    table = text[text.index("\nBATCH = ") :]
    assert all(f"    {name}={factor!r},\n" in table for name, factor in asdict(others).items())
    assert text.startswith(TABLE.read_text(encoding="utf-8").partition("\nBATCH = ")[0])
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="defines BATCH 0 times"):
        write_table(BATCH, tmp_path / "empty.py")


def changed(factors: BatchFactors) -> BatchFactors:
    return replace(factors, **{name: round(value + 0.5, 2) for name, value in asdict(factors).items()})


def overlapping() -> Case:
    return make_case("reasoning", 2, 2)


@pytest.mark.parametrize(("staleness", "left_out", "measured"), [(0, 1, 12), (1, 2, 12), (2, 3, 18), (4, 5, 30)])
def test_measured_steps_are_several_times_as_many_as_start_together(
    staleness: int, left_out: int, measured: int
) -> None:
    assert measured_steps(staleness) == (left_out, measured)


def test_measured_steps_are_those_of_a_run_that_goes_on() -> None:
    """Steps that are measured last are as long as if many more followed."""
    case = overlapping()
    plan, _ = plan_case(case)
    few, many = simulate_steps(case, plan, measured=3), simulate_steps(case, plan, measured=7)
    assert few.each == pytest.approx(many.each[:3])


def test_groups_are_the_batches_of_the_case_in_order() -> None:
    case = overlapping()
    prompts, samples = case.recipe.prompts, case.recipe.samples_per_prompt
    episodes = CaseEpisodes(case, first=3)
    assert (episodes.samples_per_prompt, episodes.max_context) == (samples, case.recipe.max_length)
    groups = [episodes.group(number, 7) for number in range(2 * prompts)]
    for which in (0, 1):
        drawn = [trajectory for group in groups[which * prompts : (which + 1) * prompts] for trajectory in group]
        assert [it.turns for it in drawn] == [it.turns for it in case.batch(3 + which)]
    for number, group in enumerate(groups):
        assert [it.id for it in group] == [f"{number}/{sample}" for sample in range(samples)]
        assert {(it.prompt_id, it.policy_version) for it in group} == {(str(number), 7)}
    assert episodes.group(1, 7) == groups[1]


@pytest.mark.parametrize(("family", "seed", "staleness"), [("proof", 1001, 1), ("terminal", 1001, 4)])
def test_a_step_is_near_what_is_simulated(family: str, seed: int, staleness: int) -> None:
    case = make_case(family, seed, staleness)
    plan, _ = plan_case(case)
    steps = simulate_steps(case, plan)
    assert sum(steps.each) / len(steps.each) == pytest.approx(steps.seconds)
    assert 0 < steps.training <= steps.seconds
    assert abs(plan.predicted.step / steps.seconds - 1) <= 0.15


def test_synchronous_steps_are_a_rollout_and_training_one_after_the_other() -> None:
    """Of a run whose batches all start on idle engines, the rollouts are those that are simulated by themselves."""
    case = make_case("proof", 1000)
    plan, _ = plan_case(case)
    steps = simulate_steps(case, plan, measured=2, first=10)
    # The first batch is left out, and training of a batch is in its own step.
    rollouts = [roll_out(plan, case.batch(11 + which)) for which in range(2)]
    assert steps.seconds == pytest.approx(sum(rollouts) / 2 + steps.training, rel=0.05)
    assert all(seconds > rollout for seconds, rollout in zip(steps.each, rollouts, strict=True))


def test_overlap_is_fitted_to_steps() -> None:
    case = overlapping()
    plan, menu = plan_case(case, UNCORRECTED)
    seconds = simulate_steps(case, plan, measured=4).seconds
    sample = Sample(request_of(case), menu.problem, plan.allocation, seconds)
    assert sample.price(UNCORRECTED) == pytest.approx(plan.predicted.step)
    found = fit([sample])
    assert found == fit([sample])
    before, after = (abs(sample.price(factors) / seconds - 1) for factors in (UNCORRECTED, found))
    assert after < before
