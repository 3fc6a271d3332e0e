"""Allocations: training replicas, and the engines of each range of context lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from libra.hardware.checks import require_at_least

ONE_DEVICE = "one device"  # the layout of a replica on a single device


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
    """Training replicas in one layout, and the rollout buckets, shortest first."""

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

    def describe(self) -> str:
        """Text for people: `train 2 | short 1 <= 40 | long 1 <= 160`."""
        engines = (f"{bucket.shape} {bucket.engines} <= {bucket.up_to}" for bucket in self.buckets)
        return " | ".join([f"train {self.replicas}", *engines])

    def without(self, shapes: Collection[str]) -> Allocation:
        """Return the allocation without the engines of `shapes`. The next longer bucket serves the range of a removed
        bucket. If the longest bucket is removed, no engine serves the longest contexts.
        """
        left: list[Bucket] = []
        for bucket in self.buckets:
            if bucket.shape not in shapes:
                left.append(replace(bucket, above=left[-1].up_to if left else 0))
        return replace(self, buckets=tuple(left))

    @property
    def engines(self) -> int:
        return sum(bucket.engines for bucket in self.buckets)

    @property
    def engines_by_shape(self) -> Counter[str]:
        """Number of engines of each shape, in the order of the buckets."""
        engines: Counter[str] = Counter()
        for bucket in self.buckets:
            engines[bucket.shape] += bucket.engines
        return engines

    @property
    def ranges(self) -> tuple[tuple[str, int], ...]:
        """Shape and longest context of each bucket, for a router."""
        return tuple((bucket.shape, bucket.up_to) for bucket in self.buckets)
