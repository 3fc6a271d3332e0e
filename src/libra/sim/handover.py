"""KV that follows a trajectory from one engine to another.

Invariant: KV moves only if the transfer is faster than recomputation on the request's engine. Only KV that the source
still has and the target lacks moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra.cost.transfer import Fabric, kv_move_seconds
from libra.sim.clock import ticks
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engine.request import Request
from libra.sim.workload.caller import Caller


@dataclass(frozen=True, slots=True)
class KVMoves:
    """Transfers over the links of a fabric. Contention is ignored: each transfer has its engines' share of the links to
    itself. `bytes_per_token` is for all layers and heads."""

    bytes_per_token: float
    fabric: Fabric

    def quicker(
        self,
        source: SimEngine,
        source_spec: EngineSpec,
        target: SimEngine,
        target_spec: EngineSpec,
        request: Request,
        now: int,
    ) -> tuple[int, int] | None:
        """(tokens from the context's beginning, ticks of their transfer) for a request on `target`; None if no KV is
        missing there, or recomputation is at least as fast."""
        there = source.cached_tokens(request, now)
        missing = there - target.cached_tokens(request, now)
        if missing <= 0:
            return None
        seconds = kv_move_seconds(
            missing,
            self.bytes_per_token,
            self.fabric,
            same_node=source_spec.node == target_spec.node,
            devices=min(source_spec.devices, target_spec.devices),
        )
        again = _prefill_ticks(target_spec, there - missing, there)
        needed = ticks(seconds)
        return (there, needed) if needed < again else None


@dataclass(frozen=True, slots=True)
class Handover:
    """KV in transfer to the engine on which its request continues."""

    request: Request
    engine: SimEngine
    tokens: int  # from the context's beginning
    end: int  # tick
    refreshes: int  # weight refreshes before the KV was sent


class Handovers:
    """The handovers of a cluster with these engines and specs."""

    __slots__ = ("_engines", "_moves", "_specs", "refreshes")

    def __init__(self, moves: KVMoves, engines: Sequence[SimEngine], specs: Sequence[EngineSpec]) -> None:
        self._moves, self._engines, self._specs = moves, engines, specs
        self.refreshes = 0  # weight refreshes so far; KV that was sent before the latest refresh is useless

    def begin(self, request: Request, engine: SimEngine, now: int) -> Handover | None:
        """Send the part of the context on the trajectory's last engine; None: no KV moves."""
        owner = request.owner
        if not isinstance(owner, Caller) or owner.engine is None or owner.engine == engine.index:
            return None
        source, specs = self._engines[owner.engine], self._specs
        if source.closing and not source.borrowed:
            return None
        moved = self._moves.quicker(source, specs[source.index], engine, specs[engine.index], request, now)
        if moved is None:
            return None
        tokens, needed = moved
        return Handover(request, engine, tokens, now + needed, self.refreshes)

    def complete(self, handover: Handover, now: int) -> int:
        """Let the engine adopt KV that has arrived. Returns the tokens that the engine lacked; 0 if the KV is of older
        weights."""
        if handover.refreshes != self.refreshes:
            return 0
        return handover.engine.adopt(handover.request, handover.tokens, now)


def _prefill_ticks(spec: EngineSpec, start: int, end: int) -> int:
    """Ticks to compute the tokens of a context from `start` to `end` on an otherwise idle engine."""
    most, total = spec.config.max_num_batched_tokens, 0
    while start < end:
        chunk = min(most, end - start)
        total += spec.cost.mixed(DecodeBatch(0), 0, [(chunk, start)])
        start += chunk
    return total
