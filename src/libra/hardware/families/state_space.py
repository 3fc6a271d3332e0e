"""Families with Mamba: Granite 4, Bamba, Falcon-H1 and Jamba."""

from __future__ import annotations

from collections.abc import Callable

from libra.config.yaml_file import shown
from libra.hardware.families.fields import Fields
from libra.hardware.families.hybrid import state_bytes
from libra.hardware.families.parts import attention, layer_count
from libra.hardware.families.stack import Stack
from libra.hardware.layers import LayerKind
from libra.hardware.mlp import MLP, Experts
from libra.hardware.state_space import Mamba, Mamba2


def granite_hybrid(fields: Fields) -> Stack:
    """Granite 4: Mamba-2 and attention (`layer_types`), with experts in addition to an MLP that all tokens pass."""
    layers, bias = layer_count(fields), fields.flag("attention_bias")
    types = fields.pattern(fields.first("layer_types", "layers_block_type"), layers)
    if types is None or not all(kind in ("mamba", "linear_attention", "attention", "full_attention") for kind in types):
        raise fields.error("layer_types", f"expected mamba or attention for each of {layers} layers; add them")
    full, state = attention(fields, qkv_bias=bias, out_bias=bias), mamba2(fields)
    shared = fields.count("shared_intermediate_size")
    mlp: MLP | Experts = MLP(shared)
    if fields.count("num_local_experts", minimum=0, otherwise=0):
        mlp = Experts(
            fields.count("num_local_experts"),
            fields.count("num_experts_per_tok"),
            fields.count("intermediate_size"),
            shared,
        )
    return Stack([LayerKind(full if kind in ("attention", "full_attention") else state, mlp) for kind in types])


def falcon_h1(fields: Fields) -> Stack:
    """Falcon-H1: attention and Mamba-2 in parallel, represented as two layers of which the second has the MLP."""
    bias = fields.flag("attention_bias")
    full = LayerKind(attention(fields, qkv_bias=bias, out_bias=bias), None, norms=0)
    mlp = MLP(fields.count("intermediate_size"), bias=fields.flag("mlp_bias"))
    state = LayerKind(mamba2(fields, normed=fields.flag("mamba_rms_norm")), mlp)
    return Stack([full, state] * layer_count(fields))


def mamba2(fields: Fields, normed: bool = True) -> Mamba2:
    """Mamba-2 from Bamba's fields."""
    heads = fields.count("mamba_n_heads")
    inner = fields.count(
        "mamba_d_ssm", otherwise=fields.count("mamba_expand", otherwise=2) * fields.count("hidden_size")
    )
    if inner % heads:
        raise fields.error("mamba_n_heads", f"{heads} heads do not divide the width {inner}")
    fields.value("mamba_d_head")
    fields.value("mamba_chunk_size")
    return Mamba2(
        heads,
        inner // heads,
        fields.count("mamba_d_state"),
        fields.count("mamba_n_groups", otherwise=1),
        fields.count("mamba_d_conv", otherwise=4),
        state_bytes(fields, 2, "mamba_ssm_cache_dtype"),
        conv_bias=fields.flag("mamba_conv_bias", otherwise=True),
        bias=fields.flag("mamba_proj_bias"),
        normed=normed,
        prefix="mamba",
    )


def bamba(fields: Fields) -> Stack:
    """Bamba: Mamba-2, and attention in the layers of `attn_layer_indices`."""
    bias = fields.flag("attention_bias")
    full, state = attention(fields, qkv_bias=bias, out_bias=bias), mamba2(fields)
    mlp = MLP(fields.count("intermediate_size"), bias=fields.flag("mlp_bias"))
    listed = fields.numbers("attn_layer_indices") or []
    return Stack([LayerKind(full if it in listed else state, mlp) for it in range(layer_count(fields))])


def jamba(fields: Fields) -> Stack:
    """Jamba: Mamba, attention in each `attn_layer_period`-th layer, and experts in each `expert_layer_period`-th
    layer."""
    hidden = fields.count("hidden_size")
    rank = fields.value("mamba_dt_rank")
    if rank in (None, "auto"):
        rank = -(-hidden // 16)
    elif type(rank) is not int or rank < 1:
        raise fields.error("mamba_dt_rank", f"expected a whole number of 1 or more, or auto (got {shown(rank)})")
    state = Mamba(
        fields.count("mamba_expand", otherwise=2) * hidden,
        fields.count("mamba_d_state", otherwise=16),
        rank,
        fields.count("mamba_d_conv", otherwise=4),
        state_bytes(fields, 2, "mamba_ssm_cache_dtype"),
        conv_bias=fields.flag("mamba_conv_bias", otherwise=True),
        bias=fields.flag("mamba_proj_bias"),
    )
    full, width = attention(fields), fields.count("intermediate_size")
    experts = None
    if fields.count("num_experts", otherwise=16) > 1:
        experts = Experts(
            fields.count("num_experts", otherwise=16), fields.count("num_experts_per_tok", otherwise=2), width
        )
    attending = _every(fields, "attn_layer", 8, 4)
    sparse = _every(fields, "expert_layer", 2, 1)
    return Stack(
        [
            LayerKind(full if attending(layer) else state, experts if experts and sparse(layer) else MLP(width))
            for layer in range(layer_count(fields))
        ]
    )


def _every(fields: Fields, name: str, period: int, offset: int) -> Callable[[int], bool]:
    step = fields.count(f"{name}_period", otherwise=period)
    first = fields.count(f"{name}_offset", minimum=0, otherwise=offset)
    return lambda layer: layer % step == first % step
