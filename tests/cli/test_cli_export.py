"""`libra plan --for` and `libra export`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from calls import EXAMPLES, assert_refused, libra

CLUSTER = EXAMPLES / "cluster_48_a800.yaml"
QUESTION = (CLUSTER, "-t", EXAMPLES / "search_agent.jsonl", "-m", "Qwen/Qwen3-14B", "-r", EXAMPLES / "request.yaml")
QUICK = ("--no-simulation", "--profile", "roofline")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan for verl and one for any framework."""
    folder = tmp_path_factory.mktemp("plans")
    for name, options in (("verl", ("--for", "verl")), ("any", ())):
        result = libra("plan", *QUESTION, *QUICK, *options, "-o", folder / f"{name}.json")
        assert result.exit_code == 0, result.output
        says = "Planning for verl (engines of one size, whole nodes" in " ".join(result.stdout.split())
        assert says == (name == "verl")
    return folder


def test_a_plan_for_a_framework_is_exported(plans: Path, tmp_path: Path) -> None:
    result = libra("export", plans / "verl.json", "--for", "verl")
    assert result.exit_code == 0, result.output
    assert "  rollout.nnodes=4\n" in result.stdout
    written = tmp_path / "verl.sh"
    assert libra("export", plans / "verl.json", "--for", "verl", "-o", written).stdout == ""
    assert written.read_text() == result.stdout
    told = json.loads(libra("export", plans / "verl.json", "--for", "verl", "--json").stdout)
    assert told == {
        "framework": "verl",
        "format": "sh",
        "gpus": {"train": 16, "rollout": 32, "idle": 0},
        "text": result.stdout,
    }


def test_the_explanation_says_what_the_framework_costs(plans: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = libra("explain", plans / "verl.json", "--html", page)
    assert result.exit_code == 0, result.output
    for text in (result.stdout, page.read_text()):
        assert "Planning for verl (engines of one size, whole nodes for training and for rollout" in text
        assert "without --for, which assumes the router cmlfq without errors." in text


def test_what_cannot_be_expressed_is_refused_with_the_remedy(plans: Path, tmp_path: Path) -> None:
    anything, exported = plans / "any.json", ("export", plans / "verl.json")
    remedy = "verl cannot express this; plan again with --for verl"
    assert_refused(libra("export", anything, "--for", "verl"), "there are engines of 4 and 8 GPUs", remedy)
    assert_refused(libra(*exported, "--for", "libra"), "libra needs no export: give the plan to libra run")
    assert_refused(libra(*exported, "--for", "verll"), "unknown framework 'verll'; did you mean verl?")
    assert_refused(libra("plan", *QUESTION, *QUICK, "--for", "verll"), "unknown framework 'verll'; did you mean verl?")
    engines = EXAMPLES / "engines.yaml"
    assert_refused(libra("export", engines, "--for", "verl"), "a file of engines needs --for vllm")
    assert_refused(libra(*exported, "--for", "verl", "-o", plans / "verl.json"), "the same file as")
    run = (EXAMPLES / "calculator.yaml", "-t", EXAMPLES / "trajectories.jsonl", "--for", "verl")
    assert_refused(libra("plan", *run), "--for is for a cluster of GPUs")


def test_the_engines_of_a_file_are_lines(tmp_path: Path) -> None:
    result = libra("export", EXAMPLES / "engines.yaml", "--for", "vllm")
    assert result.exit_code == 0, result.output
    commands = [shlex.split(line) for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [command[0] for command in commands] == ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"]
    assert commands[0][1:4] == ["vllm", "serve", "Qwen/Qwen3-14B"]
    assert [command[-1] for command in commands] == ["8000", "8001"]


def test_the_engines_that_a_search_wrote_are_lines(tmp_path: Path) -> None:
    menu, folder = tmp_path / "menu.yaml", tmp_path / "engines"
    menu.write_text(
        "architectures: [prefill-decode]\nnodes: [h100]\ntensor_parallel_size: [1, 2]\nmax_num_seqs: [64]\n"
        "max_num_batched_tokens: [2048]\nengines: [1]\n"
    )
    question = ("--model", "Qwen/Qwen3-8B", "--requests", EXAMPLES / "serving.jsonl", "--profile", "roofline")
    asked = (*question, "--jobs", 1, "--slo", "ttft_p99=0.5", "--menu", menu, "--rate", 2, "--engines-out", folder)
    result = libra("search", EXAMPLES / "cluster_mixed.yaml", *asked)
    assert result.exit_code == 0, result.output
    result = libra("export", folder / "point-1.yaml", "--for", "vllm")
    assert result.exit_code == 0, result.output
    prefill, decode = (line for line in result.stdout.splitlines() if line.startswith("CUDA"))
    for line in (prefill, decode):
        assert "--max-num-seqs 64 --max-num-batched-tokens 2048 --gpu-memory-utilization 0.9 " in line
        assert "NixlConnector" in line
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=node-0 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve" in prefill
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=node-1 " in decode


def test_engines_that_no_line_starts_are_refused_by_their_key(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    engine = {"name": "one", "model": "Qwen/Qwen3-0.6B", "gpu": "A100", "profile": "roofline"}
    node = {"gpus": 4, "inter_bandwidth": "200 Gb/s"}
    for changes, message in (
        ({"afd": {"attention": 4, "ffn": 4, "bandwidth": 25e9, "latency": 1e-6}}, "engines[0].afd: vllm serve cannot"),
        ({"tensor_parallel_size": 8, "node": node}, "engines[0].count: an engine takes 8 GPUs and a node has 4"),
    ):
        path.write_text(yaml.safe_dump({"engines": [engine | changes]}))
        assert_refused(libra("export", path, "--for", "vllm"), message)
