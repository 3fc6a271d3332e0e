"""Families with layers that keep a state per sequence instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable

from libra.config.yaml_file import shown
from libra.hardware.families.deepseek import gated_latent
from libra.hardware.families.fields import Fields
from libra.hardware.families.moe import qwen_experts
from libra.hardware.families.parts import attention, layer_count, qwen_sparse, with_experts
from libra.hardware.families.stack import Stack
from libra.hardware.layers import LayerKind, Mixer
from libra.hardware.mlp import MLP, Experts
from libra.hardware.state_space import Mamba2
from libra.hardware.states import GatedDeltaNet, KimiDelta, Lightning, ShortConvolution


def state_bytes(fields: Fields, otherwise: int, *names: str) -> int:
    """Bytes per number of a state, from the first of these fields that is present."""
    widths = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": otherwise}
    return widths[fields.word(fields.first(*names), tuple(widths), "auto")]


def _kinds(fields: Fields, layers: int, every: int) -> list[str]:
    """`layer_types`; without this field, attention in each `full_attention_interval`-th layer."""
    types = fields.pattern("layer_types", layers)
    if types is None:
        step = fields.count("full_attention_interval", otherwise=every)
        return ["full_attention" if (layer + 1) % step == 0 else "linear_attention" for layer in range(layers)]
    fields.value("full_attention_interval")
    for kind in types:
        if kind not in ("full_attention", "linear_attention"):
            raise fields.error(
                "layer_types", f"{shown(kind)} is not supported; known are full_attention and linear_attention"
            )
    return types


def qwen_next(fields: Fields) -> Stack:
    """Qwen3-Next, 3.5 and 3.6: gated delta networks, and attention with an output gate."""
    layers, bias = layer_count(fields), fields.flag("attention_bias")
    gated = fields.flag("attn_output_gate", otherwise=True)
    full = attention(
        fields,
        qk_norm="head",
        own_head_dim=True,
        qkv_bias=bias,
        out_bias=bias,
        gate="channel" if gated else "none",
    )
    state = GatedDeltaNet(
        fields.count("linear_num_key_heads"),
        fields.count("linear_num_value_heads"),
        fields.count("linear_key_head_dim"),
        fields.count("linear_value_head_dim"),
        fields.count("linear_conv_kernel_dim"),
        state_bytes(fields, 2, "mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
    )
    mixers: list[Mixer] = [full if kind == "full_attention" else state for kind in _kinds(fields, layers, 4)]
    if not fields.given("num_experts"):
        return Stack(with_experts(fields, mixers, lambda _: False, None))
    return Stack(with_experts(fields, mixers, qwen_sparse(fields), qwen_experts(fields)))


def olmo_hybrid(fields: Fields) -> Stack:
    """OLMo Hybrid: by default attention in each fourth layer, and in the others gated delta networks, with as many key
    heads as attention has heads."""
    layers, bias, heads = layer_count(fields), fields.flag("attention_bias"), fields.count("num_attention_heads")
    full = attention(fields, qk_norm="layer", qkv_bias=bias, out_bias=bias)
    keys = fields.count("linear_num_key_heads", otherwise=heads)
    width = fields.count("linear_key_head_dim", otherwise=max(1, 3 * fields.count("hidden_size") // (4 * keys)))
    state = GatedDeltaNet(
        keys,
        fields.count("linear_num_value_heads", otherwise=heads),
        width,
        fields.count("linear_value_head_dim", otherwise=2 * width),
        fields.count("linear_conv_kernel_dim", otherwise=4),
    )
    mixers: list[Mixer] = [full if kind == "full_attention" else state for kind in _kinds(fields, layers, 4)]
    return Stack(with_experts(fields, mixers, lambda _: False, None))


def kimi_linear(fields: Fields) -> Stack:
    """Kimi Linear and K3: delta attention in the layers that `linear_attn_config` lists, numbered from 1."""
    layers, hidden = layer_count(fields), fields.count("hidden_size")
    for field in ("head_dim", "qk_head_dim"):  # width of the part of queries with positions
        fields.value(field)
    state, listed = _kimi_states(fields, layers)
    attending = gated_latent(fields)
    blocks = fields.count("attn_res_block_size", minimum=0, otherwise=0)
    experts = _kimi_experts(fields)
    types = fields.pattern("mlp_layer_types", layers)
    first = fields.count("first_k_dense_replace", minimum=0, otherwise=0)
    step = fields.count("moe_layer_freq", otherwise=1)
    sparse = {it for it in range(layers) if (types[it] == "sparse" if types else it >= first and it % step == 0)}
    mixers: list[Mixer] = [state if layer + 1 in listed else attending for layer in range(layers)]
    # Residual attention over blocks has a norm and a vector before each half of a layer, and after the last layer.
    other = 4 * hidden if blocks else 0
    made = with_experts(fields, mixers, sparse.__contains__, experts, other=other)
    return Stack(made, 2 * hidden if blocks else 0)


def _kimi_states(fields: Fields, layers: int) -> tuple[KimiDelta, set[int]]:
    """The delta attention, and the numbers of its layers from 1. Reads the published form and Transformers' form."""
    linear = fields.part("linear_attn_config")
    if linear is None and fields.given("linear_num_heads"):
        kinds = _kinds(fields, layers, 4)
        kernel = fields.count("linear_conv_kernel_dim")
        made = KimiDelta(fields.count("linear_num_heads"), fields.count("linear_head_dim"), kernel)
        return made, {layer + 1 for layer, kind in enumerate(kinds) if kind == "linear_attention"}
    if linear is None:
        raise fields.error("linear_attn_config", "this field is required; add it")
    listed = set(linear.numbers("kda_layers") or [])
    full = set(linear.numbers("full_attn_layers") or [])
    if listed | full != set(range(1, layers + 1)) or listed & full:
        raise linear.error("kda_layers", f"with full_attn_layers, name each layer from 1 to {layers} once")
    state = KimiDelta(
        linear.count("num_heads"),
        linear.count("head_dim"),
        linear.count("short_conv_kernel_size"),
        full_gate=linear.flag("use_full_rank_gate"),
    )
    return state, listed


