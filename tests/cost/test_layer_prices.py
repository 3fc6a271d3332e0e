"""Prices of windows, chosen keys, states, plain MLPs and latent experts, beside those of models with the same work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles.reshaped import heads_of
from oracles.small_cluster import QWEN_14B

from libra.config.recipe import TrainingBytes
from libra.cost.engine_memory import kv_tokens
from libra.cost.sources.rates import training_rates
from libra.cost.sources.roofline import roofline
from libra.cost.train_batch import Batch
from libra.cost.train_memory import memory_columns
from libra.cost.train_passes import Work
from libra.cost.train_step import train_step
from libra.cost.transfer import Fabric
from libra.cost.unmeasured import unmeasured
from libra.hardware.attention import Attention, Indexer
from libra.hardware.cluster import GPUS
from libra.hardware.context import Reach
from libra.hardware.latent import LatentAttention
from libra.hardware.layers import LayerKind, Mixer
from libra.hardware.mlp import MLP, Experts
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import LayoutTable, ParallelLayout
from libra.hardware.state_space import Mamba2

H100 = GPUS["H100"]
FULL = heads_of(QWEN_14B)
WINDOW = replace(FULL, reach=Reach(1024))
STATE = Mamba2(128, 64, 128, 8, 4, 4)


def mixed(*mixers: Mixer, repeat: int = 20, mlp: MLP | Experts | None = None) -> ModelSpec:
    """The model of tests with these mixers in turn."""
    kinds = tuple(LayerKind(mixer, mlp or MLP(QWEN_14B.intermediate)) for mixer in mixers)
    return replace(QWEN_14B, name="mixed", kinds=kinds, order=tuple(range(len(kinds))) * repeat)


def test_layers_of_one_kind_are_the_model_itself() -> None:
    assert roofline(H100, mixed(FULL, repeat=40), [1]).grid(1) == roofline(H100, QWEN_14B, [1]).grid(1)


def test_a_window_reads_no_more_than_its_width() -> None:
    grid, full = roofline(H100, mixed(WINDOW, repeat=40), [1]).grid(1), roofline(H100, QWEN_14B, [1]).grid(1)
    assert grid.decode_seconds(32, 1024) == full.decode_seconds(32, 1024)
    assert grid.decode_seconds(32, 65536) == grid.decode_seconds(32, 1024)
    assert grid.prefill_seconds(512, 65536) == pytest.approx(full.prefill_seconds(512, 1024 - 256), rel=1e-3)


def test_alternating_layers_take_the_mean() -> None:
    pair, window, full = (
        roofline(H100, it, [1]).grid(1) for it in (mixed(FULL, WINDOW), mixed(WINDOW, repeat=40), QWEN_14B)
    )
    for batch, context in ((1, 512), (32, 8192), (256, 65536)):
        mean = (window.decode_seconds(batch, context) + full.decode_seconds(batch, context)) / 2
        assert pair.decode_seconds(batch, context) == pytest.approx(mean)


def test_a_state_costs_the_same_at_any_context() -> None:
    grid = roofline(H100, mixed(STATE, repeat=40), [1]).grid(1)
    assert grid.decode_seconds(32, 512) == grid.decode_seconds(32, 65536)
    assert grid.prefill_seconds(4096, 0) == grid.prefill_seconds(4096, 65536)
    read = 40 * 2 * 256 * STATE.kept()[0].state / H100.bandwidth
    assert grid.decode_seconds(256, 512) > read  # states are read and written


def test_an_indexer_saves_attention_where_contexts_are_long() -> None:
    plain = LatentAttention(128, 1536, 512, 128, 64, 128)
    chosen = replace(plain, indexer=Indexer(64, 128, 2048))
    grids = [roofline(H100, mixed(it, repeat=40), [8]).grid(8) for it in (plain, chosen)]
    assert grids[1].decode_seconds(64, 131072) < grids[0].decode_seconds(64, 131072)
    assert grids[1].decode_seconds(64, 1024) > grids[0].decode_seconds(64, 1024)


def test_a_plain_mlp_has_two_of_three_matrices() -> None:
    gated, plain = (roofline(H100, mixed(FULL, repeat=40, mlp=MLP(30000, it)), [1]).grid(1) for it in (True, False))
    narrow = roofline(H100, mixed(FULL, repeat=40, mlp=MLP(20000)), [1]).grid(1)
    assert plain.prefill_seconds(16384, 0) < gated.prefill_seconds(16384, 0)
    assert plain.prefill_seconds(16384, 0) == pytest.approx(narrow.prefill_seconds(16384, 0), rel=0.05)


def test_latent_experts_are_narrower() -> None:
    wide, latent = (
        roofline(H100, mixed(FULL, repeat=40, mlp=Experts(64, 8, 1024, latent=it)), [1]).grid(1) for it in (0, 1024)
    )
    assert latent.prefill_seconds(16384, 0) < wide.prefill_seconds(16384, 0)


def test_tokens_of_kv_are_those_of_sequences_of_one_length() -> None:
    model, taken = mixed(FULL, WINDOW, STATE, repeat=12), {}
    for context in (512, 4096, 32768):
        tokens = kv_tokens(model, H100.usable, 0.9, 1, batched_tokens=8192, context=context)
        sequences = tokens / context
        taken[context] = sequences * model.kv_bytes(context, 2)
        assert sequences >= 1
    assert max(taken.values()) == pytest.approx(min(taken.values()), rel=1e-2)


LAYOUT = ParallelLayout(1, 1, 8, 1, 1, 32768, "full", "zero3", True)
STATES = TrainingBytes(2, 4, 12)


def step_of(model: ModelSpec, length: float) -> float:
    work = Work(model, Batch((length,), (64.0,)), STATES, "none", H100, training_rates(H100), Fabric(8, 360e9, 300e9))
    return train_step(work, LAYOUT).attention


def test_training_sees_the_keys_of_windows_alone() -> None:
    full, window = step_of(mixed(FULL, repeat=40), 32768.0), step_of(mixed(WINDOW, repeat=40), 32768.0)
    keys = sum(min(it + 1, 1024) for it in range(32768)) / (32768 * 32769 / 2)
    assert window / full == pytest.approx(keys, rel=0.02)
    assert step_of(mixed(FULL, WINDOW), 32768.0) == pytest.approx((full + window) / 2, rel=1e-6)


def test_flops_of_a_window_are_counted_key_by_key() -> None:
    model, n = mixed(WINDOW, repeat=40), 5000
    keys = sum(min(it + 1, 1024) for it in range(n))
    each = 40 * FULL.heads * 4 * FULL.head_dim
    assert model.forward_flops(n, n * (n + 1) / 2) - model.forward_flops(n, 0) == pytest.approx(each * keys, rel=1e-3)


def test_towers_are_held_and_not_trained() -> None:
    tower, table = replace(QWEN_14B, tower=10**9), LayoutTable.of([LAYOUT])
    plain, more = (memory_columns(it, table, 32768, 80e9, STATES, "none") for it in (QWEN_14B, tower))
    added = {item: float(more[item][0] - plain[item][0]) for item in plain}
    assert added == {item: 2e9 if item == "weights" else 0 for item in plain}
    assert tower.forward_flops(10, 50) == QWEN_14B.forward_flops(10, 50)


def test_training_memory_of_states_and_attention_is_a_mean() -> None:
    table = LayoutTable.of([replace(LAYOUT, recompute="none")])
    each = [
        float(memory_columns(it, table, 32768, 80e9, STATES, "none")["activations"][0])
        for it in (mixed(FULL, repeat=40), mixed(STATE, repeat=40), mixed(FULL, STATE))
    ]
    assert each[2] == pytest.approx(np.mean(each[:2]))


@pytest.mark.parametrize(
    ("mixers", "names"),
    [
        ((FULL,), None),
        ((LatentAttention(128, 1536, 512, 128, 64, 128),), None),
        ((FULL, WINDOW), "windows"),
        ((FULL, WINDOW, STATE), "states, windows"),
        ((LatentAttention(128, 1536, 512, 128, 64, 128, Indexer(64, 128, 2048)),), "attention to chosen keys"),
    ],
)
def test_a_plan_says_which_times_nothing_was_held_against(mixers: tuple[Mixer, ...], names: str | None) -> None:
    told = unmeasured(mixed(*mixers))
    expected = f"times of {names} of mixed are modelled by FLOPs and bytes, and not compared with any run"
    assert told == (None if names is None else expected)
    assert isinstance(FULL, Attention)
