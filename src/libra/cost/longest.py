"""The longest trajectory of a step, from trajectories that stand for all of them.

Invariant: an expected maximum is taken over members, each with its own tokens and tool seconds, and never over means.
So it grows with every token and every second of any member, and is convex in what generation is slowed by.
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


_CERTAIN = 30.0  # draws of each trajectory that was seen: that none of the longest is among them has a chance of 1e-13


@dataclass(frozen=True, slots=True)
class MemberSeconds:
    """Members of all classes on one engine, by themselves: seconds that others slow, and seconds of tools."""

    of_class: Ints  # [member]
    shares: Floats  # [member] of all trajectories
    generates: Floats  # [member] seconds
    waits: Floats  # [member] seconds
    seen: float | None  # equally weighted trajectories that they are known from; None: they are known exactly

    @classmethod
    def of(cls, timing: EngineTiming, classes: Sequence[TrajectoryClass], together: Sequence[float] = ()) -> Self:
        """`together` is, for each class, the sequences that decode with it; it decodes alone otherwise."""
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
        """Each with the further seconds of its class."""
        return replace(
            self,
            generates=self.generates + (np.array(generates)[self.of_class] if generates else 0.0),
            waits=self.waits + (np.array(waits)[self.of_class] if waits else 0.0),
        )

    def corrected(self, factors: BatchFactors) -> Self:
        return replace(self, generates=factors.generation * self.generates)

    def means(self, classes: int) -> list[float]:
        """[class] seconds of its trajectories, tools included."""
        total = np.bincount(self.of_class, self.shares * (self.generates + self.waits), classes)
        shares = np.bincount(self.of_class, self.shares, classes)
        found: list[float] = np.divide(total, shares, out=np.zeros(classes), where=shares > 0).tolist()
        return found

    def longest(self, draws: float, slowed: float = 1.0) -> tuple[float, ...]:
        """[class] seconds to expect of the longest of the trajectories of all classes up to each one that are among
        `draws`, where generation takes `slowed` times as long.

        Of `seen` trajectories, each is among as many that are drawn without replacement with a chance of draws / seen.
        The mean of the longest over all such draws is an unbiased estimate of what new ones have, whatever their
        distribution (Hoeffding 1948); with replacement it would be too short. More draws than were seen have the
        longest that was seen; how much further the tail goes is not known.
        """
        ratio = draws / self.seen if self.seen else 0.0
        # The count of a Poisson distribution that is 0 with a chance of 1 - ratio.
        each = min(_CERTAIN, -math.log1p(-ratio)) if ratio < 1 else _CERTAIN
        counts = (self.seen * each if self.seen and ratio else draws) * self.shares
        return longest_upto(slowed * self.generates + self.waits, counts, self.of_class)


def own_members(cls: TrajectoryClass) -> tuple[Member, ...]:
    """The members of a class; of one without, the mean."""
    return cls.members or (Member(1.0, cls.generated, cls.prefill, cls.turns, cls.tool_seconds),)


def longest_upto(seconds: Floats, draws: Floats, of_class: Ints) -> tuple[float, ...]:
    """[class] seconds to expect of the longest of all draws from members of the classes up to each one.

    As many of a member are drawn as a Poisson distribution with the mean `draws` says, so the longest is above x unless
    none above x is drawn: the integral of 1 - exp(-D(x)), where D(x) draws are expected above x. A step without any has
    a longest of 0 seconds.
    """
    order = np.argsort(-seconds, kind="stable")
    classes = np.arange(int(of_class.max()) + 1)
    longer = np.cumsum(draws[order, None] * (of_class[order, None] <= classes), axis=0)
    none_longer = np.exp(-longer)
    chance = -np.diff(none_longer, axis=0, prepend=1.0)
    found: list[float] = (seconds[order] @ chance).tolist()
    return tuple(found)
