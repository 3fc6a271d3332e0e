"""Plans that the planner did not choose: a number of GPUs that train, and engines of one size on the others.

Invariant: layout, micro-batches and memory are the best that the planner's own menu has for that many GPUs; only the
choices that a baseline stands for are made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.menu import Menu
from libra.plan.options.price import infeasibility, solution
from libra.plan.plan import Plan, answer
from libra.plan.problem import TrainingOption


def uniform_plan(request: ClusterRequest, menu: Menu, training: TrainingOption, shape: str) -> Plan | None:
    """The GPUs that do not train, as engines of one shape in one bucket; None where that does not fit.

    In colocated training engines are on all GPUs.
    """
    problem = menu.problem
    pool, devices, _ = problem.footprint(shape)
    free = problem.pool(pool).devices - (training.devices if training.pool == pool and not problem.colocated else 0)
    if free < devices:
        return None
    bucket = Bucket(shape, free // devices, 0, problem.longest_context)
    allocation = Allocation(training.replicas, (bucket,), training.layout)
    if infeasibility(problem, allocation) is not None:
        return None
    return answer(request, menu, solution(problem, allocation))


def uniform_plans(request: ClusterRequest, devices: Sequence[int] | None = None) -> Iterator[Plan]:
    """Plans for every shape of engine and each number of training GPUs: `devices`, or all whole halves of a node.

    Where no layout uses exactly that number of GPUs, the largest smaller number that a layout uses is taken.
    """
    menu = request.menu()
    problem = menu.problem
    total = sum(pool.devices for pool in problem.pools)
    wanted = devices if devices is not None else range(4, total, 4)
    options = {max((it for it in problem.training if it.devices <= most), key=_size, default=None) for most in wanted}
    for training in sorted((it for it in options if it is not None), key=_size):
        for shape in problem.shapes:
            plan = uniform_plan(request, menu, training, shape)
            if plan is not None:
                yield plan


def _size(option: TrainingOption) -> int:
    return option.devices
