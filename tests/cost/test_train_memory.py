"""Memory of training: the facts that decide what Qwen3-14B can be trained on, and each item by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.config.recipe import TrainingBytes
from libra.cost.train_memory import CONTEXT, FRAGMENTATION, MemoryBreakdown, Reference, training_memory
from libra.hardware.cluster import GPUS
from libra.hardware.decoder import decoder
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import RECOMPUTE, SHARDING, ParallelLayout, Recompute, Sharding

QWEN3_14B = decoder("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, False, 40960, qk_norm=True)
QWEN3_30B = decoder(
    "Qwen3-30B-A3B",
    48,
    2048,
    32,
    4,
    128,
    0,
    151936,
    False,
    40960,
    qk_norm=True,
    experts=Experts(128, 8, 768, 0),
    sparse=48,
)
ADAMW = TrainingBytes(weights=2, gradients=2, states=12)
# A data sheet's 80 GB is 80e9 bytes or 80 GiB, by whom one asks: facts hold for both.
EIGHTY = (80e9, GPUS["A800"].memory)


def layout(
    dp: int = 1,
    tokens: int = 4096,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    recompute: Recompute = "full",
    sharding: Sharding = "zero3",
    chunked: bool = True,
) -> ParallelLayout:
    return ParallelLayout(tp, pp, dp, cp, ep, tokens, recompute, sharding, chunked)


def memory(
    at: ParallelLayout,
    model: ModelSpec = QWEN3_14B,
    gpu: float = 80e9,
    reference: Reference = "none",
    longest: int = 1,
) -> MemoryBreakdown:
    return training_memory(model, at, longest, gpu, ADAMW, reference)


@pytest.mark.parametrize("gpu", EIGHTY)
@pytest.mark.parametrize(
    ("at", "fits"),
    [
        (layout(1, 1), False),  # one device never holds 16 bytes a parameter
        (layout(4, 4096), True),
        (layout(4, 4096, chunked=False), True),
        (layout(8, 40960), True),
        (layout(8, 40960, chunked=False), False),
        (layout(8, 1, sharding="zero1"), False),  # Megatron, TP1 x DP8
        (layout(8, 40960, recompute="none"), False),
    ],
)
def test_what_qwen3_14b_fits_on(at: ParallelLayout, fits: bool, gpu: float) -> None:
    assert (memory(at, gpu=gpu).total <= gpu) is fits


def test_sixteen_bytes_a_parameter() -> None:
    taken = memory(layout(1, 1, sharding="zero1"))
    assert taken.weights + taken.gradients + taken.optimiser == pytest.approx(16 * QWEN3_14B.parameters, rel=1e-6)
    assert taken.largest == "optimiser"


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "optimiser"),
    [("zero1", 2, 2, 12 / 8), ("zero2", 2, 2 / 8, 12 / 8), ("zero3", 2 / 8, 2 / 8, 12 / 8)],
)
def test_each_sharding_divides_what_it_says(
    sharding: Sharding, weights: float, gradients: float, optimiser: float
) -> None:
    for at in (layout(8, sharding=sharding), layout(2, cp=4, sharding=sharding)):
        taken = memory(at)
        wanted = [each * QWEN3_14B.parameters for each in (weights, gradients, optimiser)]
        assert [taken.weights, taken.gradients, taken.optimiser] == pytest.approx(wanted, rel=1e-6)


def test_stages_and_experts_divide_the_weights() -> None:
    whole = memory(layout(sharding="zero1"), QWEN3_30B).weights
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert memory(layout(8, ep=8, sharding="zero1"), QWEN3_30B).weights == pytest.approx(whole - experts * 7 / 8)
    # Of two embeddings, a stage has one.
    embedding = 151936 * 2048 * 2
    final_norm = 2048 * 2
    halved = memory(layout(pp=2, sharding="zero1"), QWEN3_30B).weights
    assert halved == pytest.approx((whole - 2 * embedding - final_norm) / 2 + embedding + final_norm)
    # Optimiser state of an expert is divided among the copies there are of it.
    states = memory(layout(8, ep=8, sharding="zero1"), QWEN3_30B).optimiser
    assert states == pytest.approx(12 * QWEN3_30B.parameters / 8, rel=1e-6)


def test_activations_by_hand() -> None:
    tokens, layers, hidden = 1000, 40, 5120
    query, key, product = 40 * 128, 8 * 128, 17408
    per_token = 2 * (4 * hidden + 2 * query + 2 * key + query + key + 3 * product)
    none = memory(layout(8, tokens, recompute="none")).activations
    assert none == pytest.approx(tokens * layers * per_token)
    selective = memory(layout(8, tokens, recompute="selective")).activations
    assert none - selective == pytest.approx(tokens * layers * 2 * (2 * hidden + product))
    full = memory(layout(8, tokens)).activations
    assert full == pytest.approx(tokens * (layers * 2 * hidden + per_token))


def test_the_first_stage_holds_a_micro_batch_for_every_stage() -> None:
    one = memory(layout(1, 1000, sharding="zero1", recompute="none"))
    four = memory(layout(1, 1000, pp=4, sharding="zero1", recompute="none"))
    assert four.activations == pytest.approx(one.activations)
    assert four.logits == 0  # they are on the last stage, which holds one micro-batch


def test_logits_by_hand() -> None:
    assert memory(layout(8, 40960, chunked=False)).logits == pytest.approx(40960 * 151936 * (2 + 4 + 4))
    assert memory(layout(8, 40960)).logits == pytest.approx(2048 * 151936 * 10)
    assert memory(layout(2, 40960, tp=2, cp=2, chunked=False)).logits == pytest.approx(40960 / 4 * 151936 * 10)


def test_a_longer_trajectory_has_a_micro_batch_to_itself() -> None:
    assert memory(layout(8, 4096), longest=40960) == memory(layout(8, 40960))


@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_an_offloaded_reference_takes_the_room_of_gradients(sharding: Sharding) -> None:
    at = layout(8, sharding=sharding)
    assert memory(at, reference="resident").reference == memory(at).weights
    assert memory(at, reference="offloaded").reference == 0
    assert memory(layout(8, sharding="zero2"), reference="offloaded").reference > 0


def test_the_workspace_is_what_sharding_gathers_for_the_moment() -> None:
    embedding, layer = 151936 * 5120, (QWEN3_14B.parameters - 2 * 151936 * 5120 - 5120) / 40
    assert memory(layout(8)).workspace == pytest.approx(2 * (embedding + layer) + 2 * embedding)
    assert memory(layout(8, sharding="zero2")).workspace == pytest.approx(2 * embedding)
    assert memory(layout(8, sharding="zero1")).workspace == 0


@pytest.mark.parametrize("sharding", SHARDING)
def test_fp8_keeps_copies_of_the_weights_that_a_device_has(sharding: Sharding) -> None:
    at = layout(dp=8, sharding=sharding)
    plain, copied = (
        training_memory(QWEN3_14B, at, 8192, 80e9, replace(ADAMW, copies=copies), "none") for copies in (0.0, 2.0)
    )
    more = {item: getattr(copied, item) - getattr(plain, item) for item in ("weights", "workspace", "activations")}
    unit = 2 * 151936 * 5120  # the head, the largest that is gathered at a time
    wanted = (0, unit) if sharding == "zero3" else (2 * QWEN3_14B.parameters, 0)
    assert (more["weights"], more["workspace"]) == pytest.approx(wanted, rel=1e-3) and not more["activations"]


@pytest.mark.parametrize("sharding", SHARDING)
def test_offloaded_states_take_no_memory_of_a_device(sharding: Sharding) -> None:
    at = layout(dp=8, sharding=sharding)
    kept, away = (
        training_memory(QWEN3_14B, at, 8192, 80e9, replace(ADAMW, offloaded=offloaded), "none")
        for offloaded in (False, True)
    )
    assert kept.optimiser == pytest.approx(12 * QWEN3_14B.parameters / 8, rel=1e-3)
    assert away == replace(kept, optimiser=0.0)


def test_the_margin_is_stated() -> None:
    assert memory(layout(8), gpu=50e9).margin == CONTEXT + FRAGMENTATION * 50e9


layouts = st.builds(
    lambda tp, pp, dp, cp, tokens, recompute, sharding, chunked: ParallelLayout(
        tp, pp, dp, cp, 1, tokens, recompute, "zero1" if pp > 1 else sharding, chunked
    ),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.integers(1, 64),
    cp=st.sampled_from([1, 2, 4]),
    tokens=st.integers(1, 40960),
    recompute=st.sampled_from(RECOMPUTE),
    sharding=st.sampled_from(SHARDING),
    chunked=st.booleans(),
)


@given(layouts, st.sampled_from([QWEN3_14B, QWEN3_30B]), st.sampled_from(["none", "resident", "offloaded"]))
def test_more_devices_and_more_recomputation_never_take_more(
    at: ParallelLayout, model: ModelSpec, reference: Reference
) -> None:
    taken = memory(at, model, reference=reference).total
    assert memory(replace(at, dp=at.dp + 1), model, reference=reference).total <= taken + 1
    assert memory(replace(at, tp=at.tp * 2), model, reference=reference).total <= taken + 1
    assert memory(replace(at, recompute="selective" if at.recompute == "none" else at.recompute), model).total <= taken
    assert memory(replace(at, chunked_logits=True), model, reference=reference).total <= taken
    assert min(getattr(memory(at, model, reference=reference), item) for item in MemoryBreakdown.__slots__) >= 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 0}, "tp is 0; set it to 1 or more"),
        ({"micro_tokens": 0}, "micro_tokens is 0"),
        ({"ep": 3}, "ep is 3; it must divide dp \\* cp = 4"),
        ({"pp": 2}, "set sharding to 'zero1' or pp to 1"),
        ({"sharding": "zero4"}, "sharding is 'zero4'; choose one of zero1, zero2, zero3"),
        ({"recompute": "some"}, "recompute is 'some'; choose one of none, selective, full"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(layout(4), **changes)


def test_a_layout_is_named_by_what_it_is() -> None:
    at = layout(8, 4096, tp=2, ep=4)
    assert at.name == "tp2 pp1 cp1 dp8 ep4 zero3 full-recompute chunked-logits 4096-token"
    assert at.family == "tp2 pp1 cp1 dp* ep4 zero3 full-recompute chunked-logits 4096-token"
    assert (at.replica_devices, at.devices) == (2, 16)
