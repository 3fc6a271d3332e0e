"""Readers of parts that many families share: head sizes, windows, attention, MLPs and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from libra.config.yaml_file import shown
from libra.hardware.attention import Attention
from libra.hardware.context import ALL, Reach
from libra.hardware.families.fields import Fields
from libra.hardware.latent import LatentAttention
from libra.hardware.layers import LayerKind, Mixer
from libra.hardware.mlp import MLP, Experts

Norm = Literal["none", "head", "layer"]


def layer_count(fields: Fields) -> int:
    count = fields.count("num_hidden_layers")
    if count > 10_000:
        raise fields.error("num_hidden_layers", f"expected 10,000 or fewer (got {count})")
    return count


def head_dim(fields: Fields, heads: int, required: bool = False) -> int:
    """Width of a head: given, or the hidden width divided by the number of heads."""
    name = fields.first("head_dim", "attention_head_dim")
    if fields.given(name) or required:
        return fields.count(name)
    hidden = fields.count("hidden_size")
    if hidden % heads:
        raise fields.error(
            "head_dim", f"this field is required, since {heads} heads do not divide hidden_size {hidden}; add it"
        )
    return hidden // heads


def attention(
    fields: Fields,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: Norm = "none",
    own_head_dim: bool = False,
    gate: Literal["none", "head", "channel"] = "none",
    sinks: bool = False,
    reach: Reach = ALL,
) -> Attention:
    """Grouped-query attention from the usual fields. Without `num_key_value_heads` every head has its own keys."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", otherwise=heads)
    if not fields.given("num_key_value_heads"):
        fields.assume("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"kv_heads is {kv_heads}; it must divide the {heads} heads")
    return Attention(
        heads,
        kv_heads,
        head_dim(fields, heads, own_head_dim),
        reach=reach,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        gate=gate,
        sinks=sinks,
    )


def latent(fields: Fields, **options: Any) -> LatentAttention:
    """Latent attention from DeepSeek's fields."""
    fields.value("num_key_value_heads")  # of the attention before absorption, which is not needed
    return LatentAttention(
        heads=fields.count("num_attention_heads"),
        q_rank=fields.count("q_lora_rank", otherwise=0),
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim", otherwise=64),
        value_dim=fields.count("v_head_dim"),
        bias=fields.flag("attention_bias"),
        **options,
    )


_FULL = ("full_attention", "global", "full", "attention")
_WINDOW = ("sliding_attention", "sliding_window", "local", "sliding")


def reaches(fields: Fields, layers: int, every: int = 0, window: str = "sliding_window") -> list[Reach]:
    """The keys that each layer sees, from `layer_types`. Without this field, each `every`-th layer sees all keys, and
    the others have a window (0: all layers have a window). Without a width, all layers see all keys.
    """
    width = fields.count(window, minimum=0, otherwise=0)
    windowed = Reach(width) if width else ALL
    types = fields.pattern("layer_types", layers)
    if types is not None:
        return [_reach(fields, kind, windowed) for kind in types]
    return [ALL if every and (layer + 1) % every == 0 else windowed for layer in range(layers)]


def _reach(fields: Fields, kind: Any, windowed: Reach) -> Reach:
    if kind in _FULL:
        return ALL
    if kind in _WINDOW:
        if windowed == ALL:
            raise fields.error("sliding_window", "layer_types names windows; add their width")
        return windowed
    if kind == "chunked_attention":
        return Reach(fields.count("attention_chunk_size"), chunked=True)
    raise fields.error("layer_types", f"{shown(kind)} is not supported; known are full_attention and sliding_attention")


def switched_reaches(fields: Fields, layers: int) -> list[Reach]:
    """Windows from Qwen's fields: only with `use_sliding_window`, and only from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window"):
        types = fields.pattern("layer_types", layers) or []
        fields.count("sliding_window", minimum=0, otherwise=0)
        return [ALL] * layers if all(kind in _FULL for kind in types) else reaches(fields, layers)
    if fields.given("layer_types"):
        return reaches(fields, layers)
    first = fields.count("max_window_layers", minimum=0, otherwise=0)
    window = Reach(fields.count("sliding_window"))
    return [ALL if layer < first else window for layer in range(layers)]


def with_experts(
    fields: Fields, mixers: list[Mixer], sparse: Callable[[int], bool], experts: Experts | None, **layer: int
) -> list[LayerKind]:
    """Layers with experts if `sparse` accepts them, otherwise with an MLP of width `intermediate_size`."""
    found = []
    fields.value("intermediate_size")  # present even if every layer has experts
    for number, mixer in enumerate(mixers):
        if experts is not None and sparse(number):
            found.append(LayerKind(mixer, experts, **layer))
        else:
            found.append(LayerKind(mixer, MLP(fields.count("intermediate_size")), **layer))
    return found


def deepseek_experts(fields: Fields, **options: Any) -> Experts:
    """Experts from DeepSeek's fields, which many families have."""
    width = fields.count("moe_intermediate_size")
    shared = fields.count("n_shared_experts", minimum=0, otherwise=0)
    return Experts(
        count=fields.count("n_routed_experts"),
        active=fields.count("num_experts_per_tok"),
        intermediate=width,
        shared_intermediate=width * shared,
        groups=fields.count("n_group", otherwise=1),
        active_groups=fields.count("topk_group", otherwise=1),
        **options,
    )


def deepseek_sparse(fields: Fields) -> Callable[[int], bool]:
    """A test for layers with experts: all from `first_k_dense_replace` on, or those in `mlp_layer_types`."""
    layers = layer_count(fields)
    types = fields.pattern("mlp_layer_types", layers)
    if types is not None:
        return lambda layer: types[layer] == "sparse"
    listed = fields.value("moe_layer_freq")
    if isinstance(listed, list):
        marks = fields.pattern("moe_layer_freq", layers) or []
        return lambda layer: bool(marks[layer])
    if fields.count("moe_layer_freq", otherwise=1) != 1:
        raise fields.error("moe_layer_freq", "only 1 is known: every layer after first_k_dense_replace has experts")
    first = fields.count("first_k_dense_replace", minimum=0)
    if first > layers:
        raise fields.error(
            "first_k_dense_replace", f"is {first}, and the model has {layers} layers; give 0 to {layers}"
        )
    return lambda layer: layer >= first


def qwen_sparse(fields: Fields) -> Callable[[int], bool]:
    """A test for layers with experts: each `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    layers = layer_count(fields)
    step = fields.count("decoder_sparse_step", otherwise=1)
    dense = fields.value("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise fields.error("mlp_only_layers", f"expected a list of layers from 0 to {layers - 1} (got {shown(dense)})")
    return lambda layer: (layer + 1) % step == 0 and layer not in dense
