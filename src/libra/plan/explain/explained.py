"""Explains a plan by solving its problem again, with one change at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from libra.config.rooms import offered
from libra.plan.allocation import Allocation
from libra.plan.explain.alternatives import Alternative, relaxations, restrictions, splits, without_strays
from libra.plan.explain.explanation import (
    Bound,
    Explanation,
    LenderView,
    Otherwise,
    PlanView,
    PoolView,
    RejectedKind,
    Relief,
    Routing,
    SmallerCluster,
)
from libra.plan.explain.framework_cost import framework_cost
from libra.plan.explain.views import bound_of, bucket_views, plan_view, pool_views
from libra.plan.explain.what_if import one_node_fewer, one_node_more, one_version_more, smallest_cluster
from libra.plan.model.solve import solve
from libra.plan.options.menu import Rejected
from libra.plan.options.price import own_training, price
from libra.plan.options.slots import SlotRequest
from libra.plan.plan import Plan, require_answer
from libra.plan.problem import InfeasiblePlanError, Problem
from libra.plan.solution import Solution

RUNNERS_UP = 3

_DIFFERS = re.compile(r"[^\s,]*[\d*-][^\s,]*(?: [^\s,]*[\d*-][^\s,]*)*")  # numbers and layouts


def explain_plan(plan: Plan) -> Explanation:
    """Explain a plan: its bottleneck, the next best plans, binding constraints, and the gain of one more node of each
    class.

    Everything follows from the plan's request. Raises ValueError if the plan does not answer its request.
    """
    request = plan.request
    menu = request.menu()
    require_answer(plan, menu.problem)
    if isinstance(request, SlotRequest):
        return explain(menu.problem, plan.solution)
    explanation = explain(
        menu.problem,
        plan.solution,
        larger=one_node_more(request),
        staler=one_version_more(request),
        rejected=(*request.rejected_layouts(), *menu.rejected),
        fewer_nodes=one_node_fewer(request, plan.predicted.step),
        smallest=smallest_cluster(request, plan.predicted.step),
        lenders=(it for views in offered("explained lenders") for it in views(menu, plan.allocation)),
    )
    return replace(explanation, framework=framework_cost(plan))


def bound_and_pools(plan: Plan) -> tuple[Bound, tuple[PoolView, ...]]:
    """The parts of the plan's step, and the use of its devices, computed without a solver."""
    menu = plan.request.menu()
    return bound_of(menu.problem, plan.allocation), pool_views(menu.problem, plan.allocation, menu.rejected)


def explain(
    problem: Problem,
    solution: Solution,
    *,
    larger: Mapping[str, Problem] | None = None,
    staler: Problem | None = None,
    rejected: Sequence[Rejected] = (),
    fewer_nodes: Iterable[SmallerCluster] = (),
    smallest: SmallerCluster | None = None,
    lenders: Iterable[LenderView] = (),
) -> Explanation:
    """Explain a solution of the problem by solving it again, with one change at a time.

    `larger[pool]` is the problem priced again with one more node in the pool; without it the node is added to the same
    menu, so larger training layouts are missing. `staler` is the problem priced again with one more version of
    staleness; without it prices are unchanged. `fewer_nodes` and `smallest` come from the prices of other clusters, and
    `lenders` from the menu. Raises ValueError if the solution's allocation does not fit the problem.
    """
    allocation, step = solution.allocation, price(problem, solution.allocation).step

    def solved(changed: Problem, excluding: Sequence[Allocation] = ()) -> Allocation | None:
        try:
            return solve(changed, excluding=excluding).allocation
        except InfeasiblePlanError:
            return None

    def shortest(changed: Problem) -> float:
        return solve(changed, tie_break=False).predicted.step

    def view(found: Allocation, priced: Problem = problem) -> PlanView:
        return plan_view(priced, found, step)

    def runners_up() -> Iterator[PlanView]:
        known = [allocation]
        while len(known) <= RUNNERS_UP and (found := solved(problem, known)) is not None:
            known.append(found)
            yield view(found)

    def otherwise(restricted: Alternative) -> Otherwise:
        found = solved(restricted.problem)
        return Otherwise(restricted.what, None if found is None else view(found, restricted.problem))

    def relief(relaxed: Alternative) -> Relief:
        after = shortest(relaxed.problem)
        gain = 1 - after / step if step > 0 else 0.0
        binds = after < solution.proof.bound
        return Relief(relaxed.what, relaxed.relaxes, relaxed.node_of, after, step - after, gain, binds)

    reliefs = map(relief, relaxations(problem, larger or {}, staler))
    routed = without_strays(problem)
    return Explanation(
        plan=view(allocation),
        proof=solution.proof,
        bound=bound_of(problem, allocation),
        buckets=bucket_views(problem, allocation),
        pools=pool_views(problem, allocation, rejected),
        runners_up=tuple(runners_up()),
        otherwise=tuple(map(otherwise, restrictions(problem, allocation))),
        reliefs=tuple(sorted(reliefs, key=lambda relief: -relief.seconds)),
        fewer_nodes=tuple(fewer_nodes),
        smallest=smallest,
        routing=Routing(step, price(routed, allocation).step, shortest(routed)),
        splits=splits(problem, own_training(problem, allocation)),
        rejected=by_kind(rejected),
        synchronous=problem.synchronous,
        lenders=tuple(lenders),
    )


def by_kind(rejected: Iterable[Rejected]) -> tuple[RejectedKind, ...]:
    """Group rejected options by the first clause of the reason without its numbers; most frequent group first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for each in rejected:
        kind = _DIFFERS.sub("…", each.reason.partition(";")[0])
        found.setdefault(kind, []).append((each.name, each.reason))
    kinds = (RejectedKind(kind, tuple(options)) for kind, options in found.items())
    return tuple(sorted(kinds, key=lambda kind: -len(kind.options)))
