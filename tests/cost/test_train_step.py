"""The price of a training step against published runs, by hand, and by what cannot be."""

from __future__ import annotations

import random
from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.reshaped import reshaped

import libra.cost.train_step as train_step_module
from libra.config.recipe import TrainingBytes
from libra.cost.pipeline import pipeline_seconds
from libra.cost.sources.rates import TrainingRates, training_rates
from libra.cost.train_batch import Batch
from libra.cost.train_memory import Reference, training_memory
from libra.cost.train_passes import EXPERT_HOST, LAUNCH, OPERATIONS, Passes, Work, reached_parts
from libra.cost.train_step import STEP_ITEMS, TrainStep, step_table, train_step
from libra.cost.transfer import Fabric, Group, all_gather_seconds, fabric
from libra.hardware.cluster import GPUS, NodeClass
from libra.hardware.decoder import decoder
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import RECOMPUTE, SHARDING, LayoutTable, ParallelLayout, Recompute, Sharding

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
MIXED = Batch((32000.0, 8000.0, 2000.0), (16.0, 96.0, 400.0))


def work(
    gpu: str = "A800",
    batch: Batch = MIXED,
    model: ModelSpec = QWEN3_14B,
    reference: Reference = "none",
    inter: float = 25e9,
) -> Work:
    device = GPUS[gpu]
    nodes = NodeClass("n", 16, 8, device, device.link, inter)
    return Work(model, batch, ADAMW, reference, device, training_rates(device), fabric(nodes))


FULL_SHARDING = ParallelLayout(1, 1, 8, 1, 1, 40960, "none", "zero3", False)


def mpt(layers: int, hidden: int) -> ModelSpec:
    """MPT's two-matrix MLP of four times the width has the parameters of a gated one of 8/3."""
    return decoder("mpt", layers, hidden, hidden // 128, hidden // 128, 128, hidden * 8 // 3, 50368, True, 65536)


# MosaicML LLM Foundry, scripts/train/benchmarking/README.md, runs of 2,048 tokens: model FLOPs utilisation.
@pytest.mark.parametrize(
    ("gpu", "layers", "hidden", "gpus", "micro", "accumulated", "recompute", "published"),
    [
        ("A100", 80, 8192, 64, 8, 4, "full", 0.5333),
        ("A100", 48, 7168, 8, 3, 21, "full", 0.5530),
        ("A100", 40, 5120, 8, 2, 3, "none", 0.5957),
        ("A100", 32, 4096, 8, 6, 2, "none", 0.6423),
        ("A100", 32, 2560, 8, 10, 2, "none", 0.6211),
        ("H100", 80, 8192, 64, 8, 4, "full", 0.4257),
        ("H100", 48, 7168, 8, 3, 21, "full", 0.3811),
        ("H100", 40, 5120, 64, 2, 1, "none", 0.3986),
        ("H100", 32, 4096, 8, 6, 1, "none", 0.4644),
    ],
)
def test_published_runs_of_full_sharding(
    gpu: str, layers: int, hidden: int, gpus: int, micro: int, accumulated: int, recompute: Recompute, published: float
) -> None:
    model, sequences, length = mpt(layers, hidden), gpus * micro * accumulated, 2048
    at = ParallelLayout(1, 1, gpus, 1, 1, micro * length, recompute, "zero3", False)
    step = train_step(work(gpu, Batch((float(length),), (float(sequences),)), model, inter=200e9), at)
    # There: no log-probabilities beside training, and attention counted without the causal mask.
    seconds = step.total - step.forwards
    flops = sequences * (6 * model.parameters * length + 3 * layers * 4 * hidden * length**2)
    assert flops / (seconds * gpus * GPUS[gpu].flops) == pytest.approx(published, rel=0.20)


layouts = st.builds(
    lambda tp, pp, dp, cp, ep, micro, recompute, sharding, chunked: ParallelLayout(
        tp, pp, dp * ep, cp, ep, micro, recompute, "zero1" if pp > 1 else sharding, chunked
    ),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.integers(1, 40),
    cp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 8]),
    micro=st.sampled_from([2048, 10240, 40960]),
    recompute=st.sampled_from(RECOMPUTE),
    sharding=st.sampled_from(SHARDING),
    chunked=st.booleans(),
)
models = st.sampled_from([QWEN3_14B, QWEN3_30B])
batches = st.lists(st.tuples(st.integers(100, 40960), st.integers(1, 300)), min_size=1, max_size=5).map(
    lambda kinds: Batch(*zip(*((float(n), float(c)) for n, c in sorted(kinds, reverse=True)), strict=True))
)


