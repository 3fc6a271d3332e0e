"""Prices and memory of attention and FFN apart, against sums worked out by hand and against the whole model's."""

from __future__ import annotations

import pytest
from oracles.reshaped import reshaped

from libra.cost.afd import afd_refusal, token_copies
from libra.cost.engine_memory import context_bytes, expert_workspace, ffn_rank_bytes, held_bytes, kv_tokens
from libra.cost.sources.roofline import roofline, stage_roofline
from libra.cost.sources.tables import NoTablesError, stage_tables, tables
from libra.hardware.cluster import GPUS
from libra.hardware.decoder import decoder
from libra.hardware.latent import LatentAttention
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec

MOE = decoder("moe", 48, 2048, 32, 4, 128, 0, 151936, False, 40960, experts=Experts(128, 8, 768, 0), sparse=48)
LATENT = decoder(
    *("latent", 61, 7168, 128, 128, 128, 18432, 129280, False, 163840),
    experts=Experts(256, 8, 2048, 2048),
    sparse=58,
    latent=LatentAttention(128, 1536, 512, 128, 64, 128),
)
H100 = GPUS["H100"]


@pytest.mark.parametrize("model", [MOE, LATENT])
def test_stages_on_one_gpu_each_add_up_to_the_whole_engine(model: ModelSpec) -> None:
    """With one FFN rank no expert is elsewhere: attention, dense layers' MLPs and the experts are all that there is."""
    whole, stages = roofline(H100, model, [1]).grid(1), stage_roofline(H100, model, 1, 1)
    for batch, context in ((1, 1000), (32, 4096), (256, 2048)):
        attention = stages.attention.decode_seconds(batch, context)
        attention *= model.layers / model.sparse_layers  # of dense layers the same, less what experts need beside them
        parts = attention + stages.outside_seconds(batch) + stages.layers * stages.experts_seconds(batch)
        assert parts == pytest.approx(whole.decode_seconds(batch, context), rel=0.02)


def test_experts_by_hand() -> None:
    # 1,024 tokens ask for 8 of 128 experts each: 16 ranks have 8 of these, all of them asked for, and 512 rows each.
    rows, launch = 512, 3e-6
    passes = (2 * 2 * rows * 2048 + 3 * rows * 768) * 2 / 2.8e12 + 3 * 3e-6
    up = (rows * (2048 + 1536) + 8 * 2048 * 1536) * 2 / 2.8e12
    down = (rows * (768 + 2048) + 8 * 768 * 2048) * 2 / 2.8e12
    got = stage_roofline(H100, MOE, 1, 16).experts_seconds(1024)
    assert got == pytest.approx(passes + up + down + 2 * launch, rel=1e-6)


def test_a_token_goes_once_to_each_rank_that_has_an_expert_for_it() -> None:
    assert token_copies(MOE, 1) == 1
    assert token_copies(MOE, 2) == pytest.approx(2 * (1 - 0.5**8))
    assert 7.7 < token_copies(MOE, 128) < 8
    assert stage_roofline(H100, MOE, 1, 2).token_bytes == pytest.approx(2 * 2048 * token_copies(MOE, 2))


def test_an_attention_rank_has_room_for_what_the_experts_leave() -> None:
    with_experts, without = (
        kv_tokens(MOE, H100.memory, 0.9, 1, batched_tokens=8192, routed=it) for it in (True, False)
    )
    weights = 2 * 48 * 128 * 3 * 2048 * 768
    activations = expert_workspace(MOE, 8192)
    assert without - with_experts == pytest.approx((weights + activations) / MOE.kv_bytes_per_token(2), abs=32)
    assert held_bytes(MOE, 2, batched_tokens=1, routed=False) > context_bytes(2)


def test_an_ffn_rank_holds_its_share_of_the_experts_and_what_comes() -> None:
    held = ffn_rank_bytes(MOE, 16, tokens=4096)
    assert held == context_bytes() + 2 * 48 * 8 * 3 * 2048 * 768 + 2048 * 2 * (2 * 2048 + 3 * 768)


def test_more_ranks_take_less_time_for_the_same_tokens() -> None:
    seconds = [stage_roofline(H100, LATENT, 1, ranks).experts_seconds(16384) for ranks in (16, 32, 64, 256)]
    assert seconds == sorted(seconds, reverse=True)


def test_ffn_on_another_gpu_has_its_rates_and_the_source_says_so() -> None:
    stages = stage_roofline(H100, MOE, 1, 16, ffn_gpu=GPUS["L40S"])
    assert stages.attention == stage_roofline(H100, MOE, 1, 16).attention
    assert stages.experts_seconds(65536) > 2 * stage_roofline(H100, MOE, 1, 16).experts_seconds(65536)
    assert "; FFN: " in stages.source


def test_tables_part_an_engine_into_the_operators_that_it_has() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra `aic` is not installed")
    whole, stages = tables(H100, MOE, [1]).grid(1), stage_tables(H100, MOE, 1, 1)
    assert stages.source.startswith("tables: aiconfigurator-core 0.12")
    for batch, context in ((1, 1000), (64, 4096), (256, 2048)):
        parts = stages.attention.decode_seconds(batch, context) + stages.outside_seconds(batch)
        parts += stages.layers * stages.experts_seconds(batch)
        assert parts == pytest.approx(whole.decode_seconds(batch, context), rel=0.02)
    with pytest.raises(NoTablesError, match="latent attention"):
        stage_tables(H100, LATENT, 1, 16)


@pytest.mark.parametrize(
    ("model", "attention", "ffn", "micro_batches", "says"),
    [
        (reshaped(MOE, experts=None, intermediate=6144), 4, 4, 2, "afd: moe has no experts"),
        (MOE, 40, 16, 2, "afd.attention is 40, not a multiple of ffn 16"),
        (MOE, 48, 48, 2, "afd.ffn is 48; it must divide the 128 experts"),
        (MOE, 48, 16, 0, "afd.micro_batches is 0"),
        (MOE, 48, 16, 3, None),
    ],
)
def test_what_cannot_be_apart(model: ModelSpec, attention: int, ffn: int, micro_batches: int, says: str | None) -> None:
    refused = afd_refusal(model, attention, ffn, micro_batches)
    assert refused is None if says is None else refused is not None and refused.startswith(says)
