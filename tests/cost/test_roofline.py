"""Rooflines against kernels worked out by hand, and against what a layout may and may not change."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from oracles.reshaped import reshaped

from libra.config.yaml_file import ConfigError
from libra.cost.quantization import AS_STORED, Quantization
from libra.cost.sources.files import load_calibration, save_calibration
from libra.cost.sources.layer_kernels import all_reduce_seconds
from libra.cost.sources.rates import Calibration, Measured, Rates, rates
from libra.cost.sources.roofline import roofline
from libra.hardware.cluster import GPU, GPUS
from libra.hardware.decoder import decoder
from libra.hardware.latent import LatentAttention
from libra.hardware.mlp import Experts

QWEN_14B = decoder("14b", 40, 5120, 40, 8, 128, 17408, 151936, False, 40960, qk_norm=True)
QWEN_30B = decoder("30b", 48, 2048, 32, 4, 128, 0, 151936, False, 40960, experts=Experts(128, 8, 768, 0), sparse=48)
DEEPSEEK = decoder(
    name="v2-lite",
    layers=27,
    hidden=2048,
    heads=16,
    kv_heads=16,
    head_dim=192,
    intermediate=10944,
    vocab=102400,
    tied=False,
    max_context=32768,
    experts=Experts(64, 6, 1408, 2816),
    sparse=26,
    latent=LatentAttention(16, 0, 512, 128, 64, 128),
)
A100 = GPUS["A100"]
MEASURED = Measured(1.0, 0.1)
CALIBRATION = Calibration(
    device="NVIDIA A100-SXM4-80GB",
    torch="2.13.0",
    date="2026-11-20",
    dtype="bfloat16",
    linear_flops=Measured(2e14, 0.01),
    bandwidth=Measured(1e12, 0.02),
    linear_launch=Measured(7e-6, 0.3),
    attention_flops=Measured(1e14, 0.01),
    attention_launch=Measured(3e-5, 0.01),
    cache_bandwidth=Measured(1.1e12, 0.01),
    decode_launch=Measured(1e-5, 0.01),
    training_flops=Measured(1.56e14, 0.02),
    training_parameters=1_000_000_000,
)


def test_one_sequence_reads_weights_and_cache_once() -> None:
    r = rates(A100)
    grid = roofline(A100, QWEN_14B, [1]).grid(1)
    layer = 5120 * (40 + 2 * 8) * 128 + 40 * 128 * 5120 + 3 * 5120 * 17408
    weights = 2 * (40 * layer + 5120 * 151936) / r.bandwidth
    cache = 40 * 8192 * 2 * 8 * 128 * 2 / r.cache_bandwidth
    fixed = 40 * (4 * r.linear_launch + 3 * r.pass_launch + r.decode_launch) + r.linear_launch
    assert grid.decode_seconds(1, 8192) == pytest.approx(weights + cache + fixed, rel=5e-3)  # activations are the rest


def test_a_full_chunk_runs_at_the_rate_of_arithmetic() -> None:
    r = rates(A100)
    grid = roofline(A100, QWEN_14B, [1]).grid(1)
    layer = 5120 * (40 + 2 * 8) * 128 + 40 * 128 * 5120 + 3 * 5120 * 17408
    linear = 40 * 2 * 8192 * layer / r.linear_flops
    attention = 40 * 4 * 40 * 128 * 8192 * (4096 + 4096) / r.attention_flops
    passes = 40 * 2 * 8192 * (2 * 4 * 5120 + 3 * 17408) / r.bandwidth
    assert grid.prefill_seconds(8192, 4096) == pytest.approx(linear + attention + passes, rel=1e-2)


def test_weights_and_cache_are_divided_by_the_degree_once() -> None:
    """Without fixed times and links, tp 2 would take half of tp 1 but for norms, which every GPU does in full."""
    r = rates(A100)
    one, two = roofline(A100, QWEN_14B, [1, 2], intra_bandwidth=1e30).engines
    fixed = 40 * (4 * r.linear_launch + 3 * r.pass_launch + r.decode_launch) + r.linear_launch
    links = 2 * 40 * (r.link_latency + r.peer_latency)
    alone = one.decode_seconds(1, 32768) - fixed
    assert two.decode_seconds(1, 32768) - fixed - links == pytest.approx(alone / 2, rel=2e-3)


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    r = rates(A100)
    eight, sixteen = roofline(A100, reshaped(QWEN_14B, heads=48, intermediate=16384), [8, 16]).engines
    read = 40 * 2 * 128 * 2 / r.cache_bandwidth  # of one head, all layers, one token
    for grid in (eight, sixteen):
        more = grid.decode_seconds(64, 65536) - grid.decode_seconds(64, 32768)
        assert more == pytest.approx(64 * 32768 * read)


def test_latent_vectors_are_read_whole_on_every_gpu() -> None:
    r = rates(GPUS["H100"])
    one, four = roofline(GPUS["H100"], DEEPSEEK, [1, 4]).engines
    for grid in (one, four):
        more = grid.decode_seconds(64, 65536) - grid.decode_seconds(64, 32768)
        assert more == pytest.approx(27 * 64 * 32768 * (512 + 64) * 2 / r.cache_bandwidth)


def test_many_heads_over_one_latent_vector_are_bound_by_arithmetic() -> None:
    r = rates(A100)
    wide = reshaped(DEEPSEEK, heads=128)
    (grid,) = roofline(A100, wide, [1]).engines
    more = grid.decode_seconds(64, 65536) - grid.decode_seconds(64, 32768)
    assert more == pytest.approx(27 * 64 * 32768 * 128 * 2 * (512 + 64 + 512) / r.linear_flops)


def test_cached_latent_vectors_are_decompressed_for_every_chunk() -> None:
    r = rates(A100)
    (grid,) = roofline(A100, DEEPSEEK, [1]).engines
    pairs = 16 * 2 * (128 + 64 + 128) * 64 * 65536 / r.attention_flops
    up = 2 * 65536 * 512 * 16 * (128 + 128) / r.linear_flops
    more = grid.prefill_seconds(64, 131072) - grid.prefill_seconds(64, 65536)
    assert more == pytest.approx(27 * (pairs + up), rel=1e-2)


@pytest.mark.parametrize("batch", [1, 32, 512])
def test_experts_are_read_as_far_as_tokens_touch_them(batch: int) -> None:
    """The same model with one layer's experts fewer: the difference is the price of one layer of experts."""
    r = rates(A100)
    assert QWEN_30B.experts is not None
    fewer = reshaped(QWEN_30B, sparse=47, intermediate=8)
    seconds, less = (roofline(A100, m, [1]).grid(1).decode_seconds(batch, 256) for m in (QWEN_30B, fewer))
    touched = 128 * (1 - (15 / 16) ** batch)
    weights = 2 * 2048 * (touched * 3 * 768 + 128) / r.bandwidth
    assert seconds - less == pytest.approx(weights + r.linear_launch, rel=0.12)  # the rest is a dense layer of width 8


