"""The network that carries KV from prefill to decode engines."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

DEFAULT_LEASE = 30.0  # seconds, as vLLM's `kv_lease_duration`
RESERVED_DECODE_TOKENS = 512  # SGLang's `num_reserved_decode_tokens`, for pushed KV


@dataclass(frozen=True, slots=True)
class KVNetwork:
    """The network and the protocol that carry KV from prefill to decode."""

    bandwidth: float  # bytes/s of each device's network, in each direction
    latency: float = 0.0  # seconds from sending a byte to its arrival
    lease: float = DEFAULT_LEASE  # seconds for which a prefill engine keeps KV without a heartbeat; only for pulls
    local_below: int = 0  # decode engines compute prompts with fewer tokens themselves
    push: bool = False  # prefill engines send KV to blocks that are reserved before the prompt is computed

    def __post_init__(self) -> None:
        for name in ("bandwidth", "lease"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"kv_transfer.{name} is {value}; give a finite number above 0")
        if not (isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"kv_transfer.latency is {self.latency}; give seconds, 0 or more")
        if self.local_below < 0:
            raise ValueError(f"kv_transfer.local_below is {self.local_below}; give tokens, 0 or more")