@settings(max_examples=150)
@given(layouts, models, batches, st.sampled_from(sorted(GPUS)), st.sampled_from(["none", "resident", "offloaded"]))
def test_no_layout_is_faster_than_devices_were_measured_to_train(
    at: ParallelLayout, model: ModelSpec, batch: Batch, gpu: str, reference: Reference
) -> None:
    step = train_step(work(gpu, batch, model, reference), at)
    assert 0 < step.mfu <= training_rates(GPUS[gpu]).linear / GPUS[gpu].flops
    assert sum(getattr(step, item) for item in STEP_ITEMS) == pytest.approx(step.total)
    assert min(getattr(step, item) for item in STEP_ITEMS) >= -1e-9


@settings(max_examples=40)
@given(st.lists(layouts, min_size=1, max_size=6), models)
def test_a_table_has_the_prices_of_its_layouts(rows: list[ParallelLayout], model: ModelSpec) -> None:
    at = work(model=model)
    table = step_table(at, LayoutTable.of(rows))
    for row, layout in enumerate(rows):
        assert table.seconds(row) == pytest.approx(train_step(at, layout).total)
        assert LayoutTable.of(rows).layout(row) == layout


def test_one_device_by_hand() -> None:
    """No parallelism, so nothing but FLOPs, launches and the optimiser."""
    at = work(batch=Batch((4096.0,), (8.0,)))
    rates = TrainingRates(linear=200e12, attention=100e12, experts=80e12, bandwidth=1e12, source="made up")
    step = train_step(replace(at, rates=rates), replace(FULL_SHARDING, dp=1, sharding="zero1", micro_tokens=32768))
    tokens, keys = 8 * 4096, 8 * 4096 * 4097 / 2
    multiplied = QWEN3_14B.parameters - 151936 * 5120 - 5120  # the input embedding and the final norm are not
    launches = 3 * 40 * 16 * 8e-6  # forward once, backward twice, one micro-batch
    assert step.compute == pytest.approx(6 * multiplied * tokens / 200e12 + launches)
    scores = 4 * 40 * 40 * 128 * keys
    assert step.attention == pytest.approx(3.5 * scores / 100e12)
    assert step.forwards == pytest.approx(2 * multiplied * tokens / 200e12 + launches / 3 + scores / 100e12)
    assert step.optimiser == pytest.approx(QWEN3_14B.parameters * 30 / 1e12, rel=1e-4)
    assert (step.communication, step.bubble, step.imbalance, step.recompute) == (0, 0, 0, 0)
    assert step.mfu == pytest.approx((6 * multiplied * tokens + 3 * scores) / (step.total * 312e12))


def test_fp8_by_hand() -> None:
    """Layers at the FP8 rate, the head at that of bf16, and casts of what each expert multiplies."""
    at = work("H100", Batch((4096.0,), (64.0,)), QWEN3_30B)
    rates = TrainingRates(2e14, 1e14, 1e14, bandwidth=1e12, source="made up", head=5e13, casts=6.0)
    alone = replace(FULL_SHARDING, dp=1, sharding="zero1", micro_tokens=65536)
    step, uncast = (train_step(replace(at, rates=each), alone) for each in (rates, replace(rates, casts=0.0)))
    copies = 64 * 4096 * 8 * 48  # of tokens, one for each of 8 experts in each of 48 layers
    widths = (2048 + 768) + (2048 + 2 * 768)  # inputs of both products; gradients of their outputs
    assert step.compute - uncast.compute == pytest.approx(copies * widths * 6 / 1e12)
    narrow = train_step(replace(at, rates=replace(rates, casts=0.0, head=None)), alone)
    head = 6 * 151936 * 2048 * 64 * 4096
    assert uncast.compute - narrow.compute == pytest.approx(head / 5e13 - head / 2e14)


