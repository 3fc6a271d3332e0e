"""Bytes of quantised weights and KV, against sums over a model's matrices; what they do to memory and times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.reshaped import reshaped

from libra.config.recipe import Recipe
from libra.cost.engine_memory import held_bytes, kv_tokens
from libra.cost.quantization import AS_STORED, KV_FORMATS, WEIGHT_FORMATS, Quantization, rollout_quantization
from libra.cost.sources.expert_grids import expert_grid
from libra.cost.sources.roofline import roofline
from libra.cost.transfer import fabric
from libra.hardware.attention import Attention
from libra.hardware.cluster import GPUS, NodeClass
from libra.hardware.decoder import decoder
from libra.hardware.latent import LatentAttention
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec

DENSE = decoder("dense", 12, 1024, 16, 4, 64, 4096, 32000, False, 40960)
MOE = decoder("moe", 12, 1024, 16, 4, 64, 4096, 32000, True, 40960, experts=Experts(16, 2, 512, 256), sparse=10)
LATENT = reshaped(MOE, name="latent", latent=LatentAttention(16, 0, 128, 64, 32, 64))
# Bytes of a number, written out: scales of 16 bits or 8 for so many numbers, a zero point of 4 bits in AWQ.
WEIGHTS = {
    None: 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "awq": 0.5 + 2.5 / 128,
    "gptq": 0.5 + 2 / 128,
    "modelopt_fp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}
KV = {"auto": 2.0, "bfloat16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "nvfp4": 0.5 + 1 / 16}

models = st.sampled_from([DENSE, MOE, LATENT])
quantizations = st.builds(Quantization, st.sampled_from([*WEIGHTS]), st.sampled_from([*KV]))


def test_every_format_is_in_the_oracle() -> None:
    assert WEIGHT_FORMATS.keys() == WEIGHTS.keys() - {None}
    assert KV_FORMATS.keys() == KV.keys()


def matrices(model: ModelSpec, tp: int) -> tuple[float, float]:
    """Numbers of a device in matrices of layers: those that all tokens take, and those of routed experts."""
    mixer = model.kinds[0].mixer
    assert isinstance(mixer, Attention | LatentAttention)
    heads = mixer.heads / tp
    if isinstance(mixer, Attention):
        attention = 2 * model.hidden * heads * mixer.head_dim
        attention += 2 * model.hidden * max(1, mixer.kv_heads / tp) * mixer.head_dim
    else:
        attention = model.hidden * heads * (mixer.nope_dim + mixer.rope_dim)
        attention += model.hidden * (mixer.kv_rank + mixer.rope_dim)
        attention += mixer.kv_rank * heads * (mixer.nope_dim + mixer.value_dim)
        attention += heads * mixer.value_dim * model.hidden
    dense = model.dense_layers * 3 * model.hidden * model.intermediate / tp
    if model.experts is None:
        return model.layers * attention + dense, 0
    experts = model.experts
    shared = model.sparse_layers * 3 * model.hidden * experts.shared_intermediate / tp
    routed = model.sparse_layers * experts.count * 3 * model.hidden * experts.intermediate / tp
    return model.layers * attention + dense + shared, routed


@given(models, quantizations, st.sampled_from([1, 2, 4, 8]))
def test_bytes_are_those_of_the_matrices_and_of_the_rest_in_16_bits(
    model: ModelSpec, stored: Quantization, tp: int
) -> None:
    always, routed = matrices(model, tp)
    rest = 2 * (model.device_parameters(tp).total - always - routed)
    of_all = 2.0 if stored.quantization == "mxfp4" else WEIGHTS[stored.quantization]
    expected = rest + of_all * always + WEIGHTS[stored.quantization] * routed
    assert stored.weight_bytes(model, tp) == pytest.approx(expected, rel=1e-4)  # norms inside attention
    if tp == 1:
        assert stored.version_bytes(model) == pytest.approx(expected, rel=1e-4)


@given(models, quantizations, st.sampled_from([1, 2, 4, 8]))
def test_kv_is_so_many_elements(model: ModelSpec, stored: Quantization, tp: int) -> None:
    mixer = model.kinds[0].mixer
    elements = 2 * max(1, mixer.kv_heads / tp) * mixer.head_dim if isinstance(mixer, Attention) else 128 + 32
    assert stored.kv_bytes_per_token(model, tp) == model.layers * elements * KV[stored.kv_cache_dtype]


@given(models, quantizations, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.floats(2e9, 90e9))
def test_a_quantised_engine_never_needs_more_memory(
    model: ModelSpec, stored: Quantization, tp: int, pp: int, memory: float
) -> None:
    shape = {"batched_tokens": 2048, "pp": pp}
    assert held_bytes(model, tp, quantization=stored, **shape) <= held_bytes(model, tp, **shape)
    room = kv_tokens(model, memory, 0.9, tp, quantization=stored, **shape)
    assert room >= kv_tokens(model, memory, 0.9, tp, **shape)


@given(models, quantizations, st.sampled_from([*GPUS.values()]))
def test_a_quantised_engine_is_never_slower(model: ModelSpec, stored: Quantization, gpu: object) -> None:
    grid, plain = (roofline(gpu, model, [2], quantization=it).grid(2) for it in (stored, AS_STORED))  # type: ignore[arg-type]
    for batch, context in ((1, 256), (64, 4096), (256, 32768)):
        assert grid.decode_seconds(batch, context) <= plain.decode_seconds(batch, context)
    assert grid.prefill_seconds(8192, 0) <= plain.prefill_seconds(8192, 0)


@pytest.mark.parametrize(
    ("gpu", "weights", "times"),
    [
        ("H100", "fp8", 2),
        ("L40S", "fp8", 2),
        ("A100", "fp8", 1),  # no such tensor cores
        ("H100", "awq", 1),  # weights only
        ("H100", "modelopt_fp4", 1),
        ("B200", "modelopt_fp4", 4),
    ],
)
def test_products_are_faster_only_where_tensor_cores_multiply_such_numbers(gpu: str, weights: str, times: int) -> None:
    assert Quantization(weights).faster(GPUS[gpu], DENSE, "dense") == times
    narrow, plain = (roofline(GPUS[gpu], DENSE, [1], quantization=it) for it in (Quantization(weights), AS_STORED))
    ratio = plain.grid(1).prefill_seconds(16384, 0) / narrow.grid(1).prefill_seconds(16384, 0)
    assert (ratio > 1.2) == (times > 1)
    # A decode step of one sequence reads weights, whatever multiplies them.
    assert narrow.grid(1).decode_seconds(1, 256) < plain.grid(1).decode_seconds(1, 256)


def test_experts_move_with_their_scales_and_activations_in_16_bits() -> None:
    gpu = GPUS["H200"]
    nodes = fabric(NodeClass("n", 1, 8, gpu, intra_bandwidth=gpu.link, inter_bandwidth=50e9))
    grids = [
        expert_grid(gpu, MOE, 1, 8, "deepep_low_latency", nodes, source="roofline", quantization=it)
        for it in (Quantization("mxfp4"), AS_STORED)
    ]
    assert grids[0].expert_bytes == pytest.approx((0.5 + 1 / 32) * 3 * 1024 * 512)
    assert grids[0].exchange == grids[1].exchange
    assert grids[0].experts[0] < grids[1].experts[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("int3", "auto"), "quantization: unknown quantization 'int3'; known are awq, bf16, fp8"),
        (("fp7", "auto"), "quantization: unknown quantization 'fp7'; did you mean fp8?"),
        ((None, "fp4"), "kv_cache_dtype: unknown type 'fp4'; did you mean"),
    ],
)
def test_names_that_vllm_does_not_have_are_refused(given: tuple[str | None, str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        Quantization(*given)


def test_what_a_model_cannot_be_stored_in_is_said() -> None:
    refused = Quantization("mxfp4").refusal(DENSE)
    assert refused is not None and refused.startswith("quantization is mxfp4, which is for routed experts")
    assert Quantization("mxfp4").refusal(MOE) is None
    assert "latent vectors" in (Quantization(None, "nvfp4").refusal(LATENT) or "")


def test_a_recipe_says_how_engines_store_numbers() -> None:
    recipe = Recipe(batch=8, samples_per_prompt=8, max_length=64)
    assert (
        rollout_quantization(recipe) == AS_STORED == rollout_quantization(recipe.model_copy(update={"dtype": "fp16"}))
    )
    assert "kv_cache_dtype" not in recipe.model_dump()
    narrow = Recipe(batch=8, samples_per_prompt=8, max_length=64, rollout_dtype="fp8", kv_cache_dtype="fp8")
    assert rollout_quantization(narrow) == Quantization("fp8", "fp8")
    assert narrow.model_dump()["kv_cache_dtype"] == "fp8"