def _kimi_experts(fields: Fields) -> Experts:
    width = fields.count("moe_intermediate_size")
    latent = fields.count("routed_expert_hidden_size", minimum=0, otherwise=0)
    shared = fields.count(fields.first("num_shared_experts", "n_shared_experts"), minimum=0, otherwise=0)
    return Experts(
        fields.count(fields.first("num_experts", "num_local_experts", "n_routed_experts")),
        fields.count(fields.first("num_experts_per_token", "num_experts_per_tok")),
        width,
        width * shared,
        groups=fields.count("num_expert_group", otherwise=1),
        active_groups=fields.count("topk_group", otherwise=1),
        latent=latent,
        other=latent if latent and fields.flag("latent_moe_use_norm") else 0,
    )


_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_BLOCKS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"} | {
    "mlp": "mlp",
    "moe": "moe",
}


def nemotron_h(fields: Fields) -> Stack:
    """Nemotron-H and 3: each layer is a state, attention, an MLP or experts (`hybrid_override_pattern`)."""
    blocks = _blocks(fields)
    bias, wide = fields.flag("use_bias"), fields.flag("mlp_bias")
    for field in ("num_hidden_layers", "expand", "time_step_rank", "chunk_size", "intermediate_size"):
        fields.value(field)
    makers: dict[str, Callable[[], LayerKind]] = {
        "mamba": lambda: LayerKind(
            Mamba2(
                fields.count("mamba_num_heads"),
                fields.count("mamba_head_dim"),
                fields.count("ssm_state_size"),
                fields.count("n_groups"),
                fields.count("conv_kernel"),
                state_bytes(fields, 2, "mamba_ssm_cache_dtype"),
                conv_bias=fields.flag("use_conv_bias", otherwise=True),
                bias=bias,
            ),
            None,
            norms=1,
        ),
        "attention": lambda: LayerKind(_nemotron_attention(fields), None, norms=1),
        "mlp": lambda: LayerKind(None, MLP(fields.count("intermediate_size"), gated=False, bias=wide), norms=1),
        "moe": lambda: LayerKind(None, _nemotron_experts(fields), norms=1),
    }
    kinds = {block: makers[block]() for block in dict.fromkeys(blocks)}
    return Stack([kinds[block] for block in blocks])


