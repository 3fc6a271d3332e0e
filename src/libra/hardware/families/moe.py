"""Families with grouped-query attention and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from libra.config.yaml_file import shown
from libra.hardware.families.fields import Fields
from libra.hardware.families.parts import (
    Norm,
    attention,
    deepseek_experts,
    deepseek_sparse,
    layer_count,
    qwen_sparse,
    reaches,
    switched_reaches,
    with_experts,
)
from libra.hardware.families.stack import Stack
from libra.hardware.layers import LayerKind, Mixer
from libra.hardware.mlp import Experts


def qwen_moe(fields: Fields, *, qkv_bias: bool, qk_norm: Norm, own_head_dim: bool) -> Stack:
    """Qwen: experts in each `decoder_sparse_step`-th layer. Qwen 2 also has shared experts with a gate."""
    layers = layer_count(fields)
    bias = fields.flag("qkv_bias", otherwise=qkv_bias) or fields.flag("attention_bias")
    options: dict[str, Any] = {
        "qkv_bias": bias,
        "out_bias": fields.flag("attention_bias"),
        "qk_norm": qk_norm,
        "own_head_dim": own_head_dim,
    }
    mixers: list[Mixer] = [attention(fields, reach=it, **options) for it in switched_reaches(fields, layers)]
    sparse = qwen_sparse(fields)
    return Stack(
        with_experts(fields, mixers, sparse, qwen_experts(fields) if any(map(sparse, range(layers))) else None)
    )


def qwen_experts(fields: Fields) -> Experts:
    shared = fields.count("shared_expert_intermediate_size", minimum=0, otherwise=0)
    return Experts(
        count=fields.count("num_experts"),
        active=fields.count("num_experts_per_tok"),
        intermediate=fields.count("moe_intermediate_size"),
        shared_intermediate=shared,
        shared_gate=shared > 0,
    )


def mixtral(fields: Fields) -> Stack:
    """Mixtral and Granite: experts of width `intermediate_size` in every layer."""
    layers = layer_count(fields)
    shared = fields.count("shared_intermediate_size", minimum=0, otherwise=0)
    experts = Experts(
        count=fields.count(fields.first("num_local_experts", "num_experts")),
        active=fields.count("num_experts_per_tok"),
        intermediate=fields.count("intermediate_size"),
        shared_intermediate=shared,
    )
    bias = fields.flag("attention_bias")
    return Stack(
        [
            LayerKind(attention(fields, reach=it, qkv_bias=bias, out_bias=bias), experts)
            for it in reaches(fields, layers)
        ]
    )


def olmoe(fields: Fields) -> Stack:
    """OLMoE: norms over all queries and all keys of a token, and experts in every layer."""
    experts = Experts(
        fields.count("num_experts"), fields.count("num_experts_per_tok"), fields.count("intermediate_size")
    )
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qk_norm="layer", qkv_bias=bias, out_bias=bias)
    return Stack([LayerKind(mixer, experts)] * layer_count(fields))


def glm4_moe(fields: Fields) -> Stack:
    """GLM-4.5 to 4.7, dots and other families with DeepSeek's experts."""
    mixer = attention(
        fields,
        qkv_bias=fields.flag("attention_bias"),
        qk_norm="head" if fields.flag("use_qk_norm") else "none",
        own_head_dim=True,
    )
    return deepseek_layers(fields, [mixer] * layer_count(fields))


def dots(fields: Fields) -> Stack:
    bias = fields.flag("attention_bias")
    mixers: list[Mixer] = [
        attention(fields, qkv_bias=bias, out_bias=bias, qk_norm="head", reach=it)
        for it in reaches(fields, layer_count(fields))
    ]
    return deepseek_layers(fields, mixers)


def deepseek_layers(fields: Fields, mixers: list[Mixer], **options: Any) -> Stack:
    """Layers with DeepSeek's experts after the first dense layers."""
    sparse = deepseek_sparse(fields)
    some = any(map(sparse, range(len(mixers))))
    return Stack(with_experts(fields, mixers, sparse, deepseek_experts(fields, **options) if some else None))


