"""Host overhead: CPU time that an engine's iterations take in addition to the kernels of tables and rooflines.

Invariant: a host belongs to a machine and a version of the engine, not to a GPU; its source names both. A part that is
0 leaves every price exactly unchanged.

An iteration takes the host's work before and after it, plus the longer of the kernels and their launches. CUDA graphs
make launches shorter. A batch that only decodes is one graph. A batch with prefill is one graph between every two
attentions ("piecewise"), up to the largest captured size; above this size, every kernel is launched separately
("eager"). A batch is padded to the size of its graph. These are vLLM's rules for `cudagraph_mode` FULL_AND_PIECEWISE,
its default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from libra.cost.graphs import GraphKind

# A host that serves takes longer than a host that repeats one batch in a measurement: requests change, and the garbage
# collector has more to do. From four workloads of Qwen3-8B on an H100 (docs/fidelity.md).
SERVING = 1.15


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds of the host's parts in an iteration."""

    iteration: float = 0.0  # scheduling, preparing inputs, handling outputs
    request: float = 0.0  # for each request in the iteration
    overlapped: bool = False  # with the GPU (asynchronous scheduling): only the longer of the two counts
    admission: float = 0.0  # for each request admitted in the iteration
    context_token: float = 0.0  # for each token of the admitted contexts: receive and hash it
    cached_token: float = 0.0  # for each cached token of these: find and hold its block, write block tables
    piecewise: float = 0.0  # least device time of an iteration with prefill, up to the largest graph
    eager: float = 0.0  # least device time of an iteration beyond the largest graph
    source: str = "not priced"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"host.{field.name} is {value}; give seconds, finite and 0 or more")

    @property
    def priced(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self) if field.name not in ("source", "overlapped"))

    @property
    def admits(self) -> bool:
        """Whether admissions cost time."""
        return bool(self.admission or self.context_token or self.cached_token)

    def slowed(self, factor: float) -> HostCost:
        """The host with all times multiplied by `factor`."""
        seconds = {field.name: factor * getattr(self, field.name) for field in fields(self) if field.type == "float"}
        return replace(self, **seconds)

    def seconds(self, requests: float) -> float:
        """CPU seconds of an iteration with `requests` requests, without admissions."""
        return self.iteration + self.request * requests

    def admitting(self, requests: int, tokens: int, cached: int) -> float:
        """Additional CPU seconds to admit `requests` requests with `tokens` tokens of context, of which `cached` are
        cached.
        """
        return self.admission * requests + self.context_token * tokens + self.cached_token * cached

    def beside(self, device: float, cpu: float) -> float:
        """Seconds of an iteration with `device` seconds on the GPU and `cpu` seconds on the host."""
        return max(device, cpu) if self.overlapped else device + cpu

    def launching(self, kind: GraphKind) -> float:
        """Minimum device seconds of an iteration, by the kind of its graph."""
        return {"FULL": 0.0, "PIECEWISE": self.piecewise, "NONE": self.eager}[kind]


NO_HOST = HostCost()

# Seconds of a named host relative to those of the measured machine, since hosts differ. `fast` is fitted to two public
# runs: Llama-3.1-8B without graphs on A100-40GB (25.6 ms a token) and Qwen3-8B on H100 (7.38 ms).
NAMED_HOSTS: Mapping[str, float] = {"default": 1.0, "fast": 0.8}

_PIECEWISE_LAYER, _EAGER_LAYER = 0.27e-3, 0.91e-3  # seconds per layer, measured with 36 layers
# Operations that vLLM's `Qwen3DecoderLayer` and `LlamaDecoderLayer` launch: two norms, four products, the activation,
# the rotation, the cache's update and attention. Qwen3 also has norms of queries and keys.
_NORMED, _PLAIN = 12, 10


def named_host(name: str, layers: int, plain: int = 0) -> HostCost:
    """The host of this name for a model of `layers` layers; see `default_host`."""
    if name == "default":
        return default_host(layers, plain)
    factor = NAMED_HOSTS[name]
    host = default_host(layers, plain).slowed(factor)
    return replace(host, source=f"{name}: {factor:g} of the default host's seconds")


def default_host(layers: int, plain: int = 0) -> HostCost:
    """The host of a model of `layers` layers that has no measured host. Its times are those of vLLM 0.26 on a machine
    with an H100, with synchronous scheduling, from the grid of Qwen3-8B. Launch times are proportional to the layers,
    and without graphs also to the operations per layer; `plain` layers have no norms of queries and keys.
    """
    return HostCost(
        iteration=SERVING * 2.0e-3,
        request=20e-6,
        admission=0.25e-3,
        context_token=0.28e-6,
        cached_token=0.20e-6,
        piecewise=SERVING * _PIECEWISE_LAYER * layers,
        eager=SERVING * _EAGER_LAYER * (layers - plain * (1 - _PLAIN / _NORMED)),
        source="default: vLLM 0.26 on a host with an H100, by layers",
    )
