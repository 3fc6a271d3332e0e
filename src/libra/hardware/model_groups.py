"""Caches of a model's layers, which `kv_layers` groups."""

from __future__ import annotations

from libra.hardware.attention import Attention
from libra.hardware.context import Retained
from libra.hardware.kv_layers import KVLayer
from libra.hardware.latent import LatentAttention
from libra.hardware.layers import LayerKind
from libra.hardware.model import ModelSpec


def kv_layers(model: ModelSpec, number: float, tp: int = 1) -> list[KVLayer]:
    """Caches of all layers on one of `tp` devices, in order. One number of KV takes `number` bytes. A layer with an
    indexer has two caches, as in vLLM.
    """
    kinds = [tuple(_cache(kind, part, number, tp) for part in kind.kept(tp)) for kind in model.kinds]
    return [cache for index in model.order for cache in kinds[index]]


def whole_layers(layers: list[KVLayer]) -> list[KVLayer]:
    """The same layers, each with a cache for the whole context, as with vLLM's `disable_hybrid_kv_cache_manager`.
    Raises `ValueError` for layers with states, which have no such cache.
    """
    if any(it.kind == "state" for it in layers):
        raise ValueError("disable_hybrid_kv_cache_manager is true, but layers have states: set it to false")
    return [KVLayer("full", it.token_bytes, heads=it.heads, latent=it.latent) for it in layers]


def _cache(kind: LayerKind, part: Retained, number: float, tp: int) -> KVLayer:
    if part.state:
        return KVLayer("state", state_bytes=round(part.state))
    mixer, reach = kind.mixer, part.reach
    return KVLayer(
        "full" if not reach.tokens else "chunk" if reach.chunked else "window",
        round(part.token_bytes(number)),
        tokens=reach.tokens,
        heads=round(mixer.held_heads(tp)) if isinstance(mixer, Attention) else 1,
        latent=isinstance(mixer, LatentAttention),
    )