@dataclass(frozen=True, slots=True)
class Sparse:
    """Options of a family with plain attention and the usual fields of experts. Calling the value reads the layers of a
    configuration.
    """

    qkv_bias: bool | str = False  # or the name of the field with the value
    out_bias: str | None = None
    qk_norm: Norm = "none"
    norm_field: str | None = None  # name of the field that tells whether queries and keys have norms
    gate: Literal["none", "head", "channel"] = "none"
    norms: int = 2
    every: int = 0  # without layer_types, each `every`-th layer sees all keys
    layer_norm: bool = False  # whether norms have a bias, too

    def __call__(self, fields: Fields) -> Stack:
        layers, hidden = layer_count(fields), fields.count("hidden_size")
        normed = self.norm_field is None or fields.flag(self.norm_field)
        bias = self.qkv_bias if isinstance(self.qkv_bias, bool) else fields.flag(self.qkv_bias)
        mixers: list[Mixer] = [
            attention(
                fields,
                qkv_bias=bias,
                out_bias=self.out_bias is not None and fields.flag(self.out_bias),
                qk_norm=self.qk_norm if normed else "none",
                gate=self.gate,
                reach=reach,
            )
            for reach in reaches(fields, layers, self.every)
        ]
        more = self.norms * hidden if self.layer_norm else 0
        made = with_experts(fields, mixers, usual_sparse(fields), usual_experts(fields), norms=self.norms, other=more)
        head = fields.count("vocab_size") if fields.flag("lm_head_bias") else 0
        return Stack(made, (hidden if self.layer_norm else 0) + head)


def usual_experts(fields: Fields) -> Experts:
    """Experts from the usual fields for their number and width."""
    width = fields.count(fields.first("moe_intermediate_size", "intermediate_size"))
    each = fields.count("moe_shared_expert_intermediate_size", otherwise=width)
    shared = each * fields.count(fields.first("num_shared_experts", "n_shared_experts"), minimum=0, otherwise=0)
    return Experts(
        fields.count(fields.first("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")),
        fields.count(fields.first("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")),
        width,
        fields.count("shared_expert_intermediate_size", minimum=0, otherwise=shared),
        fields.count("n_group", otherwise=1),
        fields.count("topk_group", otherwise=1),
    )


def usual_sparse(fields: Fields) -> Callable[[int], bool]:
    """A test for layers with experts: those in `mlp_layer_types`, or all after the first dense layers."""
    types = fields.pattern("mlp_layer_types", layer_count(fields))
    if types is not None:
        return lambda layer: types[layer] == "sparse"
    first = fields.count(fields.first("first_k_dense_replace", "num_dense_layers"), minimum=0, otherwise=0)
    return lambda layer: layer >= first


def ernie(fields: Fields) -> Stack:
    """ERNIE 4.5: experts from `moe_layer_start_index` on."""
    layers, bias = layer_count(fields), fields.flag("use_bias")
    width = fields.count("moe_intermediate_size")
    experts = Experts(
        fields.count("moe_num_experts"),
        fields.count("moe_k"),
        width,
        width * fields.count("moe_num_shared_experts", minimum=0, otherwise=0),
    )
    first = fields.count("moe_layer_start_index", minimum=0, otherwise=0)
    last = fields.count("moe_layer_end_index", minimum=-1, otherwise=-1)
    step = fields.count("moe_layer_interval", otherwise=1)
    end = layers - 1 if last < 0 else last
    mixer = attention(fields, qkv_bias=bias, out_bias=bias)
    return Stack(
        with_experts(fields, [mixer] * layers, lambda layer: first <= layer <= end and (layer + 1) % step == 0, experts)
    )


def hunyuan_moe(fields: Fields) -> Stack:
    """Hunyuan: experts of one width in all layers, and shared experts."""
    layers, bias = layer_count(fields), fields.flag("attention_bias")

    def same(field: str, otherwise: int | None = None) -> int:
        value = fields.value(field)
        if isinstance(value, list):
            if len({*map(repr, value)}) != 1 or type(value[0]) is not int or value[0] < 0:
                raise fields.error(field, f"layers with different numbers are not supported (got {shown(value)})")
            return int(value[0])
        return fields.count(field, minimum=0, otherwise=otherwise)

    shared = fields.count("intermediate_size")
    width = same("moe_intermediate_size", shared)
    experts = Experts(same("num_experts"), same("moe_topk", 1), width, shared * same("num_shared_expert", 1))
    norm: Norm = "head" if fields.flag("use_qk_norm", otherwise=True) else "none"
    mixer = attention(fields, qkv_bias=bias, out_bias=bias, qk_norm=norm)
    return Stack([LayerKind(mixer, experts)] * layers)
