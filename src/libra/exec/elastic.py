"""The gradient exchange between training replicas, whose membership changes between steps.

Invariant: what is added up is the unnormalised gradient and the loss denominator; the division happens once, after the
exchange. A membership is one numbered generation; a replica that goes away fails the collective of everyone else, who
then report it and keep the state they had before the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

DEADLINE = timedelta(seconds=60)  # a replica that has not answered by then is taken for lost


class PeerLostError(RuntimeError):
    """A collective failed because another replica is gone."""


class GradientExchange:
    """One replica's membership. Alone (size 1) every verb is free."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self.rank, self.size = 0, 1

    def regroup(self, generation: int, rank: int, size: int, port: int) -> None:
        """Leave the old membership and enter the new one. Rank 0 keeps the store that the others find it by.

        Raises `PeerLostError` when not everyone came; this replica then exchanges nothing until the next membership."""
        self._group = None
        self.rank, self.size = rank, size
        if size <= 1:
            return
        try:
            if self._store is None:
                self._store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=DEADLINE, wait_for_workers=False)
            store = PrefixStore(f"generation-{generation}", self._store)
            self._group = ProcessGroupGloo(store, rank, size, timeout=DEADLINE)
        except RuntimeError as error:
            raise PeerLostError(f"membership {generation} of {size} replicas did not come about: {error}") from error

    def add_up(self, tensors: list[torch.Tensor], denominator: float) -> tuple[float, float]:
        """Replace the tensors by their sums over all replicas; returns (summed denominator, seconds)."""
        began = time.monotonic()
        if self.size <= 1:
            return denominator, 0.0
        if self._group is None:
            raise PeerLostError(f"gradient exchange of {self.size} replicas failed: the membership did not come about")
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors] + [torch.tensor([denominator])])
        try:
            self._group.allreduce(flat).wait()
        except RuntimeError as error:
            raise PeerLostError(f"gradient exchange of {self.size} replicas failed: {error}") from error
        offset = 0
        for tensor in tensors:
            tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
            offset += tensor.numel()
        return float(flat[-1]), time.monotonic() - began

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors of every replica with those of rank 0."""
        if self._group is None:
            return
        for tensor in tensors:
            try:
                self._group.broadcast(tensor, 0).wait()
            except RuntimeError as error:
                raise PeerLostError(f"state broadcast to {self.size} replicas failed: {error}") from error
