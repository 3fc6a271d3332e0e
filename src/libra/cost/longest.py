"""Expected longest trajectory of a step, computed from members that represent all trajectories.

Invariant: an expected maximum is over members, each with its own tokens and tool seconds, never over means. So it
increases with every token and second of any member, and is convex in the factor that slows generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from libra.cost.corrections import BatchFactors
from libra.cost.rollout import EngineTiming, prompt_seconds
from libra.lengths import TrajectoryClass
from libra.lengths.members import Member

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# Limit on mean draws of a seen trajectory; at this limit, the longest is missed with a probability of 1e-13.
_CERTAIN = 30.0


@dataclass(frozen=True, slots=True)
class MemberSeconds:
    """Seconds of the members of all classes on one engine: tools, and generation, which other sequences slow down."""

    of_class: Ints  # [member]
    shares: Floats  # [member] of all trajectories
    generates: Floats  # [member] seconds
    waits: Floats  # [member] seconds
    seen: float | None  # number of equally weighted trajectories behind the members; None: exact members

    @classmethod
    def of(cls, timing: EngineTiming, classes: Sequence[TrajectoryClass], together: Sequence[float] = ()) -> Self:
        """The members of `classes`. `together`: number of sequences that decode together, per class; default: 1."""
        each = [own_members(it) for it in classes]
        counts = [len(its) for its in each]
        share, generated, prefill, turns, tools = np.array([row for its in each for row in its]).T

        def by_member(values: Sequence[float]) -> Floats:
            return np.repeat(np.array(values, dtype=float), counts)

        context = [it.context_sum / it.generated if it.generated else 0.0 for it in classes]
        beside = together or [1.0] * len(classes)
        iteration = [timing.iteration_seconds(b, b * c) for b, c in zip(beside, context, strict=True)]
        token, turn = zip(*(prompt_seconds(timing, it.mean_context) for it in classes), strict=True)
        generates = generated * by_member(iteration) + prefill * by_member(token) + turns * by_member(turn)
        of_class = np.repeat(np.arange(len(classes)), counts)
        known = [it.seen for it in classes if it.seen is not None]
        seen = sum(known) if len(known) == len(classes) else None
        return cls(of_class, share * by_member([it.share for it in classes]), generates, tools, seen)

    def more(self, generates: Sequence[float] = (), waits: Sequence[float] = ()) -> Self:
        """Add seconds to each member, given by class."""
        return replace(
            self,
            generates=self.generates + (np.array(generates)[self.of_class] if generates else 0.0),
            waits=self.waits + (np.array(waits)[self.of_class] if waits else 0.0),
        )

    def corrected(self, factors: BatchFactors) -> Self:
        return replace(self, generates=factors.generation * self.generates)

    def means(self, classes: int) -> list[float]:
        """[class] mean seconds of the trajectories, including tools."""
        total = np.bincount(self.of_class, self.shares * (self.generates + self.waits), classes)
        shares = np.bincount(self.of_class, self.shares, classes)
        found: list[float] = np.divide(total, shares, out=np.zeros(classes), where=shares > 0).tolist()
        return found

    def longest(self, draws: float, slowed: float = 1.0) -> tuple[float, ...]:
        """[class] expected seconds of the longest among `draws` trajectories of the classes up to this one.

        Generation takes `slowed` times as long. Draws are without replacement, so each of the `seen` trajectories is
        drawn with a probability of draws / seen. The mean of the longest over all such draws is an unbiased estimate
        for new trajectories of any distribution (Hoeffding 1948); draws with replacement would give too small a value.
        More draws than `seen` give the longest seen trajectory, since the tail beyond it is unknown.
        """
        ratio = draws / self.seen if self.seen else 0.0
        # Mean of the Poisson distribution that is 0 with a probability of 1 - ratio.
        each = min(_CERTAIN, -math.log1p(-ratio)) if ratio < 1 else _CERTAIN
        counts = (self.seen * each if self.seen and ratio else draws) * self.shares
        return longest_upto(slowed * self.generates + self.waits, counts, self.of_class)


def own_members(cls: TrajectoryClass) -> tuple[Member, ...]:
    """The members of a class; without members, its mean as one member."""
    return cls.members or (Member(1.0, cls.generated, cls.prefill, cls.turns, cls.tool_seconds),)


def longest_upto(seconds: Floats, draws: Floats, of_class: Ints) -> tuple[float, ...]:
    """[class] expected seconds of the longest of all draws from members of the classes up to this one.

    The number of draws of a member is Poisson with the mean `draws`. The longest exceeds x unless no member above x is
    drawn. So its mean is the integral of 1 - exp(-D(x)), where D(x) is the expected number of draws above x. A step
    without draws counts as 0 seconds.
    """
    order = np.argsort(-seconds, kind="stable")
    classes = np.arange(int(of_class.max()) + 1)
    longer = np.cumsum(draws[order, None] * (of_class[order, None] <= classes), axis=0)
    none_longer = np.exp(-longer)
    chance = -np.diff(none_longer, axis=0, prepend=1.0)
    found: list[float] = (seconds[order] @ chance).tolist()
    return tuple(found)
