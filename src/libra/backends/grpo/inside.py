"""What the processes of one replica agree on: the inner one of the two domains in which gradients are exchanged.

Invariant: every process of the replica takes part in each of these collectives, in the same order. One that is gone
fails them for the others, which then end too: a replica is there with all its processes or not at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import distributed

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Inside:
    """Where this process stands in its replica. Alone (size 1) every verb is free."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether it speaks with the controller and writes what the replica publishes and saves."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        return int(self._reduced(torch.tensor(number), distributed.ReduceOp.MAX))

    def total(self, number: float) -> float:
        return float(self._reduced(torch.tensor(number, dtype=torch.float64), distributed.ReduceOp.SUM))

    def _reduced(self, tensor: torch.Tensor, operation: distributed.ReduceOp) -> torch.Tensor:
        if self.size > 1:
            distributed.all_reduce(tensor, operation)
        return tensor


ALONE = Inside(0, 1)


def meet(rank: int, size: int, store: distributed.Store) -> Inside:
    """Join the replica's process group: torch's default one in this process, and the one that accelerate finds."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return Inside(rank, size)
