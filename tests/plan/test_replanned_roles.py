"""Engines change roles only where that earns back its price: lengths drift, and every decision is held against groups
of devices that are counted by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_cluster import LONG, QWEN_06B, SHORT
from oracles.two_kinds import FAST, WIDE, paired_recipe

from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.lengths import TrajectoryClass
from libra.plan.decision import ROLE_CHANGE, live_refill, switch_cost
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.price import infeasibility, price
from libra.plan.placement import Role
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.plan.replanner import Outlook, Proposal
from libra.plan.site import ClusterSite, Scenario

OLD = NodeClass("old", 1, 8, GPUS["A800"], intra_bandwidth=200e9, inter_bandwidth=50e9)
# The H100s train, so that the prompts of H20s are left to A800s.
PLANNER = Planner(Cluster((OLD, FAST, replace(WIDE, count=2))), QWEN_06B, paired_recipe(batch=4096, staleness=4))

FACTORS = (1.0, 0.9, 1.1)  # on the tokens that are expected

Place = tuple[str, tuple[int, ...], tuple[int, ...]]


def saying(tokens: float) -> tuple[TrajectoryClass, ...]:
    """Two turns without waiting, of which the longest generate so many tokens and are told the rest."""
    return tuple(
        replace(
            cls,
            generated=share * tokens,
            prefill=0.95 * cls.peak_context - share * tokens,
            context_sum=0.8 * share * tokens * cls.mean_context,
            turns=2.0,
            tool_seconds=0.0,
        )
        for cls, share in ((SHORT, 0.25), (LONG, 1.0))
    )


def proposed(running: Plan, tokens: float, horizon: float, uncertainty: float = 0.01) -> Proposal:
    """What becomes of a running plan where trajectories are expected to generate so much, or a tenth less or more."""
    scenarios = tuple(Scenario(saying(factor * tokens), factor) for factor in FACTORS)
    return Outlook(ClusterSite(PLANNER, running), scenarios, horizon, uncertainty).propose()


def placed(plan: Plan) -> dict[Place, tuple[Role, str]]:
    return {(it.pool, it.nodes, it.gpus): (it.role, it.name) for it in plan.placement}


def role_changes(before: Mapping[Place, tuple[Role, str]], after: Mapping[Place, tuple[Role, str]]) -> Counter[str]:
    """Engines that stay in their place with another role."""
    changed = Counter()
    for place, (role, name) in after.items():
        if place in before and before[place][1] == name and before[place][0] != role:
            changed[f"{before[place][0]} to {role}"] += 1
    return changed


def cost_by_hand(before: Plan, after: Plan) -> float:
    """The slowest start, and the contexts of engines that stop or change their role, computed again by those there."""
    old, new = placed(before), placed(after)
    request = after.request
    assert isinstance(request, ClusterRequest)
    switch = switch_cost(request)
    slowest = 0.0
    for place, (role, name) in new.items():
        if old.get(place) == (role, name):
            continue
        stays = place in old and old[place][1] == name
        slowest = max(
            slowest, switch.trainer_join if role == "train" else ROLE_CHANGE if stays else switch.engine_start
        )

    def devices(groups: Mapping[Place, tuple[Role, str]]) -> int:
        return sum(len(nodes) * len(gpus) for (_, nodes, gpus), (role, _) in groups.items() if role != "train")

    stopped = devices({place: it for place, it in old.items() if new.get(place) != it})
    return slowest + live_refill(request) * stopped / devices(old) / devices(new)


def saved_by_hand(before: Plan, after: Plan, tokens: float) -> float:
    """Seconds a step, over what may be expected, each as likely as to the replanner; the likeliest alone where the new
    plan does not fit all."""
    held = tuple(
        (next(it.pool for it in plan.placement if it.role == "train"), plan.layout)
        for plan in (before, after)
        if plan.layout is not None
    )
    requests = [PLANNER.request(saying(factor * tokens), before.allocation, held) for factor in FACTORS]
    problems = [request.menu().problem for request in requests]
    weights = (2 / 3, 1 / 6, 1 / 6)
    if any(infeasibility(problem, after.allocation) for problem in problems):
        problems, weights = problems[:1], (1.0,)
    return sum(
        weight * (price(problem, before.allocation).step - price(problem, after.allocation).step)
        for problem, weight in zip(problems, weights, strict=True)
    )


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from([20.0, 100.0, 400.0, 800.0, 1200.0, 1600.0]), min_size=2, max_size=4),
    st.sampled_from([1.0, 3.0, 5.0, 10.0, 100.0]),
    st.sampled_from([0.0, 0.01, 0.3]),
)
def test_roles_change_where_the_saving_over_the_horizon_exceeds_the_price(
    drift: list[float], horizon: float, uncertainty: float
) -> None:
    running = PLANNER.plan(saying(drift[0]))
    for tokens in drift[1:]:
        proposal = proposed(running, tokens, horizon, uncertainty)
        decision, wanted = proposal.decision, proposal.plan
        saved, cost = saved_by_hand(running, wanted, tokens), cost_by_hand(running, wanted)
        assert decision.gain_per_step == pytest.approx(saved, abs=1e-9)
        assert decision.cost == pytest.approx(cost, abs=1e-9)
        assert decision.current is not None
        worth = saved * horizon > cost and saved > uncertainty * decision.current.step
        assert decision.taken == worth
        if decision.taken:
            running = wanted


def test_long_answers_turn_engines_of_a_running_plan_into_a_pair_if_they_last_long_enough() -> None:
    few = PLANNER.plan(saying(400))
    assert set(few.allocation.engines_by_shape) == {"wide/tp1"}
    unhurried = proposed(few, 1600, 100.0)
    assert unhurried.decision.taken
    assert role_changes(placed(few), placed(unhurried.plan)) == {"generate to decode": 6}
    lasts = cost_by_hand(few, unhurried.plan) / saved_by_hand(few, unhurried.plan, 1600)
    for horizon, taken in ((0.99 * lasts, False), (1.01 * lasts, True)):
        proposal = proposed(few, 1600, horizon)
        assert proposal.plan.allocation == unhurried.plan.allocation
        assert proposal.decision.taken == taken
    # Few answers again are as fast where they are: nothing is gained by the way back.
    back = proposed(unhurried.plan, 400, 100.0)
    assert not back.decision.taken and back.plan.allocation == unhurried.plan.allocation
