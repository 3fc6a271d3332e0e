"""Memory to which KV is offloaded from the GPU: host, disk, or a store shared by engines."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from libra.sim.clock import ticks
from libra.sim.engine.chunk_cache import CachePolicy
from libra.sim.engine.value import Value


@dataclass(frozen=True, slots=True)
class KVTier(Value):
    """One tier of an engine. A `shared` tier belongs to all engines that use its name, and engines on one node share
    its link. An engine reads and writes only its first tier; chunks stored there are copied to the other tiers."""

    name: str
    chunks: int  # capacity
    block_bytes: float  # bytes of a KV block, on all of the engine's devices together
    store_bandwidth: float  # bytes/s into the tier, one transfer after another
    load_bandwidth: float  # bytes/s out of the tier, one transfer after another
    latency: float = 0.0  # additional seconds of each transfer, during which other transfers may run
    blocks_per_chunk: int = 1
    policy: CachePolicy = "lru"
    offload_prompt_only: bool = True  # generated tokens are kept only once they are part of a prompt
    shared: bool = False

    def __post_init__(self) -> None:
        for name in ("chunks", "blocks_per_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"kv_tiers: {name} of {self.name} is {getattr(self, name)}; give 1 or more")
        for name in ("block_bytes", "store_bandwidth", "load_bandwidth"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"kv_tiers: {name} of {self.name} is {value}; give a finite number above 0")
        if not (isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"kv_tiers: latency of {self.name} is {self.latency}; give seconds, 0 or more")
        if self.policy not in ("lru", "arc"):
            raise ValueError(f"kv_tiers: policy of {self.name} is {self.policy!r}; set it to lru or arc")


class Channel:
    """One direction of a tier's link: transfers run one after another, as in vLLM's worker."""

    __slots__ = ("_bandwidth", "_free", "_latency")

    def __init__(self, bandwidth: float, latency: float) -> None:
        self._bandwidth, self._latency = bandwidth, ticks(latency)
        self._free = 0  # tick at which the link is free

    def send(self, size: float, now: int) -> int:
        """Send `size` bytes now, or once the link is free. Returns the tick of their arrival."""
        self._free = max(self._free, now) + max(1, ticks(size / self._bandwidth))
        return self._free + self._latency
