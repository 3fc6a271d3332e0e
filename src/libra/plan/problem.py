"""The planning question and its answer, as frozen values.

Invariant: a `Plan` embeds the request it answers and nothing of the machine it was computed on (no wall time, host
name or date), so the same request gives the same bytes. Times are seconds, lengths are tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import ConfigDict

from libra.cost.device import DeviceProfile
from libra.lengths import TrajectoryClass

Bottleneck = Literal["rollout", "training", "latency"]
SolverStatus = Literal["optimal", "feasible"]

FORMAT = 1

# How these values are read from a file: see `libra.plan.document`. It also holds for the values inside them.
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

SHARE_TOLERANCE = 1e-6  # shares are normalised floats, perhaps printed and read again: they sum to 1 up to rounding


def _require_at_least(minimum: int, **fields: int) -> None:
    for field, value in fields.items():
        if value < minimum:
            raise ValueError(f"{field} is {value}; set it to {minimum} or more")


@dataclass(frozen=True, slots=True)
class EngineShape:
    """A size in which a rollout engine can be started on one device."""

    name: str
    max_model_len: int  # longest context it serves
    max_num_seqs: int  # sequences that decode together
    kv_tokens: int  # tokens its KV memory holds

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name of an engine shape is empty; buckets refer to shapes by name")
        _require_at_least(1, max_model_len=self.max_model_len, max_num_seqs=self.max_num_seqs, kv_tokens=self.kv_tokens)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Healthy devices by what they may do: `core` always train, `rollout` always generate, `hybrid` do either."""

    core: int
    hybrid: int
    rollout: int

    def __post_init__(self) -> None:
        _require_at_least(0, core=self.core, hybrid=self.hybrid, rollout=self.rollout)

    @property
    def devices(self) -> int:
        return self.core + self.hybrid + self.rollout


@dataclass(frozen=True, slots=True)
class Workload:
    """What one optimiser step needs, drawn from the tracked distribution."""

    trajectories: int  # B: trajectories trained on in one step
    group_size: int  # samples of one prompt; a group is complete before use
    max_staleness: int  # eta: versions between generation and training
    max_turn_tokens: int  # a turn is never longer; engines keep this much room
    longest_context: int  # tokens; no trajectory can grow longer, and some engine must always be able to hold it
    train_tokens: float  # expected tokens per trajectory that go through forward and backward
    router_hit: float  # share of a trajectory's work after its first tool return that the router puts in its own bucket
    classes: tuple[TrajectoryClass, ...]  # shares sum to 1, ordered by final context

    def __post_init__(self) -> None:
        _require_at_least(
            1,
            trajectories=self.trajectories,
            group_size=self.group_size,
            max_turn_tokens=self.max_turn_tokens,
            longest_context=self.longest_context,
        )
        _require_at_least(0, max_staleness=self.max_staleness)
        if not (math.isfinite(self.train_tokens) and self.train_tokens >= 0):
            raise ValueError(f"train_tokens is {self.train_tokens}; give the expected tokens per trajectory, >= 0")
        if not 0 <= self.router_hit <= 1:
            raise ValueError(f"router_hit is {self.router_hit}; give a share between 0 and 1")
        if not self.classes:
            raise ValueError("classes is empty; a workload needs at least one trajectory class")
        for index, cls in enumerate(self.classes):
            self._check_class(f"classes[{index}]", cls)
        total = math.fsum(cls.share for cls in self.classes)
        if abs(total - 1) > SHARE_TOLERANCE:
            raise ValueError(f"classes: the shares sum to {total}; divide each by their sum")
        if any(shorter.peak_context > longer.peak_context for shorter, longer in pairwise(self.classes)):
            raise ValueError("classes are not ordered; sort them by peak_context, shortest first")

    def _check_class(self, where: str, cls: TrajectoryClass) -> None:
        means = (cls.share, cls.generated, cls.context_sum, cls.prefill, cls.turns, cls.tool_seconds)
        if not all(math.isfinite(mean) and mean >= 0 for mean in means):
            raise ValueError(f"{where}: {cls} has a negative or infinite field; every mean is finite and >= 0")
        if not 0 <= cls.before_first_return <= 1:
            raise ValueError(f"{where}.before_first_return is {cls.before_first_return}; it is a fraction of 0 to 1")
        if not 1 <= cls.peak_context <= self.longest_context:
            raise ValueError(
                f"{where}.peak_context is {cls.peak_context}; it lies between 1 and longest_context "
                f"({self.longest_context}): raise longest_context, or clip the class"
            )


@dataclass(frozen=True, slots=True)
class Bucket:
    """The engines that serve final contexts in `(above, up_to]` tokens. Buckets of an allocation are contiguous."""

    shape: str
    engines: int
    above: int
    up_to: int

    def __post_init__(self) -> None:
        _require_at_least(1, engines=self.engines)
        if not 0 <= self.above < self.up_to:
            raise ValueError(f"bucket ({self.above}, {self.up_to}] is empty; its range needs 0 <= above < up_to")


@dataclass(frozen=True, slots=True)
class Allocation:
    """Who does what: training replicas (core plus hybrids that train) and the rollout buckets, shortest first."""

    replicas: int
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        _require_at_least(0, replicas=self.replicas)
        reached = 0
        for bucket in self.buckets:
            if bucket.above != reached:
                raise ValueError(f"bucket {bucket} leaves a gap or overlaps; start it above {reached}")
            reached = bucket.up_to

    @property
    def engines(self) -> int:
        return sum(bucket.engines for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    __pydantic_config__ = _STRICT

    fleet: Fleet
    shapes: tuple[EngineShape, ...]
    profile: DeviceProfile
    workload: Workload
    current: Allocation | None = None  # the running allocation: a hint, and the tie-break

    def __post_init__(self) -> None:
        if len({shape.name for shape in self.shapes}) < len(self.shapes):
            raise ValueError("shapes: two have the same name; buckets refer to shapes by name, so name each once")
        if any(short.max_model_len > long.max_model_len for short, long in pairwise(self.shapes)):
            raise ValueError("shapes are not ordered; sort them by max_model_len, shortest first")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of one optimiser step, and what bounds it (async mode)."""

    step: float  # max of the three below
    rollout: float  # the busiest bucket's work for one step's trajectories, per engine, weight loads included
    training: float  # forward, backward, exchange, optimiser, publication
    latency: float  # (longest expected residence + training) / (1 + max_staleness)
    bottleneck: Bottleneck


@dataclass(frozen=True, slots=True)
class Proof:
    """What the solver can vouch for. `bound` is a proven lower bound on the step seconds, `gap` relative to it."""

    status: SolverStatus
    bound: float
    gap: float


@dataclass(frozen=True, slots=True)
class Plan:
    __pydantic_config__ = _STRICT

    request: PlanRequest
    allocation: Allocation
    predicted: Prediction
    proof: Proof
    format: int = FORMAT


class InfeasiblePlanError(ValueError):
    """No allocation satisfies the request. The message names the constraints that conflict."""
