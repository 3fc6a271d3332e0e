"""The values of an explanation.

Invariant: every number is the price of a feasible allocation, or a solver's answer to the problem with one change; no
number is an estimate. The values contain no solver objects, and `dataclasses.asdict` turns them into JSON values. Times
are seconds, losses and gains are fractions of the plan's step.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.plan.explain.framework_cost import FrameworkCost
from libra.plan.problem import Family
from libra.plan.solution import Bottleneck, Prediction, Proof, StepPart


@dataclass(frozen=True, slots=True)
class Bound:
    """The bottleneck of the step, and its parts (`libra.plan.options.price.step_parts`)."""

    by: Bottleneck
    parts: tuple[tuple[StepPart, float], ...]  # seconds that add up to the step, the largest first
    batches: int  # in flight, 1 + staleness; the parts of a latency are already divided by this number
    slack: float  # share of the step that could be saved before another bottleneck bounds it


@dataclass(frozen=True, slots=True)
class BucketView:
    """One bucket of the plan. A bucket whose `share` is 1 bounds the step."""

    shape: str
    pool: str
    engines: int
    devices: int  # of all engines of the bucket
    max_num_seqs: int  # sequences that decode together in one engine, at most
    above: int
    up_to: int
    load: float  # seconds that each engine works for one step
    residence: float  # seconds of its longest trajectory
    latency: float  # shortest step in seconds that its longest trajectory allows; see `plan.problem`
    share: float  # the larger of load and latency, as a share of the step


@dataclass(frozen=True, slots=True)
class PoolView:
    """The use of the devices of one pool. Colocated devices generate and train in turn; `idle` then counts devices that
    are idle in at least one phase.
    """

    name: str
    devices: int
    training: int
    generating: int
    idle: int
    why_idle: str  # empty if no device is idle
    serves: bool = False  # whether the pool serves users; its devices that are not borrowed count as idle


@dataclass(frozen=True, slots=True)
class PlanView:
    """The properties of a plan for comparisons: training, engines of each shape, and the step."""

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
    """The best plan with one decision forbidden. `plan` is None if every plan makes this decision."""

    decision: str
    plan: PlanView | None


@dataclass(frozen=True, slots=True)
class Relief:
    """The solution with a constraint relaxed by one unit. The constraint binds if the step is below the proven bound of
    the original problem; a smaller gain is within the solver's tolerance.
    """

    change: str
    family: Family | None  # of the constraint; see `libra.plan.problem`
    node_of: str | None  # the pool, if the change is one more node
    step: float
    seconds: float  # by which the step gets shorter
    gain: float
    binds: bool


@dataclass(frozen=True, slots=True)
class SmallerCluster:
    """The best plan for fewer nodes; `step` and `seconds` are None if no plan exists."""

    nodes: tuple[tuple[str, int, int], ...]  # class, nodes left, nodes before
    devices: int  # given back
    step: float | None
    seconds: float | None  # by which the step gets longer


@dataclass(frozen=True, slots=True)
class Routing:
    """Seconds of a step with the given router, and with a perfect router, which sends all work to its own bucket."""

    step: float
    same_plan: float  # of the explained plan, with a perfect router
    best_plan: float  # of the best plan for a perfect router


@dataclass(frozen=True, slots=True)
class RejectedKind:
    """Options rejected for the same kind of reason; an ellipsis in `kind` replaces the parts that differ."""

    kind: str
    options: tuple[tuple[str, str], ...]  # name, reason


@dataclass(frozen=True, slots=True)
class Split:
    """One training option, and the best generation on the remaining devices.

    `generation` is the step that engines and the longest trajectory alone would need. Synchronous training waits for
    generation, so `step` is then the sum; otherwise `step` is the larger of the two.
    """

    layout: str
    pool: str
    devices: int  # that train
    training: float
    generation: float
    step: float


@dataclass(frozen=True, slots=True)
class LenderView:
    """A serving pool, and the value of its loan. Seconds are per step."""

    pool: str
    engines: int  # that the plan borrows
    use: tuple[float, ...]  # certified shares of the SLO's tpot, one for each borrowed shape
    share: float  # of the borrowed devices' time that the plan counts on while the pool lends
    away: float  # probability that nothing is lent in the coming period
    step: float  # with the loan
    average: float  # over all recalls, by all lenders, that traffic may cause
    recalled: float  # of the same plan while this pool lends nothing
    without: float  # of the best plan without this pool
    kept: float  # of the best plan with the training of the best plan without this pool
    why_not: str  # reason why no engine is borrowed; empty if some are


@dataclass(frozen=True, slots=True)
class Explanation:
    plan: PlanView
    proof: Proof
    bound: Bound
    buckets: tuple[BucketView, ...]
    pools: tuple[PoolView, ...]
    runners_up: tuple[PlanView, ...]  # best first; fewer than three if the problem has fewer plans
    otherwise: tuple[Otherwise, ...]
    reliefs: tuple[Relief, ...]  # largest gain first
    fewer_nodes: tuple[SmallerCluster, ...]  # one node less of each class
    smallest: SmallerCluster | None  # with the same step; None if every node is needed
    routing: Routing
    splits: tuple[Split, ...]  # by pool and devices that train
    rejected: tuple[RejectedKind, ...]  # the commonest kind first
    synchronous: bool
    lenders: tuple[LenderView, ...] = ()
    framework: FrameworkCost | None = None  # None: the plan is for no framework
