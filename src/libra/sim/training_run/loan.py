"""What a simulated run borrows: devices that serve, one step at a time, or devices that are handed over whole.

Invariant: what is lent only generates. Lent engines are a bucket of their own, and no version of the weights waits for
them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from libra.lend.gate import SharingRule
from libra.sim.certify import LendingCase
from libra.sim.engine.config import EngineSpec


@dataclass(frozen=True, slots=True)
class Lender:
    """An engine that serves, and the rollout engine that may borrow its device."""

    case: LendingCase
    use: float  # share of its tpot that it may be slowed down to
    rule: Callable[[], SharingRule]  # a new one for each run; times are ticks
    rollout: EngineSpec
    share: float  # of the device's time, that is expected to be lent

    @property
    def name(self) -> str:
        return self.rollout.name


@dataclass(frozen=True, slots=True)
class Loan:
    """`lenders` share their devices; the devices of `whole` serve nothing, and begin `start` seconds after the run."""

    up_to: int  # longest final context of their bucket, tokens
    lenders: tuple[Lender, ...] = ()
    whole: tuple[EngineSpec, ...] = ()
    start: float = 0.0
    weights: float = 0.0  # seconds that a version of the weights takes to them

    def __post_init__(self) -> None:
        if self.up_to < 1 or self.start < 0 or self.weights < 0:
            raise ValueError(
                f"up_to is {self.up_to}, start {self.start:g}, weights {self.weights:g}: give 1 token or more, and"
                " seconds that are not negative"
            )
        if len(self.names) < len(self.lenders) + len(self.whole):
            raise ValueError("two lent engines have the same name; name each once")

    @property
    def names(self) -> frozenset[str]:
        """Of the engines."""
        return frozenset((*(it.name for it in self.lenders), *(it.name for it in self.whole)))


def with_bucket(limits: tuple[int, ...], up_to: int) -> tuple[tuple[int, ...], int]:
    """Limits of buckets with one more, whose longest final context is `up_to` (or a token less where another one has
    that limit), and the index that it has."""
    while up_to in limits:
        up_to -= 1
    place = bisect_left(limits, up_to)
    return (*limits[:place], up_to, *limits[place:]), place


def moved(spec: EngineSpec, place: int) -> EngineSpec:
    """An engine in its bucket, with one more at `place`."""
    return replace(spec, bucket=spec.bucket + 1) if spec.bucket >= place else spec
