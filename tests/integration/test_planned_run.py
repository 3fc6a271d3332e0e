"""Runs that begin as a plan file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from arithmetic import LOGPROB_GAP
from small_runs import SMALL_RUN, SmallRuns
from typer.testing import CliRunner

from libra.backends.tiny_model import write_tiny_model
from libra.cli.app import app
from libra.config.recipe import Recipe
from libra.config.run import ModelConfig
from libra.environments.calculator import Calculator
from libra.hardware.cluster import Cluster, NodeClass
from libra.hardware.gpu import GPU
from libra.hardware.model_file import load_model
from libra.lengths import TrajectoryClass
from libra.plan.plan import Plan, dump_plan, parse_plan
from libra.plan.planner import Planner

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
PROFILE = EXAMPLES / "profile_2_cores.json"
MEASURED = {"planner__calibration": str(PROFILE)}  # nothing is measured for a few steps


def test_a_run_on_cpu_slots_is_what_the_plan_says(small_runs: SmallRuns, tmp_path: Path) -> None:
    asked, file = tmp_path / "asked.yaml", tmp_path / "plan.json"
    asked.write_text(yaml.safe_dump(SMALL_RUN))
    log = EXAMPLES / "trajectories.jsonl"
    planned = CliRunner().invoke(app, ["plan", str(asked), "-t", str(log), "-p", str(PROFILE), "-o", str(file)])
    assert planned.exit_code == 0, planned.stderr
    plan = parse_plan(file.read_text()).allocation
    other = {"replicas": 1, "buckets": [{"shape": "long", "engines": 3, "up_to": 192}]}
    process = small_runs.start(
        "--plan", str(file), "--allocation", "static", start=other, training__steps=2, **MEASURED
    )
    status, _, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    for row in small_runs.rows("metrics"):
        assert row["allocation"] == plan.describe()
        roles = list(row["roles"].values())
        assert roles.count("train") == plan.replicas
        assert {f"rollout:{name}": count for name, count in plan.engines_by_shape.items()} == {
            role: roles.count(role) for role in roles if role != "train"
        }
    [event] = [row for row in small_runs.rows("events") if row["kind"] == "plan"]
    assert event["text"] == f"{plan.describe()}; layout one device"
    assert event["text"].replace("<=", "&lt;=") in (small_runs.run_directory / "report.html").read_text()


def tied_llama(directory: Path) -> Path:
    """With the calculator's alphabet, as transformers saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_model(directory, ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1), Calculator().alphabet, 192)
    config = directory / "config.json"
    shape = json.loads(config.read_text()) | {"model_type": "llama", "tie_word_embeddings": True}
    config.write_text(json.dumps(shape | {"architectures": ["LlamaForCausalLM"]}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
    return directory


def slots_plan(model: Path) -> Plan:
    """A plan for a node of two small devices, one of which trains."""
    device = GPU("slot", memory=4 * 2**30, bandwidth=1e11, flops=1e12, link=1e10, source="made up")
    nodes = NodeClass("slots", 1, 2, device, intra_bandwidth=1e10, inter_bandwidth=1e10)
    recipe = Recipe(
        batch=16,
        samples_per_prompt=4,
        max_length=192,
        max_batched_tokens=512,
        gpu_memory_utilization=0.35,
        framework="libra",
    )
    work = TrajectoryClass(1.0, 60, 40.0, 30.0, 1200.0, 30.0, 2.0, 0.1, 0.5)
    return Planner(Cluster((nodes,)), load_model(model), recipe).plan((work,))


def test_a_cluster_plan_is_carried_out_on_cpu_slots_with_a_tied_model(small_runs: SmallRuns, tmp_path: Path) -> None:
    model = tied_llama(tmp_path / "model")
    plan, file = slots_plan(model), tmp_path / "plan.json"
    file.write_text(dump_plan(plan))
    process = small_runs.start(
        "--plan", str(file), "--json", model={"directory": str(model)}, training__steps=2, **MEASURED
    )
    status, out, err = small_runs.finish(process)
    assert status == 0, err[-3000:]
    assert json.loads(out)["logprob_gap"] < LOGPROB_GAP[small_runs.precision]
    config = json.loads((small_runs.run_directory / "config.json").read_text())
    [bucket] = plan.allocation.buckets
    assert config["cluster"]["placement"] == [[0], [1]] == [list(group.gpus) for group in plan.placement]
    assert config["engines"][bucket.shape]["max_num_seqs"] == plan.max_num_seqs[0]
    [row, *_] = small_runs.rows("metrics")
    assert row["allocation"] == f"train 1 | {bucket.shape} 1 <= 192"
    assert row["roles"] == {"core-0": "train", "rollout-0": f"rollout:{bucket.shape}"}
    assert plan.layout is not None and plan.layout.name in (small_runs.run_directory / "report.html").read_text()
