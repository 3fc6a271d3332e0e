"""The values that an explanation consists of.

Invariant: every number is the price of an allocation that fits, or the answer of a solver that was asked again with one
thing changed; nothing is estimated. The values hold no solver object, and `dataclasses.asdict` makes JSON of them.
Times are seconds, losses and gains are fractions of the plan's step.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.plan.explain.framework_cost import FrameworkCost
from libra.plan.problem import Family
from libra.plan.solution import Bottleneck, Prediction, Proof, StepPart


@dataclass(frozen=True, slots=True)
class Bound:
    """What bounds the step, and what it consists of (`libra.plan.options.price.step_parts`)."""

    by: Bottleneck
    parts: tuple[tuple[StepPart, float], ...]  # seconds that add up to the step, the largest first
    batches: int  # 1 + staleness, by which the parts of a sum are divided
    slack: float  # the share that the step could be shorter by before something else bounds it


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
    """What the devices of one pool do. Where training is colocated the same devices do both, one after the other, and
    `idle` counts those that do nothing in one of the two."""

    name: str
    devices: int
    training: int
    generating: int
    idle: int
    why_idle: str  # empty where none is
    serves: bool = False  # users: idle is what is not borrowed


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
class Split:
    """One training option, and the best generation on the devices that it leaves.

    `generation` is the step that engines and the longest trajectory would keep if training bounded nothing, but
    delayed publication as it does. Synchronous training waits for it, `step` is then a sum; else `step` is the larger.
    """

    layout: str
    pool: str
    devices: int  # that train
    training: float
    generation: float
    step: float


@dataclass(frozen=True, slots=True)
class LenderView:
    """A pool that serves, and what its loan is worth. Seconds are of a step."""

    pool: str
    engines: int  # that the plan borrows
    use: tuple[float, ...]  # certified shares of the SLO's tpot, one for each shape of them
    share: float  # of their devices' time that is counted on, while it is lent
    away: float  # probability that nothing is lent in the coming period
    step: float  # with the loan
    average: float  # over all that traffic may take away, of all lenders
    recalled: float  # of the same plan while this pool lends nothing
    without: float  # of the best plan without this pool
    kept: float  # with it, training as it would be without
    why_not: str  # empty where engines are borrowed


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
    lenders: tuple[LenderView, ...] = ()
    framework: FrameworkCost | None = None  # None: the plan is for no framework
