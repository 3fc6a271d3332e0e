"""Cost of planning for a framework: the plan's predicted step, compared with the best one without a framework."""

from __future__ import annotations

from dataclasses import dataclass, replace

from libra.plan.loan import solve_loans
from libra.plan.model.solve import solve
from libra.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class FrameworkCost:
    """The restriction of a framework, and the predicted seconds of a step with and without the restriction."""

    framework: str
    restriction: str  # in words; empty if the framework allows the whole menu
    router: str
    step: float  # shortest predicted step of the compared plans
    free: float  # of the best plan without the framework, under `free_router`
    free_router: str

    @property
    def share(self) -> float:
        """Share by which the framework makes the step longer."""
        return self.step / self.free - 1 if self.free > 0 else 0.0


def framework_cost(plan: Plan) -> FrameworkCost | None:
    """Find the cost of the plan's framework by solving the request again without the framework. None if the request
    names no framework.
    """
    if plan.request.kind != "cluster" or plan.request.recipe.framework is None:
        return None
    request, recipe = plan.request, plan.request.recipe.without_framework()
    same = recipe.router == request.recipe.router
    free = replace(request, recipe=recipe, recall=request.recall if same else ())
    found = solve_loans(free.menu(), lambda problem: solve(problem, tie_break=False))
    step = min([plan.predicted.step, *(finalist.predicted for finalist in plan.finalists)])
    can = request.recipe.carried_by
    return FrameworkCost(can.name, can.restriction, request.recipe.router, step, found.predicted.step, recipe.router)
