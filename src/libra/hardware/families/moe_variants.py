"""Families whose layers with experts differ from others: gpt-oss, Llama 4, MiniMax, MiMo and Step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libra.hardware.attention import Attention, Indexer
from libra.hardware.context import ALL, Reach
from libra.hardware.families.fields import Fields
from libra.hardware.families.moe import deepseek_layers
from libra.hardware.families.parts import Norm, attention, deepseek_sparse, layer_count, reaches, with_experts
from libra.hardware.families.stack import Stack
from libra.hardware.layers import LayerKind, Mixer
from libra.hardware.mlp import MLP, Experts


def gpt_oss(fields: Fields) -> Stack:
    """gpt-oss: windows in every other layer, sinks, and biases of all projections, experts and routers."""
    layers, bias = layer_count(fields), fields.flag("attention_bias", otherwise=True)
    if fields.given("layer_types"):
        found = reaches(fields, layers)
    else:
        window = Reach(fields.count("sliding_window"))
        found = [ALL if layer % 2 else window for layer in range(layers)]
    experts = Experts(
        fields.count(fields.first("num_local_experts", "num_experts")),
        fields.count(fields.first("num_experts_per_tok", "experts_per_token")),
        fields.count("intermediate_size"),
        bias=True,
        router_bias=True,
    )
    fields.value("experts_per_token")
    options: dict[str, Any] = {"qkv_bias": bias, "out_bias": bias, "sinks": True}
    return Stack([LayerKind(attention(fields, reach=it, **options), experts) for it in found])


def llama4(fields: Fields) -> Stack:
    """Llama 4: chunks except in every fourth layer, and experts in each `interleave_moe_layer_step`-th layer."""
    layers, bias = layer_count(fields), fields.flag("attention_bias")
    fields.flag("use_qk_norm")  # these norms have no weights
    experts = Experts(
        fields.count("num_local_experts"),
        fields.count("num_experts_per_tok"),
        fields.count("intermediate_size"),
        fields.count("intermediate_size"),
    )
    sparse = _llama4_sparse(fields, layers)
    dense = MLP(fields.count("intermediate_size_mlp"))
    chunk = Reach(fields.count("attention_chunk_size", otherwise=8192), chunked=True)
    if fields.given("layer_types"):
        found = reaches(fields, layers)
    elif fields.value("no_rope_layers"):
        found = [chunk if rope else ALL for rope in fields.pattern("no_rope_layers", layers) or []]
    else:
        every = fields.count("no_rope_layer_interval", otherwise=4)
        found = [ALL if (layer + 1) % every == 0 else chunk for layer in range(layers)]
    return Stack(
        [
            LayerKind(attention(fields, reach=it, qkv_bias=bias, out_bias=bias), experts if sparse(layer) else dense)
            for layer, it in enumerate(found)
        ]
    )


def _llama4_sparse(fields: Fields, layers: int) -> Callable[[int], bool]:
    listed = fields.numbers("moe_layers")
    if listed is not None:
        return lambda layer: layer in listed
    step = fields.count("interleave_moe_layer_step", otherwise=1)
    return lambda layer: (layer + 1) % step == 0


def minimax_m2(fields: Fields) -> Stack:
    """MiniMax-M2: norms over all queries and all keys of a token, and experts in every layer."""
    layers = layer_count(fields)
    types = fields.pattern("attn_type_list", layers)
    if types is not None and set(types) != {1}:
        raise fields.error(
            "attn_type_list", "lightning attention is not supported; only layers of type 1 are supported"
        )
    norm: Norm = "none"
    if fields.flag("use_qk_norm", otherwise=True):
        norm = "layer" if fields.word("qk_norm_type", ("per_layer", "per_head"), "per_layer") == "per_layer" else "head"
    experts = Experts(
        fields.count("num_local_experts"),
        fields.count("num_experts_per_tok"),
        fields.count("intermediate_size"),
        fields.count("shared_intermediate_size", minimum=0, otherwise=0),
    )
    return Stack([LayerKind(attention(fields, qk_norm=norm, own_head_dim=True), experts)] * layers)


def minimax_m3(fields: Fields) -> Stack:
    """MiniMax-M3: attention to blocks of keys that an indexer chooses, after the first dense layers."""
    layers = layer_count(fields)
    fields.refuse("attention_output_gate", "only attention without a gate is supported")
    indexer, marks = _m3_indexer(fields, layers)
    norm: Norm = "none"
    if fields.flag("use_qk_norm", otherwise=True):
        norm = "layer" if fields.word("qk_norm_type", ("per_layer", "per_head"), "per_head") == "per_layer" else "head"
    plain = attention(fields, qk_norm=norm, own_head_dim=True)
    chosen = Attention(plain.heads, plain.kv_heads, plain.head_dim, qk_norm=norm, indexer=indexer)
    fields.count("n_shared_experts", minimum=0, otherwise=1)
    for field in ("moe_intermediate_size", "dense_intermediate_size"):
        fields.value(field)
    experts = Experts(
        fields.count("num_local_experts"),
        fields.count("num_experts_per_tok"),
        fields.count("intermediate_size"),
        fields.count("shared_intermediate_size", minimum=0, otherwise=0),
    )
    sparse = deepseek_sparse(fields)
    made = []
    for layer in range(layers):
        mlp = experts if sparse(layer) else MLP(fields.count("dense_intermediate_size"))
        made.append(LayerKind(chosen if marks[layer] and indexer else plain, mlp))
    return Stack(made)


def _m3_indexer(fields: Fields, layers: int) -> tuple[Indexer | None, list[Any]]:
    """The indexer, and whether each layer has one. Reads the published form and Transformers' form."""
    part = fields.part("sparse_attention_config")
    if part is None:
        types = fields.pattern("layer_types", layers) or ["full_attention"] * layers
        for field in ("index_local_blocks", "index_n_heads"):
            fields.value(field)
        marks = [kind != "full_attention" for kind in types]
        if not any(marks):
            return None, marks
        chosen = fields.count("index_topk_blocks") * fields.count("index_block_size")
        return Indexer(fields.count("index_n_heads"), fields.count("index_head_dim"), chosen, weighted=False), marks
    if not part.flag("use_sparse_attention", otherwise=True):
        return None, [0] * layers
    chosen = part.count("sparse_topk_blocks") * part.count("sparse_block_size")
    for field in ("sparse_init_block", "sparse_local_block"):
        part.count(field, minimum=0, otherwise=0)
    indexer = Indexer(part.count("sparse_num_index_heads"), part.count("sparse_index_dim"), chosen, weighted=False)
    return indexer, part.pattern("sparse_attention_freq", layers) or [1] * layers


