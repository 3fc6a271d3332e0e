"""What an iteration takes on an engine whose iterations were measured to be affine, as a run measures its own.

Invariant: the simulator and the planner have one source of times, `cost.EngineCost`.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra.cost.device import EngineCost
from libra.sim.clock import ticks
from libra.sim.engine.iteration_cost import AffineCost, Chunk


class TurnCost:
    """`IterationCost` of an `EngineCost`. Every prefill chunk pays `per_turn`: an engine of this kind takes a prompt in
    one chunk."""

    __slots__ = ("_affine", "_per_turn")

    def __init__(self, cost: EngineCost) -> None:
        self._affine = AffineCost(
            step=max(1, ticks(cost.step)),
            per_sequence=ticks(cost.per_sequence),
            per_context_token=ticks(cost.per_context_token),
            per_new_token=ticks(cost.per_prefill_token),
        )
        self._per_turn = ticks(cost.per_turn)

    def line(self, decoding: int, context: int) -> tuple[int, int, int]:
        return self._affine.line(decoding, context)

    def mixed(self, decoding: int, context: int, chunks: Sequence[Chunk]) -> int:
        return self._affine.mixed(decoding, context, chunks) + self._per_turn * len(chunks)
