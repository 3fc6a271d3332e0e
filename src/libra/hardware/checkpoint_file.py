"""Reads the `quantization_config` of a checkpoint's config.json as a `WeightFormat`.

Invariant: a configuration is read completely, or refused with the name of a field. Formats are those of vLLM's loaders:
`fp8`, `fbgemm_fp8`, `compressed-tensors`, `awq`, `gptq`, `mxfp4` and `modelopt` (which its producer may name, too).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from libra.config.yaml_file import shown
from libra.hardware.checkpoint_modules import modules, shares
from libra.hardware.model import ModelSpec
from libra.hardware.stored_weights import MATRIX_KINDS, KeptShares, KindFormat, NumberFormat, WeightFormat

_FIELD = "quantization_config"
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_Config = Mapping[str, Any]


def stored_weights(config: object, model: ModelSpec) -> WeightFormat:
    """The weight format of `model` from `config`, the value of `quantization_config`. Raises `ValueError` that begins
    with the name of the field.
    """
    if not isinstance(config, dict):
        raise ValueError(f"{_FIELD}: expected an object (got {shown(config)})")
    if config.get("quant_algo") == "MIXED_PRECISION":
        return _mixed(config, model)
    found = _reader(config)(config)
    kept = _kept(config, model)
    if found.kept != KeptShares():  # the method quantises only routed experts
        kept = replace(found.kept, experts=kept.experts)
    _require_some(kept, model)
    return replace(found, kept=kept, kv_cache_dtype=_kv_cache_dtype(config))


def _require_some(kept: KeptShares, model: ModelSpec) -> None:
    if all(kept.of(kind) == 1 for kind in {module.kind for module in modules(model)}):
        raise ValueError(f"{_FIELD}: every matrix of a layer is ignored; leave the field out")


def _reader(config: _Config) -> Callable[[_Config], WeightFormat]:
    method = config.get("quant_method")
    producer = config.get("producer")
    by_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    if "quant_algo" in config or (method is None and by_modelopt):
        return _modelopt
    if method is None:
        raise ValueError(f"{_FIELD}.quant_method: this field is required; add it")
    if not isinstance(method, str) or method not in _READERS:
        raise ValueError(f"{_FIELD}.quant_method: {shown(method)} is not supported; known are {', '.join(_READERS)}")
    return _READERS[method]


def _fp8(config: _Config) -> WeightFormat:
    block = config.get("weight_block_size")
    experts = config.get("expert_dtype")
    if experts not in (None, "fp4", "fp8"):
        raise ValueError(f"expert_dtype: {shown(experts)} is not supported; known are fp4 and fp8")
    own = (KindFormat("experts", NumberFormat(4, 32, 8), "fp4"),) if experts == "fp4" else ()
    return WeightFormat(
        "fp8", NumberFormat(8), "fp8", block=0 if block is None else _square("weight_block_size", block), own=own
    )


def _square(name: str, block: object) -> int:
    if not (isinstance(block, list) and len(block) == 2 and block[0] == block[1] and type(block[0]) is int):
        raise ValueError(f"{_FIELD}.{name}: only square blocks are supported, such as [128, 128] (got {shown(block)})")
    if block[0] < 1:
        raise ValueError(f"{_FIELD}.{name}: expected sizes of 1 or more (got {shown(block)})")
    return int(block[0])


def _compressed_tensors(config: _Config) -> WeightFormat:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(it, dict) for it in groups.values()):
        raise ValueError(f"{_FIELD}.config_groups: expected an object of groups (got {shown(groups)})")
    found = {_group(f"config_groups.{name}", group) for name, group in groups.items()}
    if len(found) > 1:
        raise ValueError(f"{_FIELD}.config_groups: {len(groups)} groups of different types are not supported; give one")
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
        f"{_FIELD}.{place}.weights: {shown(kind)} of {shown(bits)} bits in groups of {size or 'a channel'} is not"
        " supported; known are float and int of 8 bits, int of 4, and float of 4 in groups of 16 or 32"
    )


def _group_size(place: str, size: object) -> int:
    """Numbers that share a scale; 0 if a whole channel does."""
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
    "W4A16_NVFP4": WeightFormat("modelopt_fp4", NumberFormat(4, 16, 8)),
}


def _modelopt(config: _Config) -> WeightFormat:
    algorithm = config.get("quant_algo")
    if algorithm is None and "config_groups" in config:
        return _compressed_tensors(config)
    return _ALGORITHMS[_algorithm("quant_algo", algorithm)]


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
    """The KV type of a ModelOpt checkpoint, as in vLLM's `kv_cache_dtype: auto`; 16 bits otherwise."""
    return _kv_of_modelopt(config) if _reader(config) is _modelopt else "auto"


