"""Tokens of KV that an engine holds, against sums worked out by hand and against each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.reshaped import reshaped
from oracles.small_cluster import QWEN_14B

from libra.cost.engine_memory import (
    BLOCK,
    Profiling,
    context_bytes,
    expert_rank_bytes,
    expert_workspace,
    held_bytes,
    kv_tokens,
)
from libra.cost.quantization import AS_STORED, KV_FORMATS, Quantization
from libra.hardware.cluster import GPUS
from libra.hardware.decoder import decoder
from libra.hardware.latent import LatentAttention
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model

A800 = GPUS["A800"].memory
QUANTIZATIONS = st.builds(
    Quantization, st.sampled_from([None, "fp8", "awq", "modelopt_fp4"]), st.sampled_from([*KV_FORMATS])
)
# Libraries 0.25 GiB and 0.055 GiB that PyTorch keeps; graphs 0.2 GiB, and 6 MiB for each of 51 sizes, of both kinds.
BESIDE = (0.25 + 0.055 + 0.2) * 2**30 + 102 * 6 * 2**20
COUNTS = 1024 * 151936 * (4 + 1 / 8)  # of tokens, for penalties
MOE = decoder("moe", 48, 2048, 32, 4, 128, 0, 151936, False, 40960, experts=Experts(128, 8, 768, 0), sparse=48)


def tokens(
    tp: int,
    memory: float = A800,
    utilization: float = 0.9,
    model: ModelSpec = QWEN_14B,
    quantization: Quantization = AS_STORED,
    batched_tokens: int = 8192,
    pp: int = 1,
) -> int:
    return kv_tokens(
        *(model, memory, utilization, tp),
        batched_tokens=batched_tokens,
        quantization=quantization,
        pp=pp,
    )


def test_what_is_left_of_an_a800_by_hand() -> None:
    # 14,768,307,200 parameters; the layers' activations are more than the logits and two vectors of each token
    activations = 8192 * 2 * (3 * 5120 + 3 * 17408)
    assert activations > 1024 * 151936 * 2 + 8192 * 2 * 2 * 5120
    free = 81_920 * 2**20 * 0.9 - BESIDE - activations - COUNTS - 2 * 14_768_307_200
    # a key and a value of 8 heads of 128 numbers in 40 layers
    assert tokens(1) == free // (40 * 2 * 8 * 128 * 2) // 16 * 16
    assert 260_000 < tokens(1) < 275_000


def test_two_devices_divide_weights_and_kv() -> None:
    # Norms, 5120 * 81 + 2 * 128 * 40 parameters, are on both.
    weights = 2 * ((14_768_307_200 - 424_960) / 2 + 424_960)
    # Each counts all tokens, and has buffers of NCCL.
    free = 81_920 * 2**20 * 0.9 - BESIDE - 1.3 * 2**30 - 8192 * 2 * (15360 + 26112) - COUNTS - weights
    assert tokens(2) == free // (40 * 2 * 4 * 128 * 2) // 16 * 16


def test_devices_that_share_a_kv_head_each_keep_all_of_it() -> None:
    # Of two KV heads each of two devices keeps one, and so does each of eight: what eight have more is room.
    few = reshaped(QWEN_14B, kv_heads=2)
    per_token = 40 * 2 * 1 * 128 * 2
    assert [few.kv_bytes_per_token(2, tp) for tp in (2, 4, 8)] == [per_token] * 3
    spared = 2 * (few.device_parameters(2).total - few.device_parameters(8).total)
    # The group's buffers are those of a pair. Eight have less for the layers' activations than for the logits.
    spared += 8192 * 2 * 3 * (5120 + 17408 / 2) - (8192 * 2 * 2 * 5120 + 1024 * 151936 * 2)
    assert tokens(8, model=few) - tokens(2, model=few) == pytest.approx(spared / per_token, abs=BLOCK)


def test_a_token_has_a_row_for_each_of_its_experts() -> None:
    # Before and after either product, 2048 is wider than 768 and than twice that; a token has eight experts.
    rows = 8192 * 2 * 8 * (2048 + 2048)
    sampled = 8192 * 2 * 2 * 2048 + 1024 * 151936 * 2  # more than the other activations
    weights = 2 * MOE.device_parameters().total
    free = A800 * 0.9 - BESIDE - COUNTS - rows - sampled - weights
    assert tokens(1, model=MOE) == free // (48 * 2 * 4 * 128 * 2) // 16 * 16
    assert expert_workspace(MOE, 1000, 2) == 1000 * 8 * 2 * (2048 + 2048)
    older = {it: held_bytes(MOE, 1, batched_tokens=it, profiling=Profiling.of("0.18")) for it in (32_768, 65_536)}
    more = 32_768 * 2 * 2 * 2048
    assert older[65_536] - older[32_768] == pytest.approx(more)  # more went through experts in parts
    assert expert_workspace(QWEN_14B, 1000) == 0


@pytest.mark.parametrize(
    ("change", "bytes_"),
    [
        ({"seqs": 1024 + 256}, 256 * 151936 * 4.125),
        ({"graphs": False}, -0.2 * 2**30 - 102 * 6 * 2**20),
        ({"batched_tokens": 8192 + 1}, 2 * (3 * 5120 + 3 * 17408)),
        ({"seqs": 8}, -1016 * 151936 * 4.125 - (102 - 5 - 4) * 6 * 2**20),  # sizes 1 to 16, whole ones to 8
    ],
)
def test_an_engine_needs_memory_for_what_it_runs_with(change: dict[str, int], bytes_: float) -> None:
    usual = {"batched_tokens": 8192}
    assert held_bytes(QWEN_14B, 1, **{**usual, **change}) - held_bytes(QWEN_14B, 1, **usual) == pytest.approx(bytes_)


def test_two_stages_divide_layers_and_their_kv_by_hand() -> None:
    # A layer: attention 5120 * (2 * 40 + 2 * 8) * 128 and two norms of 128, MLP 3 * 5120 * 17408, two norms of 5120.
    layer = 5120 * 96 * 128 + 2 * 128 + 3 * 5120 * 17408 + 2 * 5120
    # Each stage has 20 layers and one embedding; the last has the final norm too, and the logits.
    weights = 2 * (20 * layer + 151936 * 5120 + 5120)
    free = 81_920 * 2**20 * 0.9 - BESIDE - 8192 * 2 * (15360 + 52224) - COUNTS - weights
    assert tokens(1, pp=2) == free // (20 * 2 * 8 * 128 * 2) // 16 * 16


@pytest.mark.parametrize(("pp", "layers"), [(3, 14), (6, 7), (7, 6), (39, 2), (40, 1)])
def test_layers_that_do_not_divide_evenly_are_bounded_by_the_fullest_stage(pp: int, layers: int) -> None:
    # Two stages of a model of 2 * layers layers are as full as the fullest of these.
    assert tokens(1, pp=pp) == tokens(1, pp=2, model=reshaped(QWEN_14B, layers=2 * layers))


def test_stages_and_devices_divide_the_same_kv() -> None:
    assert QWEN_14B.kv_bytes_per_token(2, tp=2, pp=4) == 10 * 2 * 4 * 128 * 2
    latent = LatentAttention(40, 0, 512, 128, 64, 128)
    assert reshaped(QWEN_14B, latent=latent).kv_bytes_per_token(2, tp=2, pp=3) == 14 * 576 * 2


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="pp is 41; set it to a number of pipeline stages from 1 to 40"):
        tokens(1, pp=41)


@given(
    st.sampled_from([QWEN_14B, MOE]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.floats(20e9, 200e9),
    QUANTIZATIONS,
)
def test_pipeline_parallelism_doubled_at_fixed_memory_at_least_doubles_the_kv_blocks(
    model: ModelSpec, tp: int, pp: int, memory: float, stored: Quantization
) -> None:
    found = tokens(tp, memory, model=model, pp=pp, quantization=stored)
    assert tokens(tp, memory, model=model, pp=2 * pp, quantization=stored) // BLOCK >= 2 * (found // BLOCK)


@given(st.integers(1, 39), st.floats(20e9, 200e9))
def test_one_more_stage_never_holds_less(pp: int, memory: float) -> None:
    assert tokens(1, memory, pp=pp + 1) >= tokens(1, memory, pp=pp)


def test_weights_that_leave_no_room_leave_no_tokens() -> None:
    assert tokens(1, memory=30e9) == 0
    assert tokens(1, memory=1e9) == 0


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.floats(20e9, 200e9),
    st.floats(0.3, 1.0),
    QUANTIZATIONS,
    st.sampled_from([1024, 8192]),
)
def test_tokens_are_whole_blocks_that_fit_and_one_more_would_not(
    tp: int, memory: float, utilization: float, stored: Quantization, batched: int
) -> None:
    found = tokens(tp, memory, utilization, quantization=stored, batched_tokens=batched)
    per_token = stored.kv_bytes_per_token(QWEN_14B, tp)
    peak = max(batched * 2 * (3 * 5120 + 3 * 17408 / tp), batched * 2 * 2 * 5120 + 1024 * 151936 * 2)
    beside = context_bytes(tp) + peak + COUNTS + stored.weight_bytes(QWEN_14B, tp)
    assert found % BLOCK == 0
    assert found == 0 or beside + found * per_token <= memory * utilization
    assert beside + (found + BLOCK) * per_token > memory * utilization


@given(st.sampled_from([1, 2, 4]), st.floats(40e9, 200e9))
def test_more_of_anything_never_holds_less(tp: int, memory: float) -> None:
    found = tokens(tp, memory)
    assert tokens(2 * tp, memory) >= found
    assert tokens(tp, memory * 1.1) >= found
    assert tokens(tp, memory, utilization=0.8) <= found


# GiB that versions of vLLM logged on an H100 with 1,024 sequences and 8,192 tokens an iteration: the peak of the
# profiling run, and memory outside of PyTorch's allocator (llm-d-planner, accuracy/accuracy_report.md).
LOGGED = [
    ("0.15.0", "Qwen/Qwen3-14B", 1, 5.64, 0.13),
    ("0.17.0", "Qwen/Qwen3-14B", 1, 2.23, 0.13),
    ("0.18.0", "Qwen/Qwen3-14B", 1, 2.23, 0.25),
    ("0.19.0", "meta-llama/Llama-3.1-8B", 1, 1.89, 0.25),
    ("0.19.0", "Qwen/Qwen2.5-7B", 1, 2.21, 0.24),
    ("0.19.0", "Qwen/Qwen3-8B", 1, 2.21, 0.25),
    ("0.19.0", "Qwen/Qwen3-30B-A3B", 1, 2.68, 0.27),
    ("0.19.0", "deepseek-ai/DeepSeek-V2-Lite", 1, 1.93, 0.26),
]


@pytest.mark.parametrize(("version", "name", "tp", "peak", "beside"), LOGGED)
def test_the_profiling_run_takes_what_logs_say(version: str, name: str, tp: int, peak: float, beside: float) -> None:
    model, profiling = load_model(name), Profiling.of(version)
    held = held_bytes(model, tp, batched_tokens=8192, profiling=profiling) - AS_STORED.weight_bytes(model, tp)
    assert held / 2**30 == pytest.approx(peak + beside, abs=0.07)


def test_a_group_has_buffers_that_do_not_grow_with_it() -> None:
    assert context_bytes(8) - context_bytes(1) == context_bytes(2) - context_bytes(1) == pytest.approx(1.3 * 2**30)
    assert context_bytes(8, switched=False) - context_bytes(1) == pytest.approx(0.2 * 2**30)
    assert GPUS["H100"].switched and GPUS["A100-40GB"].switched
    assert not GPUS["L40S"].switched and not GPUS["RTX PRO 6000"].switched


def test_latent_attention_expands_a_context_while_it_profiles() -> None:
    # 65,536 tokens of keys and values, of the heads that a device has: 4 GiB with DeepSeek-V3's 128 heads.
    model = load_model("deepseek-ai/DeepSeek-V3")
    alone, eighth = (held_bytes(model, tp, batched_tokens=1, routed=False, graphs=False) for tp in (1, 8))
    weights = AS_STORED.weight_bytes(model, 1) - AS_STORED.weight_bytes(model, 8)
    routed = AS_STORED.matrix_bytes(model, "experts") * model.routed_parameters * (1 - 1 / 8)
    expanded = 65_536 * 128 * (128 + 128) * 2
    sampled = 2 * 2 * 7168 + 1024 * 129280 * 2
    assert expanded / 8 > sampled
    beside = 2 * 3 * 18432 * (1 - 1 / 8)
    assert alone - eighth + 1.3 * 2**30 == pytest.approx(weights - routed + expanded * (1 - 1 / 8) + beside)


def test_ranks_have_room_for_what_their_exchange_brings_them() -> None:
    # DeepSeek-V3 on 16 ranks of two nodes, 2,048 tokens each; a row of 7,168 numbers before and after either product.
    model, tokens = load_model("deepseek-ai/DeepSeek-V3"), 16 * 2048
    weights = AS_STORED.matrix_bytes(model, "experts") * model.routed_parameters / 16
    row = 2 * (7168 + 7168)
    gathered = expert_rank_bytes(model, 16, tokens=tokens)
    assert gathered == pytest.approx(weights + tokens * 2 * 7168 + 8 * tokens * row)
    high = expert_rank_bytes(model, 16, tokens=tokens, way="deepep_high_throughput", internode=True)
    met = 1 - (15 / 16) ** 8
    assert high == pytest.approx(weights + met * tokens * 2 * 7168 + 8 * 2048 * row + 2 * 2**30)
    inside = expert_rank_bytes(model, 16, tokens=tokens, way="deepep_high_throughput")
    assert high - inside == 2**30
    low = expert_rank_bytes(model, 16, tokens=tokens, way="deepep_low_latency")
    rows = 256 * 256  # of all experts, for the tokens that a rank may send
    assert low == pytest.approx(weights + rows * row + 4 * rows * (16 + 2 * 7168 + 4 * 7168 / 128) + 2**30)
