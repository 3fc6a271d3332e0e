"""Tables against numbers read from them by hand, and what they must refuse."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest
from oracles.reshaped import reshaped

from libra.cost.quantization import AS_STORED, Quantization
from libra.cost.sources.expert_tables import routed_evenly
from libra.cost.sources.layer_kernels import all_reduce_seconds
from libra.cost.sources.rates import rates
from libra.cost.sources.roofline import roofline
from libra.cost.sources.tables import NoTablesError, tables
from libra.hardware.cluster import GPU, GPUS
from libra.hardware.decoder import decoder
from libra.hardware.latent import LatentAttention
from libra.hardware.mlp import Experts

QWEN_14B = decoder("Qwen/Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, False, 40960, qk_norm=True)
QWEN_32B = decoder("Qwen/Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, False, 40960, qk_norm=True)
QWEN_30B = decoder("30b", 48, 2048, 32, 4, 128, 0, 151936, False, 40960, experts=Experts(128, 8, 768, 0), sparse=48)


@pytest.fixture
def installed() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra `aic` is not installed")


@pytest.mark.usefixtures("installed")
def test_a100_with_qwen3_14b() -> None:
    profile = tables(GPUS["A100"], QWEN_14B, [8, 1, 2, 4])
    assert profile.source.startswith("tables: aiconfigurator-core 0.12")
    wanted = {  # milliseconds of decode at batch 1, 32, 128 with 8,000 tokens each, and of a prefill of 8,000
        1: (20.7, 51.6, 130.7, 931),
        2: (12.4, 25.7, 76.2, 528),
        4: (7.5, 14.5, 43.2, 325),
        8: (5.1, 9.2, 20.1, 211),
    }
    assert [grid.tp for grid in profile.engines] == list(wanted)
    for grid in profile.engines:
        seconds = [grid.decode_seconds(batch, 8000) for batch in (1, 32, 128)] + [grid.prefill_seconds(8000, 0)]
        assert [1e3 * value for value in seconds] == pytest.approx(wanted[grid.tp], rel=0.01)


@pytest.mark.usefixtures("installed")
def test_a_prefix_is_not_computed_again() -> None:
    grid = tables(GPUS["A100"], QWEN_14B, [1]).grid(1)
    alone, after = grid.prefill_seconds(1024, 0), grid.prefill_seconds(1024, 16384)
    assert alone < after < grid.prefill_seconds(16384, 0) / 4


@pytest.mark.usefixtures("installed")
def test_a_slower_link_adds_its_all_reduces() -> None:
    fast, slow = (tables(GPUS[name], QWEN_14B, [1, 8]) for name in ("A100", "A800"))
    assert slow.grid(1).decode == fast.grid(1).decode
    size = 8192 * 5120 * 2
    here = all_reduce_seconds(rates(GPUS["A800"]), 200e9, 8, size)
    there = all_reduce_seconds(rates(GPUS["A100"]), 300e9, 8, size)
    more = slow.grid(8).prefill_seconds(8192, 4096) - fast.grid(8).prefill_seconds(8192, 4096)
    assert more == pytest.approx(80 * float(here - there))
    assert more > 0
    assert "all-reduces modelled at 200 GB/s instead of A100's 300" in slow.source
    assert tables(GPUS["A100"], QWEN_14B, [8], intra_bandwidth=300e9) == replace(fast, engines=fast.engines[1:])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "tp"), [("H100", 1), ("H200", 2)])
def test_experts_that_are_asked_for_alike_take_what_a_roofline_says_of_their_number(name: str, tp: int) -> None:
    """8 of 128 experts a token: 16 tokens touch 82 of them, where a power law has them ask for fewer."""
    gpu = GPUS[name]
    skewed = tables(gpu, QWEN_30B, [tp])
    even, model = routed_evenly(gpu, QWEN_30B, skewed, AS_STORED).grid(tp), roofline(gpu, QWEN_30B, [tp]).grid(tp)
    for batch in even.batches:
        assert even.decode_seconds(batch, 1024) == pytest.approx(model.decode_seconds(batch, 1024), rel=0.25)
    few, many = (even.decode_seconds(batch, 0) / skewed.grid(tp).decode_seconds(batch, 0) for batch in (16, 512))
    assert few > 1.1
    assert many == pytest.approx(1, abs=0.05)
    assert even.prefill_seconds(2048, 0) < skewed.grid(tp).prefill_seconds(2048, 0)
    assert even.prefill_seconds(16, 8192) > skewed.grid(tp).prefill_seconds(16, 8192)


@pytest.mark.usefixtures("installed")
def test_a_dense_model_has_no_routing() -> None:
    profile = tables(GPUS["H100"], QWEN_14B, [1])
    assert routed_evenly(GPUS["H100"], QWEN_14B, profile, AS_STORED) is profile


@pytest.mark.usefixtures("installed")
def test_what_was_not_measured_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NoTablesError, match=r"lack kernels of 30b at tp 8: leave tp 8 out"):
        tables(GPUS["A100"], QWEN_30B, [4, 8])
    with pytest.raises(NoTablesError, match="no tables for mine"):
        tables(GPU("mine", 8e10, 2e12, 3e14, 3e11, "made up"), QWEN_14B, [1])
    with pytest.raises(NoTablesError, match="latent attention"):
        tables(GPUS["H200"], reshaped(QWEN_30B, latent=LatentAttention(32, 1536, 512, 128, 64, 128)), [1])
    with pytest.raises(NoTablesError, match="shared experts"):
        tables(GPUS["H200"], reshaped(QWEN_30B, experts=Experts(128, 8, 768, 768)), [1])
    with pytest.raises(ValueError, match="14B: tp is 3; it must divide the 40 heads"):
        tables(GPUS["A100"], QWEN_14B, [3])
    assert not [record for record in caplog.records if record.levelno < logging.ERROR]


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("aiconfigurator_core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(NoTablesError, match=r"aiconfigurator-core is not installed; pip install .*aic.*"):
        tables(GPUS["A100"], QWEN_14B, [1])


@pytest.mark.usefixtures("installed")
def test_fp8_is_faster_than_bf16_where_weights_are_read_and_so_are_its_experts() -> None:
    """On Hopper the tables' own fp8 experts are another format's, and slower than bf16."""
    fp8 = Quantization("fp8")
    for model, tp in ((QWEN_14B, 1), (QWEN_30B, 1), (QWEN_30B, 2)):
        for name in ("H100", "H200"):
            plain, narrow = (tables(GPUS[name], model, [tp], quantization=it).grid(tp) for it in (AS_STORED, fp8))
            for batch in (8, 64, 256):
                assert 0.5 < narrow.decode_seconds(batch, 1024) / plain.decode_seconds(batch, 1024) < 1
    with pytest.raises(NoTablesError, match=r"blocks of 128, but experts of 30b are 768 / 4 wide, .*: leave tp 4 out"):
        tables(GPUS["H100"], QWEN_30B, [4], quantization=fp8)


@pytest.mark.usefixtures("installed")
def test_times_that_fall_at_the_end_of_a_table_do_not_fall_on() -> None:
    """fp8 of 32 billion parameters: a batch of 512 takes less than one of 384 without its context."""
    grid = tables(GPUS["H100"], QWEN_32B, [1], quantization=Quantization("fp8")).grid(1)
    assert grid.decode_seconds(2048, 0) >= grid.decode_seconds(512, 0) > 0