@pytest.mark.parametrize("tp", [1, 4])
def test_a_full_chunk_of_experts_is_gathered_multiplied_and_summed(tp: int) -> None:
    """Every GPU moves all routed tokens twice, in and out; the products are divided."""
    r = rates(A100)
    assert QWEN_30B.experts is not None
    fewer = reshaped(QWEN_30B, sparse=47, intermediate=8)
    seconds, less = (roofline(A100, m, [tp]).grid(tp).prefill_seconds(16384, 0) for m in (QWEN_30B, fewer))
    routed = 16384 * 8
    products = 6 * routed * 2048 * 768 / tp / r.expert_flops
    moved = 2 * 2 * 2 * routed * 2048 / r.bandwidth
    activation = 2 * 3 * routed * 768 / tp / r.bandwidth
    assert seconds - less == pytest.approx(products + moved + activation, rel=0.02)


def test_shared_experts_and_dense_layers_count() -> None:
    assert DEEPSEEK.experts is not None
    gpu = GPUS["H100"]
    seconds = roofline(gpu, DEEPSEEK, [1]).grid(1).decode_seconds(1, 256)
    without = reshaped(DEEPSEEK, experts=replace(DEEPSEEK.experts, shared_intermediate=0))
    shared = 26 * 2 * 3 * 2048 * 2816 / rates(gpu).bandwidth
    fixed = 26 * (2 * rates(gpu).linear_launch + rates(gpu).pass_launch)
    assert seconds - roofline(gpu, without, [1]).grid(1).decode_seconds(1, 256) == pytest.approx(
        shared + fixed, rel=0.01
    )
    narrower = reshaped(DEEPSEEK, intermediate=10944 // 2)
    dense = 2 * 3 * 2048 * 10944 / 2 / rates(gpu).bandwidth
    assert seconds - roofline(gpu, narrower, [1]).grid(1).decode_seconds(1, 256) == pytest.approx(dense, rel=0.01)


def test_an_all_reduce_moves_its_bytes_over_the_link() -> None:
    r = rates(A100)
    assert all_reduce_seconds(r, 300e9, 1, 1e9) == 0
    fixed = r.link_latency + 7 * r.peer_latency
    assert all_reduce_seconds(r, 300e9, 8, 1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 186e9 + fixed)


@pytest.mark.parametrize(("tp", "bus"), [(2, 19e9), (4, 3.7e9), (8, 1.9e9)])
def test_over_pcie_more_than_two_meet_at_the_cpus(tp: int, bus: float) -> None:
    seconds = float(all_reduce_seconds(rates(GPUS["L40S"]), 32e9, tp, 1e9))
    assert 2 * (tp - 1) / tp * 1e9 / seconds == pytest.approx(bus, rel=0.1)


def test_a_slower_link_costs_only_where_there_is_one() -> None:
    fast, slow = (roofline(GPUS[name], QWEN_14B, [1, 8]) for name in ("A100", "A800"))
    assert slow.grid(1).prefill == fast.grid(1).prefill
    more = slow.grid(8).prefill_seconds(8192, 0) - fast.grid(8).prefill_seconds(8192, 0)
    moved = 2 * 40 * 2 * 7 / 8 * 8192 * 5120 * 2
    assert more == pytest.approx(moved / (0.74 * 200e9) - moved / (0.62 * 300e9))
    assert "those of A100 but for the link" in slow.source


def test_throughput_of_degrees_crosses_where_memory_runs_out() -> None:
    """Eight GPUs as one engine answer one sequence sooner, and 64 short ones at a higher price in GPU seconds."""
    one, eight = roofline(A100, QWEN_14B, [1, 8]).engines
    assert eight.decode_seconds(1, 1024) < one.decode_seconds(1, 1024) / 2
    assert 8 * eight.decode_seconds(64, 1024) > one.decode_seconds(64, 1024)


def test_fewer_bytes_a_number_take_less_time() -> None:
    half, full = (roofline(A100, QWEN_14B, [1], quantization=it) for it in (Quantization("fp8", "fp8"), AS_STORED))
    assert (half.dtype, full.dtype) == ("fp8, KV fp8", "bf16")
    assert half.grid(1).decode_seconds(1, 32768) < 0.6 * full.grid(1).decode_seconds(1, 32768)


@pytest.mark.parametrize("tp", [0, 3, 16])
def test_a_degree_that_does_not_divide_the_model_is_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=f"14b: tp is {tp}; (it must divide|set it to 1 or more)"):
        roofline(A100, QWEN_14B, [1, tp])


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan")])
def test_a_link_has_a_bandwidth(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="intra_bandwidth"):
        roofline(A100, QWEN_14B, [1], intra_bandwidth=bandwidth)