@pytest.mark.parametrize("devices", [2, 16])
def test_an_update_on_the_host_by_hand(devices: int) -> None:
    """Gradients go to the host and weights come back; the processors of a node of eight update the parts of all."""
    at = work()
    steps = [
        train_step(replace(at, state=replace(ADAMW, offloaded=offloaded)), replace(FULL_SHARDING, dp=devices))
        for offloaded in (False, True)
    ]
    own = QWEN3_14B.parameters / devices
    wanted = own * (2 + 2) / 25e9 + own * min(devices, 8) * 2.57 / 10e9
    assert steps[1].optimiser == pytest.approx(wanted, rel=1e-3)
    assert steps[1].total - steps[1].optimiser == pytest.approx(steps[0].total - steps[0].optimiser)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("full", 4)])
def test_no_device_undercuts_the_host_in_a_layer_with_experts(recompute: Recompute, passes: int) -> None:
    """Small micro-batches take the host's time for every layer of every pass; large ones the device's."""
    short, long = (
        train_step(
            replace(work("B200", Batch((float(tokens),), (64.0,)), QWEN3_30B), old_policy=False),
            replace(FULL_SHARDING, ep=8, sharding="zero1", micro_tokens=tokens, recompute=recompute),
        )
        for tokens in (1024, 65536)
    )

    def layers(step: TrainStep) -> float:
        return step.compute + step.attention + step.recompute + step.communication

    host = passes * 48 * 8 * EXPERT_HOST  # 8 micro-batches of each rank
    assert host < layers(short) < 1.3 * host  # head and data-parallel exchange come on top
    assert layers(long) > 2 * host
    dense = replace(work("B200", Batch((1024.0,), (64.0,))), old_policy=False)
    assert layers(train_step(dense, replace(FULL_SHARDING, sharding="zero1", micro_tokens=1024))) < host


def test_full_recompute_is_one_more_forward_of_the_layers() -> None:
    none, full = train_step(work(), FULL_SHARDING), train_step(work(), replace(FULL_SHARDING, recompute="full"))
    selective = train_step(work(), replace(FULL_SHARDING, recompute="selective"))
    # `forwards` is one forward with the head, which is the part of `compute` that is not made again.
    head = 2 * 151936 * 5120 * MIXED.tokens / 8 / training_rates(GPUS["A800"]).linear
    assert full.recompute == pytest.approx(none.forwards - head)
    assert 0 < selective.recompute < 0.05 * none.compute


def test_a_reference_costs_a_forward_and_offloaded_its_loading() -> None:
    none, resident, offloaded = (
        train_step(work(reference=each), FULL_SHARDING) for each in ("none", "resident", "offloaded")
    )
    assert resident.forwards == pytest.approx(2 * none.forwards)
    shard = 2 * QWEN3_14B.parameters / 8
    assert offloaded.forwards - resident.forwards == pytest.approx(shard / 25e9, rel=1e-3)


def test_attention_grows_with_the_square_of_the_length() -> None:
    short, long = (train_step(work(batch=Batch((n,), (2**19 / n,))), FULL_SHARDING) for n in (1024.0, 32768.0))
    assert long.compute == pytest.approx(short.compute, rel=0.01)  # the same tokens
    assert long.attention == pytest.approx(32 * short.attention, rel=0.01)


def test_a_pipeline_of_equal_micro_batches_waits_for_its_stages() -> None:
    even = work(batch=Batch((4096.0,), (8.0,)))
    at = ParallelLayout(1, 4, 1, 1, 1, 4096, "none", "zero1", False)
    step, table = train_step(even, at), step_table(even, LayoutTable.of([at]))
    assert step.bubble == pytest.approx(float(table.items["bubble"][0]), rel=1e-6)
    head = 8 * 151936 * 5120 * 8 * 4096 / training_rates(GPUS["A800"]).linear  # on the last stage only
    busy = step.compute + step.attention + step.forwards + step.communication - head
    assert step.bubble == pytest.approx(3 / 8 * busy, rel=0.02)