def _blocks(fields: Fields) -> list[str]:
    listed = fields.value("layers_block_type")
    if listed is None and fields.given("hybrid_override_pattern"):
        pattern = fields.value("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_LETTERS):
            raise fields.error(
                "hybrid_override_pattern", f"expected a text of {' '.join(_LETTERS)} (got {shown(pattern)})"
            )
        return [_LETTERS[letter] for letter in pattern]
    if not isinstance(listed, list) or not listed or not all(isinstance(it, str) and it in _BLOCKS for it in listed):
        known = ", ".join(_BLOCKS)
        raise fields.error("layers_block_type", f"expected a list of {known} (got {shown(listed)})")
    return [_BLOCKS[it] for it in listed]


def _nemotron_attention(fields: Fields) -> Mixer:
    bias = fields.flag("attention_bias")
    return attention(fields, qkv_bias=bias, out_bias=bias)


def _nemotron_experts(fields: Fields) -> Experts:
    shared = fields.count("n_shared_experts", minimum=0, otherwise=0)
    width = fields.count("moe_shared_expert_intermediate_size") if shared else 0
    return Experts(
        fields.count("n_routed_experts"),
        fields.count("num_experts_per_tok"),
        fields.count("moe_intermediate_size"),
        width,
        fields.count("n_group", otherwise=1),
        fields.count("topk_group", otherwise=1),
        gated=False,
        latent=fields.count("moe_latent_size", minimum=0, otherwise=0),
    )


def lfm2(fields: Fields) -> Stack:
    """LFM2: short convolutions, and attention in the layers of `layer_types` or `full_attn_idxs`."""
    layers, hidden = layer_count(fields), fields.count("hidden_size")
    listed = fields.numbers("full_attn_idxs")
    types = fields.pattern("layer_types", layers)
    if types is None and listed is None:
        raise fields.error("layer_types", "this field is required; add it")
    if types is not None:
        listed = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    full = attention(fields, qk_norm="head")
    kernel = fields.count(fields.first("conv_L_cache", "conv_kernel"), otherwise=3)
    state = ShortConvolution(hidden, kernel, fields.flag("conv_bias"))
    mixers: list[Mixer] = [full if layer in (listed or []) else state for layer in range(layers)]
    if fields.given("num_experts"):
        first = fields.count("num_dense_layers", minimum=0, otherwise=2)
        experts = Experts(
            fields.count("num_experts"), fields.count("num_experts_per_tok"), fields.count("moe_intermediate_size")
        )
        return Stack(with_experts(fields, mixers, lambda layer: layer >= first, experts))
    mlp = MLP(_lfm2_width(fields))
    return Stack([LayerKind(mixer, mlp) for mixer in mixers])


def _lfm2_width(fields: Fields) -> int:
    width = fields.count(fields.first("block_ff_dim", "intermediate_size"))
    if not fields.flag("block_auto_adjust_ff_dim", otherwise=True):
        return width
    factor = fields.value("block_ffn_dim_multiplier")
    if factor is not None and (type(factor) not in (int, float) or not 0 < factor <= 1000):
        raise fields.error("block_ffn_dim_multiplier", f"expected a number above 0 (got {shown(factor)})")
    multiple = fields.count("block_multiple_of", otherwise=256)
    return -(-int((1.0 if factor is None else factor) * int(2 * width / 3)) // multiple) * multiple


def minimax(fields: Fields) -> Stack:
    """MiniMax-Text-01 and M1: lightning attention in layers with 0 in `attn_type_list`, and experts in every layer."""
    layers = layer_count(fields)
    types = fields.pattern("attn_type_list", layers)
    if types is None:
        names = fields.pattern("layer_types", layers)
        if names is None:
            raise fields.error("attn_type_list", f"expected 0 or 1 for each of {layers} layers; add them")
        types = [int(name != "linear_attention") for name in names]
    full = attention(fields)
    state = Lightning(full.heads, full.head_dim)
    experts = Experts(
        fields.count("num_local_experts"),
        fields.count("num_experts_per_tok"),
        fields.count("intermediate_size"),
        fields.count("shared_intermediate_size", minimum=0, otherwise=0),
    )
    return Stack([LayerKind(full if kind == 1 else state, experts) for kind in types])
