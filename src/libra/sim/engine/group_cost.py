"""What an iteration of several data-parallel ranks takes: each rank's own part, and what they do together.

Invariant: whole ticks. A rank's own part is an `IterationCost`; the whole follows lines in the slowest rank's part, so
that jumps are sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from libra.cost.graphs import GraphKind
from libra.cost.host import HostCost
from libra.sim.engine.iteration_cost import UNLIMITED, IterationCost


class Graph(NamedTuple):
    """How all ranks run an iteration: the lowest of their kinds, and with a graph the size of the largest, in tokens.
    Without one each runs its own tokens, and `size` is 0."""

    kind: GraphKind
    size: int = 0


class Together(NamedTuple):
    """An iteration takes the longest of `factor * slowest + ticks` for each (factor, ticks) of `lines`, where `slowest`
    are the ticks of the slowest rank's own part. This holds for so many iterations. `names` say, for each line, what
    bounds an iteration that follows it; there are none where that is no question."""

    lines: tuple[tuple[int, int], ...]
    holds: int = UNLIMITED
    names: tuple[str, ...] = ()


class GroupCost(Protocol):
    @property
    def host(self) -> HostCost:
        """That of each rank."""
        ...

    def rank(self, graph: Graph) -> IterationCost:
        """A rank's own part, when all run this graph."""
        ...

    def together(self, graph: Graph, tokens: int, requests: int, cpu: float, iteration: int) -> Together:
        """What ranks do together with so many tokens, padding and dummy batches included, in the group's
        `iteration`-th iteration (counted from 0) and those after it. `requests` are those of the rank with most, `cpu`
        the seconds of the host that takes longest."""
        ...


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Ranks that begin each iteration together: those engines whose `EngineSpec` has it."""

    name: str
    cost: GroupCost
    sync_interval: int = 16  # vLLM's `dp_sync_interval`: iterations between two looks whether anybody has work

    def __post_init__(self) -> None:
        if self.sync_interval < 1:
            raise ValueError(f"dp_sync_interval is {self.sync_interval}; set it to 1 or more")
