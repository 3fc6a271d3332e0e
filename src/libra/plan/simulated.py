"""Steps of plans, measured in simulations of whole runs under one router.

Invariant: the finalists of a plan ran on the same draws of trajectories, so their differences are paired.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.plan.allocation import Allocation


@dataclass(frozen=True, slots=True)
class RehearsedStep:
    """Seconds of a step in a settled run: the mean time between two published versions of the weights over `steps`
    steps. Earlier steps, which begin with idle engines, do not count.
    """

    seconds: float
    error: float | None  # half of the 95 % interval of the mean; None: too few steps
    router: str
    steps: int
    seed: int  # of the draws


@dataclass(frozen=True, slots=True)
class Finalist:
    """A plan that was compared with others by simulation."""

    kind: str  # the kind of plans of which it is the best, such as "one engine size"
    allocation: Allocation
    predicted: float  # seconds of a step
    simulated: RehearsedStep | None  # None: there was no time to simulate it
    slower: float | None = None  # seconds by which its step is longer than the chosen plan's, over common steps
    slower_error: float | None = None  # half of the 95 % interval of `slower`; None: too few steps


@dataclass(frozen=True, slots=True)
class SimulatedGain:
    """Seconds by which a proposed plan's step is shorter than the current plan's, over the steps that both ran."""

    seconds: float
    error: float  # half of the 95 % interval
    steps: int