@pytest.mark.parametrize("chunked", [False, True])
def test_unequal_micro_batches_are_simulated(chunked: bool) -> None:
    """Two micro-batches of 32K tokens on two stages: one trajectory, then eight, whose keys are an eighth."""
    at = ParallelLayout(1, 2, 1, 1, 1, 32768, "none", "zero1", chunked)
    table = step_table(work(batch=Batch((32768.0, 4096.0), (1.0, 8.0))), LayoutTable.of([at]))
    passes = table.passes
    share = np.array([8.0, 1.0]) * 2 / 9
    (f0, f1), (b0, b1) = (
        (linear + sent) / 2 + attention / 2 * share
        for linear, sent, attention in (
            (passes.forward[0], passes.exchange_forward[0], passes.attention_forward[0]),
            (passes.backward[0], passes.exchange_backward[0], passes.attention_backward[0]),
        )
    )
    head = passes.head[0] / 2
    head_back = (3 if chunked else 2) * head
    back = 2 * f0 + head + b0 + head_back  # the first backward reaches the first stage
    last = max(back + b0, back + f1 + head + b1 + head_back) + b1
    scored = f0 + (f0 + f1) + 2 * head  # forwards alone: the last stage starts late, and is the slower one
    bubble = last + scored - 2 * (f0 + f1 + 2 * head) - (b0 + b1 + 2 * head_back)
    assert table.simulated_bubble(0) == pytest.approx(bubble, rel=1e-4)  # keys are n * (n + 1) / 2
    assert table.simulated_bubble(0) != pytest.approx(float(table.items["bubble"][0]), rel=0.01)


def test_a_long_pipeline_is_simulated_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    at = ParallelLayout(1, 4, 1, 1, 1, 8192, "none", "zero1", False)
    table = step_table(work(), LayoutTable.of([at]))
    assert table.counts[0] > 2 * train_step_module.SIMULATED
    part = table.simulated_bubble(0)
    monkeypatch.setattr(train_step_module, "SIMULATED", 10**6)
    assert part == pytest.approx(table.simulated_bubble(0), rel=0.15)


def test_more_ranks_than_even_shares_wait_for_the_longest() -> None:
    skewed = Batch((32000.0, 1000.0), (1.0, 63.0))
    assert train_step(work(batch=skewed), replace(FULL_SHARDING, dp=64)).imbalance > 0
    assert train_step(work(batch=Batch((1000.0,), (64.0,))), replace(FULL_SHARDING, dp=64)).imbalance == 0


EVEN = Batch((4096.0,), (16.0,))
LINK, NETWORK = GPUS["A800"].link * 0.74, 25e9 * 0.9


def passes(at: ParallelLayout, model: ModelSpec = QWEN3_14B, batch: Batch = EVEN) -> Passes:
    return step_table(work(batch=batch, model=model), LayoutTable.of([at])).passes


def layout(**changes: object) -> ParallelLayout:
    return replace(ParallelLayout(1, 1, 1, 1, 1, 8192, "none", "zero1", False), **changes)


def test_tensor_parallelism_gathers_and_scatters_around_attention_and_mlp() -> None:
    once = 7 / 8 * 8192 * 5120 * 2 / LINK + 7 * 1.8e-6
    found = passes(layout(tp=8))
    assert found.exchange_forward[0] == pytest.approx(8 * 40 * 4 * once)  # micro-batches, layers, times
    assert found.exchange_backward[0] == pytest.approx(8 * 40 * 2 * once)  # the others are behind products
    assert passes(layout(tp=8, recompute="full")).exchange_backward[0] == pytest.approx(8 * 40 * (4 + 2) * once)


