"""Shapes of models: counts against those of the published checkpoints, division against a list of all matrices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.reshaped import heads_of, reshaped
from tables import by_name

from libra.config.run import ConfigError
from libra.hardware.attention import Attention
from libra.hardware.decoder import decoder
from libra.hardware.latent import LatentAttention
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model, model_names

# Parameters of the checkpoints: their safetensors indices, and the Hugging Face classes built from the same shapes.
PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,  # without the module that predicts a second token
}

# In billions, as model cards and reports give them.
ACTIVE = {
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-30B-A3B": 3.35,
    "Qwen/Qwen3-235B-A22B": 22.2,
    "mistralai/Mixtral-8x7B-v0.1": 12.9,
    "mistralai/Mixtral-8x22B-v0.1": 39.15,
    "deepseek-ai/DeepSeek-V2-Lite": 2.66,
    "deepseek-ai/DeepSeek-V3": 37.55,
}


def test_the_library_is_what_is_published() -> None:
    assert set(model_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    model = load_model(name)
    assert (model.name, model.parameters) == (name, PUBLISHED[name])
    assert model.device_parameters().total == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_of_the_model_card(name: str) -> None:
    assert load_model(name).active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=3e-3)


# (rows, columns, how many devices of a tensor-parallel group divide it, what it is)
Matrix = tuple[int, int, int, str]


def matrices(model: ModelSpec, tp: int) -> Iterator[Matrix]:
    """Every tensor of the model, one by one."""
    h, mixer = model.hidden, model.kinds[0].mixer
    yield model.vocab, h, tp, "embedding"
    if not model.tied:
        yield model.vocab, h, tp, "head"
    yield 1, h, 1, "norm"
    for layer in range(model.layers):
        yield 2, h, 1, "norm"
        if isinstance(mixer, LatentAttention):
            m, n = mixer, mixer.heads
            if m.q_rank:
                yield h, m.q_rank, 1, "attention"
                yield 1, m.q_rank, 1, "norm"
            yield m.q_rank or h, n * (m.nope_dim + m.rope_dim), tp, "attention"
            yield h, m.kv_rank + m.rope_dim, 1, "attention"
            yield 1, m.kv_rank, 1, "norm"
            yield m.kv_rank, n * (m.nope_dim + m.value_dim), tp, "attention"
            yield n * m.value_dim, h, tp, "attention"
        else:
            assert isinstance(mixer, Attention)
            n, kv, d = mixer.heads, mixer.kv_heads, mixer.head_dim
            yield h, n * d, tp, "attention"
            for _ in "kv":
                yield h, kv * d, min(tp, kv), "attention"
            yield n * d, h, tp, "attention"
            if mixer.qkv_bias:
                yield 1, n * d, tp, "bias"
                yield 2, kv * d, min(tp, kv), "bias"
            if mixer.qk_norm == "head":
                yield 2, d, 1, "norm"
        if model.experts and layer >= model.dense_layers:
            e = model.experts
            yield h, e.count, 1, "router"
            for _ in range(3 * e.count):
                yield h, e.intermediate, tp, "expert"
            yield 3 * h, e.shared_intermediate, tp, "shared"
        else:
            yield 3 * h, model.intermediate, tp, "mlp"


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    layers, kv_heads = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4]))
    size = st.integers(1, 40)
    experts = sparse = latent = None
    heads = kv_heads * draw(st.sampled_from([1, 2, 8]))
    if draw(st.booleans()):
        count = draw(st.sampled_from([2, 4, 8]))
        experts = Experts(count, draw(st.integers(1, count)), draw(size), draw(st.integers(0, 9)))
        sparse = draw(st.integers(1, layers))
    if draw(st.booleans()):
        latent = LatentAttention(heads, draw(st.integers(0, 9)), draw(size), draw(size), draw(size), draw(size))
    return decoder(
        name="random",
        layers=layers,
        hidden=draw(size),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(size),
        intermediate=draw(size),
        vocab=draw(size),
        tied=draw(st.booleans()),
        max_context=128,
        qkv_bias=draw(st.booleans()) and latent is None,
        qk_norm=draw(st.booleans()) and latent is None,
        experts=experts,
        sparse=sparse,
        latent=latent,
    )


@settings(deadline=None)
@given(models())
def test_counts_are_the_sum_over_all_matrices(model: ModelSpec) -> None:
    sizes = [(rows * columns, kind) for rows, columns, _, kind in matrices(model, 1)]
    assert model.parameters == sum(size for size, _ in sizes)
    assert model.embedding_parameters == sum(size for size, kind in sizes if kind in ("embedding", "head"))
    routed = sum(size for size, kind in sizes if kind == "expert")
    idle = routed * (model.experts.count - model.experts.active) // model.experts.count if model.experts else 0
    assert model.active_parameters == model.parameters - idle


@settings(deadline=None)
@given(models(), st.sampled_from([1, 2, 4, 8]), st.data())
def test_a_device_holds_its_part_of_every_matrix(model: ModelSpec, tp: int, data: st.DataObject) -> None:
    if model.tp_refusal(tp):
        with pytest.raises(ValueError, match=f"tp is {tp}; it must divide the"):
            model.device_parameters(tp)
        return
    ep = data.draw(st.sampled_from([1, 2] if model.experts else [1]))
    held = sum(r * c / by / (ep if kind == "expert" else 1) for r, c, by, kind in matrices(model, tp))
    assert model.device_parameters(tp, ep=ep).total == pytest.approx(held, rel=1e-12)


@settings(deadline=None)
@given(models(), st.integers(1, 5))
def test_the_heaviest_stage_holds_no_less_than_its_share(model: ModelSpec, stages: int) -> None:
    if stages > model.layers:
        with pytest.raises(
            ValueError,
            match=f"pp is {stages}; set it to a number of pipeline stages from 1 to {model.layers}",
        ):
            model.device_parameters(pp=stages)
        return
    held = model.device_parameters(pp=stages).total
    assert model.parameters / stages <= held <= model.parameters


def test_pipeline_stages_of_a_real_model() -> None:
    model = load_model("Qwen/Qwen3-14B")
    layer = (model.parameters - model.embedding_parameters - model.hidden) // model.layers
    assert model.device_parameters(pp=4).total == model.vocab * model.hidden + model.hidden + 10 * layer
    assert model.device_parameters(pp=3).total == model.vocab * model.hidden + model.hidden + 14 * layer


@pytest.mark.parametrize(("name", "ep"), [("Qwen/Qwen3-30B-A3B", 3), ("Qwen/Qwen3-8B", 2), ("Qwen/Qwen3-8B", 0)])
def test_experts_are_divided_evenly(name: str, ep: int) -> None:
    with pytest.raises(ValueError, match=f"ep is {ep}; it must divide the"):
        load_model(name).device_parameters(ep=ep)


# name, tp -> bytes of one token on one device, bf16
KV = {
    ("Qwen/Qwen3-14B", 1): 163_840,
    ("Qwen/Qwen3-14B", 8): 20_480,
    ("Qwen/Qwen3-8B", 16): 18_432,  # 8 KV heads: 16 devices hold each of them twice
    ("Qwen/Qwen3-30B-A3B", 8): 24_576,  # 4 KV heads
    ("meta-llama/Llama-3.1-8B", 1): 131_072,
    ("deepseek-ai/DeepSeek-V3", 1): 70_272,  # 70 KB, arXiv 2412.19437 and 2505.09343, table 1
    ("deepseek-ai/DeepSeek-V3", 8): 70_272,
}


@pytest.mark.parametrize(("name", "tp"), KV)
def test_kv_bytes(name: str, tp: int) -> None:
    assert load_model(name).kv_bytes_per_token(2, tp) == KV[name, tp]


def test_flops_of_a_causal_sequence() -> None:
    model, n = load_model("Qwen/Qwen3-8B"), 1000
    linear = sum(2 * n * r * c for r, c, _, kind in matrices(model, 1) if kind not in ("embedding", "norm"))
    each = model.layers * heads_of(model).heads * 2 * 2 * heads_of(model).head_dim
    attention = sum(each * keys for keys in range(1, n + 1))
    assert model.forward_flops(n, n * (n + 1) / 2) == pytest.approx(linear + attention, rel=1e-4)


def test_flops_of_a_tied_head_and_of_experts() -> None:
    tied = load_model("Qwen/Qwen3-0.6B")
    assert tied.forward_flops(1, 0) == pytest.approx(2 * tied.parameters)  # the embedding is the head
    sparse = load_model("Qwen/Qwen3-30B-A3B")
    assert sparse.forward_flops(1, 0) == 2 * (sparse.active_parameters - sparse.vocab * sparse.hidden)


def test_flops_of_latent_attention() -> None:
    model = load_model("deepseek-ai/DeepSeek-V3")
    keys = model.forward_flops(0, 10)
    assert keys == 61 * 128 * 10 * 2 * (192 + 128)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"layers": 0}, "layers is 0; set it to 1 or more"),
    ({"hidden": -1}, "hidden is -1"),
    ({"kv_heads": 3}, "kv_heads is 3; it must divide the 40 heads"),
    ({"intermediate": 0}, "intermediate is 0; set it to 1 or more"),
    ({"experts": Experts(8, 2, 64), "sparse": 41}, "sparse is 41, but there are 40 layers"),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE)
def test_an_impossible_shape_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reshaped(load_model("Qwen/Qwen3-14B"), **changes)


def test_more_active_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match="active is 9, but there are 8 experts"):
        Experts(count=8, active=9, intermediate=64, shared_intermediate=0)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-14B", "qwen/qwen3-14b", "Qwen3-14B", "QWEN3-14B"])
def test_a_model_is_found_by_its_name_in_any_case(name: str) -> None:
    assert load_model(name).name == "Qwen/Qwen3-14B"


def config(name: str = "Qwen/Qwen3-14B", **changes: object) -> dict[str, Any]:
    """A published config.json; `changes` replace its fields, or remove them where they are None."""
    source = Path(__file__).parents[2] / "src" / "libra" / "hardware" / "models" / f"{name.replace('/', '--')}.json"
    data = {**json.loads(source.read_text()), **changes}
    return {key: value for key, value in data.items() if value is not None or key not in changes}


def write(directory: Path, data: object) -> Path:
    path = directory / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_file_or_its_directory_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    path = write(directory, config(torch_dtype="bfloat16", rope_scaling=None, architectures=["Qwen3ForCausalLM"]))
    assert load_model(path) == load_model(directory) == load_model(str(directory))
    assert load_model(path) == replace(load_model("Qwen/Qwen3-14B"), name="mine")


SHAPES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("by architecture", config(model_type=None, architectures=["Qwen3ForCausalLM"]), {"qk_norm": "head", "layers": 40}),
    ("own head_dim", config("Qwen/Qwen3-0.6B"), {"head_dim": 128, "hidden": 1024, "heads": 16}),
    ("head_dim by division", config("Qwen/Qwen2.5-7B"), {"head_dim": 128, "qkv_bias": True, "qk_norm": "none"}),
    ("head_dim null", {**config("Qwen/Qwen2.5-7B"), "head_dim": None}, {"head_dim": 128}),
    ("head_dim given", config("meta-llama/Llama-3.1-8B", head_dim=64), {"head_dim": 64, "qkv_bias": False}),
    ("untied unless it says so", config(tie_word_embeddings=None), {"tied": False}),
    (
        "glm4_moe",
        config(
            "Qwen/Qwen3-30B-A3B",
            model_type="glm4_moe",
            architectures=["Glm4MoeForCausalLM"],
            num_hidden_layers=92,
            hidden_size=5120,
            num_attention_heads=96,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            num_experts_per_tok=8,
            n_shared_experts=1,
            first_k_dense_replace=3,
            vocab_size=151552,
            attention_bias=True,
            use_qk_norm=True,
        ),
        {"experts": Experts(160, 8, 1536, 1536), "sparse_layers": 89, "qkv_bias": True, "qk_norm": "head",
         "parameters": 352_797_814_784},
    ),
    ("mistral", config("meta-llama/Llama-3.1-8B", model_type="mistral"), {"experts": None, "head_dim": 128}),
    ("window that is off", config("Qwen/Qwen2.5-7B", sliding_window=131072), {"max_context": 131072}),
    ("full layers", config(layer_types=["full_attention"] * 40), {"layers": 40}),
    ("every other layer has experts", config("Qwen/Qwen3-30B-A3B", decoder_sparse_step=2),
     {"experts": Experts(128, 8, 768), "sparse_layers": 24, "intermediate": 6144}),
    ("some layers have none", config("Qwen/Qwen3-30B-A3B", mlp_only_layers=[0, 47]),
     {"experts": Experts(128, 8, 768), "sparse_layers": 46, "intermediate": 6144}),
    ("a layer without experts either way",
     config("Qwen/Qwen3-30B-A3B", decoder_sparse_step=2, mlp_only_layers=[1, 2, 3]),
     {"experts": Experts(128, 8, 768), "sparse_layers": 22}),
    ("no layer has experts", config("Qwen/Qwen3-30B-A3B", mlp_only_layers=list(range(48))), {"experts": None}),
    ("all layers have experts", config("mistralai/Mixtral-8x7B-v0.1"), {"intermediate": 0}),
    ("deepseek without compressed queries", config("deepseek-ai/DeepSeek-V2-Lite"),
     {"mixer": LatentAttention(16, 0, 512, 128, 64, 128), "experts": Experts(64, 6, 1408, 2816), "sparse_layers": 26}),
    ("dense deepseek", config("deepseek-ai/DeepSeek-V2-Lite", first_k_dense_replace=27), {"experts": None}),
    ("no shared expert", config("deepseek-ai/DeepSeek-V3", n_shared_experts=None),
     {"experts": Experts(256, 8, 2048, 0, 8, 4), "sparse_layers": 58}),
]  # fmt: skip


@by_name("data, fields", SHAPES)
def test_what_a_configuration_says(tmp_path: Path, data: dict[str, Any], fields: dict[str, Any]) -> None:
    model = load_model(write(tmp_path, data))
    mixer = model.kinds[0].mixer
    of_mixer = {"mixer": mixer} | {it: getattr(mixer, it, None) for it in ("heads", "head_dim", "qkv_bias", "qk_norm")}
    assert {field: of_mixer[field] if field in of_mixer else getattr(model, field) for field in fields} == fields


REFUSED: list[tuple[str, object, str]] = [
    ("other family", config(model_type="rwkv7"), "model_type: unknown architecture 'rwkv7'; known are afmoe, "),
    ("near family", config(model_type="qwen3_mo"), "model_type: unknown architecture 'qwen3_mo'; did you mean qwen3_m"),
    ("no family", config(model_type=None), "model_type: this field is required; add it"),
    ("family that is no text", config(model_type=7), "model_type: expected a name (got 7)"),
    ("other class", config(model_type=None, architectures=["Qwen3MoeForCausalML"]),
     "did you mean Qwen3MoeForCausalLM?"),
    ("a reward model", config(architectures=["Qwen3ForSequenceClassification"]), "architectures: 'Qwen3ForSequence"),
    ("no layers", config(num_hidden_layers=None), "num_hidden_layers: this field is required; add it"),
    ("no head_dim", config(head_dim=None), "head_dim: this field is required; add it"),
    ("no vocabulary", config(vocab_size=None), "vocab_size: this field is required; add it"),
    ("no limit", config(max_position_embeddings=None), "max_position_embeddings: this field is required"),
    ("no experts", config("mistralai/Mixtral-8x7B-v0.1", num_local_experts=None), "num_local_experts: this field is"),
    ("no width", config("Qwen/Qwen3-30B-A3B", moe_intermediate_size=None), "moe_intermediate_size: this field is"),
    ("no rank", config("deepseek-ai/DeepSeek-V3", kv_lora_rank=None), "kv_lora_rank: this field is required"),
    ("no first layer", config("deepseek-ai/DeepSeek-V3", first_k_dense_replace=None),
     "first_k_dense_replace: this field"),
    ("heads that do not divide", config("Qwen/Qwen2.5-7B", num_attention_heads=30, num_key_value_heads=6),
     "head_dim: this field is required, since"),
    ("negative", config(hidden_size=-5120), "hidden_size: expected a whole number of 1 or more (got -5120)"),
    ("fraction", config(hidden_size=5120.0), "hidden_size: expected a whole number of 1 or more (got 5120.0)"),
    ("true", config(hidden_size=True), "hidden_size: expected a whole number of 1 or more (got True)"),
    ("tied to a number", config(tie_word_embeddings=1), "tie_word_embeddings: expected true or false (got 1)"),
    ("KV heads", config(num_key_value_heads=7), "num_key_value_heads: kv_heads is 7; it must divide the 40 heads"),
    ("no width of windows", config(use_sliding_window=True), "sliding_window: this field is required; add it"),
    ("windows without a width", config(layer_types=["sliding_attention"] * 40), "sliding_window: layer_types names wi"),
    ("few layer types", config(layer_types=["full_attention"]), "layer_types: expected an entry for each of 40 layers"),
    ("unknown layer", config("meta-llama/Llama-3.1-8B", layer_types=["rwkv"] * 32), "layer_types: 'rwkv' is not"),
    ("lightning", config("Qwen/Qwen3-8B", model_type="minimax_m2", num_local_experts=8, num_experts_per_tok=2,
                         attn_type_list=[0] * 36), "attn_type_list: lightning attention is not supported"),
    ("no experts in Llama 4", config("Qwen/Qwen3-8B", model_type="llama4_text"), "num_local_experts: this field is"),
    ("a pattern of letters", config("Qwen/Qwen3-8B", model_type="nemotron_h", hybrid_override_pattern="MX"),
     "hybrid_override_pattern: expected a text of M * - E (got 'MX')"),
    ("ratio", config("Qwen/Qwen3-8B", model_type="deepseek_v4", compress_ratios=[7] * 36), "compress_ratios: 7 is not"),
    ("wrapped", {"model_type": "qwen3_vl", "text_config": config("Qwen/Qwen3-8B", hidden_size=None)},
     "text_config.hidden_size: this field is required; add it"),
    ("dense layer too far", config("Qwen/Qwen3-30B-A3B", mlp_only_layers=[48]), "mlp_only_layers: expected a list of"),
    ("some layers", config("deepseek-ai/DeepSeek-V3", moe_layer_freq=2), "moe_layer_freq: only 1 is known"),
    ("a list", [], "expected a JSON object, the config.json of a model"),
    ("not JSON", "{", "not JSON: "),
]  # fmt: skip


@by_name("data, message", REFUSED)
def test_a_configuration_that_is_not_understood_is_refused_by_field(tmp_path: Path, data: object, message: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(ConfigError) as refusal:
        load_model(path)
    text = str(refusal.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwne3-14B", "Qwen/Qwen3-14B"),
        ("Llama-3.1-405B-Instruct", None),
        ("Llama-3.3-8B-Instruct", None),
        ("Qwen3-1.7", "Qwen/Qwen3-1.7B"),
        ("Qwen3-17B", None),
        ("Qwen3-235B-A3B", None),
    ],
)
def test_no_model_of_another_size_or_version_is_suggested(given: str, suggested: str | None) -> None:
    hint = "known are" if suggested is None else re.escape(f"did you mean {suggested}? Known are ")
    with pytest.raises(
        ConfigError, match=f"no such file or known model; {hint}.*for another model, give its config.json"
    ):
        load_model(given)


def test_what_is_neither_file_nor_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'Qwen/Qwen3-13B': no such file or known model; known are Qwen/Qwen2.5-"):
        load_model("Qwen/Qwen3-13B")
    with pytest.raises(ConfigError, match="for another model, give its config"):
        load_model("some/thing-else")
    with pytest.raises(ConfigError, match="No such file or directory: give an existing config"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="No such file or directory: give an existing config"):
        load_model(tmp_path / "none.json")
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 0\)"):
        load_model(tmp_path)
