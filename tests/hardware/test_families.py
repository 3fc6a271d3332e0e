"""Families: parameters are those of Transformers' classes, and no changed configuration gives a traceback."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
from oracles.changed_configs import changed
from oracles.family_configs import ALL, CONFIGS

from libra.config.yaml_file import ConfigError
from libra.hardware.context import Reach
from libra.hardware.families.known import FAMILIES
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from tests.oracles.transformers_class import made_parameters


def read(directory: Path, data: object) -> tuple[ModelSpec, list[str]]:
    path, notes = directory / "config.json", []
    path.write_text(json.dumps(data))
    return load_model(path, notes.append), notes


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_class(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    made = made_parameters(copy.deepcopy(CONFIGS[name]))
    if made is None:
        pytest.skip("the installed Transformers has no class of it")
    model, notes = read(tmp_path, CONFIGS[name])
    assert model.parameters == made
    assert not [note for note in notes if "not read" in note]


def test_a_layer_of_longcat_is_two_with_attention_and_experts_beside_them(tmp_path: Path) -> None:
    model, _ = read(tmp_path, ALL["longcat_flash"])
    assert model.layers == 2 * 3 and model.sparse_layers == 2
    assert model.experts is not None
    assert (model.experts.count, model.experts.active) == (8, 2)  # of three, one in three computes nothing
    assert model.kv_bytes_per_token(2) == 2 * 2 * (48 + 8) * 2
    router = 64 * (8 + 4)
    beside = 8 * 3 * 64 * 40 + router
    attending = 64 * 32 + 32 * 4 * 24 + 64 * (48 + 8) + 48 * 4 * (16 + 24) + 4 * 24 * 64 + 32 + 48
    each = attending + 3 * 64 * 96 + 2 * 64
    assert model.parameters == 2 * 200 * 64 + 64 + 2 * (2 * each + beside)


def test_every_family_is_tried() -> None:
    tried = {config["model_type"] for config in ALL.values()}
    tried |= {config["text_config"]["model_type"] for config in ALL.values() if "text_config" in config}
    same = {"ministral3", "qwen2_vl_text", "qwen2_5_vl_text", "minimax_m3", "step3p7", "deepseek_ref"}  # as another one
    same |= {"bailing_moe", "minimax_text_01", "minimax_m1", "qwen3_omni_moe_text", "qwen2_5_omni_text"}
    assert set(FAMILIES) - same <= tried


def test_the_docs_name_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert not [name for name in FAMILIES if f"`{name}`" not in page]


@pytest.mark.parametrize("name", ALL)
def test_the_arithmetic_holds(tmp_path: Path, name: str) -> None:
    model, _ = read(tmp_path, ALL[name])
    assert model.parameters == model.device_parameters().total
    assert 0 < model.active_parameters <= model.trained_parameters
    lengths = (1, 100, 1000, 4000)
    held = [model.kv_bytes(length, 2) for length in lengths]
    assert held == sorted(held)
    per_token = [model.kv_bytes_per_token(2, context=length) for length in lengths]
    assert per_token == sorted(per_token, reverse=True)  # a mean length never takes less than its sequences
    flops = model.forward_flops(1000, 500_500)
    assert 2 * 1000 * (model.active_parameters - model.embedding_parameters) < flops
    assert flops <= model.forward_flops(1000, 500_500 * 2)
    if not model.tp_refusal(2):
        assert model.device_parameters(2).total < model.parameters


REACHES: list[tuple[str, list[int]]] = [
    ("mistral", [128] * 4),
    ("gpt_oss", [64, 0, 64, 0]),
    ("gemma3_text", [64, 64, 64, 64, 64, 0, 64]),
    ("exaone4", [64, 64, 64, 0]),
    ("llama4_text", [64, 64, 64, 0]),
    ("mimo_v2_flash", [0, 64, 64, 64]),
]


@pytest.mark.parametrize(("name", "tokens"), REACHES)
def test_windows_are_where_the_configuration_has_them(tmp_path: Path, name: str, tokens: list[int]) -> None:
    model, _ = read(tmp_path, ALL[name])
    found = [getattr(model.kinds[index].mixer, "reach", Reach()) for index in model.order]
    assert [it.tokens for it in found] == tokens
    assert all(it.chunked == (name == "llama4_text" and it.tokens > 0) for it in found)


def test_a_field_that_changes_a_shape_and_is_not_read_is_told(tmp_path: Path) -> None:
    _, notes = read(tmp_path, CONFIGS["qwen3"] | {"side_network_dim": 7, "num_side_heads": 3, "comment": "none"})
    assert notes == [
        f"{tmp_path.name}: fields not read: side_network_dim, num_side_heads; "
        "compare the number of parameters: these may change the shape"
    ]
    without = {key: value for key, value in CONFIGS["gemma3_text"].items() if key != "head_dim"}
    _, notes = read(tmp_path, without)
    assert notes == [f"{tmp_path.name}: absent fields, with assumed values: head_dim 256"]
    _, notes = read(tmp_path, {key: it for key, it in CONFIGS["qwen3"].items() if key != "num_key_value_heads"})
    assert notes == [
        f"{tmp_path.name}: absent fields, with assumed values: num_key_value_heads"
        f" {CONFIGS['qwen3']['num_attention_heads']}"
    ]


SHAPES = [
    "llama",
    "mistral",
    "qwen2",
    "deepseek_v3",
    "deepseek_v32",
    "qwen3_moe",
    "solar_open",
    "nemotron_h",
    "qwen3_next",
]


@pytest.mark.parametrize("name", SHAPES)
def test_an_unknown_family_is_read_by_its_fields(tmp_path: Path, name: str) -> None:
    known, _ = read(tmp_path, ALL[name])
    new = ALL[name] | {"model_type": "apple_pie", "hidden_act": "silu"}
    model, notes = read(tmp_path, new)
    assert model.parameters == pytest.approx(known.parameters, rel=0.01)
    assert model.kv_bytes(1000, 2) == known.kv_bytes(1000, 2)
    assert notes[0].endswith("the family apple_pie is unknown: read by its fields; norms and biases may be missing")
    with pytest.raises(
        ConfigError,
        match="num_side_heads: this field may change the shape, but its meaning in an unknown family is unclear",
    ):
        read(tmp_path, new | {"num_side_heads": 3})
    with pytest.raises(ConfigError, match="model_type: unknown architecture 'apple_pie'"):
        read(tmp_path, new | {"hidden_act": "relu2"})


def test_an_unknown_tower_is_told_and_left_out(tmp_path: Path) -> None:
    data = copy.deepcopy(CONFIGS["qwen3_vl"])
    data["vision_config"] = {"model_type": "new_tower"}
    data["model_type"] = "qwen3_vl_next"
    model, notes = read(tmp_path, data)
    assert model.tower == 0
    assert notes == [
        f"{tmp_path.name}: vision_config.model_type: new_tower is unknown; parameters of the vision tower are not"
        " counted"
    ]


@pytest.mark.parametrize("seed", range(10))
def test_a_changed_configuration_is_read_or_refused_in_a_line(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        data = changed(draw, ALL[draw.choice(list(ALL))])
        try:
            model, _ = read(tmp_path, data)
        except ConfigError as refusal:
            assert "\n" not in str(refusal)
            assert ": " in str(refusal).removeprefix(f"{tmp_path / 'config.json'}: ")
            continue
        model.forward_flops(10, 50)
        assert model.kv_bytes(100, 2) >= 0
        assert model.parameters > 0


@pytest.mark.parametrize(
    ("name", "change", "refusal"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok: active is 7, but there are 4 experts; lower it"),
        (
            "mistral4",
            {"n_group": 7},
            "n_group: groups is 7 and active_groups 1; set groups to a divisor of the 8 experts",
        ),
        (
            "olmo_hybrid",
            {"linear_num_key_heads": 7},
            "linear_num_key_heads: key_heads is 7; it must divide",
        ),
    ],
)
def test_what_a_part_of_a_layer_refuses_names_the_field(
    tmp_path: Path, name: str, change: dict[str, int], refusal: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, ALL[name] | change)
    assert str(error.value).removeprefix(f"{tmp_path / 'config.json'}: ").startswith(refusal)
