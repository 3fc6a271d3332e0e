"""A CP-SAT model of the cheapest engines, by shape and number, that serve a rate of requests.

Sets        o in O      options: an engine of a shape, in a role (colocated, prefill, decode), on a class of nodes
            c in C      classes of nodes
            k in K      plans that proved insufficient
Parameters  R           requests/s to be served
            rate[o]     requests/s that one engine serves in its role
            link[o]     requests/s whose KV its network can send (prefill) or receive (decode)
            gpus[o], cost[o], class[o];   limits GPUS[c], GPUS, COST
            had[k, r]   sum over o of role r of rate[o] times its engines in plan k
Variables   n[o]        engines, a whole number
            d           requests/s with prefill on one engine and decode on another
            more[k, r]  whether role r serves more than in plan k
            spare       thousandths of R served beyond R, at most 1000
Objective   the least sum of cost[o] n[o]; of equally cheap plans the one that serves most

served      sum over colocated o of rate[o] n[o]  +  d  >=  (1 + spare / 1000) R
prefill     sum over prefill o of rate[o] n[o]   >=  d
decode      sum over decode o of rate[o] n[o]    >=  d
sent        sum over prefill o of link[o] n[o]   >=  d
received    sum over decode o of link[o] n[o]    >=  d
both        n[o] > 0 for some prefill o  <=>  n[o] > 0 for some decode o
class[c]    sum over o of c of gpus[o] n[o]      <=  GPUS[c]
gpus        sum over o of gpus[o] n[o]           <=  GPUS
cost        sum over o of cost[o] n[o]           <=  COST
cut[k]      at least one more[k, r];   more[k, r]  =>  sum over o of r of rate[o] n[o] > had[k, r]

A cut demands that some role serves more, which assumes that capacity is monotone in each role. Rates are integers, in
thousandths of a request a second; rates of engines are rounded down. Costs are integers, in parts of one unit of cost,
rounded up. The cheapest engine costs a thousand parts or more if the solver's integers allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from typing import Literal

from ortools.sat.python import cp_model

from libra.plan.problem import InfeasiblePlanError

_PARTS = 1000  # of a request a second
_EFFORT = 60.0  # limit of the solver, in its deterministic seconds, which are equal on all machines

ServingRole = Literal["colocated", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class ServingOption:
    """One engine of a shape in a role. Rates are requests/s."""

    name: str
    role: ServingRole
    nodes: str  # class of nodes
    gpus: int
    cost: float
    rate: float
    link: float = 0.0  # rate at which the network sends or receives KV; 0 for colocated engines

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.cost <= 0 or self.rate < 0 or self.link < 0:
            raise ValueError(
                f"{self.name}: gpus {self.gpus}, cost {self.cost}, rate {self.rate}, link {self.link}: give"
                " 1 GPU or more, a cost above 0, and rates of 0 or more"
            )


@dataclass(frozen=True, slots=True)
class ServingProblem:
    rate: float
    options: tuple[ServingOption, ...]
    there_are: Mapping[str, int]  # GPUs of each class of nodes
    gpus: int | None = None
    budget: float | None = None
    cuts: tuple[tuple[int, ...], ...] = ()  # for each insufficient plan: engines of each option

    def without(self, counts: tuple[int, ...]) -> ServingProblem:
        """The problem with a cut for one more insufficient plan."""
        return replace(self, cuts=(*self.cuts, counts))


@dataclass(frozen=True, slots=True)
class ServingPlan:
    counts: tuple[int, ...]  # engines of each option
    cost: float
    bound: float  # proven lower bound on the cost

    @property
    def proven(self) -> bool:
        return self.cost <= self.bound * (1 + 1e-6)


def solve_serving(problem: ServingProblem) -> ServingPlan:
    """Find the cheapest plan. Raises `InfeasiblePlanError` if no plan exists."""
    model = cp_model.CpModel()
    options = problem.options
    # Variables
    most = [problem.there_are[it.nodes] // it.gpus for it in options]
    if problem.rate > sum(it.rate * count for it, count in zip(options, most, strict=True)):
        raise InfeasiblePlanError(_conflict(problem))  # also for a rate beyond the solver's integers
    wanted, parts = ceil(problem.rate * _PARTS), _parts_of_cost(options)
    n = [model.new_int_var(0, most[o], f"n_{it.name}") for o, it in enumerate(options)]
    d = model.new_int_var(0, 2 * wanted, "d")
    spare = model.new_int_var(0, _PARTS, "spare")
    of = {role: [o for o, it in enumerate(options) if it.role == role] for role in ("colocated", "prefill", "decode")}
    rate = [floor(it.rate * _PARTS) for it in options]
    link = [floor(it.link * _PARTS) for it in options]
    price = [ceil(it.cost * parts) for it in options]

    # Constraints
    served = sum(rate[o] * n[o] for o in of["colocated"]) + d
    model.add(_PARTS * served >= wanted * (_PARTS + spare)).with_name("served")
    for role in ("prefill", "decode"):
        model.add(sum(rate[o] * n[o] for o in of[role]) >= d).with_name(role)
    for role, name in (("prefill", "sent"), ("decode", "received")):
        model.add(sum(link[o] * n[o] for o in of[role]) >= d).with_name(name)
    engines = sum(most) + 1
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        model.add(sum(n[o] for o in of[role]) <= engines * sum(n[o] for o in of[other])).with_name(f"both_{role}")
    for nodes, there in problem.there_are.items():
        here = [o for o, it in enumerate(options) if it.nodes == nodes]
        model.add(sum(options[o].gpus * n[o] for o in here) <= there).with_name(f"class_{nodes}")
    total = sum(price[o] * n[o] for o in range(len(options)))
    if problem.gpus is not None:
        model.add(sum(it.gpus * n[o] for o, it in enumerate(options)) <= problem.gpus).with_name("gpus")
    if problem.budget is not None:
        everything, limit = sum(cost * count for cost, count in zip(price, most, strict=True)), problem.budget * parts
        model.add(total <= (everything if limit >= everything else floor(limit))).with_name("cost")
    for k, plan in enumerate(problem.cuts):
        more = {role: model.new_bool_var(f"more_{k}_{role}") for role, those in of.items() if those}
        for role, one in more.items():
            had = sum(rate[o] * plan[o] for o in of[role])
            model.add(sum(rate[o] * n[o] for o in of[role]) > had).only_enforce_if(one)
        model.add_bool_or(more.values()).with_name(f"cut_{k}")

    # Objective
    model.minimize(total * (_PARTS + 1) - spare)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _EFFORT
    solver.parameters.catch_sigint_signal = False  # otherwise Ctrl-C would end only the solver, not the command
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InfeasiblePlanError(_conflict(problem))
    counts = tuple(solver.value(it) for it in n)
    cost = sum(options[o].cost * count for o, count in enumerate(counts))
    return ServingPlan(counts, cost, ceil(solver.best_objective_bound / (_PARTS + 1)) / parts)


def _parts_of_cost(options: Sequence[ServingOption]) -> float:
    """Parts of one unit of cost: a power of ten at which the cheapest option costs a thousand parts or more, unless the
    most expensive option would then exceed the solver's integers."""
    costs = [it.cost for it in options]
    finest = max(3, 3 - floor(log10(min(costs))))
    return 10.0 ** min(finest, 9 - floor(log10(max(costs))))


def _conflict(problem: ServingProblem) -> str:
    there = ", ".join(f"{count:,} of {name}" for name, count in problem.there_are.items())
    limits = [f"gpus {problem.gpus:,}"] if problem.gpus is not None else []
    limits += [f"budget {problem.budget:g}"] if problem.budget is not None else []
    tried = f", after {len(problem.cuts)} plans that missed an objective" if problem.cuts else ""
    raised = [it.partition(" ")[0] for it in limits]
    remedy = " or ".join(["lower the rate", *([f"raise {' and '.join(raised)}"] if raised else [])])
    return (
        f"{problem.rate:g} requests/s need more than the cluster or the limits allow "
        f"({'; '.join([there, *limits])}){tried}: {remedy}"
    )
