"""Texts of each framework: golden files, GPUs that add up, and refusals."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from oracles.small_cluster import A800, CLASSES, CLUSTER, QWEN_14B, RECIPE
from random_plans import random_plan

from libra.config.frameworks import FRAMEWORKS
from libra.config.recipe import Recipe
from libra.export.split import DeviceSplit, ExportError, _grid
from libra.export.table import EMITTERS, Exported, export
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.plan.loan import Loan
from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.serve.gateway.config import GatewayConfig

GOLDEN = Path(__file__).parent / "golden"
PLANS = 200


def recipe_for(name: str | None, **changes: object) -> Recipe:
    given = {key: getattr(RECIPE, key) for key in RECIPE.model_fields_set}
    return Recipe.model_validate({**given, "framework": name, **changes})


@cache
def plan_for(name: str | None, **changes: object) -> Plan:
    return Planner(CLUSTER, QWEN_14B, recipe_for(name, **changes)).plan(CLASSES)


def test_training_on_the_only_node_keeps_to_its_own_gpus() -> None:
    single = Cluster((replace(A800, count=1),))
    for plan in (Planner(single, QWEN_14B, recipe_for("trl")).plan(CLASSES), plan_for("trl")):
        made = export(plan, "trl")
        accelerate, _ = files(made.text)
        if made.split.nodes > 1:
            assert "gpu_ids" not in accelerate
            continue
        train = set(accelerate["gpu_ids"].split(","))
        generate = {gpu for line in served(made.text) for gpu in line["gpus"].split(",")}
        assert len(train) == accelerate["num_processes"] and train | generate <= set("01234567")
        assert not train & generate


def test_every_framework_of_the_table_has_a_writer() -> None:
    assert set(EMITTERS) == set(FRAMEWORKS)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_text_of_a_plan(name: str) -> None:
    """To renew the files: delete them, run this, and read what changed."""
    made = export(plan_for(name), name)
    path = GOLDEN / f"{name}.{made.format}"
    if not path.exists():
        path.write_text(made.text, encoding="utf-8")
    assert made.text == path.read_text(encoding="utf-8")


def test_states_on_the_host_are_written_or_told() -> None:
    texts = {name: export(plan_for(name, offload_optimiser=True), name).text for name in ("slime", "prime-rl", "verl")}
    assert "--optimizer-cpu-offload" in texts["slime"] and "optim_cpu_offload = true" in texts["prime-rl"]
    told = {name: "not in this file: offload_optimiser True" in text for name, text in texts.items()}
    assert told == {"slime": False, "prime-rl": False, "verl": True}


def settings(text: str) -> dict[str, str]:
    """The `key=value` words of a shell array."""
    words = shlex.split(text[text.index("PLAN_ARGS=(") + len("PLAN_ARGS=(") :], comments=True)
    return dict(word.split("=", 1) for word in words if "=" in word)


def flags(text: str) -> dict[str, str]:
    """The `--flag value` words of a shell array."""
    words = shlex.split(text[text.index("PLAN_ARGS=(") + len("PLAN_ARGS=(") :], comments=True)
    return {word: following for word, following in pairwise(words) if word.startswith("--")}


def files(text: str) -> list[Any]:
    """The YAML files that a script writes."""
    return [yaml.safe_load(body) for body in re.findall(r"<<'END'\n(.*?)END\n", text, re.DOTALL)]


def served(text: str) -> list[dict[str, str]]:
    """Node, GPUs and flags of each `vllm serve` line."""
    lines = []
    for node, command in re.findall(r"^# on (\S+?)(?::.*)?\n(CUDA.*)$", text, re.MULTILINE):
        words = shlex.split(command)
        given = dict(pairwise(words))
        lines.append({"node": node, "gpus": words[0].partition("=")[2], **given})
    return lines


def gpus_written(made: Exported) -> tuple[int, int]:
    """GPUs that train and that generate, by what the text says alone; for engines without training (0, theirs)."""
    name, text = made.split.framework.name, made.text
    if name in ("slime", "miles", "vime"):
        given, (document,) = flags(text), files(text)
        (models,) = document.values()
        groups = models[0]["server_groups"]
        generate = sum(group["num_gpus"] for group in groups)
        assert all(group["num_gpus"] % group["num_gpus_per_engine"] == 0 for group in groups)
        assert generate == int(given["--rollout-num-gpus"])
        return int(given["--actor-num-nodes"]) * int(given["--actor-num-gpus-per-node"]), generate
    if name == "verl":
        given = settings(text)
        trained, generated = (
            int(given[f"{it}.nnodes"]) * int(given[f"{it}.n_gpus_per_node"]) for it in ("trainer", "rollout")
        )
        assert generated % int(given["actor_rollout_ref.rollout.tensor_model_parallel_size"]) == 0
        return trained, generated
    if name == "prime-rl":
        deployment = tomllib.loads(text)["deployment"]
        if deployment["type"] == "single_node":
            return deployment["num_train_gpus"], deployment["num_infer_gpus"]
        each = deployment["gpus_per_node"]
        return deployment["num_train_nodes"] * each, deployment["num_infer_nodes"] * deployment[
            "num_infer_replicas"
        ] * each
    if name == "skyrl":
        given = settings(text)
        placed = "trainer.placement.policy_num_"
        engines = "generator.inference_engine."
        return (
            int(given[placed + "nodes"]) * int(given[placed + "gpus_per_node"]),
            int(given[engines + "num_engines"]) * int(given[engines + "tensor_parallel_size"]),
        )
    if name == "trl":
        accelerate, gateway = files(text)
        lines = served(text)
        assert len(GatewayConfig.model_validate(gateway).engines) == len(lines)
        return accelerate["num_processes"], sum(len(it["gpus"].split(",")) for it in lines)
    if name == "nemo-rl":
        document = yaml.safe_load(text)
        cluster, resources = document["cluster"], document["policy"]["generation"]["colocated"]["resources"]
        generated = resources["num_nodes"] * resources["gpus_per_node"]
        return cluster["num_nodes"] * cluster["gpus_per_node"] - generated, generated
    if name == "areal":
        given = settings(text)
        dense = given["actor.backend"].partition(":")[2].removeprefix("(attn:").partition("|")[0]
        return _product(dense), _product(given["rollout.backend"].partition(":")[2])
    return 0, sum(len(it["gpus"].split(",")) for it in served(text))


def _product(degrees: str) -> int:
    product = 1
    for _, size in re.findall(r"([a-z])(\d+)", degrees):
        product *= int(size)
    return product


def check_lines(split: DeviceSplit, text: str) -> None:
    """Each engine has GPUs and a port of its own, as many GPUs as its degree."""
    lines = served(text)
    assert len(lines) == split.engine_count
    taken = [(it["node"], gpu) for it in lines for gpu in it["gpus"].split(",")]
    assert len(set(taken)) == len(taken)
    assert len({(it["node"], it["--port"]) for it in lines}) == len(lines)
    assert all(int(it["--tensor-parallel-size"]) == len(it["gpus"].split(",")) for it in lines)


def test_gpus_add_up_in_random_plans_and_every_text_parses() -> None:
    made = 0
    for seed in range(PLANS + PLANS // 10):
        plan = random_plan(seed)
        if plan is None:
            continue
        made += 1
        name = plan.of_cluster.recipe.framework
        assert name is not None
        written = export(plan, name)
        split = written.split
        assert split.train_gpus + split.rollout_gpus + split.idle_gpus == plan.of_cluster.devices, seed
        assert split.idle_gpus >= 0, seed
        assert sum(group.devices for group in plan.placement) == split.train_gpus + split.rollout_gpus, seed
        trained = 0 if name == "vllm" else split.train_gpus
        assert gpus_written(written) == (trained, split.rollout_gpus), seed
        if name in ("vllm", "trl"):
            check_lines(split, written.text)
    assert made >= PLANS


def test_engines_of_trl_share_no_node_with_training() -> None:
    split = export(plan_for("trl"), "trl").split
    nodes = {node for group in split.engines for place in group.places for node in place.nodes}
    assert len(nodes) * A800.gpus == split.rollout_gpus


@pytest.mark.parametrize(("gpus", "expected"), [(4, (1, 4)), (8, (1, 8)), (12, (3, 4)), (20, (5, 4)), (24, (3, 8))])
def test_gpus_as_equal_parts_of_nodes(gpus: int, expected: tuple[int, int]) -> None:
    assert _grid(gpus, 8) == expected


def mixed_plan() -> Plan:
    """One with engines of two sizes, made from a plan with two engines of one."""
    plan = plan_for(None, max_buckets=1)
    engine = next(group for group in plan.placement if group.role == "generate")
    parts = (replace(engine, gpus=engine.gpus[:1]), replace(engine, gpus=engine.gpus[2:4]))
    return replace(plan, placement=(*(group for group in plan.placement if group is not engine), *parts))


REFUSED = [
    ("verl", mixed_plan, r"there are engines of 1 and 2( and \d)? GPUs: verl .*; plan again with --for verl"),
    ("trl", lambda: plan_for("slime"), r"training is tp\d .*, which is not a layout of FSDP: trl cannot express this"),
    ("verl", lambda: plan_for(None, mode="colocated"), "training and rollout share .* mode async and --for"),
    ("slime", lambda: plan_for(None, staleness=3), "staleness is 3: .* plan again with staleness 1 and --for slime"),
    ("verll", lambda: plan_for("verl"), r"unknown framework 'verll'; did you mean verl\?"),
]


@pytest.mark.parametrize(("name", "made", "message"), REFUSED)
def test_what_a_framework_cannot_express_is_refused_by_its_part(name: str, made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export(made(), name)


def test_a_loan_is_refused() -> None:
    plan = replace(plan_for(None), loans=(Loan("chat", "chat/tp1@0.8", 0.8, 1, 0.5, 0.1),))
    with pytest.raises(ExportError, match="engines of pool chat are lent: verl cannot express this"):
        export(plan, "verl")


@pytest.mark.parametrize("name", ["prime-rl", "nemo-rl"])
def test_nodes_of_two_sizes_are_refused_where_there_is_one_key(name: str) -> None:
    four = NodeClass("four", 2, 4, GPUS["H200"], intra_bandwidth=200e9, inter_bandwidth=25e9)
    plan = Planner(Cluster((A800, four)), QWEN_14B, recipe_for(name)).plan(CLASSES)
    pools = {group.role: group.pool for group in plan.placement}
    assert len(set(pools.values())) == 2
    with pytest.raises(ExportError, match=rf"GPUs, nodes that generate \d: {name} has one setting for both"):
        export(plan, name)
    text = export(plan, "skyrl").text
    assert "trainer.placement.policy_num_nodes=2" in text


def test_what_the_text_does_not_say_is_named() -> None:
    plan = Planner(CLUSTER, QWEN_14B, recipe_for("verl", rollout_dtype="fp8", reference="resident")).plan(CLASSES)
    text = export(plan, "verl").text
    assert "not in this file: rollout_dtype fp8, reference resident" in text
    lines = export(replace(plan, request=plan.request), "vllm").text
    assert "--quantization fp8" in lines
    assert "rollout_dtype" not in lines


def test_a_router_of_ones_own_goes_before_the_engines() -> None:
    assert "put `libra route` in front of the engines" in export(plan_for("slime", router="cmlfq"), "slime").text
    assert "libra route" not in export(plan_for("slime"), "slime").text
