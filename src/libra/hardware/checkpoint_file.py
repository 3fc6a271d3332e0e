"""The `quantization_config` of a checkpoint's config.json, as a `WeightFormat`.

Invariant: a configuration is understood or refused by its field. Formats are those of vLLM's loaders: `fp8` and
`fbgemm_fp8`, `compressed-tensors`, `awq`, `gptq`, `modelopt` (also where only its producer is named) and `mxfp4`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from libra.config.yaml_file import shown
from libra.hardware.model import ModelSpec
from libra.hardware.stored_weights import MATRIX_KINDS, KeptShares, MatrixKind, NumberFormat, WeightFormat

_FIELD = "quantization_config"
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_Config = Mapping[str, Any]


def stored_weights(config: object, model: ModelSpec) -> WeightFormat:
    """The format that `config`, the value of `quantization_config`, gives `model`. Raises ValueError that opens with
    the field."""
    if not isinstance(config, dict):
        raise ValueError(f"{_FIELD}: expected an object (got {shown(config)})")
    found = _reader(config)(config)
    kept = _kept(config, model)
    if found.kept != KeptShares():  # a method that stores routed experts alone
        kept = replace(found.kept, experts=kept.experts)
    if all(kept.of(kind) == 1 for kind in MATRIX_KINDS if kind == "attention" or _parameters(model, kind)):
        raise ValueError(f"{_FIELD}: every matrix of a layer is ignored; leave the field out")
    return replace(found, kept=kept, kv_cache_dtype=_kv_cache_dtype(config))


def _reader(config: _Config) -> Callable[[_Config], WeightFormat]:
    method = config.get("quant_method")
    producer = config.get("producer")
    by_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    if "quant_algo" in config or (method is None and by_modelopt):
        return _modelopt
    if method is None:
        raise ValueError(f"{_FIELD}.quant_method: this field is required; add it")
    if not isinstance(method, str) or method not in _READERS:
        raise ValueError(f"{_FIELD}.quant_method: {shown(method)} has no price; known are {', '.join(_READERS)}")
    return _READERS[method]


def _fp8(config: _Config) -> WeightFormat:
    block = config.get("weight_block_size")
    return WeightFormat(
        "fp8", NumberFormat(8), "fp8", block=0 if block is None else _square("weight_block_size", block)
    )


def _square(name: str, block: object) -> int:
    if not (isinstance(block, list) and len(block) == 2 and block[0] == block[1] and type(block[0]) is int):
        raise ValueError(f"{_FIELD}.{name}: only square blocks have a price, such as [128, 128] (got {shown(block)})")
    if block[0] < 1:
        raise ValueError(f"{_FIELD}.{name}: expected sizes of 1 or more (got {shown(block)})")
    return int(block[0])


def _compressed_tensors(config: _Config) -> WeightFormat:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(it, dict) for it in groups.values()):
        raise ValueError(f"{_FIELD}.config_groups: expected an object of groups (got {shown(groups)})")
    found = {_group(f"config_groups.{name}", group) for name, group in groups.items()}
    if len(found) > 1:
        raise ValueError(f"{_FIELD}.config_groups: {len(groups)} groups of different types have no price; only one has")
    return found.pop()


def _group(place: str, group: _Config) -> WeightFormat:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ValueError(f"{_FIELD}.{place}.weights: expected an object (got {shown(weights)})")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    block = weights.get("block_structure")
    only_weights = not group.get("input_activations")
    size = _group_size(f"{place}.weights.group_size", weights.get("group_size"))
    if (bits, kind) == (8, "float"):
        width = 0 if block is None else _square(f"{place}.weights.block_structure", block)
        return WeightFormat("fp8", NumberFormat(8), "bf16" if only_weights else "fp8", block=width)
    if (bits, kind) == (8, "int"):
        return WeightFormat("int8", _grouped(8, size, 16), "bf16" if only_weights else "int8")
    if (bits, kind) == (4, "float") and size in (16, 32):
        name = "modelopt_fp4" if size == 16 else "mxfp4"
        return WeightFormat(name, NumberFormat(4, size, 8), "bf16" if only_weights else "fp4")
    if (bits, kind) == (4, "int"):
        return WeightFormat("int4", _grouped(4, size, 16))
    raise ValueError(
        f"{_FIELD}.{place}.weights: {shown(kind)} of {shown(bits)} bits in groups of {size or 'a channel'} has no price"
        "; known are float and int of 8 bits, int of 4, and float of 4 in groups of 16 or 32"
    )


def _group_size(place: str, size: object) -> int:
    """Numbers that share a scale; 0: all of a channel."""
    if size in (None, -1):
        return 0
    if type(size) is not int or size < 1:
        raise ValueError(f"{_FIELD}.{place}: expected a whole number of 1 or more, or -1 (got {shown(size)})")
    return size


def _grouped(bits: int, size: int, scale_bits: int) -> NumberFormat:
    return NumberFormat(bits, size, scale_bits) if size else NumberFormat(bits)


def _awq(config: _Config) -> WeightFormat:
    zero = _bits(config) if config.get("zero_point", True) else 0
    return WeightFormat("awq", _grouped(_bits(config), _group_size("group_size", config.get("group_size")), 16 + zero))


def _gptq(config: _Config) -> WeightFormat:
    return WeightFormat("gptq", _grouped(_bits(config), _group_size("group_size", config.get("group_size")), 16))


def _bits(config: _Config) -> int:
    bits = config.get("bits", config.get("w_bit"))
    if bits not in (2, 3, 4, 8) or type(bits) is not int:
        raise ValueError(f"{_FIELD}.bits: expected 2, 3, 4 or 8 (got {shown(bits)})")
    return bits


_ALGORITHMS: Mapping[str, WeightFormat] = {
    "FP8": WeightFormat("fp8", NumberFormat(8), "fp8"),
    "FP8_PB_WO": WeightFormat("fp8", NumberFormat(8), "fp8", block=128),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("fp8", NumberFormat(8), "fp8"),
    "MXFP8": WeightFormat("mxfp8", NumberFormat(8, 32, 8), "fp8"),
    "NVFP4": WeightFormat("modelopt_fp4", NumberFormat(4, 16, 8), "fp4"),
}


def _modelopt(config: _Config) -> WeightFormat:
    algorithm = config.get("quant_algo")
    if algorithm is None and "config_groups" in config:
        return _compressed_tensors(config)
    if not isinstance(algorithm, str) or algorithm.upper() not in _ALGORITHMS:
        raise ValueError(f"{_FIELD}.quant_algo: {shown(algorithm)} has no price; known are {', '.join(_ALGORITHMS)}")
    return _ALGORITHMS[algorithm.upper()]


def _mxfp4(config: _Config) -> WeightFormat:
    return WeightFormat("mxfp4", NumberFormat(4, 32, 8), kept=KeptShares(attention=1, dense=1, shared=1))


_READERS: Mapping[str, Callable[[_Config], WeightFormat]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
}


def _kv_cache_dtype(config: _Config) -> str:
    """The type of KV that a ModelOpt checkpoint names, as vLLM resolves `kv_cache_dtype: auto`; otherwise 16 bits."""
    if _reader(config) is not _modelopt:
        return "auto"
    given = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(given, dict):
        bits = given.get("num_bits")
        given = "FP8" if bits == 8 else "NVFP4" if bits == 4 else None
    return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(given).upper(), "auto")


# Ignored modules


def _kept(config: _Config, model: ModelSpec) -> KeptShares:
    patterns: list[str] = []
    for name in _IGNORED:
        given = config.get(name) or []
        if not isinstance(given, list) or not all(isinstance(it, str) for it in given):
            raise ValueError(f"{_FIELD}.{name}: expected a list of names (got {shown(given)})")
        patterns += given
    if not patterns:
        return KeptShares()
    ignored = _matcher(patterns)
    shares: dict[str, float] = {}
    for kind in MATRIX_KINDS:
        sizes = [(size, ignored(name)) for name, size in _matrices(model, kind)]
        total = sum(size for size, _ in sizes)
        shares[kind] = sum(size for size, kept in sizes if kept) / total if total else 0.0
    return KeptShares(**shares)


def _matcher(patterns: list[str]) -> Callable[[str], bool]:
    """A test whether a module is ignored: a pattern names it, a module above it, or a part of its path (`self_attn`).
    A pattern with `re:` is a regular expression, one with `*` a wildcard."""
    plain: set[str] = set()
    expressions: list[re.Pattern[str]] = []
    wildcards: list[str] = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expressions.append(re.compile(pattern[3:]))
            except re.error as error:
                raise ValueError(f"{_FIELD}.ignore: {shown(pattern)} is no regular expression: {error}") from None
        elif "*" in pattern:
            wildcards.append(pattern.replace("language_model.", ""))
        else:
            plain.add(pattern.replace("language_model.", ""))

    def ignored(name: str) -> bool:
        parts = name.split(".")
        spans = ((start, end) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))
        return (
            any(".".join(parts[start:end]) in plain for start, end in spans)
            or any(fnmatchcase(name, it) or fnmatchcase(name, f"{it}.*") for it in wildcards)
            or any(it.match(name) for it in expressions)
        )

    return ignored


def _matrices(model: ModelSpec, kind: MatrixKind) -> Iterator[tuple[str, int]]:
    """Names and sizes of the model's matrices of one kind, as Hugging Face calls them; the first layers are taken to be
    those without experts, and one routed expert stands for all of its layer."""
    first = model.dense_layers
    layers = {"attention": range(model.layers), "dense": range(first)}.get(kind, range(first, model.layers))
    inside = {"dense": "mlp", "shared": "mlp.shared_experts", "experts": "mlp.experts.0"}
    for layer in layers:
        if kind == "attention":
            for name, size in _attention(model).items():
                yield f"model.layers.{layer}.self_attn.{name}", size
        elif size := _parameters(model, kind):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"model.layers.{layer}.{inside[kind]}.{name}", size


def _parameters(model: ModelSpec, kind: MatrixKind) -> int:
    """Parameters of one layer's MLP matrices of this kind; 0 where the model has none."""
    sizes = {
        "dense": model.dense_mlp_parameters if model.dense_layers else 0,
        "shared": model.shared_expert_parameters,
        "experts": model.expert_parameters,
    }
    return sizes.get(kind, 0)


def _attention(model: ModelSpec) -> dict[str, int]:
    latent = model.latent
    if latent is None:
        query, key = model.hidden * model.heads * model.head_dim, model.hidden * model.kv_heads * model.head_dim
        return {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query}
    query = model.heads * (latent.nope_dim + latent.rope_dim)
    compressed = {"q_a_proj": model.hidden * latent.q_rank, "q_b_proj": latent.q_rank * query}
    return (compressed if latent.q_rank else {"q_proj": model.hidden * query}) | {
        "kv_a_proj_with_mqa": model.hidden * (latent.kv_rank + latent.rope_dim),
        "kv_b_proj": latent.kv_rank * model.heads * (latent.nope_dim + latent.value_dim),
        "o_proj": model.heads * latent.value_dim * model.hidden,
    }
