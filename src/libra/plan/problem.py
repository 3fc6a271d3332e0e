"""The planning problem as numbers, and its answer, as frozen values.

Invariant: a `Problem` is a menu. Everything that could be chosen is listed and priced before the solver sees it, so
the solvers, the brute-force oracle, the explanation and the executor mean the same thing by a choice. Whatever can be
listed without knowing hardware or model lives here; where the prices come from is the business of `plan.slots` (one
machine, measured) and `plan.cluster_request` (many nodes, profiles). Times are seconds, lengths are tokens.

What a choice costs. Generation and training overlap; a trajectory's oldest token is trained on at most `staleness`
versions late. With L the seconds of one training step, S those of its publication, and for every bucket b the load
`W_b / n_b` of its engines and the residence of its longest trajectory,

    step >= L
    step >= W_b / n_b + stall_b                      for every bucket
    (1 + staleness) * step >= R + L + S              R = max over buckets of residence

(L here, and in all that follows, are the seconds of training after the last trajectory: all, or a `tail`)

Where all trajectories of a step start together, the longest that a bucket serves shares its engine with the others
while it generates, and not while its tools run (processor sharing). An engine that is busy for a share u of the time
slows it by 1 / (1 - u), and with every line (generates, waits) of its residence

    R_b = waits + generates / (1 - u)         u = (W_b / n_b + stall_b) / step

With staleness 0, synchronous training, nothing overlaps: the work is spread over the rollout, u = W_b / (n_b R_b), and

    step >= stall_b + R_b + L + S

and colocated training adds two switches.

Caches that are full forget contexts, which then are prefilled again: the share D_b / n_b - 1 of a
bucket's returns, and at most all, where the contexts of a batch would fill the caches of D_b engines.

A bucket's work W_b is the largest of several rows, each linear in the classes the bucket serves; with `refresh` it also
grows by (refresh seconds squared) / step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import ConfigDict

Bottleneck = Literal["rollout", "training", "latency"]
SolverStatus = Literal["optimal", "feasible"]

ONE_DEVICE = "one device"  # the layout of a replica that is not spread over devices

# How requests and plans are read from a file: see `libra.plan.document`. It also holds for the values inside them.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def require_at_least(minimum: int, **fields: int) -> None:
    """Raise ValueError naming the first of `fields` that is below `minimum`."""
    for field, value in fields.items():
        if value < minimum:
            raise ValueError(f"{field} is {value}; set it to {minimum} or more")


def _require_costs(owner: str, **fields: Iterable[float]) -> None:
    for field, values in fields.items():
        for value in values:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{owner}: {field} has {value}; every price is finite and >= 0")


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices of one kind: `nodes` nodes of `devices_per_node`. A tensor-parallel group never leaves its node."""

    name: str
    nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        require_at_least(0, nodes=self.nodes)
        require_at_least(1, devices_per_node=self.devices_per_node)

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One way to generate, priced for every class. Options of one `shape` differ only in `seats` and prices.

    All per-class numbers are for the trajectories of one optimiser step (the class's share of them).
    """

    shape: str  # what is started
    pool: str
    devices: int  # of one engine, all on one node (or on whole nodes)
    seats: int  # sequences that decode together, at most
    holds: int  # tokens: the longest context it can serve
    stall: float  # seconds of every step in which it takes new weights
    work: tuple[tuple[float, ...], ...]  # [row][class] engine seconds; a bucket needs time for each row's sum
    refresh: tuple[float, ...]  # [class] seconds squared: engine seconds of re-prefill, times the step's seconds
    residence: tuple[float, ...]  # [class] seconds its longest trajectory is expected to take, at least, tools included
    # Where batches start together, the longest trajectory of all classes up to each one. Slowed by s while it generates
    # it takes as long as the line says that is longest then: waits + s * generates.
    generates: tuple[tuple[float, ...], ...] = ()  # [line][class] seconds
    waits: tuple[tuple[float, ...], ...] = ()  # [line][class] seconds
    # Where caches cannot hold all contexts:
    refill: tuple[float, ...] = ()  # [class] engine seconds of prefill if every return finds its context gone
    kv_occupancy: tuple[float, ...] = ()  # [class] engines whose caches its contexts fill

    def __post_init__(self) -> None:
        require_at_least(1, devices=self.devices, seats=self.seats, holds=self.holds)
        owner = f"engine option {self.name}"
        _require_costs(owner, stall=(self.stall,), refresh=self.refresh, residence=self.residence)
        _require_costs(owner, refill=self.refill, kv_occupancy=self.kv_occupancy)
        for field, table in (("work", self.work), ("generates", self.generates), ("waits", self.waits)):
            _require_costs(owner, **{field: (seconds for row in table for seconds in row)})
        shared = (*self.generates, *self.waits)
        rows = (*self.work, self.refresh, *shared, self.refill, self.kv_occupancy)
        if not self.work or any(row and len(row) != len(self.residence) for row in rows):
            raise ValueError(f"{owner}: all its prices must be of the same classes")
        if bool(self.refill) != bool(self.kv_occupancy):
            raise ValueError(f"{owner}: refill and kv_occupancy belong together; what is always gone belongs to work")
        if len(self.generates) != len(self.waits):
            raise ValueError(f"{owner}: generates and waits must have the same lines")

    def lines(self, last: int) -> tuple[tuple[float, float], ...]:
        """(generates, waits) of the longest trajectory of the classes up to `last`."""
        return tuple((g[last], w[last]) for g, w in zip(self.generates, self.waits, strict=True))

    @property
    def name(self) -> str:
        return f"{self.shape}/{self.seats}"

    @property
    def alone(self) -> float:
        """Seconds of the longest trajectory of a batch if it were the only one."""
        return max((sum(line) for last in range(len(self.residence)) for line in self.lines(last)), default=0.0)

    @property
    def footprint(self) -> tuple[str, int, int]:
        """What all options of the shape have in common: pool, devices, and the longest context."""
        return self.pool, self.devices, self.holds


@dataclass(frozen=True, slots=True)
class TrainingOption:
    """One way to train: `replicas` data-parallel copies in one layout, `devices` in all, on one pool."""

    layout: str
    pool: str
    devices: int
    replicas: int
    seconds: float  # one optimiser step over one step's trajectories, with all that generation has to wait for
    publish: float  # further seconds until engines have the new weights
    # Those of `seconds` that follow the step's last trajectory; None: all, as training waits for the whole batch.
    tail: float | None = None

    def __post_init__(self) -> None:
        require_at_least(1, devices=self.devices, replicas=self.replicas)
        _require_costs(f"training option {self.layout}", seconds=(self.seconds,), publish=(self.publish,))
        if self.tail is not None and not 0 <= self.tail <= self.seconds:
            raise ValueError(
                f"training option {self.layout}: tail is {self.tail}; it is a part of {self.seconds} seconds"
            )

    @property
    def follows(self) -> float:
        """Seconds of training after the last trajectory."""
        return self.seconds if self.tail is None else self.tail


@dataclass(frozen=True, slots=True)
class Bucket:
    """The engines that serve final contexts in `(above, up_to]` tokens. Buckets of an allocation are contiguous."""

    shape: str
    engines: int
    above: int
    up_to: int

    def __post_init__(self) -> None:
        require_at_least(1, engines=self.engines)
        if not 0 <= self.above < self.up_to:
            raise ValueError(f"bucket ({self.above}, {self.up_to}] is empty; its range needs 0 <= above < up_to")


@dataclass(frozen=True, slots=True)
class Allocation:
    """Who does what: training replicas in one layout, and the rollout buckets, shortest first."""

    replicas: int
    buckets: tuple[Bucket, ...]
    layout: str = ONE_DEVICE

    def __post_init__(self) -> None:
        require_at_least(0, replicas=self.replicas)
        reached = 0
        for bucket in self.buckets:
            if bucket.above != reached:
                raise ValueError(f"bucket {bucket} leaves a gap or overlaps; start it above {reached}")
            reached = bucket.up_to

    @property
    def engines(self) -> int:
        return sum(bucket.engines for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that can be chosen, priced."""

    pools: tuple[Pool, ...]
    engines: tuple[EngineOption, ...]
    training: tuple[TrainingOption, ...]
    peaks: tuple[int, ...]  # [class] tokens: the longest context of the class; shortest class first
    met: tuple[bool, ...]  # [class] whether a typical step has a trajectory of it
    longest_context: int  # tokens; no trajectory can grow longer, and some engine must always be able to hold it
    # How much of a class's work reaches its own bucket; the rest stays in the first one, where all trajectories start.
    # Each row is a router; a plan must have time for all of them. Ranges that run already are known better.
    reach_tried: tuple[tuple[float, ...], ...]  # [router][class] fraction, for the current ranges
    reach_untried: tuple[tuple[float, ...], ...]  # [router][class] fraction, for other ranges
    staleness: int = 0  # versions; 0 is synchronous training
    colocated: bool = False  # all devices generate, then all of them train; needs staleness 0
    switch: float = 0.0  # seconds to change sides, twice a step, when colocated
    use_all_devices: bool = False  # a run's devices are there anyway: what is not needed generates, too
    one_bucket_per_shape: bool = False  # where an engine's shape alone says which bucket it serves
    most_buckets: int | None = None  # None: as many as there are classes
    current: Allocation | None = None  # what runs now: a hint, and the tie-break

    def __post_init__(self) -> None:
        require_at_least(0, staleness=self.staleness)
        require_at_least(1, longest_context=self.longest_context)
        if self.most_buckets is not None:
            require_at_least(1, most_buckets=self.most_buckets)
        if self.colocated and self.staleness:
            raise ValueError(f"staleness is {self.staleness}; colocated training is synchronous: set it to 0")
        if not self.peaks:
            raise ValueError("there is no class; a problem needs at least one trajectory class")
        if any(shorter > longer for shorter, longer in pairwise(self.peaks)) or self.peaks[-1] > self.longest_context:
            raise ValueError("peaks are not ordered; sort the classes, shortest first, none above longest_context")
        pools = {pool.name for pool in self.pools}
        if len(pools) < len(self.pools):
            raise ValueError("two pools have the same name; name each once")
        for pool in (*(option.pool for option in self.engines), *(option.pool for option in self.training)):
            if pool not in pools:
                raise ValueError(f"an option is on pool {pool!r}; the pools are {', '.join(sorted(pools))}")
        named = [(option.layout, option.replicas) for option in self.training]
        if len(set(named)) < len(named):
            raise ValueError("two training options have the same layout and replicas; list each once")
        same: dict[str, tuple[str, int, int]] = {}
        for engine in self.engines:
            if same.setdefault(engine.shape, engine.footprint) != engine.footprint:
                raise ValueError(
                    f"two options of shape {engine.shape} differ in pool, devices or holds; name them apart"
                )
        classes = len(self.peaks)
        rows = (self.met, *self.reach_tried, *self.reach_untried, *(option.residence for option in self.engines))
        if any(len(row) != classes for row in rows):
            raise ValueError(f"there are {classes} classes; met, reach and every engine option must list them all")
        for row in (*self.reach_tried, *self.reach_untried):
            if not all(0 <= part <= 1 for part in row):
                raise ValueError("reach holds fractions of 0 to 1")
        if not set(self.reach_tried) <= set(self.reach_untried):
            raise ValueError("reach_untried must list every router of reach_tried: what is known is also possible")
        _require_costs("problem", switch=(self.switch,))

    @property
    def synchronous(self) -> bool:
        """Whether nothing overlaps: a step is the sum of generation and of what follows it."""
        return self.staleness == 0

    @property
    def shared(self) -> bool:
        """Whether batches that start together overlap, so that each one's longest trajectory shares its engine."""
        return self.staleness > 0 and any(option.generates for option in self.engines)

    def pool(self, name: str) -> Pool:
        return next(pool for pool in self.pools if pool.name == name)

    @property
    def shapes(self) -> tuple[str, ...]:
        """Names of the shapes, in the order of the options."""
        return tuple(dict.fromkeys(option.shape for option in self.engines))

    def footprint(self, shape: str) -> tuple[str, int, int]:
        """Pool, devices of one engine, and longest context of a shape."""
        return next(option.footprint for option in self.engines if option.shape == shape)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of one optimiser step, and what bounds it."""

    step: float  # the largest of the three below
    # The busiest bucket's work for one step's trajectories, per engine, weight loads included; where the step is
    # synchronous, the longest trajectory of a batch, too
    rollout: float
    training: float  # forward, backward, exchange, optimiser, exposed publication
    latency: float  # (longest residence + what follows it) / (1 + staleness); synchronous, of load where longer
    bottleneck: Bottleneck


@dataclass(frozen=True, slots=True)
class Proof:
    """What the solver can vouch for. `bound` is a proven lower bound on the step seconds, `gap` relative to it."""

    status: SolverStatus
    bound: float
    gap: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The best allocation of a problem, its price and the proof."""

    allocation: Allocation
    predicted: Prediction
    proof: Proof


class InfeasiblePlanError(ValueError):
    """No allocation satisfies the request. The message names the constraints that conflict."""
