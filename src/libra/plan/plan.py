"""The answer to a planning request.

Invariant: a `Plan` embeds the request it answers and nothing of the machine it was computed on (no wall time, host
name or date), so the same request gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from libra.hardware.parallel import ParallelLayout
from libra.plan.explain.conflict import conflict, message
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.price import bucket_prices
from libra.plan.options.slots import SlotRequest
from libra.plan.placement import Group, place
from libra.plan.problem import STRICT, Allocation, InfeasiblePlanError, Prediction, Problem, Proof, Solution

FORMAT = 2


@dataclass(frozen=True, slots=True)
class Plan:
    __pydantic_config__ = STRICT

    allocation: Allocation
    predicted: Prediction
    proof: Proof
    seats: tuple[int, ...]  # of each bucket's engines: sequences that decode together
    layout: ParallelLayout | None  # of the trainers; None where every device is a replica of its own
    placement: tuple[Group, ...]  # empty where devices are interchangeable
    request: Annotated[SlotRequest | ClusterRequest, Field(discriminator="kind")]
    format: int = FORMAT

    @property
    def solution(self) -> Solution:
        return Solution(self.allocation, self.predicted, self.proof)


def make_plan(
    request: SlotRequest | ClusterRequest,
    *,
    placed: Sequence[Group] = (),
    deterministic_limit: float = 30.0,
    seed: int = 0,
) -> Plan:
    """The best plan for the request. The same request, placement, limit and seed give the same plan.

    `placed` says where the current allocation's groups are: they stay where they can. Raises `InfeasiblePlanError` when
    no allocation can serve the request.
    """
    if isinstance(request, SlotRequest):
        problem = request.problem()
        return answer(request, problem, _solved(problem, deterministic_limit, seed))
    menu = request.menu()
    solution = _solved(menu.problem, deterministic_limit, seed)
    return answer(
        request,
        menu.problem,
        solution,
        layout=menu.layouts[solution.allocation.layout, solution.allocation.replicas],
        placement=place(menu.problem, solution.allocation, placed),
    )


def _solved(problem: Problem, deterministic_limit: float, seed: int) -> Solution:
    try:
        return solve(problem, deterministic_limit=deterministic_limit, seed=seed)
    except InfeasiblePlanError:
        conflicting = conflict(problem)
        if len(conflicting) < 2:  # the solver's own message names it, and the remedy
            raise
        shared = "" if problem.colocated or problem.use_all_devices else ", or share devices (mode: colocated)"
        raise InfeasiblePlanError(f"{message(conflicting)}: add devices, ask for less{shared}") from None


def answer(
    request: SlotRequest | ClusterRequest,
    problem: Problem,
    solution: Solution,
    *,
    layout: ParallelLayout | None = None,
    placement: tuple[Group, ...] = (),
) -> Plan:
    """The plan that a solution of the request's problem stands for."""
    seats = tuple(bucket.option.seats for bucket in bucket_prices(problem, solution.allocation))
    return Plan(solution.allocation, solution.predicted, solution.proof, seats, layout, placement, request)
