"""Weights as `quantization_config` describes them: types, ignored modules, and refusals by their field."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.reshaped import reshaped

from libra.config.yaml_file import ConfigError
from libra.cost.quantization import AS_STORED, Quantization
from libra.hardware.checkpoint_file import stored_weights
from libra.hardware.decoder import decoder
from libra.hardware.latent import LatentAttention
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.hardware.stored_weights import KeptShares, WeightFormat

DENSE = decoder("dense", 4, 1024, 16, 4, 64, 4096, 32000, False, 40960)
MOE = decoder("moe", 4, 1024, 16, 4, 64, 4096, 32000, False, 40960, experts=Experts(16, 2, 512, 256), sparse=3)
LATENT = decoder(
    *("latent", 4, 1024, 16, 16, 96, 4096, 32000, False, 40960),
    experts=Experts(16, 2, 512, 256),
    sparse=3,
    latent=LatentAttention(16, 256, 128, 64, 32, 64),
)


def linear(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": weights["num_bits"]}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4 = linear(num_bits=4, type="int", group_size=32)
INT4["config_groups"]["group_0"]["input_activations"] = None


@pytest.mark.parametrize(
    ("config", "name", "bits", "product", "block"),
    [
        (FP8, "fp8", 8, "fp8", 128),
        ({"quant_method": "fp8"}, "fp8", 8, "fp8", 0),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8", 8, "fp8", 0),
        (linear(num_bits=8, type="float", strategy="channel"), "fp8", 8, "fp8", 0),
        (linear(num_bits=8, type="float", block_structure=[128, 128]), "fp8", 8, "fp8", 128),
        (linear(num_bits=8, type="int"), "int8", 8, "int8", 0),
        (INT4, "int4", 4.5, "bf16", 0),
        (linear(num_bits=4, type="float", group_size=16), "modelopt_fp4", 4.5, "fp4", 0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "awq", 4 + 20 / 128, "bf16", 0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}, "gptq", 4.25, "bf16", 0),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq", 8, "bf16", 0),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 8, "fp8", 0),
        ({"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}, "modelopt_fp4", 4.5, "fp4", 0),
    ],
)
def test_a_method_gives_the_type_of_the_weights(
    config: dict[str, Any], name: str, bits: float, product: str, block: int
) -> None:
    found = stored_weights(config, DENSE)
    assert (found.name, found.product, found.block, found.kept) == (name, product, block, KeptShares())
    assert found.number.bytes * 8 == pytest.approx(bits)
    assert all(found.bytes_of(kind) == found.number.bytes for kind in ("attention", "dense"))


def every_layer(*modules: str) -> list[str]:
    return [f"model.layers.{layer}.{module}" for layer in range(4) for module in modules]


@pytest.mark.parametrize(
    ("ignored", "model", "kept"),
    [
        (["lm_head"], DENSE, KeptShares()),
        (["gate", "e_score_correction_bias", "lm_head"], MOE, KeptShares()),  # the router
        (["self_attn"], DENSE, KeptShares(attention=1)),
        (
            every_layer("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            DENSE,
            "attention",
        ),
        (["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"], MOE, "all but experts"),
        (["model.layers.*.self_attn", "model.layers.*.mlp.router"], MOE, "attention"),
        (["model.layers.0*"], DENSE, KeptShares(attention=0.25, dense=0.25)),
        (["model.layers.0"], MOE, KeptShares(attention=0.25, dense=1.0)),
        (["model.language_model.layers.1.mlp.shared_experts*"], MOE, KeptShares(shared=1 / 3)),
        (every_layer("input_layernorm", "mlp.gate"), MOE, KeptShares()),
    ],
)
def test_ignored_modules_keep_16_bits(ignored: list[str], model: ModelSpec, kept: KeptShares | str) -> None:
    words = {"attention": KeptShares(attention=1), "all but experts": KeptShares(attention=1, dense=1, shared=1)}
    wanted = words[kept] if isinstance(kept, str) else kept
    for field in ("modules_to_not_convert", "ignore", "exclude_modules"):
        found = stored_weights({"quant_method": "fp8", field: ignored}, model)
        assert [found.kept.of(kind) for kind in ("attention", "dense", "shared", "experts")] == pytest.approx(
            [wanted.of(kind) for kind in ("attention", "dense", "shared", "experts")]
        )


def test_a_part_of_attention_keeps_16_bits_by_its_size() -> None:
    ignored = every_layer("self_attn.kv_a_proj_with_mqa", "self_attn.q_a_proj")
    kept = stored_weights({"quant_method": "fp8", "ignore": ignored}, LATENT).kept
    down = 1024 * (128 + 32) + 1024 * 256
    assert kept.attention == pytest.approx(down / (down + 256 * 16 * 96 + 128 * 16 * 128 + 16 * 64 * 1024))


def test_mxfp4_is_of_routed_experts() -> None:
    found = stored_weights({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, MOE)
    assert found.kept == KeptShares(attention=1, dense=1, shared=1)
    assert found.described == "mxfp4 (attention, dense, shared in 16 bits)"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config: expected an object"),
        ({}, "quantization_config.quant_method: this field is required"),
        (
            {"quant_method": "bitsandbytes"},
            "quantization_config.quant_method: 'bitsandbytes' is not supported; known are",
        ),
        ({"quant_method": ["fp8"]}, "quantization_config.quant_method: "),
        (FP8 | {"weight_block_size": [128, 64]}, "quantization_config.weight_block_size: only square blocks"),
        (FP8 | {"weight_block_size": [0, 0]}, "quantization_config.weight_block_size: expected sizes"),
        (FP8 | {"ignored_layers": "lm_head"}, "quantization_config.ignored_layers: expected a list"),
        (FP8 | {"ignore": ["re:("]}, "quantization_config.ignore: 're:\\(' is not a regular expression"),
        ({"quant_method": "awq", "bits": "4"}, "quantization_config.bits: expected"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "quantization_config.group_size: expected"),
        ({"quant_method": "compressed-tensors"}, "quantization_config.config_groups: expected"),
        (linear(num_bits=6, type="float"), "quantization_config.config_groups.group_0.weights: .* is not supported"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "quantization_config.quantized_layers: expected an",
        ),
        (FP8 | {"ignore": ["model"]}, "quantization_config: every matrix of a layer is ignored"),
    ],
)
def test_what_has_no_price_is_refused_by_its_field(config: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        stored_weights(config, DENSE)
    assert "\n" not in str(refused.value)


VALID = (
    FP8 | {"ignore": ["lm_head"]},
    linear(num_bits=8, type="float", group_size=32),
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 64},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}},
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["fp8", "re:(", "re:.*", "*"]),
    lambda it: st.lists(it, max_size=3) | st.dictionaries(st.sampled_from(["weights", "num_bits", "a"]), it),
    max_leaves=6,
)


@given(st.sampled_from(VALID), st.sampled_from([DENSE, MOE, LATENT]), st.data())
def test_any_value_anywhere_is_read_or_refused_by_its_field(
    valid: dict[str, Any], model: ModelSpec, data: st.DataObject
) -> None:
    config = copy.deepcopy(valid)
    node = config
    while True:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(VALUES)
    try:
        found = stored_weights(config, model)
    except ValueError as refused:
        assert str(refused).startswith("quantization_config") and "\n" not in str(refused)
    else:
        assert 0 < found.number.bytes <= 3
        assert all(
            found.number.bytes <= 2 * found.bytes_of(kind) for kind in ("attention", "dense", "shared", "experts")
        )


def test_a_config_json_says_how_it_is_stored(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "quantization_config": FP8,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape), encoding="utf-8")
    assert load_model(path).stored == WeightFormat("fp8", stored_weights(FP8, DENSE).number, "fp8", block=128)
    path.write_text(json.dumps(shape | {"quantization_config": {"quant_method": "x"}}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"quantization_config\.quant_method: 'x' is not supported"):
        load_model(path)
    path.write_text(
        json.dumps({key: it for key, it in shape.items() if key != "quantization_config"}), encoding="utf-8"
    )
    assert load_model(path).stored is None
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    stored = load_model(path).stored
    assert stored is not None and (stored.name, stored.kv_cache_dtype) == ("fp8", "fp8")


def test_engines_store_what_the_checkpoint_does_unless_a_key_says_otherwise() -> None:
    plain = replace(DENSE, stored=None)
    eight = replace(DENSE, stored=stored_weights(FP8 | {"ignore": ["self_attn"]}, DENSE))
    held = plain.device_parameters()
    matrices = {"attention": held.mixer, "dense": held.dense}
    saved = Quantization("bf16").weight_bytes(eight) - AS_STORED.weight_bytes(eight)
    assert saved == pytest.approx(matrices["dense"])  # attention keeps 16 bits
    assert Quantization("fp8").weight_bytes(eight) == AS_STORED.weight_bytes(eight)  # its own type
    assert Quantization("awq").weights(eight).name == "awq"
    assert AS_STORED.weight_bytes(plain) == Quantization("bf16").weight_bytes(eight)
    assert AS_STORED.note(plain) is None
    assert "in its checkpoint's format: fp8 (attention in 16 bits)" in (AS_STORED.note(eight) or "")
    assert "in bf16 (key quantization)" in (Quantization("bf16").note(eight) or "")


@pytest.mark.parametrize(
    ("width", "tp", "refused"),
    [(1536, 4, False), (1536, 8, True), (2048, 8, False), (2048, 16, False), (1408, 2, True)],
)
def test_tensor_parallelism_cuts_no_block(width: int, tp: int, refused: bool) -> None:
    experts = Experts(16, 2, width)
    model = reshaped(MOE, heads=128, kv_heads=16, head_dim=128, intermediate=0, experts=experts, sparse=4)
    model = replace(model, stored=stored_weights(FP8, model))
    found = AS_STORED.tp_refusal(model, tp)
    assert (found is not None) == refused
    if found is not None:
        assert found.startswith(f"weight_block_size is 128: tp {tp} cuts moe_intermediate_size {width:,}")
    assert AS_STORED.tp_refusal(model, tp, routed=False) is None
    assert Quantization("bf16").tp_refusal(model, tp) is None


def of_layers(name: str, algorithm: str, layers: range = range(4)) -> dict[str, dict[str, str]]:
    return {f"backbone.layers.{layer}.{name}": {"quant_algo": algorithm} for layer in layers}


def test_each_kind_of_matrix_may_have_a_type_of_its_own() -> None:
    layers = of_layers("mixer.q_proj", "FP8") | of_layers("mixer.o_proj", "FP8")
    layers |= of_layers("mlp.experts.0.up_proj", "NVFP4") | of_layers("mlp.experts.0.down_proj", "NVFP4")
    layers |= of_layers("mlp.experts.0.gate_proj", "NVFP4")
    found = stored_weights({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, MOE)
    assert found.bytes_of("experts") == 4.5 / 8
    assert found.bytes_of("attention") == pytest.approx(
        0.8 * 1 + 0.2 * 2
    )  # keys and values have a quarter of the heads
    assert (found.bytes_of("dense"), found.bytes_of("shared")) == (2, 2)
    assert (found.product_of("experts"), found.product_of("attention")) == ("fp4", "fp8")
    assert found.described.startswith("modelopt_mixed (attention of 8 bits; experts of 4 bits; ")


def test_modules_that_are_not_named_have_the_type_of_the_method_beside_them() -> None:
    layers = {f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4"} for layer in range(4)}
    found = stored_weights(FP8 | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, MOE)
    assert [found.bytes_of(kind) for kind in ("attention", "dense", "shared", "experts")] == [1, 1, 1, 4.5 / 8]
    assert stored_weights(FP8 | {"expert_dtype": "fp4"}, MOE).bytes_of("experts") == 4.25 / 8


def test_two_types_in_one_kind_have_no_price() -> None:
    layers = of_layers("self_attn.q_proj", "FP8") | of_layers("self_attn.o_proj", "NVFP4")
    with pytest.raises(
        ValueError, match="quantized_layers: attention matrices of more than one type are not supported"
    ):
        stored_weights({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, MOE)
    with pytest.raises(ValueError, match=r"expert_dtype: 'fp2' is not supported; known are fp4 and fp8"):
        stored_weights(FP8 | {"expert_dtype": "fp2"}, MOE)


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.layers.*.mlp.shared_experts*"],
        ["language_model.model.layers.*.mlp.shared_expert.*"],
        ["*.mlp.shared_experts.*"],
        ["re:.*shared_experts.*"],
        [f"model.language_model.layers.{layer}.block_sparse_moe.shared_experts" for layer in range(4)],
        [f"backbone.layers.{layer}.mixer.shared_experts.{it}" for layer in range(4) for it in ("w1", "w2", "w3")],
    ],
)
def test_publishers_name_modules_in_many_ways(patterns: list[str]) -> None:
    assert stored_weights(FP8 | {"ignore": patterns}, MOE).kept == KeptShares(shared=1)
