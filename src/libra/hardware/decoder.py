"""Models with the same attention in all layers, and gated MLPs or experts, as most models before 2025."""

from __future__ import annotations

from libra.hardware.attention import Attention
from libra.hardware.latent import LatentAttention
from libra.hardware.layers import LayerKind, Mixer
from libra.hardware.mlp import MLP, Experts
from libra.hardware.model import ModelSpec, arranged
from libra.hardware.stored_weights import WeightFormat


def decoder(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    tied: bool,
    max_context: int,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: Experts | None = None,
    sparse: int | None = None,
    latent: LatentAttention | None = None,
    stored: WeightFormat | None = None,
) -> ModelSpec:
    """A model of `layers` layers. The last `sparse` layers (by default all) have `experts`; the other layers have an
    MLP of width `intermediate`. `latent` replaces the attention with `heads` heads. Raises `ValueError` if the shape is
    impossible.
    """
    attention = Attention(heads, kv_heads, head_dim, qkv_bias=qkv_bias, qk_norm="head" if qk_norm else "none")
    mixer: Mixer = latent or attention
    last = (layers if sparse is None else sparse) if experts else 0
    if last > layers:
        raise ValueError(f"sparse is {last}, but there are {layers} layers; lower it")
    first = [LayerKind(mixer, MLP(intermediate)) for _ in range(layers - last)]
    kinds, order = arranged([*first, *[LayerKind(mixer, experts)] * last])
    return ModelSpec(name, hidden, vocab, tied, max_context, kinds, order, stored=stored)
