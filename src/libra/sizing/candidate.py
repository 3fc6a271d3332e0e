"""What a search chooses among: pools of alike engines that together serve the requests.

Invariant: a candidate is a value that names everything that the simulator is told of its engines; two that are equal
are simulated alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from libra.cost.collectives import AllToAll
from libra.sim.engine.config import RoleName

Architecture = Literal["colocated", "prefill-decode"]


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """How one engine, or one group of data-parallel ranks, is set up, in vLLM's terms. `nodes` is the class of nodes
    that it stands on."""

    nodes: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool
    data_parallel_size: int = 1  # ranks, which divide the experts
    all2all_backend: AllToAll = "allgather_reducescatter"

    @property
    def devices(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def __str__(self) -> str:
        stages = "" if self.pipeline_parallel_size == 1 else f" pp{self.pipeline_parallel_size}"
        ranks = "" if self.data_parallel_size == 1 else f" dp{self.data_parallel_size} {self.all2all_backend}"
        return (
            f"{self.nodes} tp{self.tensor_parallel_size}{stages}{ranks} seqs {self.max_num_seqs}"
            f" tokens {self.max_num_batched_tokens}{' async' if self.async_scheduling else ''}"
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

    def __str__(self) -> str:
        return (
            f"{self.count} x {self.shape}" if self.role == "colocated" else f"{self.role}: {self.count} x {self.shape}"
        )


@dataclass(frozen=True, slots=True)
class ServingCandidate:
    """A colocated pool, or one that computes prompts and one that generates; a plan may mix several of each."""

    pools: tuple[EnginePool, ...]

    @property
    def architecture(self) -> Architecture | Literal["mixed"]:
        roles = {pool.role for pool in self.pools}
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
