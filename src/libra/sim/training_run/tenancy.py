"""What serves on the devices that a plan borrows.

Invariant: the plan says which engines are lent and which contexts they take; what serves beside them says only when
they may compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from libra.lend.gate import SharingRule
from libra.sim.certify import LendingCase


@dataclass(frozen=True, slots=True)
class ServingDevice:
    """A device that serves, one step at a time with whoever borrows it."""

    case: LendingCase
    use: float  # share of its tpot that serving may be slowed down to
    rule: Callable[[], SharingRule]  # a new one for each run; times are ticks
    share: float  # of the device's time that is expected to be lent


@dataclass(frozen=True, slots=True)
class Tenancy:
    """`devices` are named as the engines that borrow them. A lent engine that is not among them has its device to
    itself, `start` seconds after it is wanted."""

    devices: Mapping[str, ServingDevice]
    start: float = 0.0
    weights: float = 0.0  # seconds that a version takes to all of them
    watched: bool = False  # keep what becomes of each device, step by step, to be shown

    def __post_init__(self) -> None:
        for name in ("start", "weights"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name):g} s; it cannot be negative")
