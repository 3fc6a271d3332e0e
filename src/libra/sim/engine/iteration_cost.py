"""Duration of one iteration of an engine.

Invariant: ticks are whole numbers. The time of decoding alone is exactly linear in the context between two knots, so
the sum over many iterations is known without visiting each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from libra.cost.device import EngineCost
from libra.sim.clock import ticks
from libra.sim.engine.value import Value

Chunk = tuple[int, int]  # prefill of one request: (new tokens, tokens of its context before them)

UNLIMITED = 1 << 62


class DecodeBatch(NamedTuple):
    """The decoding requests of an iteration. Each request has `tokens_each` tokens: one, and the drafts verified with
    it. `spread` and `shared` are set only for costs that need them (`IterationCost.uneven`)."""

    requests: int
    tokens_each: int = 1
    spread: int = 0  # requests x standard deviation of their contexts, in tokens
    shared: int = 0  # tokens of contexts in blocks that another request of the batch has, too


class Admitted(NamedTuple):
    """The requests that are admitted with an iteration."""

    requests: int = 0
    tokens: int = 0  # tokens of their contexts
    cached: int = 0  # tokens of their contexts found in the prefix cache


NONE_ADMITTED = Admitted()


class IterationCost(Protocol):
    """Ticks of iterations. `context` is the sum of the tokens that the requests of the batch attend to, new ones
    included."""

    @property
    def uneven(self) -> bool:
        """Whether times depend on the spread of contexts, on blocks that contexts share, or on admissions. Then batches
        have `spread` and `shared`, and `mixed` gets `admitted`."""
        ...

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        """(base, slope, limit): an iteration that only decodes takes `base + slope * context` ticks, > 0, from the
        given context up to `limit` (exclusive). The batch has 1 request or more."""
        ...

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        """Ticks > 0 of an iteration with one prefill chunk or more. The batch may be empty."""
        ...


@dataclass(frozen=True, slots=True)
class AffineCost(Value):
    """Ticks of an iteration that are affine in all its counts: for tests, and for engines measured to be affine. A
    draft costs as much as a prompt token."""

    step: int
    per_sequence: int = 0  # per decoding request
    per_context_token: int = 0
    per_new_token: int = 0  # per token of prefill, and per draft
    per_pair: int = 0  # per pair of a token of prefill and a token that it attends to, itself included
    per_chunk: int = 0  # per chunk of prefill

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"AffineCost.step is {self.step} ticks; set it to 1 or more")

    @property
    def uneven(self) -> bool:
        return False

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        requests, tokens_each = batch.requests, batch.tokens_each
        base = self.step + (self.per_sequence + self.per_new_token * (tokens_each - 1)) * requests
        return base, self.per_context_token, UNLIMITED

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        base, slope, _ = self.line(batch, context)
        ticks = base + slope * context + self.per_chunk * len(chunks)
        for new, before in chunks:
            ticks += self.per_new_token * new + self.per_pair * (new * before + new * (new + 1) // 2)
        return ticks


def measured_cost(cost: EngineCost) -> AffineCost:
    """Cost of an engine whose times a run measured. Every prefill chunk costs `per_turn`, because such an engine
    computes a prompt in one chunk."""
    return AffineCost(
        step=max(1, ticks(cost.step)),
        per_sequence=ticks(cost.per_sequence),
        per_context_token=ticks(cost.per_context_token),
        per_new_token=ticks(cost.per_prefill_token),
        per_chunk=ticks(cost.per_turn),
    )
