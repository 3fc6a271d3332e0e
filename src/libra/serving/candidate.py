"""The candidates of a search: pools of equal engines that together serve the requests.

Invariant: a candidate has every setting of its engines that the simulator uses, so equal candidates have equal
simulations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from libra.cost.collectives import AllToAll
from libra.sim.described_tiers import DescribedTier
from libra.sim.engine.config import RoleName
from libra.sim.engine.speculative import Speculative

Architecture = Literal["colocated", "prefill-decode", "attention-ffn"]


@dataclass(frozen=True, slots=True)
class Apart:
    """Attention and FFN of an engine on separate GPUs: the engine is a group of `attention` attention ranks."""

    attention: int
    ffn: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.attention}A{self.ffn}F in {self.micro_batches}"


@dataclass(frozen=True, slots=True)
class DataParallel:
    """`size` ranks that divide the experts of a model and form one engine."""

    size: int
    all2all_backend: AllToAll = "allgather_reducescatter"

    def __str__(self) -> str:
        return f"dp{self.size} {self.all2all_backend}"


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens and their acceptance. `model` is the name of the draft model; None: drafts without a model."""

    speculative: Speculative
    model: str | None = None

    def __str__(self) -> str:
        its, proposer = self.speculative, self.model or self.speculative.method
        return f"{its.num_speculative_tokens} drafts of {proposer} for {its.mean_tokens:.3g} tokens"


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings of one engine, with vLLM's names. `nodes` is the class of its nodes."""

    nodes: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool
    apart: Apart | None = None
    parallel: DataParallel | None = None
    drafts: Drafts | None = None
    kv_tiers: tuple[DescribedTier, ...] = ()  # the nearest first

    @property
    def ranks(self) -> int:
        """Number of ranks that schedule separately."""
        if self.parallel is not None:
            return self.parallel.size
        return 1 if self.apart is None else self.apart.attention

    @property
    def rank_devices(self) -> int:
        """GPUs of one rank, which have the KV of a request and send it over their links."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def devices(self) -> int:
        return self.ranks * self.rank_devices + (0 if self.apart is None else self.apart.ffn)

    def __str__(self) -> str:
        stages = "" if self.pipeline_parallel_size == 1 else f" pp{self.pipeline_parallel_size}"
        apart = "" if self.apart is None else f" {self.apart}"
        ranks = "" if self.parallel is None else f" {self.parallel}"
        return (
            f"{self.nodes}{apart} tp{self.tensor_parallel_size}{stages}{ranks} seqs {self.max_num_seqs}"
            f" tokens {self.max_num_batched_tokens}{' async' if self.async_scheduling else ''}"
            f"{'' if self.drafts is None else f' {self.drafts}'}{''.join(f' + {it}' for it in self.kv_tiers)}"
        )


@dataclass(frozen=True, slots=True)
class EnginePool:
    """`count` engines of one shape, in one role."""

    role: RoleName
    shape: EngineSetup
    count: int

    @property
    def devices(self) -> int:
        return self.count * self.shape.devices

    @property
    def ranks(self) -> int:
        return self.count * self.shape.ranks

    @property
    def kv_devices(self) -> int:
        return self.ranks * self.shape.rank_devices

    def __str__(self) -> str:
        return (
            f"{self.count} x {self.shape}" if self.role == "colocated" else f"{self.role}: {self.count} x {self.shape}"
        )


@dataclass(frozen=True, slots=True)
class ServingCandidate:
    """A colocated pool, or a prefill and a decode pool. Engines may have attention and FFN on separate GPUs. With
    `--plan`, a candidate may have several pools of each role."""

    pools: tuple[EnginePool, ...]

    @property
    def architecture(self) -> Architecture | Literal["mixed"]:
        roles = {pool.role for pool in self.pools}
        if any(pool.shape.apart is not None for pool in self.pools):
            return "attention-ffn"
        return "colocated" if roles == {"colocated"} else "mixed" if "colocated" in roles else "prefill-decode"

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    def by_class(self) -> Counter[str]:
        """GPUs of each class of nodes."""
        used: Counter[str] = Counter()
        for pool in self.pools:
            used[pool.shape.nodes] += pool.devices
        return used

    def __str__(self) -> str:
        return ", ".join(map(str, self.pools))
