"""The planning problem as frozen values, and the notation of its model.

Invariant: a `Problem` is a menu. Every choice is listed and priced before solving, so a choice has the same meaning for
solvers, brute force, explanations and the executor. `plan.options` makes the prices. Times are seconds, lengths are
tokens.

Sets
    t       training options
    s       engine shapes; an option o of a shape is one `max_num_seqs` with its prices
    p       pools of devices
    j       classes of trajectories, shortest first
    (i, j)  ranges of classes, from i to j
    k       routers
    l       lines of an option, for its longest trajectories

Parameters
    eta                                              staleness
    L, F, S                                          of t: training, its part `after_rollout`, publication
    work, refresh, refill, kv_occupancy, residence   of o, by class
    generates, waits                                 of o, by line, for the longest trajectory up to a class
    stall, holds                                     of o
    recall                                           of k, by class: share of the work that reaches its own bucket
    devices                                          of p

Variables
    x[t]        1 if option t trains
    z[s, i, j]  1 if engines of shape s are the bucket of the range (i, j)
    n[s, i, j]  engines of this bucket
    keep        1 if the buckets are the running ones
    T           seconds of a step

Objective: the least T; then the fewest moves, devices and buckets.

Constraints, by the names that `plan.model` (CP-SAT, ILP, bounds), `plan.explain` and docs/planning.md use:

    one_training          sum over t of x[t] = 1
    every_class_once      the ranges with z = 1 are a path from the first class to the last
    most_buckets          sum of z <= most_buckets
    one_bucket_per_shape  sum over i, j of z[s, i, j] <= 1                        for every s, if requested
    keep_buckets          keep <= z of every running bucket
    training              T >= L                                                  if x[t]
    rollout               T >= W / n + stall                                      if z[s, i, j], and for one option o
    latency               (1 + eta) T >= R + F + S                                  of s that meets these three
    longest_context       longest context of class j <= holds
    devices               generating[p] + training[p] <= devices[p]               for every p
    own_devices           the sum is limited; without it (colocated), each term is
    no_idle_devices       = instead of <=, if requested; on a serving pool = or 0

For a given T, rollout, latency and longest_context require a number of engines, need[t, f, s, i, j], if t trains and
the first bucket has shape f (`plan.model.ranges`). Models replace these three constraints by two, with an x for each
pair of t and f:

    enough_engines        n[s] >= sum over i, j of need[t, f, s, i, j] z[s, i, j] if x[t, f]
    no_stray_engines      n[s] = 0                                                if s has no bucket

Work. W is the work of a bucket, the largest over routers k and over rows of `work`:

    W = sum over the bucket's classes of  cost[j] recall[k, j]
        and in the first bucket           + sum over all classes of cost[j] (1 - recall[k, j])

    cost = work + refresh / T + refill * min(1, max(0, D / n - 1))

The last factor is the share of returns whose context a full cache has evicted, so that it is prefilled again. D is the
number of engines whose caches a batch fills: the same sum, of kv_occupancy. The routers of running ranges are known;
with `keep` only known routers count.

Residence. R is the longest residence among the bucket's classes that a typical step has (`expected`). Trajectories
start in the first bucket, and the work that the router leaves there runs at the pace of its shape f. So in later
buckets, residence, generates and waits of class j are, for each router k,

    recall[k, j] * (value of o) + (1 - recall[k, j]) * (value of f's option)

where f's option is the one that ends the last class first. R is the largest over k. In the first bucket, R also covers
the longer classes, which leave it. Their later part takes the seconds of the fastest engine without other trajectories,
a lower bound.

Shared engines. If the trajectories of a step start together, the longest trajectory of a bucket shares its engine with
others while it generates (processor sharing). Nothing slows it while its tools run. On an engine that is busy for a
share u of the time, with the prices of the bucket's last class,

    R >= waits[l] + generates[l] / (1 - u)    for every l       u = (W / n + stall) / T

With eta = 0 nothing overlaps: the work is spread over the rollout, so R >= W / n and u = (W / n) / R, and rollout is

    T >= stall + R + F + S                                      (colocated: plus two switches, as in latency)

Each line is a quadratic inequality in T; latency, with eta > 0, is

    ((1 + eta) T - F - S - waits[l]) * (T - stall - W / n) >= generates[l] T      with both factors >= 0

Special engines. A prefill/decode pair is an engine on two pools; its rows of work are prompts, KV on the links, and
decoding. Engines on a serving pool are lent. Their prices are for their share of the device, and they do not hold the
longest context of the problem. No training option is on a serving pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import ConfigDict

from libra.hardware.checks import require_at_least
from libra.plan.allocation import Allocation
from libra.plan.stays import Lines, Stays

# The families of constraints, as above.
Family = Literal[
    "one_training",
    "every_class_once",
    "most_buckets",
    "one_bucket_per_shape",
    "keep_buckets",
    "longest_context",
    "rollout",
    "latency",
    "training",
    "devices",
    "own_devices",
    "no_idle_devices",
    "enough_engines",
    "no_stray_engines",
]

# Rules for reading requests and plans, and the values inside them, from a file; see `libra.plan.plan`.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _require_costs(owner: str, **fields: Iterable[float]) -> None:
    for field, values in fields.items():
        for value in values:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{owner}: {field} contains {value}; prices are finite and >= 0")


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices of one kind: `nodes` nodes of `devices_per_node`. A tensor-parallel group is inside one node, or takes
    whole nodes.
    """

    name: str
    nodes: int
    devices_per_node: int
    serves: bool = False  # whether it serves users: engines there are lent, and nothing trains

    def __post_init__(self) -> None:
        require_at_least(0, nodes=self.nodes)
        require_at_least(1, devices_per_node=self.devices_per_node)

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One way to generate, priced for every class. Options of one `shape` differ only in `max_num_seqs` and prices.

    Numbers of a class are for the class's trajectories of one optimiser step.
    """

    shape: str  # of the engine to start
    pool: str
    devices: int  # of one engine, all on one node (or on whole nodes)
    max_num_seqs: int  # sequences that decode together, at most
    holds: int  # tokens: the longest context that the engine serves
    stall: float  # seconds of every step in which the engine loads new weights
    work: tuple[tuple[float, ...], ...]  # [row][class] engine seconds; a bucket needs time for each row's sum
    refresh: tuple[float, ...]  # [class] seconds squared: engine seconds of re-prefill, times the step's seconds
    residence: tuple[float, ...]  # [class] least expected seconds of its longest trajectory, tools included
    # If batches start together: seconds of the longest trajectory of all classes up to each class. If a factor s slows
    # generation, the trajectory takes the maximum over lines of waits + s * generates.
    generates: Lines = ()  # [line][class] seconds; a line is for the same s in all options
    waits: Lines = ()  # [line][class] seconds
    # If caches cannot hold all contexts:
    refill: tuple[float, ...] = ()  # [class] engine seconds of prefill if every return finds its context evicted
    kv_occupancy: tuple[float, ...] = ()  # [class] number of engines whose caches the class's contexts fill
    # For a prefill/decode pair: pool and devices of the engine that computes prompts. `pool` and `devices` generate.
    prefill: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        require_at_least(1, devices=self.devices, max_num_seqs=self.max_num_seqs, holds=self.holds)
        if self.prefill is not None:
            require_at_least(1, devices=self.prefill[1])
        owner = f"engine option {self.name}"
        _require_costs(owner, stall=(self.stall,), refresh=self.refresh, residence=self.residence)
        _require_costs(owner, refill=self.refill, kv_occupancy=self.kv_occupancy)
        for field, table in (("work", self.work), ("generates", self.generates), ("waits", self.waits)):
            _require_costs(owner, **{field: (seconds for row in table for seconds in row)})
        shared = (*self.generates, *self.waits)
        rows = (*self.work, self.refresh, *shared, self.refill, self.kv_occupancy)
        if not self.work or any(row and len(row) != len(self.residence) for row in rows):
            raise ValueError(f"{owner}: its prices differ in their number of classes; price every class")
        if bool(self.refill) != bool(self.kv_occupancy):
            raise ValueError(
                f"{owner}: give refill and kv_occupancy together; prefill that is always needed belongs to work"
            )
        if len(self.generates) != len(self.waits):
            raise ValueError(f"{owner}: generates and waits differ in their number of lines; give both for each line")

    @property
    def stays(self) -> Stays:
        return Stays(self.residence, self.generates, self.waits)

    @property
    def name(self) -> str:
        return f"{self.shape}/{self.max_num_seqs}"

    @property
    def uses(self) -> dict[str, int]:
        """Devices of one engine by pool; for a pair, those of both halves."""
        used = {self.pool: self.devices}
        if self.prefill is not None:
            pool, devices = self.prefill
            used[pool] = used.get(pool, 0) + devices
        return used

    @property
    def footprint(self) -> tuple[str, int, int]:
        """Pool, devices, and longest context, equal for all options of the shape."""
        return self.pool, self.devices, self.holds


@dataclass(frozen=True, slots=True)
class TrainingOption:
    """One way to train: `replicas` data-parallel copies in one layout on one pool, with `devices` devices in total."""

    layout: str
    pool: str
    devices: int
    replicas: int
    seconds: float  # of one optimiser step, exposed publication included
    publish: float  # further seconds until engines have the new weights
    # The part of `seconds` after the step's last trajectory; None: all, as training waits for the whole batch.
    tail: float | None = None

    def __post_init__(self) -> None:
        require_at_least(1, devices=self.devices, replicas=self.replicas)
        _require_costs(f"training option {self.layout}", seconds=(self.seconds,), publish=(self.publish,))
        if self.tail is not None and not 0 <= self.tail <= self.seconds:
            raise ValueError(
                f"training option {self.layout}: tail is {self.tail}; it is a part of {self.seconds} seconds"
            )

    @property
    def after_rollout(self) -> float:
        """Seconds of training after the last trajectory."""
        return self.seconds if self.tail is None else self.tail


@dataclass(frozen=True, slots=True)
class Problem:
    """The priced options of a planning problem, and its constraints."""

    pools: tuple[Pool, ...]
    engines: tuple[EngineOption, ...]
    training: tuple[TrainingOption, ...]
    peaks: tuple[int, ...]  # [class] tokens: the longest context of the class; shortest class first
    expected: tuple[bool, ...]  # [class] whether a typical step has a trajectory of the class
    longest_context: int  # tokens; no trajectory grows longer, and some engine must hold this context
    # Share of a class's work that reaches its own bucket; the rest stays in the first, where all trajectories start.
    # Each row is a router, and a plan must suffice for every row. Ranges that already run have fewer possible routers.
    recall_known: tuple[tuple[float, ...], ...]  # [router][class] fraction, for the current ranges
    recall_possible: tuple[tuple[float, ...], ...]  # [router][class] fraction, for other ranges
    staleness: int = 0  # versions; 0 is synchronous training
    colocated: bool = False  # all devices generate, then all of them train; needs staleness 0
    switch: float = 0.0  # seconds to change between generation and training, twice a step, when colocated
    use_all_devices: bool = False  # no device may idle: superfluous devices generate, too
    one_bucket_per_shape: bool = False  # set if an engine's shape alone determines its bucket
    most_buckets: int | None = None  # None: the number of classes
    current: Allocation | None = None  # the running allocation, which breaks ties between plans
    restriction: str = ""  # options left out of the menu, and the remedy; named in the error if no plan exists

    def __post_init__(self) -> None:
        require_at_least(0, staleness=self.staleness)
        require_at_least(1, longest_context=self.longest_context)
        if self.most_buckets is not None:
            require_at_least(1, most_buckets=self.most_buckets)
        if self.colocated and self.staleness:
            raise ValueError(f"staleness is {self.staleness}; colocated training is synchronous: set it to 0")
        self._require_classes()
        self._require_pools()
        self._require_distinct_options()
        _require_costs("problem", switch=(self.switch,))

    def _require_classes(self) -> None:
        """Raises ValueError unless classes are ordered and every row lists them all."""
        if not self.peaks:
            raise ValueError("there is no class; a problem needs at least one trajectory class")
        if any(shorter > longer for shorter, longer in pairwise(self.peaks)) or self.peaks[-1] > self.longest_context:
            raise ValueError("peaks are not ordered; sort the classes, shortest first, none above longest_context")
        recall = (*self.recall_known, *self.recall_possible)
        rows = (self.expected, *recall, *(option.residence for option in self.engines))
        if any(len(row) != len(self.peaks) for row in rows):
            raise ValueError(
                f"there are {len(self.peaks)} classes; expected, recall and every engine option must list them all"
            )
        if not all(0 <= part <= 1 for row in recall for part in row):
            raise ValueError("recall has a share outside 0 to 1; give fractions")
        if not set(self.recall_known) <= set(self.recall_possible):
            raise ValueError(
                "recall_possible must list every router of recall_known, since a known router is also possible"
            )

    def _require_pools(self) -> None:
        """Raises ValueError unless every option is on an existing pool, and serving pools only have lent engines."""
        pools = {pool.name for pool in self.pools}
        if len(pools) < len(self.pools):
            raise ValueError("two pools have the same name; name each once")
        for pool in (*(pool for option in self.engines for pool in option.uses), *(it.pool for it in self.training)):
            if pool not in pools:
                raise ValueError(f"an option is on pool {pool!r}; the pools are {', '.join(sorted(pools))}")
        serving = {pool.name for pool in self.pools if pool.serves}
        for option in self.training:
            if option.pool in serving:
                raise ValueError(
                    f"{option.layout} trains on pool {option.pool}, which serves users: train on another pool"
                )
        for engine in self.engines:
            if engine.pool in serving and engine.holds >= self.longest_context:
                raise ValueError(
                    f"{engine.name} is lent and holds the longest context of {self.longest_context} tokens; only own"
                    " engines may hold this context: lower its holds"
                )

    def _require_distinct_options(self) -> None:
        """Raises ValueError if two options cannot be distinguished."""
        named = [(option.layout, option.replicas) for option in self.training]
        if len(set(named)) < len(named):
            raise ValueError("two training options have the same layout and replicas; list each once")
        same: dict[str, tuple[object, ...]] = {}
        for engine in self.engines:
            shared = (*engine.footprint, engine.prefill)
            if same.setdefault(engine.shape, shared) != shared:
                raise ValueError(
                    f"two options of shape {engine.shape} differ in pool, devices or holds; name them apart"
                )

    @property
    def synchronous(self) -> bool:
        """Whether nothing overlaps: a step is the sum of generation and all later phases."""
        return self.staleness == 0

    @property
    def shared(self) -> bool:
        """Whether batches that start together overlap, so that a batch's longest trajectory shares its engine with
        others.
        """
        return self.staleness > 0 and any(option.generates for option in self.engines)

    def pool(self, name: str) -> Pool:
        return next(pool for pool in self.pools if pool.name == name)

    @property
    def lent(self) -> frozenset[str]:
        """Shapes of engines on devices that serve."""
        serving = {pool.name for pool in self.pools if pool.serves}
        return frozenset(option.shape for option in self.engines if option.pool in serving)

    @property
    def shapes(self) -> tuple[str, ...]:
        """Names of the shapes, in the order of the options."""
        return tuple(dict.fromkeys(option.shape for option in self.engines))

    def options(self, shape: str) -> list[EngineOption]:
        """The options of a shape."""
        return [option for option in self.engines if option.shape == shape]

    def begins(self, shape: str) -> Stays:
        """Stays on the option of a shape on which trajectories are assumed to begin."""
        return min(self.options(shape), key=lambda option: option.residence[-1]).stays

    @property
    def elsewhere(self) -> Stays:
        """Lower bound on stays after the first bucket, for any engines and any load there."""
        stays = [option.stays for option in self.engines]
        alone = tuple(min(max(it.residence[j], it.alone(j)) for it in stays) for j in range(len(self.peaks)))
        lines = max(len(it.generates) for it in stays)
        return Stays(alone, ((0.0,) * len(alone),) * lines, (alone,) * lines)

    def uses(self, shape: str) -> dict[str, int]:
        """Devices of one engine of a shape, by pool."""
        return next(option.uses for option in self.engines if option.shape == shape)

    def footprint(self, shape: str) -> tuple[str, int, int]:
        """Pool, devices of one engine, and longest context of a shape."""
        return next(option.footprint for option in self.engines if option.shape == shape)


class InfeasiblePlanError(ValueError):
    """No allocation satisfies the request. The message names the constraints that conflict."""