def mimo_v2(fields: Fields) -> Stack:
    """MiMo-V2: windows with other heads and with sinks (`hybrid_layer_pattern`), and experts after the first layer."""
    layers = layer_count(fields)
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    dim, value = fields.count("head_dim"), fields.count("v_head_dim")
    bias = fields.flag("attention_bias")
    full = Attention(heads, kv_heads, dim, value, qkv_bias=bias, sinks=fields.flag("add_full_attention_sink_bias"))
    window = Attention(
        fields.count("swa_num_attention_heads", otherwise=heads),
        fields.count("swa_num_key_value_heads", otherwise=2 * kv_heads),
        fields.count("swa_head_dim", otherwise=dim),
        fields.count("swa_v_head_dim", otherwise=value),
        Reach(fields.count(fields.first("sliding_window", "sliding_window_size"))),
        qkv_bias=bias,
        sinks=fields.flag("add_swa_attention_sink_bias", otherwise=True),
    )
    fields.value("sliding_window_size")
    fields.value("attention_chunk_size")  # not needed: vLLM and Transformers read the window's width elsewhere
    marks = fields.pattern("hybrid_layer_pattern", layers)
    if marks is None and fields.given("layer_types"):
        marks = [kind != "full_attention" for kind in fields.pattern("layer_types", layers) or []]
    if marks is None:
        raise fields.error("hybrid_layer_pattern", "this field is required; add it")
    return deepseek_layers(fields, [window if mark else full for mark in marks])


def step(fields: Fields) -> Stack:
    """Step-3.5 and 3.7: windows with other numbers of heads, a gate for each head, and shared experts."""
    layers, bias = layer_count(fields), fields.flag("attention_bias")
    other = fields.part("attention_other_setting")
    usual = fields.count("num_attention_heads")
    heads = fields.count("num_sliding_attention_heads", otherwise=usual)
    kv_heads = fields.count(fields.first("num_key_value_heads", "num_attention_groups"))
    few = kv_heads
    if other is not None:
        heads = other.count("num_attention_heads", otherwise=usual)
        few = other.count(other.first("num_key_value_heads", "num_attention_groups"), otherwise=kv_heads)
    dim = fields.count("head_dim")

    def mixer(reach: Reach) -> Attention:
        full = reach == ALL
        return Attention(
            usual if full else heads,
            kv_heads if full else few,
            dim,
            reach=reach,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            gate="head",
        )

    experts = Experts(
        fields.count(fields.first("moe_num_experts", "n_routed_experts", "num_experts")),
        fields.count(fields.first("moe_top_k", "num_experts_per_tok")),
        fields.count("moe_intermediate_size"),
        fields.count(fields.first("share_expert_dim", "share_expert_dims")),
    )
    for field in ("n_shared_experts", "num_experts", "n_routed_experts"):
        fields.value(field)
    mixers: list[Mixer] = [mixer(it) for it in reaches(fields, layers)]
    return Stack(with_experts(fields, mixers, _step_sparse(fields, layers), experts))


def _step_sparse(fields: Fields, layers: int) -> Callable[[int], bool]:
    listed = fields.value("moe_layers_enum")
    if isinstance(listed, str):
        marks = {int(it) for it in listed.split(",") if it.strip().isdecimal()}
        return lambda layer: layer in marks
    types = fields.pattern("mlp_layer_types", layers)
    if types is not None:
        return lambda layer: types[layer] == "sparse"
    first = fields.count("first_k_dense_replace", minimum=0, otherwise=3)
    return lambda layer: layer >= first
