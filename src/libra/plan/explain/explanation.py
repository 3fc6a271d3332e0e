"""Why a plan is what it is, and what would change it.

Invariant: every number here is the price of an allocation that fits, or the answer of a solver that was asked again
with one thing changed; nothing is estimated. The values hold no solver object, and `dataclasses.asdict` makes JSON of
them. Times are seconds, losses and gains are fractions of the plan's step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from libra.plan.allocation import Allocation
from libra.plan.explain.alternatives import (
    Alternative,
    Split,
    relaxations,
    restrictions,
    splits,
    without_strays,
)
from libra.plan.explain.idle import idle_devices
from libra.plan.model.solve import solve
from libra.plan.options.price import bucket_latency, bucket_prices, devices_used, price, step_parts, training_option
from libra.plan.problem import (
    Bottleneck,
    Family,
    InfeasiblePlanError,
    Prediction,
    Problem,
    Proof,
    Solution,
    TrainingOption,
)

RUNNERS_UP = 3
SAME_STEP = 1e-3  # relative: steps that a smaller cluster and the plan's have in common

_DIFFERS = re.compile(r"[^\s,]*[\d*-][^\s,]*(?: [^\s,]*[\d*-][^\s,]*)*")  # numbers, and words of layouts


@dataclass(frozen=True, slots=True)
class Bound:
    """What the step consists of (`libra.plan.options.price.step_parts`); the largest part is the bottleneck."""

    by: Bottleneck
    parts: tuple[tuple[Bottleneck, float], ...]  # seconds that add up to the step, the largest first
    batches: int  # 1 + staleness, by which the parts of a sum are divided
    # Of a step that is no sum: the share that it could be shorter by before something else bounds it
    slack: float | None


@dataclass(frozen=True, slots=True)
class BucketView:
    """One bucket of the plan. A bucket whose `share` is 1 bounds the step."""

    shape: str
    pool: str
    engines: int
    devices: int  # of all its engines
    max_num_seqs: int  # sequences that decode together in one engine, at most
    above: int
    up_to: int
    load: float  # seconds that each engine works for one step
    residence: float  # seconds of its longest trajectory
    latency: float  # seconds of a step in which its longest trajectory is just not too stale; see `plan.problem`
    share: float  # the larger of load and latency, of the step


@dataclass(frozen=True, slots=True)
class PoolView:
    """What the devices of one pool do. Where training is colocated the same devices do both, one after the other."""

    name: str
    devices: int
    training: int
    generating: int
    idle: int
    why_idle: str  # empty where none is


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan as far as plans are compared: who trains, how many engines of each shape, and the step."""

    layout: str
    replicas: int
    training_pool: str
    training_devices: int
    engines: tuple[tuple[str, int], ...]  # shape, count
    buckets: int
    predicted: Prediction
    loss: float  # of this plan against the explained one: 0.04 is a step 4 % longer


@dataclass(frozen=True, slots=True)
class Otherwise:
    """The best plan that decides one thing differently; None where only this decision leaves a plan."""

    decision: str
    plan: PlanView | None


@dataclass(frozen=True, slots=True)
class Relief:
    """A constraint relaxed by one unit and the problem solved again. It binds if that step is shorter than is proven
    possible without; less is within the solver's tolerance."""

    change: str
    family: Family | None  # of constraints, see `libra.plan.problem`
    node_of: str | None  # the pool, if the change is one more node
    step: float
    seconds: float  # that the step gets shorter by
    gain: float
    binds: bool


@dataclass(frozen=True, slots=True)
class SmallerCluster:
    """The best plan for fewer nodes; `step` is None where there is none, and `seconds` that it is longer by."""

    nodes: tuple[tuple[str, int, int], ...]  # class, nodes left, of how many
    devices: int  # given back
    step: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Routing:
    """Seconds of a step: with the router as it is, and were all work to reach its own bucket."""

    step: float
    same_plan: float  # of the explained plan, with such a router
    best_plan: float  # of the best plan for such a router


@dataclass(frozen=True, slots=True)
class RejectedKind:
    """Options that were rejected for the same kind of reason; in the kind an ellipsis stands for what differs."""

    kind: str
    options: tuple[tuple[str, str], ...]  # name, reason


@dataclass(frozen=True, slots=True)
class Explanation:
    plan: PlanView
    proof: Proof
    bound: Bound
    buckets: tuple[BucketView, ...]
    pools: tuple[PoolView, ...]
    runners_up: tuple[PlanView, ...]  # best first; fewer than three where there are no more plans
    otherwise: tuple[Otherwise, ...]
    reliefs: tuple[Relief, ...]  # what helps most first
    fewer_nodes: tuple[SmallerCluster, ...]  # one node less of each class
    smallest: SmallerCluster | None  # with the same step; None where no node can be given back
    routing: Routing
    splits: tuple[Split, ...]  # by pool and devices that train
    rejected: tuple[RejectedKind, ...]  # the commonest kind first
    synchronous: bool


