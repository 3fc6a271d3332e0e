"""Training by PyTorch's own kernels, operation by operation: slower the narrower a model, and with more to remember."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles.reshaped import reshaped

from libra.config.recipe import Execution, TrainingBytes
from libra.cost.sources.rates import training_rates
from libra.cost.train_batch import Batch
from libra.cost.train_memory import training_memory
from libra.cost.train_passes import Work, layer_passes
from libra.cost.train_step import TrainStep, train_step
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPUS, NodeClass
from libra.hardware.decoder import decoder
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import LayoutTable, ParallelLayout, Recompute

NARROW = decoder("narrow", 28, 2048, 16, 8, 128, 6144, 151936, True, 40960, qk_norm=True)
WIDE = decoder("wide", 28, 8192, 64, 16, 128, 24576, 151936, True, 40960, qk_norm=True)
BF16 = TrainingBytes(2, 2, 4)
AUTOCAST = TrainingBytes(4, 4, 8, compute=2)
H100 = GPUS["H100"]
NODES = NodeClass("n", 1, 1, H100, H100.link, 25e9)


def layout(recompute: Recompute = "none") -> ParallelLayout:
    return ParallelLayout(1, 1, 1, 1, 1, 8192, recompute, "zero1", True)


def step(model: ModelSpec, execution: Execution, state: TrainingBytes = BF16, length: float = 512.0) -> TrainStep:
    rates = training_rates(H100, "bf16", execution)
    batch = Batch((length,), (8192 / length,))
    return train_step(Work(model, batch, state, "none", H100, rates, fabric(NODES)), layout())


def memory(model: ModelSpec, execution: Execution, state: TrainingBytes, recompute: Recompute, alone: bool) -> float:
    found = training_memory(
        model, layout(recompute), 8192, H100.memory, state, "none", execution, accumulated=not alone
    )
    return found.total - found.margin


def test_narrow_layers_reach_less_eagerly_and_as_much_with_fused_kernels() -> None:
    lost = step(NARROW, "eager").mfu / step(WIDE, "eager").mfu
    kept = step(NARROW, "fused").mfu / step(WIDE, "fused").mfu
    assert lost < 0.75 * kept
    assert step(NARROW, "eager").compute > step(NARROW, "fused").compute


def test_weights_are_cast_under_autocast() -> None:
    assert step(NARROW, "eager", AUTOCAST).compute > step(NARROW, "eager").compute


def test_each_held_expert_is_cast_once() -> None:
    """Four ranks of a tensor-parallel group hold a quarter of each expert: autocast reads and writes that quarter."""
    experts = reshaped(NARROW, experts=Experts(64, 4, 6144, 0))
    at, batch = replace(layout(), tp=4), Batch((512.0,), (16.0,))
    rates = replace(training_rates(H100, "bf16", "eager"), passes=0.0, fused=None)
    cast, uncast = (
        layer_passes(
            Work(experts, batch, state, "none", H100, rates, fabric(NODES)), LayoutTable.of([at]), np.array([1.0])
        ).forward[0]
        for state in (AUTOCAST, TrainingBytes(4, 4, 8))
    )
    held = experts.kinds[0].parameters(experts.hidden)
    matrices = 28 * (held.total - held.routed) + 28 * 64 * 3 * 2048 * 6144
    assert cast - uncast == pytest.approx(matrices / 4 * (4 + 2) / rates.bandwidth)


def test_flash_attention_3_is_hoppers() -> None:
    assert training_rates(GPUS["H200"], "bf16", "eager").attention > 1.5 * training_rates(GPUS["B200"]).attention * (
        GPUS["H200"].flops / GPUS["B200"].flops
    )
    assert training_rates(GPUS["A100"], "bf16", "eager").attention == training_rates(GPUS["A100"]).attention
    # Within a whole step of fused kernels attention reaches no more than the published ceiling of such steps.
    assert training_rates(H100).attention == training_rates(H100).linear
    assert "not measured" in training_rates(GPUS["A100"], "bf16", "eager").source


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        # Two norms of 2,048 and what reads them, heads and their norms (2,048 and 1,024 wide), four times the gated
        # product of 6,144.
        (BF16, 2 * 8 * 2048 + 6 * 3072 + 2 * 2 * 3072 + 4 * 2 * 6144),
        (AUTOCAST, 2 * 8 * 2048 + 5 * 2 * 2048 + 6 * 3072 + 2 * 2 * 3072 + 4 * 2 * 6144),
    ],
)
def test_what_a_layer_keeps_of_a_token(state: TrainingBytes, wanted: int) -> None:
    deeper = reshaped(NARROW, layers=29)
    kept = memory(deeper, "eager", state, "none", alone=False) - memory(NARROW, "eager", state, "none", alone=False)
    layer = NARROW.kinds[0].parameters(NARROW.hidden).total
    copies = 0 if state.compute is None else state.compute
    assert kept - layer * (state.total + copies) == pytest.approx(8192 * wanted)


@pytest.mark.parametrize("state", [BF16, AUTOCAST])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_micro_batch_never_has_all_gradients_and_all_activations(
    state: TrainingBytes, recompute: Recompute
) -> None:
    alone = memory(NARROW, "eager", state, recompute, alone=True)
    several = memory(NARROW, "eager", state, recompute, alone=False)
    least = NARROW.parameters * state.total
    # At most the embedding's second gradient comes to the sum of all, where nothing else is as large.
    assert least <= alone <= several + state.gradients * NARROW.vocab * NARROW.hidden
    assert memory(NARROW, "fused", state, recompute, alone=False) <= several