def _kv_of_modelopt(config: _Config) -> str:
    given = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(given, dict):
        bits = given.get("num_bits")
        given = "FP8" if bits == 8 else "NVFP4" if bits == 4 else None
    return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(given).upper(), "auto")


# Modules


def _mixed(config: _Config, model: ModelSpec) -> WeightFormat:
    """The format of a ModelOpt checkpoint that lists the algorithm of each module. A module that is not listed keeps 16
    bits, or has the type of the general method (fp8).
    """
    layers = config.get("quantized_layers")
    if not isinstance(layers, dict) or not layers or not all(isinstance(it, dict) for it in layers.values()):
        raise ValueError(f"{_FIELD}.quantized_layers: expected an object of modules (got {shown(layers)})")
    by_algorithm: dict[str, list[str]] = {}
    for name, its in layers.items():
        by_algorithm.setdefault(_algorithm(f"quantized_layers.{name}.quant_algo", its.get("quant_algo")), []).append(
            name
        )
    named = {algorithm: shares(model, names) for algorithm, names in by_algorithm.items()}
    beside = _fp8(config) if config.get("quant_method") == "fp8" else None
    own, kept, there = [], dict.fromkeys(MATRIX_KINDS, 0.0), {module.kind for module in modules(model)}
    for kind in MATRIX_KINDS:
        if kind not in there:
            continue
        found = [(_ALGORITHMS[algorithm], share.of(kind)) for algorithm, share in named.items() if share.of(kind)]
        if len(found) > 1:
            raise ValueError(f"{_FIELD}.quantized_layers: {kind} matrices of more than one type are not supported")
        if found and beside and found[0][1] < 1:
            raise ValueError(f"{_FIELD}.quantized_layers: {kind} matrices of more than one type are not supported")
        if found:
            own.append(KindFormat(kind, found[0][0].number, found[0][0].product))
        kept[kind] = 1 - found[0][1] if found else 0.0 if beside else 1.0
    shared = KeptShares(**kept)
    _require_some(shared, model)
    base = beside or WeightFormat("modelopt_mixed", NumberFormat(16))
    return replace(base, name="modelopt_mixed", own=tuple(own), kept=shared, kv_cache_dtype=_kv_of_modelopt(config))


def _algorithm(place: str, name: object) -> str:
    if not isinstance(name, str) or name.upper() not in _ALGORITHMS:
        raise ValueError(f"{_FIELD}.{place}: {shown(name)} is not supported; known are {', '.join(_ALGORITHMS)}")
    return name.upper()


def _kept(config: _Config, model: ModelSpec) -> KeptShares:
    patterns: list[str] = []
    for name in _IGNORED:
        given = config.get(name) or []
        if not isinstance(given, list) or not all(isinstance(it, str) for it in given):
            raise ValueError(f"{_FIELD}.{name}: expected a list of names (got {shown(given)})")
        patterns += given
    try:
        return shares(model, patterns) if patterns else KeptShares()
    except ValueError as error:
        raise ValueError(f"{_FIELD}.ignore: {error}") from None
