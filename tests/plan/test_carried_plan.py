"""What a run begins with is what its plan says, or is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracles.small_cluster import A800, CLASSES, QWEN_06B, QWEN_14B
from oracles.small_request import REQUEST

from libra.config.recipe import Recipe
from libra.config.run import ConfigError, RunConfig
from libra.hardware.cluster import Cluster
from libra.plan.carried_plan import carried, carried_words
from libra.plan.plan import Plan, make_plan
from libra.plan.planner import Planner

ENVIRONMENT: dict[str, Any] = {"kind": "calculator", "tools": ["calculator"]}
A800_BYTES = A800.gpu.memory
FIRST = REQUEST.shapes[0]


def config(**sections: Any) -> RunConfig:
    """Of the batch of `recipe`, with engines that no plan names."""
    made = {
        "name": "planned",
        "environment": ENVIRONMENT,
        "model": {"directory": Path("model")},
        "training": {"steps": 3, "prompts_per_step": 8, "samples_per_prompt": 8},
        "engines": {"own": {"max_model_len": 64, "max_num_seqs": 4, "kv_tokens": 64}},
        "start": {"replicas": 1, "buckets": [{"shape": "own", "engines": 3, "up_to": 64}]},
    }
    return RunConfig.model_validate({**made, **sections})


def plan_on(gpus: int, model: Any = QWEN_06B, count: int = 1, **recipe: Any) -> Plan:
    asked = Recipe(**{"batch": 64, "samples_per_prompt": 8, "max_length": 8192, "framework": "libra", **recipe})
    return Planner(Cluster((replace(A800, count=count, gpus=gpus),)), model, asked).plan(CLASSES)


def of_slots(**changes: Any) -> RunConfig:
    """The configuration that `REQUEST` was made of."""
    work, fleet = REQUEST.workload, REQUEST.fleet
    shapes = {
        it.name: {"max_model_len": it.max_model_len, "max_num_seqs": it.max_num_seqs, "kv_tokens": it.kv_tokens}
        for it in REQUEST.shapes
    }
    sections: dict[str, Any] = {
        "cluster": {
            "slots": fleet.devices,
            "core": fleet.core,
            "hybrid": fleet.hybrid,
            "rollout": fleet.rollout,
        },
        "engines": shapes,
        "start": {
            "replicas": fleet.core,
            "buckets": [{"shape": [*shapes][-1], "engines": fleet.devices - fleet.core, "up_to": work.longest_context}],
        },
        "training": {
            "steps": 3,
            "prompts_per_step": work.trajectories // work.group_size,
            "samples_per_prompt": work.group_size,
            "max_staleness": work.max_staleness,
        },
    }
    for key, value in changes.items():
        sections[key] = {**sections[key], **value}
    return config(**sections)


def test_a_plan_for_slots_is_the_start_of_the_run() -> None:
    plan = make_plan(REQUEST)
    made = carried(of_slots(), plan, None, None)
    assert made.start.replicas == plan.allocation.replicas
    assert [(it.shape, it.engines, it.up_to) for it in made.start.buckets] == [
        (it.shape, it.engines, it.up_to) for it in plan.allocation.buckets
    ]
    assert made.start != of_slots().start
    assert made.model_copy(update={"start": of_slots().start}) == of_slots()
    assert carried_words(plan) == f"{plan.allocation.describe()}; layout one device"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"training": {"max_staleness": 7}},
            r"training\.max_staleness: the plan is for \d, and the configuration has 7",
        ),
        ({"training": {"prompts_per_step": 999}}, r"training\.prompts_per_step: the plan is for \d+, .* has 999; plan"),
        (
            {"engines": {"new": {"max_model_len": 8, "max_num_seqs": 1, "kv_tokens": 8}}},
            "engines: the plan is for .*new",
        ),
        (
            {"engines": {FIRST.name: {"max_model_len": 8, "max_num_seqs": 1, "kv_tokens": 8}}},
            rf"engines\.{FIRST.name}\.max_model_len: the plan is for {FIRST.max_model_len}, and",
        ),
    ],
)
def test_a_plan_for_another_question_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        carried(of_slots(**changes), make_plan(REQUEST), None, None)


def test_slots_of_other_kinds_are_refused() -> None:
    fleet = REQUEST.fleet
    other = {"core": fleet.core, "hybrid": fleet.hybrid + 1, "rollout": fleet.rollout, "slots": fleet.devices + 1}
    longest = REQUEST.workload.longest_context
    buckets = [{"shape": REQUEST.shapes[-1].name, "engines": fleet.devices + 1 - fleet.core, "up_to": longest}]
    with pytest.raises(ConfigError, match=r"cluster\.hybrid: the plan is for "):
        carried(of_slots(cluster=other, start={"buckets": buckets}), make_plan(REQUEST), None, None)


@pytest.mark.parametrize(("gpus", "model"), [(2, QWEN_06B), (3, QWEN_06B), (8, QWEN_06B), (8, QWEN_14B)])
def test_a_plan_for_one_node_has_each_group_on_the_gpus_that_it_names(gpus: int, model: Any) -> None:
    plan = plan_on(gpus, model)
    made, cluster = carried(config(), plan, model, A800_BYTES), carried(config(), plan, model, A800_BYTES).cluster
    training = [group for group in plan.placement if group.role == "train"]
    engines = [group for group in plan.placement if group.role == "generate"]
    assert plan.layout is not None and cluster.placement is not None
    assert cluster.placement[0] == tuple(gpu for group in training for gpu in group.gpus)
    assert cluster.placement[1:] == tuple(group.gpus for group in engines)
    assert (cluster.core, cluster.hybrid, cluster.rollout, cluster.share) == (1, 0, len(engines), 1.0)
    assert made.training.processes == plan.layout.dp == cluster.replica_gpus
    assert made.training.sharding == ("fsdp2" if plan.layout.dp > 1 else "none")
    assert made.training.micro_batch_tokens == plan.layout.micro_tokens
    assert [(it.engines, it.up_to) for it in made.start.buckets] == [
        (it.engines, it.up_to) for it in plan.allocation.buckets
    ]
    for bucket, seqs in zip(made.start.buckets, plan.max_num_seqs, strict=True):
        shape = made.engines[bucket.shape]
        assert shape.max_num_seqs == seqs and shape.kv_tokens >= shape.max_model_len >= bucket.up_to
    assert all(f"{group.name} on a800 0" in carried_words(plan) for group in plan.placement)


@pytest.mark.parametrize(
    ("gpus", "recipe", "message"),
    [
        (3, {"framework": None}, r"layout tp1 pp1 cp1 dp2 zero1 8192-token: .*; plan with --for libra"),
        (8, {"framework": None}, r"layout tp1 pp1 cp2 dp3 zero1"),
        (2, {"reference": "resident"}, "reference: the plan has a reference model, which a run does not support"),
        (2, {"lora_rank": 8}, "lora_rank: the plan has adapters"),
        (2, {"offload_optimiser": True}, "offload_optimiser: the plan has the optimiser's state on the host"),
        (2, {"batch": 128}, r"training\.prompts_per_step: the plan is for 16, and the configuration has 8"),
        (2, {"kv_on_update": "refresh"}, r"training\.kv_on_update: the plan is for refresh"),
        (2, {"mode": "colocated", "framework": None}, "mode: the plan has devices that train and generate in turn"),
    ],
)
def test_what_a_run_cannot_have_is_named(gpus: int, recipe: dict[str, Any], message: str) -> None:
    wanted = (
        config()
        if recipe.get("mode") != "colocated"
        else config(training={"steps": 3, "prompts_per_step": 8, "samples_per_prompt": 8, "max_staleness": 0})
    )
    with pytest.raises(ConfigError, match=message):
        carried(wanted, plan_on(gpus, **recipe), QWEN_06B, A800_BYTES)


def test_other_models_gpus_and_several_nodes_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.directory: the plan is for Qwen/Qwen3-0.6B, .* another model, .*14B"
    ):
        carried(config(), plan_on(2), QWEN_14B, A800_BYTES)
    with pytest.raises(ConfigError, match=r"model\.directory: .* the configuration has none"):
        carried(config(), plan_on(2), None, A800_BYTES)
    with pytest.raises(ConfigError, match="placement on a800: its A800 have 80 GiB, and a GPU here 40 GiB; plan for"):
        carried(config(), plan_on(2), QWEN_06B, A800_BYTES / 2)
    with pytest.raises(ConfigError, match="placement on nodes a800 0, a800 1: the slots of a run are on one machine"):
        carried(config(), plan_on(1, count=2), QWEN_06B, A800_BYTES)
