"""DeepSeek and similar families: latent attention, indexers, compressed keys. Kimi and GLM-5 have the same fields."""

from __future__ import annotations

from libra.hardware.attention import Indexer
from libra.hardware.families.fields import Fields
from libra.hardware.families.moe import deepseek_layers
from libra.hardware.families.parts import attention, latent, layer_count
from libra.hardware.families.stack import Stack
from libra.hardware.latent import CompressedAttention, LatentAttention
from libra.hardware.layers import LayerKind, Mixer
from libra.hardware.mlp import MLP, Experts


def deepseek(fields: Fields) -> Stack:
    """DeepSeek-V2 to V3.1 and Kimi K2: the same latent attention in all layers, or with `use_mla` false, plain
    attention."""
    for field in ("head_dim", "qk_head_dim"):  # repeat sums of other fields
        fields.value(field)
    if fields.flag("use_mla", otherwise=True):
        return deepseek_layers(fields, [latent(fields)] * layer_count(fields))
    for field in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        fields.value(field)
    return deepseek_layers(fields, [attention(fields)] * layer_count(fields))


def longcat(fields: Fields) -> Stack:
    """LongCat-Flash: a layer has two pairs of latent attention and MLP, and experts in parallel to them. Some of a
    token's experts compute nothing, so the average number of the others counts as active.
    """
    fields.value("head_dim")  # repeats another field
    attending = LayerKind(latent(fields), MLP(fields.count("ffn_hidden_size")))
    count, idle = fields.count("n_routed_experts"), fields.count("zero_expert_num", minimum=0, otherwise=0)
    active = fields.count(fields.first("moe_topk", "num_experts_per_tok"))
    experts = Experts(count, max(1, round(active * count / (count + idle))), fields.count("expert_ffn_hidden_size"))
    beside = LayerKind(None, experts, norms=0, other=idle * fields.count("hidden_size"))
    return Stack([attending, attending, beside] * fields.count(fields.first("num_layers", "num_hidden_layers")))


def dense_latent(fields: Fields) -> Stack:
    """MiniCPM3: latent attention and an MLP in every layer."""
    mlp = MLP(fields.count("intermediate_size"), bias=fields.flag("mlp_bias"))
    fields.with_defaults({"v_head_dim": fields.count("hidden_size") // fields.count("num_attention_heads")})
    return Stack([LayerKind(latent(fields), mlp)] * layer_count(fields))


def indexed(fields: Fields) -> Stack:
    """DeepSeek-V3.2 and GLM-5: an indexer chooses the keys. Some layers use an earlier layer's indexer
    (`indexer_types`).
    """
    layers, topk = layer_count(fields), fields.count("index_topk")
    for field in ("head_dim", "qk_head_dim", "num_experts", "layer_types"):
        fields.value(field)
    own = latent(fields, indexer=Indexer(fields.count("index_n_heads"), fields.count("index_head_dim"), topk))
    reusing = latent(fields, topk=topk)
    mixers: list[Mixer] = [own if full else reusing for full in _indexers(fields, layers)]
    return deepseek_layers(fields, mixers)


def _indexers(fields: Fields, layers: int) -> list[bool]:
    """Whether each layer has its own indexer."""
    types = fields.pattern("indexer_types", layers)
    if types is not None:
        return [kind == "full" for kind in types]
    pattern = fields.pattern("index_topk_pattern", layers)
    if pattern is not None:
        return [mark in ("F", "full") for mark in pattern]
    every = fields.count("index_topk_freq", otherwise=1)
    offset = fields.count("index_skip_topk_offset", minimum=0, otherwise=2)
    return [max(layer - offset + 1, 0) % every == 0 for layer in range(layers)]


def deepseek_v4(fields: Fields) -> Stack:
    """DeepSeek-V4: a window and compressed vectors (`compress_ratios`), and several residual streams."""
    layers, hidden = layer_count(fields), fields.count("hidden_size")
    ratios = fields.numbers("compress_ratios")
    if ratios is None:
        ratios = _ratios(fields, layers)
    if ratios is None or len(ratios) < layers:
        raise fields.error("compress_ratios", f"expected a number for each of {layers} layers; add them")
    for field in ("num_key_value_heads", "intermediate_size"):  # one head, and a repetition of the experts' width
        fields.value(field)
    mixers = {ratio: _compressed(fields, ratio) for ratio in set(ratios[:layers])}
    streams = fields.count("hc_mult", otherwise=4)
    mixing = (2 + streams) * streams
    width = fields.count("moe_intermediate_size")
    experts = Experts(
        fields.count("n_routed_experts"),
        fields.count("num_experts_per_tok"),
        width,
        width * fields.count("n_shared_experts", minimum=0, otherwise=1),
    )
    other = 2 * (mixing * streams * hidden + mixing + 3)
    made = [LayerKind(mixers[ratio], experts, other=other) for ratio in ratios[:layers]]
    return Stack(made, streams * streams * hidden + streams + 1)


_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _ratios(fields: Fields, layers: int) -> list[int] | None:
    """Ratios from `layer_types`, Transformers' form; None without this field."""
    rates = fields.part("compress_rates")
    types = fields.pattern("layer_types", layers)
    if types is None:
        return None
    if not all(isinstance(kind, str) and kind in _RATIOS for kind in types):
        raise fields.error("layer_types", f"expected {', '.join(_RATIOS)} for each of {layers} layers")
    return [_RATIOS[kind] if rates is None else rates.count(kind, 0, _RATIOS[kind]) for kind in types]


def _compressed(fields: Fields, ratio: int) -> CompressedAttention:
    """The attention of layers with this ratio. With the small ratio 4, an indexer chooses among the compressed
    vectors."""
    if ratio not in (0, 4, 128):
        raise fields.error("compress_ratios", f"{ratio} is not supported; known are 0, 4 and 128")
    chooses = ratio == 4
    return CompressedAttention(
        heads=fields.count("num_attention_heads"),
        head_dim=fields.count("head_dim"),
        q_rank=fields.count("q_lora_rank"),
        out_rank=fields.count("o_lora_rank"),
        out_groups=fields.count("o_groups"),
        window=fields.count("sliding_window"),
        ratio=ratio,
        indexer=Indexer(fields.count("index_n_heads"), fields.count("index_head_dim"), fields.count("index_topk"))
        if chooses
        else None,
    )


def gated_latent(fields: Fields) -> LatentAttention:
    """Latent attention of Kimi Linear and K3, optionally with an output gate."""
    return latent(fields, gated=fields.flag("mla_use_output_gate"))
