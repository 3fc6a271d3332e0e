"""Plans that borrow, in the core: what frameworks leave out of them, when they are made again, and their engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import A800, CLASSES, CLUSTER, QWEN_06B, QWEN_14B, RECIPE, trajectories
from oracles.small_lender import SERVING, lender

from libra.cost.device import SwitchCost
from libra.hardware.cluster import Cluster
from libra.plan.plan import make_plan
from libra.plan.planner import Planner, recipe_tracker
from libra.plan.replanner import Replanner
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.planned_engines import planned_engines

PLANNER = Planner(CLUSTER, QWEN_14B, RECIPE.model_copy(update={"batch": 1024}))
FREE = SwitchCost(0.0, 0.0, 0.0)


def test_lent_engines_are_left_out() -> None:
    cluster = Cluster((A800,), (SERVING,))
    planner = Planner(cluster, QWEN_06B, RECIPE.model_copy(update={"framework": "slime"}), lenders=(lender(1.0, 2.0),))
    menu = planner.request(CLASSES).menu()
    assert not menu.problem.lent
    assert not menu.lent
    left_out = [it for it in menu.rejected if it.kind == "framework"]
    assert left_out
    assert "slime starts engines only on its own nodes" in left_out[0].reason
    assert any(group.role == "generate" for group in make_plan(planner.request(CLASSES)).placement)


def test_a_loan_is_taken_and_given_back_as_traffic_moves() -> None:
    quiet, busy = lender(1.0), lender(9.0)
    planner = replace(PLANNER, cluster=replace(CLUSTER, serving=(SERVING,)), lenders=(busy,))
    replanner = Replanner(planner, switch=FREE, holds=10.0)  # steps: enough to earn back the contexts that are lost
    borrowed = []
    for now in (busy, quiet, lender(1.5), busy):
        replanner.lend([now])
        replanner.step(trajectories(len(borrowed), 4), [])
        assert replanner.plan is not None
        borrowed.append(sum(loan.engines for loan in replanner.plan.loans))
    assert borrowed[0] == borrowed[3] == 0
    assert borrowed[1] > 0 and borrowed[2] > 0
    assert "no longer fits" in replanner.looks[-1].decision.reason
    with pytest.raises(ValueError, match="lenders are for no pool; give one for each of the planner's: chat"):
        replanner.lend([])
    with pytest.raises(ValueError, match="there is no planner"):
        Replanner(None, tracker=recipe_tracker(PLANNER.recipe, 4.0)).lend([quiet])


def test_a_loan_that_is_often_away_is_weighed_by_that() -> None:
    planner = replace(PLANNER, cluster=replace(CLUSTER, serving=(SERVING,)))
    steps = {}
    for name, rates in (("calm", (1.0, 1.0)), ("rough", (1.0, 9.0))):
        replanner = Replanner(replace(planner, lenders=(lender(*rates),)), switch=FREE)
        steps[name] = replanner.step(trajectories(0, 4), []).proposed.step
    alone = Replanner(PLANNER, switch=FREE).step(trajectories(0, 4), []).proposed.step
    assert steps["calm"] < steps["rough"] <= alone


def test_lent_engines_have_the_memory_and_the_share_that_was_priced() -> None:
    recipe = RECIPE.model_copy(update={"batch": 2048})  # more rollout than one's own GPUs do in time
    planner = Planner(replace(CLUSTER, serving=(SERVING,)), QWEN_06B, recipe, lenders=(lender(2.0),))
    plan = planner.plan(CLASSES)
    (loan,), (beside,) = plan.loans, plan.request.menu().lent
    lent = [engine for engine in planned_engines(plan) if engine.name.startswith("chat-")]
    own = next(
        engine
        for engine in planned_engines(Planner(CLUSTER, QWEN_06B, RECIPE).plan(CLASSES))
        if engine.name.startswith("a800-")
    )
    assert len(lent) == loan.engines
    config = lent[0].config
    assert config.max_model_len == beside.holds + 1  # for the token that is one too many
    assert config.kv_blocks * config.block_size == beside.kv_tokens // config.block_size * config.block_size
    if own.devices == 1:  # the same engine, for all of the time
        times = [engine.cost.line(DecodeBatch(4), 4000)[0] for engine in (lent[0], own)]
        assert times[0] == pytest.approx(times[1] / 0.8, rel=1e-3)