def test_what_is_exchanged_beside_products_that_are_too_short_is_waited_for() -> None:
    usual = work(batch=EVEN)
    slow = replace(usual.fabric, link=usual.fabric.link / 100)
    found = step_table(replace(usual, fabric=slow), LayoutTable.of([layout(tp=8)])).passes
    gathered = 2 * float(all_gather_seconds(8192 * 5120 * 2, Group(8), slow))
    hidden = 0.8 * 2 * (found.forward[0] - 8 * 40 * OPERATIONS * LAUNCH)
    assert hidden < 8 * 40 * gathered
    assert found.exchange_backward[0] == pytest.approx(8 * 40 * 2 * gathered - hidden)


def test_frozen_weights_have_no_products_to_hide_exchanges_behind() -> None:
    frozen = replace(work(batch=EVEN), state=replace(ADAMW, trained=0.01))
    found = step_table(frozen, LayoutTable.of([layout(tp=8)])).passes
    assert found.exchange_backward[0] == found.exchange_forward[0]


@pytest.mark.parametrize(("tp", "dp", "rate", "latency"), [(1, 1, LINK, 1.8e-6), (1, 8, NETWORK / 8, 5e-6)])
def test_stages_send_what_is_between_them(tp: int, dp: int, rate: float, latency: float) -> None:
    found = passes(layout(tp=tp, dp=dp, pp=2))
    assert found.exchange_forward[0] == pytest.approx(8 / dp * (8192 * 5120 * 2 / tp / rate + latency))


def test_the_ring_hides_behind_attention() -> None:
    hop = 4096 / 2 * 2 * 8 * 128 * 2 / LINK  # keys and values of a device's share of 4,096 tokens
    ring = 40 * (hop + 1.8e-6)
    short = Batch((32.0,), (128.0,))  # packed to 4,096 tokens that hardly attend
    found = passes(layout(cp=2, micro_tokens=4096), batch=short)
    assert found.attention_forward[0] < ring
    assert found.exchange_forward[0] == pytest.approx(ring - 0.8 * found.attention_forward[0])
    assert found.exchange_backward[0] == pytest.approx(2 * ring - 0.8 * found.attention_backward[0])
    assert passes(layout(cp=2), batch=Batch((32768.0,), (1.0,))).exchange_forward[0] == 0


@pytest.mark.parametrize(
    ("ep", "seconds"),
    [
        # Eight of 128 experts: 8 * (1 - C(112, 8) / C(128, 8)) of eight devices have one, and nearly always both nodes.
        (8, 7 / 8 * 8 * (1 - comb(112, 8) / comb(128, 8)) * 8192 * 2048 * 2 / LINK + 7 * 1.8e-6),
        (16, (1 - comb(64, 8) / comb(128, 8)) * 8192 * 2048 * 2 / (NETWORK / 8) + 7 * 1.8e-6 + 5e-6),
    ],
)
def test_tokens_are_sent_to_their_experts_and_back(ep: int, seconds: float) -> None:
    at = layout(dp=ep, ep=ep)
    batch = Batch((8192.0,), (float(ep),))
    assert passes(at, QWEN3_30B, batch).exchange_forward[0] == pytest.approx(48 * 2 * seconds)
    assert passes(layout(dp=ep), QWEN3_30B, batch).exchange_forward[0] == 0


