"""Parameters of vision towers, with their projectors to the language model.

Invariant: a tower is counted as in Transformers, or a note says that it is not counted. Towers take memory and are
never trained.
"""

from __future__ import annotations

from collections.abc import Callable

from libra.hardware.families.fields import Fields


def tower_parameters(top: Fields, hidden: int, note: Callable[[str], None]) -> int:
    """Parameters of the tower in a wrapper whose language model has width `hidden`."""
    vision = top.part("vision_config", whole=False)
    for field in ("audio_config", "sound_config"):
        if top.value(field):
            note(f"{field}: parameters of this tower are not counted")
    if vision is None:
        return 0
    kind = vision.value("model_type") or top.value("model_type")
    reader = _TOWERS.get(str(kind)) or _TOWERS.get(str(top.value("model_type")))
    try:
        if reader is None:
            raise ValueError(f"vision_config.model_type: {kind} is unknown")
        return reader(top, vision, hidden)
    except ValueError as error:
        note(f"{error}; parameters of the vision tower are not counted")
        return 0


def _encoder(layers: int, width: int, inner: int, gated: bool = False, bias: bool = True, norm: int = 2) -> int:
    """Parameters of layers with four square projections and an MLP; `norm` is 1 if norms have no bias."""
    matrices = 4 * width * width + (3 if gated else 2) * width * inner
    biases = (4 * width + (2 if gated else 1) * inner + width) if bias else 0
    return layers * (matrices + biases + 2 * norm * width)


def _qwen3_vl(top: Fields, vision: Fields, hidden: int) -> int:
    width, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    patch = (
        vision.count("patch_size") ** 2 * vision.count("temporal_patch_size") * vision.count("in_channels", otherwise=3)
    )
    merged, out = width * vision.count("spatial_merge_size") ** 2, vision.count("out_hidden_size", otherwise=hidden)
    deep = len(vision.numbers("deepstack_visual_indexes") or [])
    heads = (1 + deep) * (merged * (merged + 1) + (merged + 1) * out) + 2 * width + deep * 2 * merged
    embedded = patch * width + width + vision.count("num_position_embeddings") * width
    return embedded + _encoder(vision.count("depth"), width, inner) + heads