def explain(
    problem: Problem,
    solution: Solution,
    *,
    larger: Mapping[str, Problem] | None = None,
    staler: Problem | None = None,
    rejected: Iterable[tuple[str, str]] = (),
    fewer_nodes: Iterable[SmallerCluster] = (),
    smallest: SmallerCluster | None = None,
    most_splits: int = 40,
    deterministic_limit: float = 30.0,
    seed: int = 0,
) -> Explanation:
    """Explain a solution of the problem by solving it again, with one thing changed at a time.

    `larger[pool]` is the problem priced anew with one more node in that pool; without it the node is added to the menu
    as it is, on which larger training layouts are missing. `staler` is the problem priced anew with one more version of
    staleness; without it prices stay as they are. `rejected` are names of options with the reason. `fewer_nodes` and
    `smallest` are known to who can price other clusters.
    Raises ValueError if the solution's allocation does not fit the problem.
    """

    def solved(changed: Problem, excluding: Sequence[Allocation] = ()) -> Solution | None:
        try:
            return solve(changed, deterministic_limit=deterministic_limit, seed=seed, excluding=excluding)
        except InfeasiblePlanError:
            return None

    def shortest(changed: Problem) -> float:
        return solve(changed, deterministic_limit=deterministic_limit, seed=seed, tie_break=False).predicted.step

    allocation, step = solution.allocation, price(problem, solution.allocation).step

    def view(found: Solution) -> PlanView:
        return _plan_view(problem, found.allocation, step)

    def runners_up() -> Iterator[Solution]:
        known = [allocation]
        while len(known) <= RUNNERS_UP and (found := solved(problem, known)) is not None:
            known.append(found.allocation)
            yield found

    def otherwise(restricted: Alternative) -> Otherwise:
        found = solved(restricted.problem)
        return Otherwise(restricted.what, None if found is None else view(found))

    def relief(relaxed: Alternative) -> Relief:
        after = shortest(relaxed.problem)
        gain = 1 - after / step if step > 0 else 0.0
        binds = after < solution.proof.bound
        return Relief(relaxed.what, relaxed.relaxes, relaxed.node_of, after, step - after, gain, binds)

    unsuitable = list(rejected)
    reliefs = map(relief, relaxations(problem, larger or {}, staler))
    routed = without_strays(problem)
    return Explanation(
        plan=view(solution),
        proof=solution.proof,
        bound=bound_of(problem, allocation),
        buckets=_bucket_views(problem, allocation),
        pools=_pool_views(problem, allocation, unsuitable),
        runners_up=tuple(map(view, runners_up())),
        otherwise=tuple(map(otherwise, restrictions(problem, allocation))),
        reliefs=tuple(sorted(reliefs, key=lambda relief: -relief.seconds)),
        fewer_nodes=tuple(fewer_nodes),
        smallest=smallest,
        routing=Routing(step, price(routed, allocation).step, shortest(routed)),
        splits=splits(
            problem, most_splits, _training(problem, allocation), deterministic_limit=deterministic_limit, seed=seed
        ),
        rejected=by_kind(unsuitable),
        synchronous=problem.synchronous,
    )


def by_kind(rejected: Iterable[tuple[str, str]]) -> tuple[RejectedKind, ...]:
    """Names and reasons by the first clause of the reason, whatever its numbers; the commonest kind first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, reason in rejected:
        kind = _DIFFERS.sub("…", reason.partition(";")[0])
        found.setdefault(kind, []).append((name, reason))
    kinds = (RejectedKind(kind, tuple(options)) for kind, options in found.items())
    return tuple(sorted(kinds, key=lambda kind: -len(kind.options)))


def _plan_view(problem: Problem, allocation: Allocation, step: float) -> PlanView:
    predicted = price(problem, allocation)
    training = _training(problem, allocation)
    return PlanView(
        layout=allocation.layout,
        replicas=allocation.replicas,
        training_pool=training.pool,
        training_devices=training.devices,
        engines=tuple(allocation.engines_by_shape.items()),
        buckets=len(allocation.buckets),
        predicted=predicted,
        loss=predicted.step / step - 1 if step > 0 else 0.0,
    )


def bound_of(problem: Problem, allocation: Allocation) -> Bound:
    """What the step of an allocation that fits consists of."""
    predicted = price(problem, allocation)
    parts = sorted(step_parts(problem, allocation).items(), key=lambda part: -part[1])
    slack = None
    if len(parts) == 1 and predicted.step > 0:
        asked = {"rollout": predicted.rollout, "training": predicted.training, "latency": predicted.latency}
        slack = 1 - max(seconds for name, seconds in asked.items() if name != predicted.bottleneck) / predicted.step
    return Bound(predicted.bottleneck, tuple(parts), 1 + problem.staleness, slack)


def _bucket_views(problem: Problem, allocation: Allocation) -> tuple[BucketView, ...]:
    step = price(problem, allocation).step
    training = _training(problem, allocation)
    views = []
    for bucket, priced in zip(allocation.buckets, bucket_prices(problem, allocation), strict=True):
        latency = bucket_latency(problem, training, priced)
        views.append(
            BucketView(
                shape=bucket.shape,
                pool=priced.option.pool,
                engines=bucket.engines,
                devices=bucket.engines * priced.option.devices,
                max_num_seqs=priced.option.max_num_seqs,
                above=bucket.above,
                up_to=bucket.up_to,
                load=priced.load,
                residence=priced.residence,
                latency=latency,
                share=max(priced.load, latency) / step if step > 0 else 0.0,
            )
        )
    return tuple(views)


def _pool_views(problem: Problem, allocation: Allocation, rejected: Sequence[tuple[str, str]]) -> tuple[PoolView, ...]:
    used = devices_used(problem, allocation)
    idle = {each.pool: each.reason for each in idle_devices(problem, allocation, rejected)}
    views = []
    for pool in problem.pools:
        training, generating = used[pool.name]
        busy = max(training, generating) if problem.colocated else training + generating
        views.append(
            PoolView(pool.name, pool.devices, training, generating, pool.devices - busy, idle.get(pool.name, ""))
        )
    return tuple(views)


def _training(problem: Problem, allocation: Allocation) -> TrainingOption:
    option = training_option(problem, allocation)
    assert option is not None  # it fits
    return option