def test_an_unknown_gpu_says_that_it_was_not_measured() -> None:
    twice = GPU("N1", A100.memory, 2 * 3.35e12, 2 * 989e12, 450e9, "made up")
    profile = roofline(twice, QWEN_14B, [1])
    assert "not measured" in profile.source
    h100 = roofline(GPUS["H100"], QWEN_14B, [1]).grid(1)
    assert profile.grid(1).prefill_seconds(8192, 0) == pytest.approx(h100.prefill_seconds(8192, 0) / 2, rel=0.1)


def test_a_calibration_replaces_what_it_measured_and_nothing_else() -> None:
    before, after = rates(A100), rates(A100, CALIBRATION)
    measured = {
        field.name: getattr(CALIBRATION, field.name).median
        for field in fields(Rates)
        if field.name in {field.name for field in fields(Calibration)}
    }
    assert len(measured) == 7
    assert after == replace(before, **measured, source=after.source)
    profile = roofline(A100, QWEN_14B, [1], calibration=CALIBRATION)
    assert profile.source.startswith("calibration: NVIDIA A100-SXM4-80GB, 2026-11-20, torch 2.13.0")
    assert profile.grid(1).decode_seconds(1, 256) > roofline(A100, QWEN_14B, [1]).grid(1).decode_seconds(1, 256)
    assert CALIBRATION.mfu(A100) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("field", "value"), [("median", 0.0), ("median", math.inf), ("spread", -0.1), ("spread", math.nan)]
)
def test_a_measurement_is_positive(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"Measured\.{field}"):
        replace(MEASURED, **{field: value})


def test_a_saved_calibration_is_loaded_equal(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(path, CALIBRATION)
    assert load_calibration(path) == CALIBRATION
    path.write_text(path.read_text().replace('"spread": 0.3', '"spread": -0.3'))
    with pytest.raises(ConfigError, match="linear_launch"):
        load_calibration(path)