@pytest.mark.parametrize(("groups", "active"), [(1, 1), (8, 4), (16, 2), (16, 1)])
@pytest.mark.parametrize("parts", [1, 2, 8, 16, 32])
def test_a_token_reaches_the_parts_that_draws_do(groups: int, active: int, parts: int) -> None:
    experts = Experts(64, 4, 16, 0, groups, active)
    draw, seen = random.Random(0), 0
    each = 64 // groups
    for _ in range(3000):
        chosen = draw.sample(range(groups), active)
        among = [group * each + expert for group in chosen for expert in range(each)]
        seen += len({expert * parts // 64 for expert in draw.sample(among, 4)})
    found = float(reached_parts(experts, np.array(float(parts))))
    # Exact without groups; with several groups in a part, draws from a mean number of parts are near enough.
    assert found == pytest.approx(seen / 3000, rel=0.03 if parts >= groups else 0.06)


def test_tensor_parallel_experts_gather_every_copy() -> None:
    whole, copies = (7 / 8 * 8192 * 2048 * 2 * each / LINK + 7 * 1.8e-6 for each in (1, 8))
    model = reshaped(QWEN3_30B, kv_heads=8)
    found = passes(layout(tp=8), model, Batch((8192.0,), (1.0,)))
    assert found.exchange_forward[0] == pytest.approx(48 * (2 * whole + 2 * copies))


def test_few_tokens_wait_for_the_experts_to_be_read() -> None:
    """Experts so wide that this takes longer than launching them."""
    wide = reshaped(QWEN3_30B, experts=Experts(128, 8, 8192))
    few, more = (passes(layout(), wide, Batch((n,), (1.0,))).forward[0] for n in (16.0, 32.0))
    read = 48 * 128 * 3 * 2048 * 8192 * 2 / (0.8 * GPUS["A800"].bandwidth)
    launched = 48 * 16 * 8e-6
    assert few == pytest.approx(read + launched, rel=0.05)
    assert more == pytest.approx(few, rel=0.05)


@pytest.mark.parametrize(("sharding", "gathered", "reduced"), [("zero1", 1, 1), ("zero2", 1, 16), ("zero3", 48, 16)])
def test_a_slow_network_shows_what_each_sharding_moves(sharding: Sharding, gathered: int, reduced: int) -> None:
    """Two ranks of sixteen micro-batches: full sharding gathers for each of its three passes."""
    given = work(batch=Batch((4096.0,), (32.0,)))
    slow = replace(given, fabric=Fabric(gpus=1, link=1e9, network=1e7))
    step = train_step(slow, layout(dp=2, micro_tokens=4096, sharding=sharding))
    once = 2 * QWEN3_14B.parameters / 2 / 1e7  # half of two bytes a parameter
    assert step.communication == pytest.approx((gathered + reduced) * once, rel=0.01)


def test_a_fast_network_hides_most_of_full_sharding() -> None:
    step = train_step(work(inter=200e9), replace(FULL_SHARDING, dp=16))
    assert 0 < step.communication < 0.05 * step.total


def test_single_precision_runs_at_half_speed() -> None:
    assert training_rates(GPUS["A800"], "fp32").linear == training_rates(GPUS["A800"]).linear / 2


def test_the_balance_of_experts_counts_their_slower_layers() -> None:
    """One long trajectory against many short ones: experts slow the short ones' tokens, not the long one's keys."""
    skewed, at = Batch((32768.0, 512.0), (1.0, 1000.0)), layout(dp=32)
    slow = work(batch=skewed, model=QWEN3_30B)
    fast = replace(slow, rates=replace(slow.rates, experts=slow.rates.linear))
    shares = [train_step(each, at) for each in (slow, fast)]
    assert shares[0].imbalance / shares[0].total < shares[1].imbalance / shares[1].total


def test_unknown_gpus_get_the_lowest_share_and_say_so() -> None:
    rates = training_rates(GPUS["L40S"])
    assert rates.linear == pytest.approx(0.47 * GPUS["L40S"].flops)
    assert "no published run" in rates.source
    assert "no published run" not in training_rates(GPUS["H800"]).source


@pytest.mark.parametrize(
    ("linear", "attention", "message"),
    [(0.0, 1.0, "linear is 0.0"), (1.0, 2.0, "attention is 2; it is at most linear")],
)
def test_impossible_rates_are_refused(linear: float, attention: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingRates(linear, attention, experts=0.5, bandwidth=1.0, source="")


def test_dp_is_a_column() -> None:
    dp = np.arange(1.0, 65.0)
    one = LayoutTable.of([FULL_SHARDING])
    table = one.take(np.zeros(len(dp), dtype=np.intp)).with_dp(dp)
    assert len(step_table(work(), table).total) == 64


def test_a_last_stage_has_fewer_layers_and_the_head() -> None:
    """61 layers on four stages: 16 and 13. The price is that of stages that were simulated with what each has."""
    model, count = reshaped(QWEN3_14B, layers=61), 16
    even = work(batch=Batch((4096.0,), (float(count),)), model=model)
    at = ParallelLayout(1, 4, 1, 1, 1, 4096, "none", "zero1", False)
    step = train_step(even, at)
    whole = step_table(even, LayoutTable.of([replace(at, pp=1)])).passes
    sent = 4096 * 5120 * 2 / LINK + 1.8e-6
    forward = [[float(whole.forward[0] + whole.attention_forward[0]) / count * n / 61 + sent] * count for n in DEPTHS]
    backward = [
        [float(whole.backward[0] + whole.attention_backward[0]) / count * n / 61 + sent] * count for n in DEPTHS
    ]
    head = float(whole.head[0]) / count
    forward[-1] = [each + head for each in forward[-1]]
    backward[-1] = [each + 2 * head for each in backward[-1]]
    exact = pipeline_seconds(forward, backward) + pipeline_seconds(forward, [[0.0] * count] * 4)
    priced = step.total - step.optimiser
    assert exact <= priced <= 1.03 * exact


DEPTHS = (16, 16, 16, 13)


@pytest.mark.parametrize("virtual", [2, 5])
def test_virtual_stages_divide_the_wait_and_send_more(virtual: int) -> None:
    even = work(batch=Batch((4096.0,), (8.0,)))
    at = ParallelLayout(1, 4, 1, 1, 1, 4096, "none", "zero1", False)
    plain, parts = train_step(even, at), train_step(even, replace(at, virtual=virtual))
    sent = 8 * (4096 * 5120 * 2 / LINK + 1.8e-6)
    assert parts.communication - plain.communication == pytest.approx(3 * (virtual - 1) * sent)  # with the scoring
    assert parts.bubble == pytest.approx(plain.bubble / virtual + 3 / 8 * 3 * sent * (1 - 1 / virtual), rel=1e-6)
    odd = step_table(work(batch=Batch((4096.0,), (9.0,))), LayoutTable.of([replace(at, virtual=virtual)]))
    assert odd.counts[0] == 12  # whole turns of four


SPARSE = st.builds(
    lambda hidden, count, active, width, shared: reshaped(
        QWEN3_30B, hidden=hidden, experts=Experts(count, min(active, count), width, shared)
    ),
    st.sampled_from([1024, 2048, 7168]),
    st.sampled_from([16, 64, 256]),
    st.integers(2, 8),
    st.sampled_from([512, 2048]),
    st.sampled_from([0, 1024]),
)


@given(SPARSE, st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 4]), st.booleans())
def test_whole_experts_are_never_worse_than_divided_ones(
    model: ModelSpec, tp: int, ep: int, pp: int, slow: bool
) -> None:
    """In as many parts: this is why divided ones are not listed beside them."""
    divided = ParallelLayout(tp, pp, 8, 1, ep, 8192, "none", "zero1", False)
    whole = replace(divided, ep=ep * tp, whole_experts=True)
    at = work(batch=Batch((4096.0,), (256.0,)), model=model, inter=5e9 if slow else 400e9)
    assert train_step(at, whole).total <= train_step(at, divided).total * (1 + 1e-12)  # equal where the host sets both
    taken = [training_memory(model, each, 8192, 80e9, ADAMW, "none") for each in (divided, whole)]
    assert (taken[0].weights, taken[0].optimiser) == (taken[1].weights, taken[1].optimiser)
    assert taken[1].total <= taken[0].total


def test_whole_experts_by_hand() -> None:
    """Tokens go from tensor-parallel ranks, each with its part of the sequence, to the experts' devices and back."""
    found = passes(layout(tp=4, ep=4, whole_experts=True), QWEN3_30B)
    micro, reached = 8192, 4 * (1 - comb(96, 8) / comb(128, 8))
    whole = 3 / 4 * micro * 2048 * 2 / LINK + 3 * 1.8e-6
    moved = reached * 3 / 4 * micro * 2048 * 2 / 4 / LINK + 3 * 1.8e-6
    assert found.exchange_forward[0] == pytest.approx(8 * 48 * (2 * whole + 2 * moved))
