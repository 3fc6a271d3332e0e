"""The menu of priced options of a request, and its classes of trajectories.

Invariant: classes that pass `check_classes` are a distribution: their shares sum to 1, shortest first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import pairwise
from typing import Literal, Protocol

from libra.config.recipe import Recipe
from libra.cost.corrections import BatchFactors
from libra.cost.grid import EngineProfile
from libra.hardware.cluster import NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import ParallelLayout
from libra.lengths import TrajectoryClass
from libra.plan.problem import EngineOption, Problem
from libra.route.catalogue import ignores_buckets

# Tolerance, since normalised shares that are printed and read again sum to 1 only up to rounding.
SHARE_TOLERANCE = 1e-6

RejectionKind = Literal[
    "does not divide",  # devices or degrees do not suit nodes or model
    "no times",  # the profile has no times for the degree
    "does not fit",  # too large; a layout: at every dp
    "slower",  # another option is faster wherever this one fits
    "lends nothing",  # lent engine: traffic exceeds the certified rate
    "too slow",  # lent engine: no grant is long enough
    "framework",  # the plan's framework does not support the option
    "does not multiply",  # the GPU does not compute in the number type
]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected option with the reason: an engine size, a layout, a degree, or a family of layouts that differ only in
    dp ("dp*").
    """

    name: str
    kind: RejectionKind
    reason: str


class LendingPool(Protocol):
    """A serving pool whose engines may lend their devices, as a source of priced options."""

    @property
    def pool(self) -> str: ...

    @property
    def devices(self) -> int:
        """Devices of one engine."""
        ...

    def options(
        self,
        model: ModelSpec,
        nodes: NodeClass,
        recipe: Recipe,
        classes: Sequence[TrajectoryClass],
        profile: EngineProfile,
        factors: BatchFactors = ...,
    ) -> tuple[tuple[EngineOption, ...], tuple[BorrowedEngine, ...], tuple[Rejected, ...]]:
        """Priced options of rollout engines on `nodes`, the engines of these options, and rejected loans."""
        ...


class BorrowedEngine(Protocol):
    """A rollout engine on the devices of a serving engine."""

    @property
    def lender(self) -> LendingPool: ...

    @property
    def shape(self) -> str: ...

    @property
    def use(self) -> float:
        """Share of the SLO's tpot to which serving is slowed down."""
        ...

    @property
    def kv_tokens(self) -> int: ...

    @property
    def batched_tokens(self) -> int:
        """Most tokens that a step can prefill."""
        ...

    @property
    def holds(self) -> int:
        """Longest context that the engine serves, in tokens."""
        ...

    @property
    def share(self) -> float:
        """Share of the devices' time that is lent, while lending is possible."""
        ...

    @property
    def away(self) -> float:
        """Probability that nothing is lent in the coming period."""
        ...

    @property
    def cases(self) -> tuple[bool, ...]:
        """Whether nothing is lent, for each of the equally probable cases of traffic, lowest traffic first."""
        ...


@dataclass(frozen=True, slots=True)
class PairHalf:
    """The engines of one role in a prefill/decode pair, on one class of nodes."""

    pool: str
    tp: int
    engines: int

    @property
    def shape(self) -> str:
        """Shape of one engine, named like the shape of a colocated engine."""
        return f"{self.pool}/tp{self.tp}"

    @property
    def devices(self) -> int:
        return self.tp * self.engines


@dataclass(frozen=True, slots=True)
class PrefillDecodePair:
    """Prefill and decode engines in a fixed ratio, which count as one engine of the menu."""

    prefill: PairHalf
    decode: PairHalf

    @property
    def shape(self) -> str:
        return " > ".join(f"{half.engines} {half.shape}" for half in (self.prefill, self.decode))


@dataclass(frozen=True, slots=True)
class Availability:
    """Lent shapes that are away together in one case of traffic."""

    away: frozenset[str]  # lent shapes whose engines are all away
    probability: float


