"""Low-rank adapters: how many parameters they have, and what training, memory and updates become with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import A800, CLASSES, CLUSTER, QWEN_14B, RECIPE

from libra.config.recipe import Recipe
from libra.cost.adapters import (
    adapter_parameters,
    engine_bytes,
    reference_of,
    trained_parameters,
    training_bytes,
    version_bytes,
)
from libra.cost.train_memory import training_memory
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.hardware.parallel import ParallelLayout
from libra.plan.options.engines import engine_kv_tokens
from libra.plan.options.layouts import priced_step
from libra.plan.planner import Planner

LAYOUT = ParallelLayout(2, 1, 8, 1, 1, 8192, "full", "zero1", chunked_logits=True)
GIVEN = {key: getattr(RECIPE, key) for key in RECIPE.model_fields_set}


def recipe(**changes: object) -> Recipe:
    return Recipe.model_validate({**GIVEN, **changes})


# Trainable parameters that PEFT prints for rank 16: on all linear layers, and on q, k, v and o.
PEFT = [
    ("meta-llama/Llama-3.1-8B", 41_943_040, 13_631_488),
    ("meta-llama/Llama-2-7b-hf", 39_976_960, 16_777_216),
]


@pytest.mark.parametrize(("name", "everywhere", "attention"), PEFT)
def test_adapters_have_the_parameters_that_peft_counts(name: str, everywhere: int, attention: int) -> None:
    model = load_model(name)
    assert adapter_parameters(model, 16) == everywhere
    assert adapter_parameters(model, 16, attention_only=True) == attention
    assert adapter_parameters(model, 32) == 2 * everywhere


def test_devices_of_an_engine_divide_one_side_of_an_adapter() -> None:
    model = load_model("meta-llama/Llama-3.1-8B")
    attention = (4096 + 4096 / 2) + 2 * (4096 + 1024 / 2) + (4096 + 4096 / 2)
    each = 16 * (attention + 3 * (4096 + 14336 / 2))
    for targets in ("all", "attention"):  # vLLM has room for all
        assert engine_bytes(recipe(lora_rank=16, lora_targets=targets), model, 2) == 2 * 32 * each
    assert engine_bytes(recipe(lora_rank=16), model, 1) == 2 * 41_943_040
    assert engine_bytes(recipe(), model, 2) == 0
    nodes = A800
    without, held = (engine_kv_tokens(model, nodes, it, 1) for it in (recipe(), recipe(lora_rank=16)))
    assert without - held == pytest.approx(2 * 41_943_040 / model.kv_bytes_per_token(2), abs=16)


def test_each_routed_expert_has_its_own() -> None:
    model = load_model("Qwen/Qwen3-30B-A3B")
    of_mlps = adapter_parameters(model, 1) - adapter_parameters(model, 1, attention_only=True)
    assert of_mlps == 48 * 128 * 3 * (2048 + 768)


def memory(model: ModelSpec, asked: Recipe) -> tuple[float, float, float]:
    held = training_memory(
        model, LAYOUT, 8192, A800.gpu.memory, training_bytes(asked, model), reference_of(asked), asked.execution
    )
    return held.weights, held.gradients + held.optimiser, held.reference


def test_memory_is_of_frozen_weights_and_trained_adapters() -> None:
    share = adapter_parameters(QWEN_14B, 32) / QWEN_14B.trained_parameters
    weights, trained, reference = memory(QWEN_14B, recipe(lora_rank=32, reference="resident"))
    whole_weights, whole_trained, whole_reference = memory(QWEN_14B, recipe(reference="resident"))
    assert weights == whole_weights and whole_reference == whole_weights
    assert reference == 0.0
    # 2 bytes of gradients, whole on each rank; 12 of the optimiser and 2 of the adapters' weights, divided by 8 ranks.
    assert trained / whole_trained == pytest.approx(share * (2 + 14 / 8) / (2 + 12 / 8))


def test_a_step_has_no_gradients_of_weights_to_compute_or_exchange() -> None:
    whole = priced_step(QWEN_14B, A800, recipe(), CLASSES, LAYOUT)
    some = priced_step(QWEN_14B, A800, recipe(lora_rank=8), CLASSES, LAYOUT)
    share = training_bytes(recipe(lora_rank=8), QWEN_14B).trained
    assert share < 0.01
    assert some.compute == pytest.approx(whole.compute * 2 / 3, rel=0.01)
    assert some.optimiser < 0.02 * whole.optimiser
    assert some.communication < whole.communication
    assert some.total < whole.total
    # A rank so high that adapters are as large as the weights costs more than the weights.
    assert priced_step(QWEN_14B, A800, recipe(lora_rank=4096), CLASSES, LAYOUT).total > whole.total


def test_an_update_sends_the_adapters() -> None:
    asked = recipe(lora_rank=16, rollout_dtype="fp8")
    assert version_bytes(asked, QWEN_14B) == 2 * trained_parameters(asked, QWEN_14B)
    assert version_bytes(recipe(), QWEN_14B) == 2 * QWEN_14B.parameters


def test_a_plan_needs_fewer_gpus_to_train() -> None:
    node = replace(CLUSTER, nodes=(replace(A800, count=1),))
    plan = Planner(node, QWEN_14B, recipe(lora_rank=32)).plan(CLASSES)
    whole = Planner(node, QWEN_14B, recipe()).plan(CLASSES)
    assert plan.layout is not None and whole.layout is not None
    assert plan.predicted.step < whole.predicted.step
    assert plan.layout.replica_devices <= whole.layout.replica_devices


def test_adapters_are_written_only_where_they_are_asked_for() -> None:
    assert not {"lora_rank", "lora_targets"} & set(recipe().model_dump())
    assert recipe(lora_rank=8, lora_targets="attention").model_dump()["lora_targets"] == "attention"
    with pytest.raises(ValueError, match="lora_targets is attention, but lora_rank is not given"):
        recipe(lora_targets="attention")
