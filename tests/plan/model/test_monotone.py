"""What a price may never do, over random recipes and classes: of given allocations, and of the best one.

Menus are those of a small cluster, allocations all that have up to two buckets on a few engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_cluster import CLUSTER, QWEN_14B

from libra.config.recipe import Recipe
from libra.lengths import TrajectoryClass
from libra.lengths.members import Member
from libra.plan.allocation import Allocation, Bucket
from libra.plan.model.solve import solve
from libra.plan.options.price import infeasibility, price
from libra.plan.planner import Planner
from libra.plan.problem import Problem

_SHAPES = ("a800/tp1", "a800/tp2", "a800/tp4", "a800/tp8")
_PEAKS = (1000, 3000, 8000)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    staleness = draw(st.sampled_from([0, 1, 2, 4]))
    return Recipe(
        batch=draw(st.sampled_from([64, 512, 4096])),
        samples_per_prompt=8,
        max_length=8192,
        mode="async" if staleness else "sync",
        staleness=staleness,
        gpu_memory_utilization=draw(st.sampled_from([0.45, 0.6, 0.9])),  # with little memory caches forget
        max_buckets=2,
    )


@st.composite
def workloads(draw: st.DrawFn) -> tuple[TrajectoryClass, ...]:
    """Three classes of agents: turns that each generate, with tools between them."""
    shares = draw(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3))
    turns = draw(st.sampled_from([1.0, 4.0, 16.0]))
    tool = draw(st.sampled_from([0.0, 0.5, 20.0]))
    factors = st.sampled_from([0.0, 0.5, 1.0, 2.0, 8.0])
    found = []
    for share, peak in zip(shares, _PEAKS, strict=True):
        generated = peak * draw(st.floats(0.05, 0.5))
        prefill = peak - generated
        found.append(
            TrajectoryClass(
                share=share / sum(shares),
                peak_context=peak,
                mean_context=0.9 * peak,
                generated=generated,
                context_sum=generated * 0.5 * peak,
                prefill=prefill,
                turns=turns,
                tool_seconds=tool * turns,
                before_first_return=1 / turns,
                members=tuple(
                    Member(
                        0.25, generated * draw(factors), (peak - generated) * 0.5, turns, tool * turns * draw(factors)
                    )
                    for _ in range(4)
                ),
                seen=draw(st.sampled_from([None, 1000.0])),
            )
        )
    return tuple(found)


def problem_of(recipe: Recipe, classes: Sequence[TrajectoryClass]) -> Problem:
    return Planner(CLUSTER, QWEN_14B, recipe).problem(tuple(classes))


def allocations(problem: Problem) -> list[Allocation]:
    training = (problem.training[0], problem.training[-1])
    ways = [(Bucket(shape, engines, 0, 8192),) for shape in _SHAPES for engines in (1, 3, 8)]
    ways += [
        (Bucket(_SHAPES[0], 2, 0, cut), Bucket(shape, engines, cut, 8192))
        for cut in _PEAKS[:2]
        for shape in _SHAPES
        for engines in (1, 4)
    ]
    found = [Allocation(option.replicas, way, option.layout) for option in training for way in ways]
    return [allocation for allocation in found if infeasibility(problem, allocation) is None]


def require_no_longer(shorter: Problem, longer: Problem) -> None:
    """Of every allocation that both know, and of the best: as far as the solver tells plans apart."""
    known = {(option.layout, option.replicas) for option in longer.training}
    compared = [a for a in allocations(shorter) if (a.layout, a.replicas) in known and infeasibility(longer, a) is None]
    for allocation in compared:
        assert price(shorter, allocation).step <= price(longer, allocation).step * (1 + 1e-9)
    found, other = (solve(problem, tie_break=False) for problem in (shorter, longer))
    assert found.proof.bound <= other.predicted.step * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(recipes(), workloads())
def test_more_staleness_is_never_slower(recipe: Recipe, classes: tuple[TrajectoryClass, ...]) -> None:
    staler = recipe.model_copy(update={"staleness": recipe.staleness + 1, "mode": "async"})
    require_no_longer(problem_of(staler, classes), problem_of(recipe, classes))


@settings(max_examples=30, deadline=None)
@given(recipes(), workloads(), st.sampled_from([0.0, 0.5, 0.99]))
def test_faster_tools_are_never_slower(recipe: Recipe, classes: tuple[TrajectoryClass, ...], factor: float) -> None:
    faster = [
        replace(
            cls,
            tool_seconds=cls.tool_seconds * factor,
            members=tuple(it._replace(tool_seconds=it.tool_seconds * factor) for it in cls.members),
        )
        for cls in classes
    ]
    require_no_longer(problem_of(recipe, faster), problem_of(recipe, classes))


@settings(max_examples=30, deadline=None)
@given(recipes(), workloads(), st.sampled_from([1.01, 1.3]), st.integers(0, 2))
def test_longer_trajectories_are_never_faster(
    recipe: Recipe, classes: tuple[TrajectoryClass, ...], factor: float, which: int
) -> None:
    """Tokens of one class that its contexts hold and generate; what trains is held fixed."""
    longer = list(classes)
    cls = classes[which]
    longer[which] = replace(
        cls,
        generated=cls.generated * factor,
        context_sum=cls.context_sum * factor**2,
        prefill=cls.prefill * factor,
        members=tuple(it._replace(generated=it.generated * factor, prefill=it.prefill * factor) for it in cls.members),
    )
    before, after = problem_of(recipe, classes), problem_of(recipe, longer)
    require_no_longer(before, replace(after, training=before.training))


@settings(max_examples=15, deadline=None)
@given(recipes(), workloads())
def test_a_price_does_not_depend_on_what_else_is_on_the_menu(
    recipe: Recipe, classes: tuple[TrajectoryClass, ...]
) -> None:
    problem = problem_of(recipe, classes)
    found = [(allocation, price(problem, allocation)) for allocation in allocations(problem)]
    for buckets in (1, 4, 8):
        other = problem_of(recipe.model_copy(update={"max_buckets": buckets}), classes)
        for allocation, predicted in found:
            if infeasibility(other, allocation) is None:
                assert price(other, allocation) == predicted
