"""Shapes of models by name, or from a Hugging Face config.json.

Invariant: a configuration is understood or refused. A needed field that is missing, an architecture that is not known
and a variant that would be priced wrongly (a sliding window, say) are each refused by the name of the field; only
what the Hugging Face classes themselves default in every family is defaulted here. `quantization_config` says how the
weights are stored (`libra.hardware.checkpoint_file`). Other fields that change no shape are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from libra.config.input_file import read_input
from libra.config.yaml_file import ConfigError, nearest, refusal, shown, unknown
from libra.hardware.checkpoint_file import stored_weights
from libra.hardware.model import Experts, LatentAttention, ModelSpec


def load_model(path_or_name: str | Path) -> ModelSpec:
    """Load a config.json, a directory that holds one, or a model that ships with Libra (`model_names`) by its name, in
    any case and with or without its organisation. Files on disk come first. Raises `ConfigError`."""
    path = Path(path_or_name)
    if path.is_dir():
        path /= "config.json"
    elif not path.exists() and path.suffix != ".json":
        return _from_library(str(path_or_name))
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    try:
        text = read_input(path).decode()
    except OSError as error:
        raise refusal(path, f"{error.strerror}: give an existing config.json, or a directory that holds one") from None
    except UnicodeDecodeError as error:
        raise refusal(path, f"not UTF-8 text (byte {error.start}): give a config.json") from None
    return _parse(text, path, name)


def model_names() -> tuple[str, ...]:
    """The models whose shapes ship with Libra, such as `Qwen/Qwen3-14B`."""
    entries = (files("libra.hardware") / "models").iterdir()
    return tuple(sorted(_name_of(entry.name) for entry in entries if entry.name.endswith(".json")))


def _name_of(file: str) -> str:
    return file.removesuffix(".json").replace("--", "/")


def _from_library(given: str) -> ModelSpec:
    names = model_names()
    by_name = {name.casefold(): name for name in names} | {_short(name): name for name in names}
    name = by_name.get(given.casefold())
    if name is None:
        same = [name for name in by_name if _numbers(name) == _numbers(_short(given))]
        close = nearest(_short(given), same)
        hint = f"did you mean {by_name[close]}? Known are" if close else "known are"
        raise ConfigError(
            f"{shown(given)}: no such file or known model; {hint} {', '.join(names)}; for another one give its"
            " config.json"
        )
    file = f"{name.replace('/', '--')}.json"
    return _parse((files("libra.hardware") / "models" / file).read_text(encoding="utf-8"), Path(file), name)


def _short(name: str) -> str:
    """The name without its organisation, in lower case."""
    return name.rpartition("/")[2].casefold()


def _numbers(name: str) -> list[str]:
    """Version and sizes in a name: a model that differs in one is another model, not another spelling."""
    return re.findall(r"\d+(?:\.\d+)?", name)


def _parse(text: str, path: Path, name: str) -> ModelSpec:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise refusal(path, "expected a JSON object, the config.json of a model")
    try:
        spec = _spec(_Fields(data), name)
        given = data.get("quantization_config")
        given = _beside(path) if given is None else given
        return spec if given is None else replace(spec, stored=stored_weights(given, spec))
    except ValueError as error:
        raise refusal(path, str(error)) from None


def _beside(path: Path) -> object:
    """The quantisation that ModelOpt writes into `hf_quant_config.json` beside an older config.json; None: no file."""
    file = path.with_name("hf_quant_config.json")
    if path.name != "config.json" or not file.is_file():
        return None
    try:
        data = json.loads(read_input(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file.name}: {error}; give ModelOpt's file, or remove it") from None
    return data.get("quantization") if isinstance(data, dict) else data


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a configuration. Raises ValueError that opens with the field's name."""

    data: dict[str, Any]

    def given(self, field: str) -> bool:
        return self.data.get(field) is not None

    def count(self, field: str, minimum: int = 1, otherwise: int | None = None) -> int:
        """A whole number. `otherwise` is its value where the field is not given; None: it is required."""
        if otherwise is not None and not self.given(field):
            return otherwise
        if not self.given(field):
            raise ValueError(f"{field}: this field is required; add it")
        value = self.data[field]
        if type(value) is not int or not minimum <= value <= 2**40:
            raise ValueError(f"{field}: expected a whole number of {minimum} or more (got {shown(value)})")
        return value

    def flag(self, field: str) -> bool:
        """A truth value; False where it is not given, as in the Hugging Face classes of every family known here."""
        value = self.data.get(field)
        if value not in (None, True, False) or type(value) is int:
            raise ValueError(f"{field}: expected true or false (got {shown(value)})")
        return bool(value)

    def names(self, field: str) -> list[str]:
        value = self.data.get(field) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{field}: expected a list of names (got {shown(value)})")
        return value


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    experts: Callable[[_Fields], Experts | None] | None = None  # None: every layer is dense
    latent: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    own_head_dim: bool = False  # head_dim is required: hidden_size / num_attention_heads is not its default
    window_switch: bool = False  # sliding_window is used only with use_sliding_window
    optional_bias: bool = False  # attention_bias says whether QKV have biases; the output projection has none
    optional_norm: bool = False  # use_qk_norm says whether queries and keys have norms


def _qwen3_experts(fields: _Fields) -> Experts | None:
    layers = fields.count("num_hidden_layers")
    step = fields.count("decoder_sparse_step")
    dense = fields.data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise ValueError(f"mlp_only_layers: expected a list of layers from 0 to {layers - 1} (got {shown(dense)})")
    sparse = layers // step - sum((i + 1) % step == 0 for i in set(dense))
    if sparse == 0:
        return None
    return Experts(
        count=fields.count("num_experts"),
        active=fields.count("num_experts_per_tok"),
        intermediate=fields.count("moe_intermediate_size"),
        shared_intermediate=0,
        layers=sparse,
    )


