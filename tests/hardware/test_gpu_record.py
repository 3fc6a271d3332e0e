"""One record a GPU: no gaps, nothing faster than its data sheet, and what was not measured says so."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from libra.cost.quantization import Quantization
from libra.cost.sources.rates import dtype_refusal, published_mfu, rates, training_rates
from libra.cost.transfer import fabric
from libra.hardware.cluster import NodeClass
from libra.hardware.decoder import decoder
from libra.hardware.gpu import GPU
from libra.hardware.gpu_record import GPURecord
from libra.hardware.gpus import GPUS, RECORDS, record_of

MEASURED = {"A100", "A100-40GB", "A800", "H100", "H800", "H200", "L40S"}  # by kernels
PUBLISHED = {"A100", "A100-40GB", "A800", "H100", "H800", "H200", "GB200"}  # training runs
OWN = GPU("mine", 80e9, 2e12, 300e12, 100e9, "a card of our own")
DENSE = decoder("dense", 12, 1024, 16, 4, 64, 4096, 32000, False, 40960)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_says_what_was_measured(record: GPURecord) -> None:
    name = record.gpu.name
    assert GPUS[name] is record.gpu and record_of(record.gpu) is record
    assert ("not measured" in record.kernels.source) == (name not in MEASURED)
    assert (published_mfu(record.gpu) is not None) == (name in PUBLISHED)
    reached, trained = rates(record.gpu), training_rates(record.gpu)
    assert 0 < reached.linear_flops < record.gpu.flops and 0 < reached.bandwidth < record.gpu.bandwidth
    assert 0 < trained.linear < record.gpu.flops and trained.attention <= trained.linear
    nodes = NodeClass("n", 1, 8, record.gpu, record.gpu.link, 50e9)
    assert fabric(nodes).link == record.bus * record.gpu.link


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_products_in_fp8_train_faster_and_the_rest_as_in_bf16(record: GPURecord) -> None:
    gpu, wide = record.gpu, training_rates(record.gpu)
    refusal = dtype_refusal(gpu, "fp8")
    assert dtype_refusal(gpu, "bf16") is None and (refusal is None) == ("fp8" in record.faster)
    if refusal is not None:
        with pytest.raises(ValueError, match="does not multiply in fp8: set it to bf16"):
            training_rates(gpu, "fp8")
        return
    narrow = training_rates(gpu, "fp8")
    assert 1 < narrow.linear / wide.linear < 2 and narrow.experts < narrow.linear
    assert (narrow.head, narrow.attention, narrow.bandwidth) == (wide.linear, wide.attention, wide.bandwidth)
    assert "FP8" in narrow.source and narrow.casts > 0


def test_gb300_trains_as_much_faster_than_gb200_in_bf16_as_in_fp8() -> None:
    """Published in FP8, Llama-3.1-405B: 1,048 and 843 tokens/s (release 26.06), 1,024 and 864 (26.04.01)."""
    faster = training_rates(GPUS["GB300"]).linear / training_rates(GPUS["GB200"]).linear
    assert 1024 / 864 < faster < 1048 / 843
    assert "in bf16 above GB200" in training_rates(GPUS["GB300"]).source and published_mfu(GPUS["GB300"]) is None


def test_a_gap_is_an_error() -> None:
    record = RECORDS["B200"]
    given = {it.name: getattr(record, it.name) for it in fields(record)}
    for name in given:
        with pytest.raises(TypeError, match=f"missing 1 required .* '{name}'"):
            GPURecord(**{field: value for field, value in given.items() if field != name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bus": 0.0}, "bus of B200 is 0.0"),
        ({"bus": 1.1}, "bus of B200 is 1.1"),
        ({"faster": {"fp8": 0.5}}, "faster of B200"),
        ({"faster": {"int8": 2.0}}, "training.fp8 of B200 is 0.37"),
        ({"kernels": RECORDS["H200"].kernels, "gpu": GPUS["L4"]}, "kernels of L4 are faster than its data sheet"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RECORDS["B200"], **change)  # type: ignore[arg-type]


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cache_bandwidth is 0\.0; a rate is positive"):
        replace(RECORDS["H100"].kernels, cache_bandwidth=0.0)
    with pytest.raises(ValueError, match="share above 1"):
        replace(RECORDS["H100"].training, ceiling=1.2)


def test_a_described_gpu_has_the_shares_of_others_and_multiplies_in_bf16() -> None:
    record = record_of(OWN)
    assert record.gpu is OWN and record.tables is None and not record.training.published
    assert "not measured" in rates(OWN).source
    assert Quantization("fp8").faster(OWN, DENSE, "dense") == 1


@pytest.mark.parametrize(
    ("gpu", "weights", "times"),
    [("H20", "fp8", 2), ("MI300X", "fp8", 2), ("B300", "modelopt_fp4", 6), ("RTX 3090", "fp8", 1), ("L4", "fp8", 2)],
)
def test_types_are_those_of_the_tensor_cores(gpu: str, weights: str, times: float) -> None:
    assert Quantization(weights).faster(GPUS[gpu], DENSE, "dense") == times
