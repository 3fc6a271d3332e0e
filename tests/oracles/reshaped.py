"""Copies of models with other sizes, for models whose layers all have the same mixer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from libra.hardware.attention import Attention
from libra.hardware.decoder import decoder
from libra.hardware.latent import LatentAttention
from libra.hardware.model import ModelSpec


def heads_of(model: ModelSpec) -> Attention:
    """The grouped-query attention of all layers."""
    mixer = model.kinds[0].mixer
    assert isinstance(mixer, Attention)
    return mixer


def reshaped(model: ModelSpec, **changes: Any) -> ModelSpec:
    """`model` with these arguments of `decoder` changed."""
    mixer = model.kinds[0].mixer
    shape: dict[str, Any] = {
        "name": model.name,
        "layers": model.layers,
        "hidden": model.hidden,
        "intermediate": model.intermediate,
        "vocab": model.vocab,
        "tied": model.tied,
        "max_context": model.max_context,
        "experts": model.experts,
        "sparse": model.sparse_layers if model.experts and model.dense_layers else None,
        "stored": model.stored,
    }
    if isinstance(mixer, LatentAttention):
        shape |= {"heads": mixer.heads, "kv_heads": mixer.heads, "head_dim": 1}
        shape["latent"] = replace(mixer, heads=changes.get("heads", mixer.heads))
    else:
        assert isinstance(mixer, Attention)
        shape |= {"heads": mixer.heads, "kv_heads": mixer.kv_heads, "head_dim": mixer.head_dim}
        shape |= {"qkv_bias": mixer.qkv_bias, "qk_norm": mixer.qk_norm == "head"}
    return decoder(**(shape | changes))
