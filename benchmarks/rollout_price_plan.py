"""The plan of a case.

Invariant: the planner knows the case's observed trajectories and nothing that is simulated afterwards.
"""

from __future__ import annotations

from benchmarks.rollout_price_cases import Case
from libra.choose.recall import with_recall
from libra.cost.corrections import BATCH, BatchFactors
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.menu import Menu
from libra.plan.plan import Plan, answer
from libra.plan.planner import Planner
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.sim.of_plan import teach
from libra.trajectory import Trajectory

_REPLAYED = 4_096  # observed trajectories that a router learns from, or is measured on


def request_of(case: Case) -> ClusterRequest:
    """The planner's request for a case, from all of its observed trajectories."""
    planner = Planner(case.cluster, case.model, case.recipe, case.profiles)
    tracker = planner.tracker(case.observed(), half_life_steps=1e6)  # all of them count
    return planner.request(tracker)


def plan_case(case: Case, factors: BatchFactors = BATCH) -> tuple[Plan, Menu]:
    """The best plan and what it was chosen from. Raises `InfeasiblePlanError`."""
    request = request_of(case)
    menu = request.menu(factors)
    return answer(request, menu, solve(menu.problem)), menu


def routed_case(case: Case) -> tuple[Plan, Menu]:
    """As `plan_case`, with the recall of the recipe's router on observed trajectories, as `libra plan` does."""
    request, menu, best = with_recall(request_of(case), _replayed(case), policy_named(case.recipe.router, seed=0))
    return answer(request, menu, best), menu


def taught_router(case: Case) -> Policy:
    """The recipe's router, after it has learned from observed trajectories."""
    router = policy_named(case.recipe.router, seed=0)
    teach(router, _replayed(case))
    return router


def _replayed(case: Case) -> tuple[Trajectory, ...]:
    return case.observed()[:_REPLAYED]