def _qwen2_vl(top: Fields, vision: Fields, hidden: int) -> int:
    """The towers of Qwen2.5-VL, and of Qwen2-VL, whose `hidden_size` is the width of the language model."""
    older = vision.given("embed_dim")
    vision.with_defaults({"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "depth": 32})
    width = vision.count(vision.first("embed_dim", "hidden_size"))
    inner = width * vision.count("mlp_ratio", otherwise=4) if older else vision.count("intermediate_size")
    channels = vision.count(vision.first("in_channels", "in_chans"), otherwise=3)
    patch = channels * vision.count("patch_size") ** 2 * vision.count("temporal_patch_size")
    merged = width * vision.count("spatial_merge_size") ** 2
    out = vision.count("hidden_size" if older else "out_hidden_size", otherwise=hidden)
    project = merged * (merged + 1) + (merged + 1) * out + (2 if older else 1) * width
    layers = _encoder(vision.count("depth"), width, inner, gated=not older, norm=2 if older else 1)
    return patch * width + layers + project


def _kimi(top: Fields, vision: Fields, hidden: int) -> int:
    def count(name: str) -> int:
        return vision.count(vision.first(f"vt_{name}", name))

    top.value("projection_hidden_size")  # equals the tower's own width
    width, inner, layers = count("hidden_size"), count("intermediate_size"), count("num_hidden_layers")
    kernel = vision.numbers("merge_kernel_size") or [2, 2]
    grid = vision.count(vision.first("init_pos_emb_height", "pos_emb_height"))
    grid *= vision.count(vision.first("init_pos_emb_width", "pos_emb_width"))
    merged = width * kernel[0] * kernel[1]
    project = merged * (merged + 1) + (merged + 1) * hidden
    patch = 3 * vision.count("patch_size") ** 2
    if vision.value("norm_type") == "rmsnorm":  # Kimi K3: no biases, and another width of queries, keys and values
        qkv = vision.count("qkv_hidden_size", otherwise=width)
        each = 4 * width * qkv + 2 * width * inner + 2 * width
        return patch * width + grid * width + layers * each + width + project + width
    embedded = (patch + 1) * width + grid * width
    return embedded + _encoder(layers, width, inner) + 2 * width + 2 * width + project


def _gemma4(top: Fields, vision: Fields, hidden: int) -> int:
    width, inner, layers = (vision.count(it) for it in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, dim = vision.count("num_attention_heads"), vision.count("head_dim")
    kv = vision.count("num_key_value_heads", otherwise=heads)
    each = 2 * width * dim * (heads + kv) + 3 * width * inner + 4 * width + 2 * dim
    embedded = 3 * vision.count("patch_size") ** 2 * width + 2 * vision.count("position_embedding_size") * width
    return embedded + layers * each + width * hidden


def _siglip(top: Fields, vision: Fields, hidden: int) -> int:
    vision.with_defaults(
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 16}
    )
    width, inner, layers = (vision.count(it) for it in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    patch = vision.count("patch_size")
    embedded = (3 * patch**2 + 1) * width + (vision.count("image_size") // patch) ** 2 * width
    head = 0
    if vision.flag("vision_use_head", otherwise=True):
        head = width + 4 * width * width + 4 * width + 2 * width + 2 * width * inner + inner + width
    return embedded + _encoder(layers, width, inner) + 2 * width + head + width * hidden + width


def _pixtral(top: Fields, vision: Fields, hidden: int) -> int:
    vision.with_defaults(
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 16, "num_channels": 3}
    )
    width, inner, layers = (vision.count(it) for it in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    embedded = vision.count("num_channels") * vision.count("patch_size") ** 2 * width + width
    merge = top.count("spatial_merge_size", otherwise=2)
    bias = 2 * hidden if top.flag("multimodal_projector_bias") else 0
    project = width + width * width * merge**2 + width * hidden + hidden * hidden + bias
    return embedded + _encoder(layers, width, inner, gated=True, bias=False, norm=1) + project


def _llama4(top: Fields, vision: Fields, hidden: int) -> int:
    width, inner, layers = (vision.count(it) for it in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    patch = vision.count("patch_size")
    grid = (vision.count("image_size") // patch) ** 2 + 1
    into, out = vision.count("projector_input_dim"), vision.count("projector_output_dim")
    embedded = 3 * patch**2 * width + width + grid * width + 4 * width
    return (
        embedded
        + _encoder(layers, width, inner)
        + inner * into
        + out * out
        + vision.count("vision_output_dim") * hidden
    )


def _minimax(top: Fields, vision: Fields, hidden: int) -> int:
    width, inner, layers = (vision.count(it) for it in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    compression = vision.part("img_token_compression_config") or vision
    merge, frames = (compression.count(it, otherwise=2) for it in ("spatial_merge_size", "temporal_patch_size"))
    inside = top.count("projector_hidden_size", otherwise=hidden)
    embedded = 3 * vision.count("patch_size") ** 2 * frames * width + 2 * width
    project = (width + 1) * inside + (inside + 1) * hidden + (hidden * merge**2 + 1) * inside + (inside + 1) * hidden
    return embedded + _encoder(layers, width, inner) + project


def _glm4v(top: Fields, vision: Fields, hidden: int) -> int:
    """GLM-4.1V to 4.6V: a layer's MLP is as wide as the language model, the merger as `intermediate_size`."""
    width, out, inner = (vision.count(it) for it in ("hidden_size", "out_hidden_size", "intermediate_size"))
    patch, merge = vision.count("patch_size"), vision.count("spatial_merge_size", otherwise=2)
    pixels = vision.count("in_channels", otherwise=3) * patch**2 * vision.count("temporal_patch_size", otherwise=2)
    biases = 3 * width if vision.flag("attention_bias") else 0
    embedded = (pixels + 1) * width + (vision.count("image_size") // patch) ** 2 * width
    layers = (
        _encoder(vision.count("depth"), width, out, gated=True, bias=False, norm=1) + vision.count("depth") * biases
    )
    merger = out * out + 2 * out + 3 * out * inner
    return embedded + layers + (width * merge**2 + 1) * out + 2 * width + merger


def _internvl(top: Fields, vision: Fields, hidden: int) -> int:
    width, inner, layers = (vision.count(it) for it in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    patch, image = (_side(vision, it) for it in ("patch_size", "image_size"))
    each = 4 * width**2 + width + 2 * width * inner + inner + width + 2 * width
    each += 3 * width if vision.flag("attention_bias") else 0
    each += 2 * width if vision.flag("use_qk_norm") else 0
    each += (2 if vision.word("norm_type", ("layer_norm", "rms_norm"), "layer_norm") == "rms_norm" else 4) * width
    embedded = (vision.count("num_channels", otherwise=3) * patch**2 + 2) * width
    embedded += width if vision.flag("use_mask_token") else 0
    embedded += ((image // patch) ** 2 + 1) * width if vision.flag("use_absolute_position_embeddings", True) else 0
    last = 0 if vision.flag("use_mean_pooling", True) else 2 * width
    ratio = top.value("downsample_ratio") or 0.5
    if type(ratio) is not float or not 0.01 <= ratio <= 1:
        raise top.error("downsample_ratio", "expected a number from 0.01 to 1")
    merged = width * int(1 / ratio) ** 2
    return embedded + layers * each + last + 2 * merged + (merged + 1) * hidden + (hidden + 1) * hidden


def _side(vision: Fields, field: str) -> int:
    """A size, given as a number or as a list of equal numbers."""
    value = vision.value(field)
    if isinstance(value, list) and value and all(it == value[0] for it in value) and type(value[0]) is int:
        return max(1, int(value[0]))
    return vision.count(field)


_TOWERS: dict[str, Callable[[Fields, Fields, int], int]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_vl_vision": _qwen3_vl,
    "qwen3_vl_moe_vision": _qwen3_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "qwen3_5_vision": _qwen3_vl,
    "qwen3_5_moe_vision": _qwen3_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
    "glm4v": _glm4v,
    "glm4v_vision": _glm4v,
    "glm4v_moe": _glm4v,
    "glm4v_moe_vision": _glm4v,
    "internvl": _internvl,
    "internvl_vision": _internvl,
    "kimi_k25": _kimi,
    "kimi_k3": _kimi,
    "kimi_vl": _kimi,
    "gemma4_vision": _gemma4,
    "siglip_vision_model": _siglip,
    "pixtral": _pixtral,
    "llama4_vision_model": _llama4,
    "minimax_m3_vl": _minimax,
}
