"""KV that follows a trajectory from one engine to another.

Invariant: KV moves only where that ends sooner than computing it again on the engine where the request waits for it,
and only what is still there and would be missing moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.cost.collectives import Fabric
from libra.cost.transfer import kv_move_seconds
from libra.sim.clock import ticks
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import Engine
from libra.sim.engine.iteration_cost import Batch
from libra.sim.engine.request import Request


@dataclass(frozen=True, slots=True)
class Moved:
    tokens: int  # from the context's beginning
    ticks: int


@dataclass(frozen=True, slots=True)
class KVMoves:
    """Transfers over the links of a fabric, each with its engines' share of them to itself: no two are taken to meet.

    `bytes_per_token` is of all layers and heads.
    """

    bytes_per_token: float
    fabric: Fabric

    def quicker(
        self,
        source: Engine,
        source_spec: EngineSpec,
        target: Engine,
        target_spec: EngineSpec,
        request: Request,
        now: int,
    ) -> Moved | None:
        """What to move for a request that goes to `target`; None where it is quicker to compute it again."""
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
        return Moved(there, needed) if needed < again else None


def _prefill_ticks(spec: EngineSpec, start: int, end: int) -> int:
    """To compute the tokens of a context from one position to another with the engine to itself."""
    most, total = spec.config.max_num_batched_tokens, 0
    while start < end:
        chunk = min(most, end - start)
        total += spec.cost.mixed(Batch(0), 0, [(chunk, start)])
        start += chunk
    return total
