"""Comparison of clusters: against brute force over all offers, and with simulated steps that upset the order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_cluster import A800, CLASSES, CLUSTER, QWEN_06B

from libra.choose.offers import Comparison, Job, OfferedCluster, compare_offers
from libra.config.recipe import Recipe
from libra.hardware.cluster import Cluster
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.plan.problem import InfeasiblePlanError
from libra.plan.simulated import RehearsedStep

PLAN = Planner(CLUSTER, QWEN_06B, Recipe(batch=64, samples_per_prompt=8, max_length=8192)).plan(CLASSES)


def sized(nodes: int, cost: float | None = None) -> Cluster:
    return Cluster((replace(A800, count=nodes, cost_per_hour=cost),))


def planned(step: float, *, simulated: bool = False) -> Plan:
    if simulated:
        return replace(PLAN, simulated=RehearsedStep(step, None, "cmlfq", 2, 0))
    return replace(PLAN, predicted=replace(PLAN.predicted, step=step))


STEPS = st.one_of(st.none(), st.sampled_from((10.0, 20.0, 40.0)), st.floats(1, 100))


@given(
    st.lists(st.tuples(STEPS, st.integers(1, 8), st.sampled_from((None, 10.0, 25.0))), min_size=1, max_size=6),
    st.sampled_from((60.0, 400.0, float("inf"))),
)
@settings(max_examples=200, deadline=None)
def test_choices_and_front_are_those_of_brute_force(
    given_offers: list[tuple[float | None, int, float | None]], deadline: float
) -> None:
    offers = tuple(
        OfferedCluster(sized(nodes, cost), None if step is None else planned(step))
        for step, nodes, cost in given_offers
    )
    found = Comparison(Job(10, deadline), offers)
    time = {id(it): it.seconds(found.job) for it in offers}
    cost = {id(it): found.cost(it) for it in offers}
    possible = [it for it in offers if it.plan is not None]
    punctual = [it for it in possible if time[id(it)] <= deadline]
    if punctual:
        assert found.cheapest is not None
        assert cost[id(found.cheapest)] == min(cost[id(it)] for it in punctual)
    else:
        assert found.cheapest is None
    if possible:
        assert found.fastest is not None and time[id(found.fastest)] == min(time[id(it)] for it in possible)
    undominated = {
        (time[id(it)], cost[id(it)])
        for it in possible
        if not any(
            time[id(other)] <= time[id(it)]
            and cost[id(other)] <= cost[id(it)]
            and (time[id(other)], cost[id(other)]) != (time[id(it)], cost[id(it)])
            for other in possible
        )
    }
    assert {(time[id(it)], cost[id(it)]) for it in found.front} == undominated
    priced = all(c is not None for _, _, c in given_offers)
    assert found.priced == priced
    for it in possible:
        hours = time[id(it)] / 3600
        hourly = it.cluster.nodes[0].count * (it.cluster.nodes[0].cost_per_hour or 0) if priced else it.cluster.devices
        assert cost[id(it)] == pytest.approx(hourly * hours)


def test_the_promised_offers_were_simulated() -> None:
    """The one that seems cheapest, and fastest, turns out slow; the next ones are simulated, too."""
    predicted = {1: 40.0, 2: 10.0, 3: 30.0, 4: 29.0}
    simulated = {1: 41.0, 2: 100.0, 3: 31.0, 4: 28.0}
    asked: list[int] = []

    def rehearse(cluster: Cluster) -> Plan:
        count = cluster.nodes[0].count
        asked.append(count)
        return planned(simulated[count], simulated=True)

    clusters = [sized(count) for count in predicted]
    found = compare_offers(clusters, Job(100), lambda it: planned(predicted[it.nodes[0].count]), rehearse)
    assert found.cheapest is not None and found.fastest is not None
    assert (found.cheapest.name, found.fastest.name) == (f"{A800.gpus} a800", f"{4 * A800.gpus} a800")
    assert asked == [2, 1, 4]
    assert all(it.plan and it.plan.simulated for it in (found.cheapest, found.fastest))


def test_a_cluster_without_a_plan_says_why() -> None:
    def refuse(cluster: Cluster) -> Plan:
        if cluster.nodes[0].count == 1:
            raise InfeasiblePlanError("weights do not fit")
        return planned(5.0)

    found = compare_offers([sized(1), sized(2)], Job(10), refuse)
    assert [(it.refusal, it in found.in_time) for it in found.offers] == [("weights do not fit", False), ("", True)]


@pytest.mark.parametrize(
    ("steps", "deadline", "words"), [(0, 1.0, "steps is 0; give"), (1, 0.0, "deadline is 0 s; give more than 0")]
)
def test_impossible_jobs_are_refused(steps: int, deadline: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Job(steps, deadline)
