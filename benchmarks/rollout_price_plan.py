"""The plan of a case.

Invariant: the planner is told of the case's observed trajectories and of nothing that is simulated afterwards.
"""

from __future__ import annotations

from benchmarks.rollout_price_cases import Case
from libra.cost.corrections import BATCH, BatchFactors
from libra.plan.allocation import Allocation
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.menu import Menu
from libra.plan.options.price import solution
from libra.plan.plan import Plan, answer
from libra.plan.planner import Planner
from libra.plan.solution import Solution


def request_of(case: Case) -> ClusterRequest:
    """What the planner is asked."""
    planner = Planner(case.cluster, case.model, case.recipe, case.profiles)
    tracker = planner.tracker(half_life_steps=1e6)  # all that is observed counts
    for trajectory in case.observed():
        tracker.observe(trajectory)
    return planner.request(tracker)


def plan_case(case: Case, factors: BatchFactors = BATCH) -> tuple[Plan, Menu]:
    """The best plan and what it was chosen from. Raises `InfeasiblePlanError`."""
    request = request_of(case)
    menu = request.menu(factors)
    return plan_of(request, menu, solve(menu.problem)), menu


def plan_of(request: ClusterRequest, menu: Menu, chosen: Solution | Allocation) -> Plan:
    """The plan that a solution stands for, or an allocation that fits, of which nothing is proven."""
    return answer(request, menu, solution(menu.problem, chosen) if isinstance(chosen, Allocation) else chosen)
