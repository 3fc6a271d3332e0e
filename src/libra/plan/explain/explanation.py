"""Why a plan is what it is, and what would change it.

Invariant: every number here is the price of an allocation that fits, or the answer of a solver that was asked again
with one thing changed; nothing is estimated. The values hold no solver object, and `dataclasses.asdict` makes JSON of
them. Times are seconds, losses and gains are fractions of the plan's step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from libra.plan.explain.changes import Change, relaxations, restrictions, without_strays
from libra.plan.explain.splits import Split, splits
from libra.plan.model.solve import solve
from libra.plan.options.price import bucket_latency, bucket_prices, devices_used, parts, price, training_option
from libra.plan.problem import (
    Allocation,
    Bottleneck,
    InfeasiblePlanError,
    Prediction,
    Problem,
    Proof,
    Solution,
    TrainingOption,
)
from libra.plan.transition import engines_by_shape

RUNNERS_UP = 3

_DIFFERS = re.compile(r"[^\s,]*[\d*-][^\s,]*(?: [^\s,]*[\d*-][^\s,]*)*")  # numbers, and words of layouts


@dataclass(frozen=True, slots=True)
class Bound:
    """What bounds the step, and by how much: `slack` of its seconds could go before `next` bounds it as well.

    Where the seconds of a step add up they are those it is the sum of, as far as training alone does not take longer:
    see `libra.plan.options.price.parts`.
    """

    by: Bottleneck
    seconds: float
    next: Bottleneck
    next_seconds: float
    slack: float  # 1 - next_seconds / seconds; 0 for a step of no length


@dataclass(frozen=True, slots=True)
class BucketView:
    """One bucket of the plan. A bucket whose `share` is 1 bounds the step."""

    shape: str
    pool: str
    engines: int
    devices: int  # of all its engines
    seats: int  # sequences that decode together in one engine, at most
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
    node_of: str | None  # the pool, if the change is one more node
    step: float
    seconds: float  # that the step gets shorter by
    gain: float
    binds: bool


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
    most_splits: int = 40,
    deterministic_limit: float = 30.0,
    seed: int = 0,
) -> Explanation:
    """Explain a solution of the problem by solving it again, with one thing changed at a time.

    `larger[pool]` is the problem priced anew with one more node in that pool; without it the node is added to the menu
    as it is, on which larger training layouts are missing. `staler` is the problem priced anew with one more version of
    staleness; without it prices stay as they are. `rejected` are names of options with the reason.
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

    def otherwise(restricted: Change) -> Otherwise:
        found = solved(restricted.problem)
        return Otherwise(restricted.what, None if found is None else view(found))

    def relief(relaxed: Change) -> Relief:
        after = shortest(relaxed.problem)
        gain = 1 - after / step if step > 0 else 0.0
        binds = after < solution.proof.bound
        return Relief(relaxed.what, relaxed.node_of, after, step - after, gain, binds)

    reliefs = map(relief, relaxations(problem, larger or {}, staler))
    routed = without_strays(problem)
    return Explanation(
        plan=view(solution),
        proof=solution.proof,
        bound=_bound(problem, allocation),
        buckets=_bucket_views(problem, allocation),
        pools=_pool_views(problem, allocation),
        runners_up=tuple(map(view, runners_up())),
        otherwise=tuple(map(otherwise, restrictions(problem, allocation))),
        reliefs=tuple(sorted(reliefs, key=lambda relief: -relief.seconds)),
        routing=Routing(step, price(routed, allocation).step, shortest(routed)),
        splits=splits(
            problem, most_splits, _training(problem, allocation), deterministic_limit=deterministic_limit, seed=seed
        ),
        rejected=by_kind(rejected),
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
        engines=tuple(engines_by_shape(allocation).items()),
        buckets=len(allocation.buckets),
        predicted=predicted,
        loss=predicted.step / step - 1 if step > 0 else 0.0,
    )


def _bound(problem: Problem, allocation: Allocation) -> Bound:
    bottleneck = price(problem, allocation).bottleneck
    others = parts(problem, allocation)
    seconds = others.pop(bottleneck)
    after = max(others, key=lambda name: others[name])
    return Bound(bottleneck, seconds, after, others[after], 1 - others[after] / seconds if seconds > 0 else 0.0)


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
                seats=priced.option.seats,
                above=bucket.above,
                up_to=bucket.up_to,
                load=priced.load,
                residence=priced.residence,
                latency=latency,
                share=max(priced.load, latency) / step if step > 0 else 0.0,
            )
        )
    return tuple(views)


def _pool_views(problem: Problem, allocation: Allocation) -> tuple[PoolView, ...]:
    used = devices_used(problem, allocation)
    views = []
    for pool in problem.pools:
        training, generating = used[pool.name]
        busy = max(training, generating) if problem.colocated else training + generating
        views.append(PoolView(pool.name, pool.devices, training, generating, pool.devices - busy))
    return tuple(views)


def _training(problem: Problem, allocation: Allocation) -> TrainingOption:
    option = training_option(problem, allocation)
    assert option is not None  # it fits
    return option
