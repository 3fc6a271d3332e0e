"""Plans of serving engines against brute force and an integer linear program."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from libra.plan.problem import InfeasiblePlanError
from libra.serving.mix_problem import ServingOption, ServingProblem, solve_serving

ROLES = ("colocated", "prefill", "decode")


def serves(problem: ServingProblem, counts: tuple[int, ...]) -> bool:
    def total(role: str, of: str) -> float:
        rates = zip(problem.options, counts, strict=True)
        return sum(int(getattr(it, of) * 1000) * count for it, count in rates if it.role == role)

    there_are = {
        role: any(n for it, n in zip(problem.options, counts, strict=True) if it.role == role) for role in ROLES
    }
    if there_are["prefill"] != there_are["decode"]:
        return False
    apart = min(total(role, of) for role in ("prefill", "decode") for of in ("rate", "link"))
    used = {
        name: sum(it.gpus * n for it, n in zip(problem.options, counts, strict=True) if it.nodes == name)
        for name in problem.there_are
    }
    return (
        total("colocated", "rate") + apart >= problem.rate * 1000
        and all(used[name] <= there for name, there in problem.there_are.items())
        and sum(used.values()) <= (problem.gpus or inf)
        and cost(problem, counts) <= (problem.budget or inf)
        and all(any(rate_of(problem, counts, it) > rate_of(problem, cut, it) for it in ROLES) for cut in problem.cuts)
    )


def rate_of(problem: ServingProblem, counts: tuple[int, ...], role: str) -> int:
    """In thousandths."""
    return sum(int(1000 * it.rate) * n for it, n in zip(problem.options, counts, strict=True) if it.role == role)


def cost(problem: ServingProblem, counts: tuple[int, ...]) -> float:
    return sum(it.cost * n for it, n in zip(problem.options, counts, strict=True))


def brute_force(problem: ServingProblem) -> float:
    """The least cost, infinite where there is no plan."""
    ranges = [range(problem.there_are[it.nodes] // it.gpus + 1) for it in problem.options]
    return min((cost(problem, counts) for counts in product(*ranges) if serves(problem, counts)), default=inf)


def integer_program(problem: ServingProblem) -> float:
    pulp = pytest.importorskip("pulp", reason="the extra `ilp` is not installed")
    lp = pulp.LpProblem("serving", pulp.LpMinimize)
    options = range(len(problem.options))
    n = [pulp.LpVariable(f"n{o}", 0, cat="Integer") for o in options]
    d = pulp.LpVariable("d", 0)
    lp += pulp.lpSum(it.cost * n[o] for o, it in enumerate(problem.options))

    def total(role: str, of: str) -> object:
        return pulp.lpSum(
            int(1000 * getattr(problem.options[o], of)) * n[o] for o in options if problem.options[o].role == role
        )

    lp += total("colocated", "rate") + d >= 1000 * problem.rate
    for role, of in product(("prefill", "decode"), ("rate", "link")):
        lp += total(role, of) >= d
    for name, there in problem.there_are.items():
        lp += pulp.lpSum(it.gpus * n[o] for o, it in enumerate(problem.options) if it.nodes == name) <= there
    if problem.gpus is not None:
        lp += pulp.lpSum(it.gpus * n[o] for o, it in enumerate(problem.options)) <= problem.gpus
    if problem.budget is not None:
        lp += pulp.lpSum(it.cost * n[o] for o, it in enumerate(problem.options)) <= problem.budget
    lp.solve(pulp.PULP_CBC_CMD(msg=False))
    return float(pulp.value(lp.objective)) if pulp.LpStatus[lp.status] == "Optimal" else inf


def random_problem(generator: np.random.Generator, options: int, there: int) -> ServingProblem:
    def option(number: int) -> ServingOption:
        gpus = int(generator.choice([1, 2, 4]))
        return ServingOption(
            f"option {number}",
            str(generator.choice(["colocated", "prefill", "decode"])),  # type: ignore[arg-type]
            str(generator.choice(["a", "b"])),
            gpus,
            float(gpus * generator.integers(1, 6) / 2),
            float(generator.integers(1, 40) / 4),
            float(generator.integers(1, 40) / 4),
        )

    return ServingProblem(
        float(generator.integers(1, 20)),
        tuple(option(number) for number in range(options)),
        {"a": there, "b": there},
        gpus=int(generator.integers(2, 2 * there)) if generator.random() < 0.5 else None,
        budget=float(generator.integers(2, 20)) if generator.random() < 0.3 else None,
    )


def least(problem: ServingProblem) -> float:
    try:
        plan = solve_serving(problem)
    except InfeasiblePlanError:
        return inf
    assert serves(problem, plan.counts)
    assert plan.proven
    return plan.cost


@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_plan_is_that_of_brute_force_also_after_cuts(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(15):
        problem = random_problem(generator, 4, 4)
        for _ in range(3):
            found = least(problem)
            assert found == pytest.approx(brute_force(problem))
            if found == inf:
                break
            problem = problem.without(solve_serving(problem).counts)


@pytest.mark.parametrize("seed", range(2))
def test_the_cheapest_plan_is_that_of_an_integer_program(seed: int) -> None:
    generator = np.random.default_rng(100 + seed)
    for _ in range(10):
        problem = random_problem(generator, 12, 64)
        assert least(problem) == pytest.approx(integer_program(problem))


def test_a_cut_is_not_met_by_half_a_pair() -> None:
    """The cheapest engine by far only computes prompts, which nobody goes on with."""
    options = (
        ServingOption("alone", "colocated", "a", 1, 10, 5),
        ServingOption("first", "prefill", "a", 1, 1, 5, 5),
        ServingOption("then", "decode", "a", 1, 12, 5, 5),
    )
    problem = ServingProblem(5, options, {"a": 8})
    assert solve_serving(problem).counts == (1, 0, 0)
    assert solve_serving(problem.without((1, 0, 0))).counts == (0, 1, 1)


def test_of_plans_that_cost_the_same_one_serves_most() -> None:
    options = (ServingOption("small", "colocated", "a", 1, 1, 5), ServingOption("large", "colocated", "a", 2, 2, 9))
    assert solve_serving(ServingProblem(9, options, {"a": 8})).counts == (2, 0)


def test_a_plan_that_serves_no_more_in_any_role_is_cut_with_it() -> None:
    options = tuple(ServingOption(name, "colocated", "a", 1, 1, 5) for name in ("one", "other"))
    problem = ServingProblem(9, options, {"a": 8})
    missed = solve_serving(problem)
    assert missed.cost == 2
    assert solve_serving(problem.without(missed.counts)).cost == 3


def test_what_there_is_too_little_for_says_so() -> None:
    problem = ServingProblem(100, (ServingOption("one", "colocated", "a", 1, 1, 1),), {"a": 8}, budget=5)
    with pytest.raises(
        InfeasiblePlanError, match=r"100 requests/s need more than the cluster or the limits .* \(8 of a; budget 5\)"
    ):
        solve_serving(problem)


@pytest.mark.parametrize("scale", [1e-9, 1e-5, 1e6, 1e12])
def test_the_unit_of_prices_changes_no_plan(scale: float) -> None:
    options = (
        ServingOption("small", "colocated", "a", 1, 0.9 * scale, 10.0),
        ServingOption("large", "colocated", "b", 1, 2.5 * scale, 20.0),
    )
    problem = ServingProblem(20.0, options, {"a": 4, "b": 4}, budget=2 * scale)
    plan = solve_serving(problem)
    assert plan.counts == (2, 0)
    assert plan.proven and plan.bound == pytest.approx(1.8 * scale)
    with pytest.raises(InfeasiblePlanError, match="lower the rate or raise budget"):
        solve_serving(replace(problem, budget=1.7 * scale))
    assert solve_serving(replace(problem, budget=1e308)).counts == (2, 0)


def test_all_there_is_costs_no_more_than_a_budget_that_is_larger() -> None:
    """Costs are rounded up to parts, so all engines together cost more parts than their sum has."""
    everything = ServingProblem(30, (ServingOption("one", "colocated", "a", 1, 1.0005, 10),), {"a": 3}, budget=1e308)
    assert solve_serving(everything).counts == (3,)


def test_no_rate_is_too_high_to_be_refused() -> None:
    option = ServingOption("one", "colocated", "a", 1, 1.0, 10.0)
    with pytest.raises(
        InfeasiblePlanError, match=r"1e\+308 requests/s need more than the .* \(4 of a\): lower the rate$"
    ):
        solve_serving(ServingProblem(1e308, (option,), {"a": 4}))
