"""Duration of an iteration of several data-parallel ranks: each rank's own part, and their joint part.

Invariant: ticks are whole numbers. A rank's own part is an `IterationCost`. The duration is piecewise linear in the
slowest rank's own part, so the time of many iterations is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from libra.cost.graphs import GraphKind
from libra.cost.host import HostCost
from libra.sim.engine.iteration_cost import UNLIMITED, IterationCost


class Graph(NamedTuple):
    """CUDA graph with which all ranks run an iteration: the lowest kind among the ranks, and the largest size, in
    tokens. Without a graph, each rank runs its own tokens, and `size` is 0. `whole`: not divided into micro-batches."""

    kind: GraphKind
    size: int = 0
    whole: bool = False


class Together(NamedTuple):
    """Ticks of an iteration: the largest `factor * slowest + ticks` over all (factor, ticks) of `lines`, where
    `slowest` are the ticks of the slowest rank's own part. The lines are valid for `holds` iterations. `names` is the
    bottleneck of each line; empty if the cost does not distinguish bottlenecks."""

    lines: tuple[tuple[int, int], ...]
    holds: int = UNLIMITED
    names: tuple[str, ...] = ()


class GroupCost(Protocol):
    @property
    def host(self) -> HostCost:
        """The host of each rank."""
        ...

    def rank(self, graph: Graph) -> IterationCost:
        """A rank's own part, if all ranks run this graph."""
        ...

    def together(self, graph: Graph, tokens: int, requests: int, cpu: float, iteration: int) -> Together:
        """The joint part of all ranks, from the group's iteration number `iteration` on (counted from 0). `tokens`
        includes padding and dummy batches, `requests` are the requests of the fullest rank, and `cpu` the seconds of
        the slowest host."""
        ...


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """Conditions for dividing batches: as in vLLM's dual batch overlap, each rank must reach its threshold of tokens,
    and have enough that none of its micro-batches is empty."""

    count: int
    dbo_decode_token_threshold: int  # least tokens of a rank that only decodes
    dbo_prefill_token_threshold: int  # least tokens of a rank with a prompt

    def __post_init__(self) -> None:
        for key in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            if getattr(self, key) < self.count:
                raise ValueError(f"{key} is {getattr(self, key)}; set it to {self.count} (one per micro-batch) or more")

    def wanted(self, tokens: int, *, uniform: bool) -> bool:
        """Whether a rank with `tokens` tokens reaches its threshold."""
        return tokens >= (self.dbo_decode_token_threshold if uniform else self.dbo_prefill_token_threshold)

    def fills(self, fewest: int, largest: int) -> bool:
        """Whether the rank with the fewest tokens has a token in its last micro-batch. The fullest rank determines the
        size of micro-batches, padding included."""
        return largest // self.count * (self.count - 1) < fewest


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group of ranks that begin each iteration together. Its ranks are the engines whose `EngineSpec.group` it is."""

    name: str
    cost: GroupCost
    sync_interval: int = 16  # vLLM's `dp_sync_interval`: iterations between two checks whether any rank has work
    micro_batching: MicroBatching | None = None  # None: batches are always divided, if the cost has micro-batches

    def __post_init__(self) -> None:
        if self.sync_interval < 1:
            raise ValueError(f"dp_sync_interval is {self.sync_interval}; set it to 1 or more")