@dataclass(frozen=True, slots=True)
class Menu:
    """A problem, and the layouts and engines of its options."""

    problem: Problem
    # By layout and replicas of the training option; empty if each device is a replica.
    layouts: Mapping[tuple[str, int], ParallelLayout] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()  # shapes of engines
    lent: tuple[BorrowedEngine, ...] = ()  # one for each shape that is lent
    pairs: tuple[PrefillDecodePair, ...] = ()  # one for each shape that is a pair
    availability: tuple[Availability, ...] = (Availability(frozenset(), 1.0),)  # the likeliest first


def availability(lent: Sequence[BorrowedEngine]) -> tuple[Availability, ...]:
    """Sets of shapes that may be away in the coming period, with their probabilities, likeliest first.

    Traffic of several lenders is assumed to be high at the same times, since they share the time of day. This is
    cautious: no lender then replaces another.
    """
    edges = {Fraction(0), Fraction(1)}
    edges |= {Fraction(k, len(engine.cases)) for engine in lent for k in range(len(engine.cases))}
    found: dict[frozenset[str], Fraction] = {}
    for low, high in pairwise(sorted(edges)):
        away = frozenset(engine.shape for engine in lent if engine.cases[int(low * len(engine.cases))])
        found[away] = found.get(away, Fraction(0)) + high - low
    return tuple(Availability(away, float(weight)) for away, weight in sorted(found.items(), key=lambda it: -it[1]))


_MOST = 1e15  # upper limit of a mean: seconds, or tokens summed over contexts
_MEMBER_TOLERANCE = 1e-3  # members are written with few digits


def check_classes(classes: Sequence[TrajectoryClass], longest_context: int) -> None:
    """Raise ValueError with field and remedy, unless the classes are a distribution of contexts within
    `longest_context`."""
    if not classes:
        raise ValueError("classes is empty; a workload needs at least one trajectory class")
    for index, cls in enumerate(classes):
        where = f"classes[{index}]"
        means = {it.name: getattr(cls, it.name) for it in fields(cls) if it.name not in ("members", "seen")}
        if cls.seen is not None:
            means["seen"] = cls.seen
        for number, member in enumerate(cls.members):
            means.update((f"members[{number}].{name}", value) for name, value in member._asdict().items())
        for name, mean in means.items():
            if not 0 <= mean < _MOST:
                raise ValueError(f"{where}.{name} is {mean}; every mean is 0 or more, and below {_MOST:g}")
        of_members = math.fsum(member.share for member in cls.members)
        if cls.members and abs(of_members - 1) > _MEMBER_TOLERANCE:
            raise ValueError(f"{where}.members: the shares sum to {of_members}; divide each by their sum")
        if not 0 <= cls.before_first_return <= 1:
            raise ValueError(f"{where}.before_first_return is {cls.before_first_return}; it is a fraction of 0 to 1")
        if not 1 <= cls.peak_context <= longest_context:
            raise ValueError(
                f"{where}.peak_context is {cls.peak_context}; it lies between 1 and longest_context "
                f"({longest_context}): raise longest_context, or clip the class"
            )
    total = math.fsum(cls.share for cls in classes)
    if abs(total - 1) > SHARE_TOLERANCE:
        raise ValueError(f"classes: the shares sum to {total}; divide each by their sum")
    if any(shorter.peak_context > longer.peak_context for shorter, longer in pairwise(classes)):
        raise ValueError("classes are not ordered; sort them by peak_context, shortest first")


def reach(classes: Sequence[TrajectoryClass], hits: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """[router][class] share of a class's work that reaches its own bucket: for the given router, and for a perfect
    router.

    The given router sends `hits[class]` of the work after the first tool return to the class's own bucket. Other work,
    and all work before the first tool return, stays in the first bucket. The hit rate is known for the running buckets.
    For other buckets it depends on their limits, so they must also have time for a perfect router.
    """
    perfect = tuple(1 - cls.before_first_return for cls in classes)
    routed = tuple(part * hit for part, hit in zip(perfect, hits, strict=True))
    return tuple(dict.fromkeys((routed, perfect)))


def most_buckets(recipe: Recipe, classes: Sequence[TrajectoryClass]) -> int:
    """Number of ranges of final context that the router can distinguish. One if the router ignores buckets, or if there
    are no tool returns, since a trajectory can change its bucket only there.
    """
    if ignores_buckets(recipe.router) or all(cls.before_first_return == 1 for cls in classes):
        return 1
    return recipe.max_buckets
