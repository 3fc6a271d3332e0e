"""Gemma 4: windows, wider heads in layers with full attention, experts in addition to an MLP, and per-layer inputs."""

from __future__ import annotations

from libra.hardware.attention import Attention
from libra.hardware.context import ALL
from libra.hardware.families.fields import Fields
from libra.hardware.families.parts import layer_count, reaches
from libra.hardware.families.stack import Stack
from libra.hardware.layers import LayerKind
from libra.hardware.mlp import MLP, Experts


def gemma4(fields: Fields) -> Stack:
    layers, hidden, heads = layer_count(fields), fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads, dim = fields.count("num_key_value_heads", otherwise=heads), fields.count("head_dim")
    wide = fields.count("global_head_dim", otherwise=512)
    few = fields.count("num_global_key_value_heads", otherwise=kv_heads)
    same, bias = fields.flag("attention_k_eq_v"), fields.flag("attention_bias")
    reusing = layers - fields.count("num_kv_shared_layers", minimum=0, otherwise=0)
    doubled = fields.flag("use_double_wide_mlp")
    inputs = fields.count("hidden_size_per_layer_input", minimum=0, otherwise=0)
    experts = _experts(fields) if fields.flag("enable_moe_block") else None
    made = []
    for number, reach in enumerate(reaches(fields, layers, 6)):
        full = reach == ALL
        mixer = Attention(
            heads,
            few if full and same else kv_heads,
            wide if full else dim,
            reach=reach,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            keys_are_values=full and same,
            shared=number >= reusing,
        )
        width = fields.count("intermediate_size") * (2 if doubled and number >= reusing else 1)
        norms = (7 if experts else 4) + (1 if inputs else 0)
        made.append(LayerKind(mixer, experts or MLP(width), norms=norms, other=2 * hidden * inputs))
    table = fields.count("vocab_size_per_layer_input", otherwise=fields.count("vocab_size"))
    return Stack(made, (table + hidden) * layers * inputs + inputs)


def _experts(fields: Fields) -> Experts:
    """Routed experts in addition to the MLP, which all tokens pass. The router has a scale for each input and
    output."""
    count = fields.count("num_experts")
    return Experts(
        count,
        fields.count("top_k_experts"),
        fields.count(fields.first("moe_intermediate_size", "expert_intermediate_size")),
        fields.count("intermediate_size"),
        beside=True,
        other=fields.count("hidden_size") + count,
    )