def _mixtral_experts(fields: _Fields) -> Experts:
    return Experts(
        count=fields.count("num_local_experts"),
        active=fields.count("num_experts_per_tok"),
        intermediate=fields.count("intermediate_size"),
        shared_intermediate=0,
        layers=fields.count("num_hidden_layers"),
    )


def _deepseek_experts(fields: _Fields) -> Experts | None:
    layers = fields.count("num_hidden_layers")
    first = fields.count("first_k_dense_replace", minimum=0)
    if fields.count("moe_layer_freq", otherwise=1) != 1:
        raise ValueError("moe_layer_freq: only 1 is known: every layer after first_k_dense_replace has experts")
    if first >= layers:
        return None
    width = fields.count("moe_intermediate_size")
    shared = fields.count("n_shared_experts", minimum=0, otherwise=0)
    return Experts(
        count=fields.count("n_routed_experts"),
        active=fields.count("num_experts_per_tok"),
        intermediate=width,
        shared_intermediate=width * shared,
        layers=layers - first,
        groups=fields.count("n_group", otherwise=1),
        active_groups=fields.count("topk_group", otherwise=1),
    )


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM"),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True, window_switch=True),
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm=True, own_head_dim=True, window_switch=True),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", _qwen3_experts, qk_norm=True, own_head_dim=True, window_switch=True),
    "mixtral": _Family("MixtralForCausalLM", _mixtral_experts),
    "glm4_moe": _Family(
        "Glm4MoeForCausalLM", _deepseek_experts, own_head_dim=True, optional_bias=True, optional_norm=True
    ),
    "deepseek_v2": _Family("DeepseekV2ForCausalLM", _deepseek_experts, latent=True),
    "deepseek_v3": _Family("DeepseekV3ForCausalLM", _deepseek_experts, latent=True),
}

_WINDOWS = "some layers hold only a window of the context, so KV does not grow by the same bytes with every token"
_UNPRICED = {  # families whose shape has parts without a price
    "gemma2": f"sliding_window: {_WINDOWS}; and layers have four norms",
    "gemma3_text": f"sliding_window: {_WINDOWS}; and layers have four norms",
    "gpt_oss": f"sliding_window: {_WINDOWS}; and heads have sinks, experts and their router biases, weights four bits",
    "qwen3_next": "layer_types: layers of linear attention hold a state for each sequence instead of KV for each token,"
    " and have other matrices",
    "qwen2_vl": "vision_config: a vision tower has parameters and FLOPs besides those of the language model",
    "qwen2_5_vl": "vision_config: a vision tower has parameters and FLOPs besides those of the language model",
}


def _family(fields: _Fields) -> _Family:
    kind, architectures = fields.data.get("model_type"), fields.names("architectures")
    if kind is None and not architectures:
        raise ValueError("model_type: this field is required; add it")
    if kind is None:
        by_architecture = {family.architecture: family for family in _FAMILIES.values()}
        if architectures[0] not in by_architecture:
            raise ValueError(f"architectures: {unknown('architecture', architectures[0], by_architecture)}")
        return by_architecture[architectures[0]]
    if isinstance(kind, str) and kind in _UNPRICED:
        raise ValueError(f"model_type: {kind} has no price yet, for its {_UNPRICED[kind]}")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(f"model_type: unknown architecture {shown(kind)}; known are {', '.join(_FAMILIES)}")
    family = _FAMILIES[kind]
    if architectures and family.architecture not in architectures:
        raise ValueError(
            f"architectures: {shown(architectures[0])} is not known; only {family.architecture} of {kind} is"
        )
    return family


def _refuse_variants(fields: _Fields, family: _Family) -> None:
    for field in ("attention_bias", "mlp_bias"):
        if fields.flag(field) and not (field == "attention_bias" and family.optional_bias):
            raise ValueError(f"{field}: true is not known for {family.architecture}; only models without it are")
    windowed = fields.flag("use_sliding_window") if family.window_switch else fields.given("sliding_window")
    layers = fields.names("layer_types")
    if windowed or any(kind != "full_attention" for kind in layers):
        field = "layer_types" if not windowed else "use_sliding_window" if family.window_switch else "sliding_window"
        raise ValueError(f"{field}: attention to a part of the context is not known; only full attention is")


def _spec(fields: _Fields, name: str) -> ModelSpec:
    family = _family(fields)
    _refuse_variants(fields, family)
    experts = None if family.experts is None else family.experts(fields)
    layers, hidden, heads = (fields.count(f) for f in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    latent = _latent(fields) if family.latent else None
    if latent is not None:
        head_dim = latent.nope_dim + latent.rope_dim
    elif fields.given("head_dim") or family.own_head_dim:
        head_dim = fields.count("head_dim")
    elif hidden % heads:
        raise ValueError(
            f"head_dim: this field is required, for {heads} heads do not divide hidden_size {hidden}; add it"
        )
    else:
        head_dim = hidden // heads
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=head_dim,
        intermediate=0 if experts and experts.layers == layers else fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        max_context=fields.count("max_position_embeddings"),
        qkv_bias=family.qkv_bias or (family.optional_bias and fields.flag("attention_bias")),
        qk_norm=family.qk_norm or (family.optional_norm and fields.flag("use_qk_norm")),
        experts=experts,
        latent=latent,
    )


def _latent(fields: _Fields) -> LatentAttention:
    return LatentAttention(
        q_rank=fields.count("q_lora_rank", otherwise=0),
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
        value_dim=fields.count("v_head_dim"),
    )
