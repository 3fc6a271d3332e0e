"""KV tiers in files that describe an engine, or the engines on a menu.

Invariant: an impossible tier is refused in a line that begins with the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libra.sim.engine.chunk_cache import CachePolicy
from libra.sim.engine.kv_tier import KVTier

_SLOWEST = 3600  # most seconds that a transfer of the longest request may take


@dataclass(frozen=True, slots=True)
class DescribedTier:
    """A KV tier as a file describes it. Its number of blocks is not known yet, since that depends on the bytes of a
    token's KV."""

    name: str
    gib: float
    bandwidth: float  # bytes/s each way, of each GPU; of the node's link where it is shared
    latency: float = 0.0  # seconds
    policy: CachePolicy = "lru"
    blocks_per_chunk: int = 1
    offload_prompt_only: bool = True
    shared: bool = False

    def __str__(self) -> str:
        usual = DescribedTier(self.name, self.gib, self.bandwidth)
        words = [f"{self.gib:g} GiB {self.name} at {self.bandwidth / 1e9:g} GB/s"]
        for key in ("latency", "policy", "blocks_per_chunk", "offload_prompt_only", "shared"):
            value = getattr(self, key)
            if value != getattr(usual, key):
                words.append(f"{key} {value}")
        return " ".join(words)


def tiers_of(
    given: Sequence[DescribedTier], key: str, longest: str, tokens: int, block_size: int, kv_bytes: float, gpus: int
) -> tuple[KVTier, ...]:
    """The tiers of an engine. `kv_bytes` are a token's KV bytes on all `gpus` GPUs together. Each tier must have room
    for `tokens` tokens, which errors call `longest`. Raises ValueError that begins with the key."""
    tiers: list[KVTier] = []
    block_bytes = block_size * kv_bytes
    for place, it in enumerate(given):
        chunks = int(it.gib * 2**30 // (block_bytes * it.blocks_per_chunk))
        held = chunks * it.blocks_per_chunk * block_size
        if held < tokens:
            raise ValueError(
                f"{key}.{place}.gib is {it.gib:g}: {it.name} has room for {held:,} tokens, less than {longest}"
                f" {tokens:,}: raise gib, or shorten the request"
            )
        if any(it.name == other.name for other in given[:place]):
            raise ValueError(f"{key}.{place}.name is {it.name}, the name of another tier: give each tier its own name")
        if it.blocks_per_chunk != given[0].blocks_per_chunk:
            raise ValueError(
                f"{key}.{place}.blocks_per_chunk is {it.blocks_per_chunk}, but that of {given[0].name} is"
                f" {given[0].blocks_per_chunk}: chunks move between tiers, so make them equal"
            )
        bandwidth = it.bandwidth * (1 if it.shared else gpus)
        if tokens * kv_bytes > _SLOWEST * bandwidth:
            raise ValueError(
                f"{key}.{place}.bandwidth is {it.bandwidth:g} bytes/s: a transfer of {longest} {tokens:,} to {it.name}"
                f" would take more than {_SLOWEST / 60:.0f} minutes: raise bandwidth"
            )
        tiers.append(
            KVTier(
                it.name,
                chunks,
                block_bytes,
                bandwidth,
                bandwidth,
                it.latency,
                it.blocks_per_chunk,
                it.policy,
                it.offload_prompt_only,
                it.shared,
            )
        )
    return tuple(tiers)
