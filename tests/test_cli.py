"""The commands as a user meets them: what they print, their exit status, and what they leave behind."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from libra.cli.app import app
from libra.config.recipe import Recipe
from libra.config.run import ConfigError, RunConfig, load_config
from libra.loop.checkpoint import FORMAT
from libra.loop.run_directory import locked
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.slots import SlotRequest
from libra.plan.plan import dump_plan, parse_plan
from libra.records.files import DiskError
from libra.records.schema import Evaluation
from libra.route.catalogue import policy_named

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG, LOG, PROFILE = (EXAMPLES / name for name in ("calculator.yaml", "trajectories.jsonl", "profile_2_cores.json"))
BASE: dict[str, Any] = yaml.safe_load(CONFIG.read_text())


def libra(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(*arguments: object, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "libra.cli.app", *(str(argument) for argument in arguments)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def plan(*arguments: object, config: Path = CONFIG, log: Path = LOG, profile: Path = PROFILE) -> Result:
    return libra("plan", config, "-t", log, "-p", profile, *arguments)


def write(path: Path, data: object) -> Path:
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def changed(**sections: object) -> dict[str, Any]:
    """The example's configuration with keys replaced; sections that are mappings are merged."""
    data = copy.deepcopy(BASE)
    for key, value in sections.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    return data


def assert_refused(result: Result | subprocess.CompletedProcess[str], message: str, status: int = 2) -> None:
    code = result.returncode if isinstance(result, subprocess.CompletedProcess) else result.exit_code
    assert code == status, result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("libra: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


# libra --help


def test_help_names_every_command() -> None:
    result = libra("--help")
    assert result.exit_code == 0
    for command in ("run", "plan", "trace"):
        assert command in result.stdout


@pytest.mark.parametrize("command", [("run",), ("plan",), ("trace",), ("trace", "stats")], ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    assert libra(*command, "--help").exit_code == 0


# libra plan


def test_plan_shows_who_does_what_how_long_it_takes_and_the_proof() -> None:
    result = plan()
    assert result.exit_code == 0, result.stderr
    for words in ("training replicas", "short", "long", "bottleneck", "optimal", "144 trajectories"):
        assert words in result.stdout
    assert result.stderr == ""


def test_plan_as_json_embeds_the_request_that_it_answers() -> None:
    result = plan("--json")
    assert result.exit_code == 0, result.stderr
    found = parse_plan(result.stdout)
    assert dump_plan(found) == result.stdout
    assert found.proof.status == "optimal"
    assert isinstance(found.request, SlotRequest)
    assert found.request.workload.trajectories == 144
    assert [shape.name for shape in found.request.shapes] == ["short", "long"]
    assert found.request.profile.hardware == json.loads(PROFILE.read_text())["hardware"]
    assert found.allocation.replicas + found.allocation.engines == 4


def test_plan_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    first, second = (
        process("plan", CONFIG, "-t", LOG, "-p", PROFILE, "--json", "-o", tmp_path / seed, hash_seed=seed)
        for seed in ("1", "2")
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout == (tmp_path / "1").read_text() == (tmp_path / "2").read_text()
    assert str(tmp_path) not in first.stdout


def test_plan_writes_the_plan_and_still_shows_it(tmp_path: Path) -> None:
    result = plan("--output", tmp_path / "plan.json")
    assert "Allocation" in result.stdout
    assert parse_plan((tmp_path / "plan.json").read_text()).allocation.engines > 0


def test_plan_needs_nothing_that_running_needs() -> None:
    code = (
        "import sys\n"
        "from libra.cli.app import app\n"
        f"app(['plan', {str(CONFIG)!r}, '-t', {str(LOG)!r}, '-p', {str(PROFILE)!r}], standalone_mode=False)\n"
        "heavy = {'torch', 'vllm', 'msgspec', 'psutil', 'transformers'} & set(sys.modules)\n"
        "heavy |= {name for name in sys.modules if name.startswith('libra.exec')}\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_plan_says_what_the_log_cannot_tell(tmp_path: Path) -> None:
    records = [json.loads(line) for line in LOG.read_text().splitlines()]
    records[0]["finished"] = False
    for record in records:
        for turn in record["turns"]:
            turn["tool_seconds"] = None
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    notes = (
        "note: 1 trajectory of 60 in the log left out: unfinished",
        "note: tool seconds unknown for 100.0 % of the tool calls: planned as 0 s",
    )
    shown, as_json = plan(log=log), plan("--json", log=log)
    for note in notes:
        assert note in shown.stdout
        assert note in as_json.stderr
    request = parse_plan(as_json.stdout).request
    assert isinstance(request, SlotRequest)
    assert request.workload.classes[0].tool_seconds == 0.0


def test_plan_refuses_files_that_are_not_there(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert_refused(plan(config=none), f"{none}: No such file or directory: give an existing YAML file")
    assert_refused(plan(log=none), f"{none}: No such file or directory")
    assert_refused(plan(profile=none), f"{none}: No such file or directory; give a profile.json that a run has written")
    assert_refused(plan("-o", none / "plan.json"), f"{none / 'plan.json'}: there is no directory {none}; make it")


def test_plan_refuses_a_bad_line_with_file_line_and_field(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    first, second, *_ = LOG.read_text().splitlines()
    log.write_text(f"{first}\n{second.replace('prompt_tokens', 'prompt_token', 1)}\n")
    assert_refused(plan(log=log), f"{log}:2: prompt_tokens: ")


def test_plan_refuses_a_profile_with_a_hole(tmp_path: Path) -> None:
    costs = json.loads(PROFILE.read_text())
    del costs["engine"]["per_turn"]
    spoiled = tmp_path / "profile.json"
    spoiled.write_text(json.dumps(costs))
    assert_refused(plan(profile=spoiled), f"{spoiled}: engine.per_turn: ")


def test_plan_refuses_a_log_with_nothing_finished(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("")
    assert_refused(plan(log=log), "give a log with at least one finished trajectory")


def test_plan_refuses_trajectories_longer_than_every_engine(tmp_path: Path) -> None:
    engines = {name: {**shape, "max_model_len": shape["max_model_len"] // 2} for name, shape in BASE["engines"].items()}
    config = write(tmp_path / "run.yaml", changed(engines=engines))
    assert_refused(plan(config=config), "engines.long.max_model_len: it is 96, the largest, and ")


def test_plan_ends_with_3_when_no_plan_exists(tmp_path: Path) -> None:
    # No engine has the memory for its own longest context.
    engines = {name: {**shape, "kv_tokens": 128} for name, shape in BASE["engines"].items()}
    config = write(tmp_path / "run.yaml", changed(engines=engines))
    assert_refused(
        plan(config=config), "no plan exists: an engine must hold the longest context of 192 tokens", status=3
    )


# libra plan --model: for a cluster of GPUs

CLUSTER: dict[str, Any] = {
    "nodes": [{"name": "a800", "count": 2, "gpus": 8, "gpu": "A800", "inter_bandwidth": "200 Gb/s"}]
}
REQUEST: dict[str, Any] = {"batch": 64, "samples_per_prompt": 8, "max_length": 8192}
TRAJECTORY: dict[str, Any] = {
    "id": "t",
    "prompt_id": "p",
    "task": "x",
    "prompt_tokens": 100,
    "turns": [
        {"generated_tokens": 50, "tool": "t", "status": "ok", "returned_tokens": 20, "tool_seconds": 1.0},
        {"generated_tokens": 30, "tool": None, "status": None, "returned_tokens": 0},
    ],
    "reward": 1.0,
    "policy_version": 0,
    "finished": True,
}
SMALL = "Qwen/Qwen3-0.6B"
RUNNING = {**TRAJECTORY, "finished": False, "turns": TRAJECTORY["turns"][:1]}


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


TWENTY = lines(*[TRAJECTORY] * 20)


def node(**changes: object) -> dict[str, Any]:
    return {"nodes": [{**CLUSTER["nodes"][0], **changes}]}


@dataclass(frozen=True)
class Asked:
    """Files and options of one call of `libra plan --model`."""

    cluster: object = field(default_factory=lambda: CLUSTER)
    request: object = field(default_factory=lambda: REQUEST)
    log: str | bytes = TWENTY
    model: str = SMALL
    options: tuple[str, ...] = ()
    profile: str = "roofline"

    def arguments(self, directory: Path) -> tuple[object, ...]:
        """Write the files, and say how they are given."""
        log = directory / "log.jsonl"
        log.write_bytes(self.log if isinstance(self.log, bytes) else self.log.encode())
        cluster = write(directory / "cluster.yaml", self.cluster)
        request = write(directory / "request.yaml", self.request)
        return ("plan", cluster, "-m", self.model, "-t", log, "-r", request, "-p", self.profile, *self.options)

    def call(self, directory: Path) -> Result:
        return libra(*self.arguments(directory))


def test_a_cluster_is_planned_onto_its_nodes(tmp_path: Path) -> None:
    result = Asked().call(tmp_path)
    assert result.exit_code == 0, result.stderr
    for words in ("training", "replicas", "a800/tp", "where", "bottleneck", "optimal", "64 trajectories"):
        assert words in result.stdout
    assert result.stderr == ""


def test_as_json_there_is_nothing_else_on_standard_output(tmp_path: Path) -> None:
    log = lines(RUNNING, *[TRAJECTORY] * 20)
    result = Asked(log=log, options=("--json", "-o", str(tmp_path / "plan.json"))).call(tmp_path)
    assert result.exit_code == 0, result.stderr
    found = parse_plan(result.stdout)
    assert dump_plan(found) == result.stdout == (tmp_path / "plan.json").read_text()
    assert isinstance(found.request, ClusterRequest)
    assert found.request.recipe.batch == 64
    assert found.request.cluster.devices == 16
    assert found.request.model.name == SMALL
    assert result.stderr == "note: 1 trajectory of 21 in the log unfinished: counted as at least as long as they are\n"
    assert str(tmp_path) not in result.stdout


def test_without_a_request_the_defaults_are_said(tmp_path: Path) -> None:
    *arguments, _, _, _, _ = Asked().arguments(tmp_path)
    result = libra(*arguments, "-p", "roofline", "--json")
    assert result.exit_code == 0, result.stderr
    request = parse_plan(result.stdout).request
    assert isinstance(request, ClusterRequest)
    assert request.recipe == Recipe(batch=512, samples_per_prompt=16, max_length=40960)
    assert (
        result.stderr == "note: no --request: 512 trajectories a step, 16 a prompt, up to 40,960 tokens, asynchronous\n"
    )


def test_a_cluster_is_planned_with_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    arguments = Asked(options=("--json",)).arguments(tmp_path)
    first, second = (process(*arguments, hash_seed=seed) for seed in ("1", "2"))
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == second.stdout == libra(*arguments).stdout


WHAT_IFS = [
    (("--what-if", "gpus=32"), 4, 64),
    (("--what-if", "a800=3", "--what-if", "batch=128"), 3, 128),
]


@pytest.mark.parametrize(("options", "count", "batch"), WHAT_IFS, ids=["gpus", "nodes and batch"])
def test_what_if_is_as_if_the_files_said_so(tmp_path: Path, options: tuple[str, ...], count: int, batch: int) -> None:
    assumed = Asked(options=("--json", *options)).call(tmp_path)
    written = Asked(cluster=node(count=count), request={**REQUEST, "batch": batch}, options=("--json",)).call(tmp_path)
    assert assumed.exit_code == 0, assumed.stderr
    assert assumed.stdout == written.stdout


def test_contexts_beyond_the_limit_are_cut_when_that_is_asked_for(tmp_path: Path) -> None:
    log = lines(TRAJECTORY, {**TRAJECTORY, "prompt_tokens": 9000})
    result = Asked(log=log, options=("--truncate-context", "--json")).call(tmp_path)
    assert result.exit_code == 0, result.stderr
    request = parse_plan(result.stdout).request
    assert isinstance(request, ClusterRequest)
    assert [cls.peak_context for cls in request.classes] == [200, 8192]


@pytest.mark.parametrize("mode", ["async", "sync", "colocated"])
def test_every_mode_has_a_plan(tmp_path: Path, mode: str) -> None:
    result = Asked(request={**REQUEST, "mode": mode}).call(tmp_path)
    assert result.exit_code == 0, result.stderr


# What is wrong, exit status, and words of the one line: key, and remedy.
BAD_PLANS: list[tuple[str, Asked, int, tuple[str, ...]]] = [
    ("no nodes", Asked(node(count=0)), 2, ("cluster.yaml: nodes.0.count is 0", "set it to 1 or more")),
    ("fewer than no nodes", Asked(node(count=-1)), 2, ("nodes.0.count is -1", "set it to 1 or more")),
    ("no GPUs", Asked(node(gpus=0)), 2, ("nodes.0.gpus is 0", "set it to 1 or more")),
    ("fewer than no GPUs", Asked(node(gpus=-8)), 2, ("nodes.0.gpus is -8", "set it to 1 or more")),
    (
        "a count in words",
        Asked(node(count="two")),
        2,
        ("nodes.0.count: Input should be a valid integer", "(got 'two')"),
    ),
    ("a GPU nobody knows", Asked(node(gpu="A801")), 2, ("nodes.0.gpu: unknown GPU 'A801'", "did you mean A800?")),
    ("a GPU unlike any", Asked(node(gpu="TPU")), 2, ("nodes.0.gpu: unknown GPU 'TPU'", "known are A100, A800, H100")),
    (
        "a bandwidth without unit",
        Asked(node(inter_bandwidth=200)),
        2,
        ("nodes.0.inter_bandwidth is 200 without a unit", "add one of GB/s"),
    ),
    (
        "a bandwidth in the wrong unit",
        Asked(node(inter_bandwidth="200 Mb/s")),
        2,
        ("nodes.0.inter_bandwidth is 0.025 GB/s", "check the unit (b is a bit, B a byte)"),
    ),
    (
        "bits for bytes",
        Asked(node(intra_bandwidth="400 GB/s")),
        2,
        ("nodes.0.intra_bandwidth is 400 GB/s", "A800 reaches 200 GB/s", "lower it, or leave it out"),
    ),
    (
        "a typo",
        Asked(node(inter_bandwith="1 GB/s")),
        2,
        ("nodes.0.inter_bandwith: unknown key", "did you mean inter_b"),
    ),
    ("no mapping", Asked([]), 2, ("cluster.yaml: expected a mapping of keys, as in examples/cluster_48_a800.yaml",)),
    (
        "no batch",
        Asked(request={**REQUEST, "batch": 0}),
        2,
        ("request.yaml: batch: Input should be greater", "(got 0)"),
    ),
    ("half a group", Asked(request={**REQUEST, "batch": 63}), 2, ("batch is 63", "make it a multiple")),
    (
        "longer than the model",
        Asked(request={**REQUEST, "max_length": 50_000}),
        2,
        ("max_length is 50000; Qwen/Qwen3-0.6B is made for 40960 tokens: lower max_length",),
    ),
    (
        "more at once than is known",
        Asked(request={**REQUEST, "max_batched_tokens": 100_000}),
        2,
        ("max_batched_tokens is 100000", "lower it"),
    ),
    (
        "synchronous and stale",
        Asked(request={**REQUEST, "mode": "sync", "staleness": 2}),
        2,
        ("staleness is 2, but mode is sync", "set it to 0, or mode to async"),
    ),
    ("an unknown mode", Asked(request={**REQUEST, "mode": "fast"}), 2, ("mode: Input should be 'async', 'sync' or",)),
    ("an empty log", Asked(log=""), 2, ("log.jsonl: there is no trajectory", "at least one finished trajectory")),
    (
        "only unfinished trajectories",
        Asked(log=lines(RUNNING, RUNNING)),
        2,
        ("log.jsonl: all 2 trajectories are unfinished", "give a log with at least one finished trajectory"),
    ),
    ("broken JSON", Asked(log=TWENTY + "{\n"), 2, ("log.jsonl:21: line: Invalid JSON",)),
    ("a blank line", Asked(log="\n" + TWENTY), 2, ("log.jsonl:1: line: Invalid JSON",)),
    ("no text", Asked(log=b"\xff\n"), 2, ("log.jsonl:1: line: Invalid JSON",)),
    (
        "a reward that is no number",
        Asked(log=TWENTY + lines({**TRAJECTORY, "reward": float("nan")})),
        2,
        ("log.jsonl:21: ", "reward must be finite, or null where there is none"),
    ),
    (
        "tokens below none",
        Asked(log=lines({**TRAJECTORY, "prompt_tokens": -1})),
        2,
        ("log.jsonl:1: ", "prompt_tokens must be >= 0"),
    ),
    (
        "a context beyond the limit",
        Asked(log=TWENTY + lines({**TRAJECTORY, "prompt_tokens": 9000})),
        2,
        ("log.jsonl:21: a context of 9100 tokens, more than the 8192", "give --truncate-context to cut it there"),
    ),
    (
        "an unknown model",
        Asked(model="Qwen/Qwen3-14"),
        2,
        ("'Qwen/Qwen3-14': no such file", "did you mean Qwen/Qwen3-14B"),
    ),
    ("no such profile", Asked(profile="no.json"), 2, ("no.json: No such file", "or give another file")),
    (
        "half a node",
        Asked(options=("--what-if", "gpus=12")),
        2,
        ("--what-if gpus=12", "give a positive multiple of it"),
    ),
    ("no assumption", Asked(options=("--what-if", "more")), 2, ("--what-if more: give KEY=VALUE",)),
    (
        "a model that trains nowhere",
        Asked(node(count=1, gpus=1), model="Qwen/Qwen3-14B"),
        3,
        (
            "no plan exists: no layout trains Qwen/Qwen3-14B",
            "add nodes, or lower max_length or what the optimiser keeps",
        ),
    ),
    (
        "a model that generates nowhere",
        Asked(request={**REQUEST, "gpu_memory_utilization": 0.01}),
        3,
        ("no plan exists: no engine holds Qwen/Qwen3-0.6B", "it would fit with gpu_memory_utilization: 0.9"),
    ),
    (
        "one GPU for both",
        Asked(node(count=1, gpus=1)),
        3,
        ("no plan exists: ", "pool a800 has 1 devices", "share devices (mode: colocated)"),
    ),
]


@pytest.mark.parametrize(
    ("asked", "status", "words"), [row[1:] for row in BAD_PLANS], ids=[row[0] for row in BAD_PLANS]
)
def test_bad_input_ends_in_one_line_that_names_key_and_remedy(
    tmp_path: Path, asked: Asked, status: int, words: tuple[str, ...]
) -> None:
    result = asked.call(tmp_path)
    for message in words:
        assert_refused(result, message, status)


def test_a_model_of_another_kind_is_refused_with_the_missing_field(tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    shape = json.loads(
        (EXAMPLES.parent / "src" / "libra" / "hardware" / "models" / "Qwen--Qwen3-0.6B.json").read_text()
    )
    del shape["num_key_value_heads"]
    model.write_text(json.dumps(shape))
    assert_refused(Asked(model=str(model)).call(tmp_path), "num_key_value_heads")


def test_a_plan_is_not_written_where_there_is_no_directory(tmp_path: Path) -> None:
    place = tmp_path / "none" / "plan.json"
    result = Asked(options=("-o", str(place), "--json")).call(tmp_path)
    assert_refused(result, f"{place}: there is no directory {place.parent}; make it, or give another file to write to")
    assert not place.parent.exists()


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    arguments = list(Asked().arguments(tmp_path))
    for position, message in (
        (1, "give an existing YAML file"),
        (5, "No such file"),
        (7, "give an existing YAML file"),
    ):
        result = libra(*arguments[:position], tmp_path / "none", *arguments[position + 1 :])
        assert_refused(result, f"{tmp_path / 'none'}: ")
        assert message in result.stderr


def test_a_cluster_needs_a_model_and_a_run_its_profile() -> None:
    assert_refused(libra("plan", CONFIG, "-t", LOG), "--model or --profile is missing: with --model a cluster of GPUs")
    assert_refused(plan("--what-if", "gpus=8"), "--what-if changes a cluster; change the configuration of a run in its")


# libra trace stats


def test_trace_stats_shows_the_log() -> None:
    result = libra("trace", "stats", LOG)
    assert result.exit_code == 0
    assert "Trajectories" in result.stdout
    assert "60" in result.stdout


def test_trace_stats_as_json() -> None:
    found = json.loads(libra("trace", "stats", LOG, "--json").stdout)
    assert (found["count"], found["finished"], found["turns"]["max"]) == (60, 60, 7)


def test_trace_stats_refuses_a_bad_line_with_file_line_and_field(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(LOG.read_text() + '{"id": "e60"}\n')
    assert_refused(libra("trace", "stats", log), f"{log}:61: prompt_id: ")


def test_trace_stats_refuses_a_log_that_is_not_there_or_empty(tmp_path: Path) -> None:
    assert_refused(libra("trace", "stats", tmp_path / "none"), f"{tmp_path / 'none'}: No such file or directory")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert_refused(libra("trace", "stats", empty), "no trajectories to summarise; give a log with at least one line")


# libra run: what is refused before anything starts


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to run in. A run that starts all the same fails the test."""

    async def started(*_: object) -> None:
        pytest.fail("the run was started")

    monkeypatch.setattr("libra.loop.run.run", started)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything_below(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def slots(count: int) -> dict[str, Any]:
    buckets = [BASE["start"]["buckets"][0], {**BASE["start"]["buckets"][1], "engines": count - 3}]
    return changed(cluster={"slots": count, "core": 1, "hybrid": 1, "rollout": count - 2}, start={"buckets": buckets})


BAD_RUNS: list[tuple[str, dict[str, Any], str]] = [
    (
        "typo",
        changed(training={"learning_rat": 1e-4}),
        "training.learning_rat: unknown key 'learning_rat'; did you mean learning_rate?",
    ),
    (
        "unknown tool",
        changed(environment={"tools": ["calculatr"]}),
        "environment.tools: unknown tool 'calculatr'; calculator has calculator",
    ),
    (
        "unknown environment",
        changed(environment={"kind": "chess"}),
        "environment.kind: unknown environment 'chess'; use calculator or your own",
    ),
    (
        "no model directory",
        changed(model={"directory": "no/model"}),
        "model.directory: no/model does not exist; give a directory in Hugging Face layout",
    ),
    (
        "through a Ray client",
        changed(cluster={"launcher": "ray", "ray_address": "ray://head:10001"}),
        "cluster.ray_address: ray://head:10001 is not the address of a Ray cluster; run libra on a node of the cluster",
    ),
    (
        "no Ray cluster there",
        changed(cluster={"launcher": "ray", "ray_address": "127.0.0.1:1"}),
        "cluster.ray_address: nothing answers at 127.0.0.1:1 ([Errno 111] Connection refused); run libra on a node",
    ),
    ("more workers than memory", slots(100_000), "cluster.slots: 100000 workers need about "),
    ("more slots than cores", changed(cluster={"share": 1000.0}), "or a smaller cluster.share"),
    (
        "no memory for a context",
        changed(engines={"long": {"max_model_len": 192, "max_num_seqs": 5, "kv_tokens": 100}}),
        "engines.long.kv_tokens: 100 tokens cannot hold one context of 192; give at least engines.long.max_model_len",
    ),
    (
        "a bucket beyond its engines",
        changed(start={"buckets": [{"shape": "short", "engines": 1, "up_to": 65}, BASE["start"]["buckets"][1]]}),
        "start.buckets: 'short' is to serve contexts up to 65 tokens and holds 64; lower up_to, or raise engines.short",
    ),
    (
        "the longest fit nowhere",
        changed(start={"buckets": [{"shape": "short", "engines": 2, "up_to": 64}]}),
        "start.buckets: the last bucket uses 'short', which holds 64 tokens; end with the shape that holds 192",
    ),
    (
        "unknown policy",
        changed(routing={"policy": "cmlqf"}),
        "routing.policy: policy is 'cmlqf'; choose one of round-robin, least-loaded,",
    ),
    ("in /proc", changed(directory="/proc/runs"), "directory: /proc/runs/calculator cannot be written; give a"),
    (
        "below a file",
        changed(directory="run.yaml/runs"),
        "directory: run.yaml/runs/calculator cannot be written; give a directory that you may write to",
    ),
]


@pytest.mark.parametrize(("data", "message"), [row[1:] for row in BAD_RUNS], ids=[row[0] for row in BAD_RUNS])
def test_a_run_that_cannot_work_is_refused_and_leaves_nothing_behind(
    here: Path, data: dict[str, Any], message: str
) -> None:
    config = write(here / "run.yaml", data)
    before = everything_below(here)
    assert_refused(libra("run", config), message)
    assert everything_below(here) == before


def test_too_many_workers_are_told_how_many_fit(here: Path) -> None:
    result = libra("run", write(here / "run.yaml", slots(100_000)))
    assert "GiB are free; use at most " in result.stderr


def test_a_missing_ray_is_told_of_before_anything_starts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    result = libra("run", write(here / "run.yaml", BASE), "--launcher", "ray")
    assert_refused(result, "Ray is not installed, and launcher is ray; pip install 'libra-rl[ray]', or use local")


def test_a_port_in_use_is_refused(here: Path, taken_port: int) -> None:
    config = write(here / "run.yaml", changed(cluster={"port": taken_port}))
    before = everything_below(here)
    assert_refused(
        libra("run", config),
        f"cluster.port: {taken_port} cannot be used on 127.0.0.1 (Address already in use); give a free port, or 0",
    )
    assert_refused(
        libra("run", write(here / "run.yaml", BASE), "--metrics-port", taken_port),
        f"metrics.port: {taken_port} cannot be used on 127.0.0.1 (Address already in use); give a free port, or leave",
    )
    assert everything_below(here) == before


def test_a_name_that_no_host_can_have_is_refused(here: Path) -> None:
    config = write(here / "run.yaml", changed(metrics={"host": "no..host", "port": 29_501}))
    assert_refused(libra("run", config), "metrics.port: 29501 cannot be used on no..host (encoding with 'idna' codec")


def test_metrics_do_not_meet_replicas(here: Path) -> None:
    config = write(here / "run.yaml", changed(cluster={"port": 29_501}))
    result = libra("run", config, "--metrics-port", 29_501)
    assert_refused(result, "metrics.port: 29501 is cluster.port too, where training replicas meet; give another one")


def make_run(here: Path) -> Path:
    """What an earlier run left: some file, and no checkpoint."""
    run = here / "runs" / "calculator"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    return run


MODELS: list[tuple[str, tuple[str, ...], str]] = [
    ("no tokenizer", ("config.json",), "holds no tokenizer.json; give a directory in Hugging Face layout"),
    ("no weights", ("config.json", "tokenizer.json"), "holds no *.safetensors weights; save the model there first"),
    (
        "no JSON",
        ("config.json", "tokenizer.json", "one.safetensors"),
        "config.json is not a JSON object; save the model there again",
    ),
]


@pytest.mark.parametrize(("files", "message"), [row[1:] for row in MODELS], ids=[row[0] for row in MODELS])
def test_a_model_directory_that_lacks_something_is_refused(here: Path, files: tuple[str, ...], message: str) -> None:
    (here / "model").mkdir()
    for name in files:
        (here / "model" / name).write_text("[")
    config = write(here / "run.yaml", changed(model={"directory": "model"}))
    before = everything_below(here)
    assert_refused(libra("run", config), message)
    assert everything_below(here) == before


BAD_CONTINUATIONS = [
    ("earlier run", (), True, "calculator holds an earlier run; use --resume, --overwrite, or another --name"),
    ("no run", ("--resume",), False, "name: there is no run to resume in runs/calculator; start it without --resume"),
    ("no checkpoint", ("--resume",), True, "holds no checkpoint to resume from; start again with --overwrite"),
    ("both", ("--resume", "--overwrite"), True, "--resume and --overwrite contradict each other"),
]


@pytest.mark.parametrize(
    ("options", "ran_before", "message"),
    [row[1:] for row in BAD_CONTINUATIONS],
    ids=[row[0] for row in BAD_CONTINUATIONS],
)
def test_a_run_neither_destroys_nor_invents_an_earlier_one(
    here: Path, options: tuple[str, ...], ran_before: bool, message: str
) -> None:
    config = write(here / "run.yaml", BASE)
    if ran_before:
        make_run(here)
    before = everything_below(here)
    assert_refused(libra("run", config, *options), message)
    assert everything_below(here) == before


def make_checkpoint(run: Path, policy: dict[str, Any]) -> Path:
    """What a run with `BASE` left in its directory, with this snapshot of its router."""
    config = load_config(write(run.parent / "run.yaml", BASE)).computing_in("fp32")
    (run / "config.json").write_text(config.model_dump_json())
    (run.parent / "run.yaml").unlink()
    checkpoint = run / "checkpoint-3"
    checkpoint.mkdir()
    state = {
        "format": FORMAT,
        "step": 3,
        "seconds": 1.0,
        "tracker": {},
        "policy": policy,
        "started": json.loads(Evaluation("start", 0, 16, 0.25, 0.5, 2.0).to_json()),
    }
    (checkpoint / "state.json").write_text(json.dumps(state))
    return checkpoint


def test_a_checkpoint_of_another_router_is_refused(here: Path) -> None:
    config = write(here / "run.yaml", BASE)
    make_checkpoint(make_run(here), policy_named("cmlfq-published").snapshot())
    before = everything_below(here)
    assert_refused(
        libra("run", config, "--resume"), "routing.policy: runs/calculator/checkpoint-3: snapshot is of policy"
    )
    assert everything_below(here) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed: the run was started with 0 and cannot go on with 4; give the same, or start again with"),
        (
            {"training": {"prompts_per_step": 3}},
            "training.prompts_per_step: the run was started with 24 and cannot go on",
        ),
        (
            {"training": {"precision": "bf16"}},
            "training.precision: the run was started with fp32 and cannot go on with bf16; give the same, or start",
        ),
    ],
)
def test_a_run_goes_on_with_the_groups_that_it_has(here: Path, change: dict[str, Any], message: str) -> None:
    make_checkpoint(make_run(here), policy_named("cmlfq").snapshot())
    assert_refused(libra("run", write(here / "run.yaml", changed(**change)), "--resume"), message)


def test_a_run_that_goes_on_computes_as_it_did(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(make_run(here), policy_named("cmlfq").snapshot())
    asked = []

    async def full(config: RunConfig, *_: object) -> None:
        asked.append(config.training.precision)
        raise DiskError(here, OSError(28, "No space left on device"))

    monkeypatch.setattr("libra.loop.run.run", full)
    for precision in ("auto", "fp32"):
        libra("run", write(here / "run.yaml", changed(training={"precision": precision})), "--resume")
        recorded = json.loads((here / "runs" / "calculator" / "config.json").read_text())
        assert recorded["training"]["precision"] == "fp32"
    assert asked == ["fp32", "fp32"]


@pytest.mark.parametrize("saved", [True, False])
def test_a_full_disk_is_told_in_one_line(here: Path, monkeypatch: pytest.MonkeyPatch, saved: bool) -> None:
    run = here / "runs" / "calculator"

    async def full(*_: object) -> None:
        if saved:
            (run / "checkpoint-3").mkdir()
            (run / "checkpoint-3" / "state.json").touch()
        raise DiskError(run / "journal.jsonl", OSError(28, "No space left on device"))

    monkeypatch.setattr("libra.loop.run.run", full)
    result = libra("run", write(here / "run.yaml", changed(directory=str(here / "runs"))))
    remedy = "continue with --resume" if saved else "it had no checkpoint yet, start again with --overwrite"
    assert (result.exit_code, result.stderr) == (
        1,
        f"libra run: {run}/journal.jsonl cannot be written (No space left on device): free some space on its disk;"
        f" {remedy}\n",
    )


@pytest.mark.parametrize("options", [("--resume",), ("--overwrite",)])
def test_a_second_controller_is_refused_and_touches_nothing(here: Path, options: tuple[str, ...]) -> None:
    config, run = write(here / "run.yaml", BASE), make_run(here)
    make_checkpoint(run, policy_named("cmlfq").snapshot())
    with locked(run):
        before = {path: path.read_bytes() for path in everything_below(here) if path.is_file()}
        message = f"name: process {os.getpid()} is running in runs/calculator; wait for it, stop it, or give another"
        assert_refused(libra("run", config, *options), message)
        assert {path: path.read_bytes() for path in everything_below(here) if path.is_file()} == before


def test_an_overwritten_run_is_gone_and_the_new_one_is_locked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(here)
    make_checkpoint(run, policy_named("cmlfq").snapshot())

    async def look(*_: object) -> None:
        assert everything_below(run) == {run / "lock", run / "config.json"}
        with pytest.raises(ConfigError), locked(run):
            pass
        raise DiskError(run / "journal.jsonl", OSError(28, "No space left on device"))

    monkeypatch.setattr("libra.loop.run.run", look)
    assert "journal.jsonl" in libra("run", write(here / "run.yaml", BASE), "--overwrite").stderr
    with locked(run):
        pass


def test_a_full_disk_at_the_start_leaves_the_configuration_of_an_earlier_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = write(here / "run.yaml", BASE), make_run(here)
    make_checkpoint(run, policy_named("cmlfq").snapshot())
    before = (run / "config.json").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = libra("run", config, "--resume")
    said = "runs/calculator/config.json cannot be written (No space left on device): free some space on its disk"
    assert (result.exit_code, result.stderr) == (1, f"libra run: {said}\n")
    assert (run / "config.json").read_bytes() == before
    assert not any(run.glob("*.part"))


def test_a_report_that_cannot_be_written_does_not_hide_why_the_run_ended(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = here / "runs" / "calculator"

    async def full(*_: object) -> None:
        (run / "metrics.jsonl").touch()
        (run / "report.html").mkdir()
        raise DiskError(run / "metrics.jsonl", OSError(28, "No space left on device"))

    monkeypatch.setattr("libra.loop.run.run", full)
    result = libra("run", write(here / "run.yaml", changed(directory=str(here / "runs"))))
    assert result.exit_code == 1 and "metrics.jsonl cannot be written" in result.stderr


def test_options_are_checked_as_the_file_is(here: Path) -> None:
    config = write(here / "run.yaml", BASE)
    before = everything_below(here)
    assert_refused(libra("run", config, "--steps", 0), "training.steps: Input should be greater than 0 (got 0)")
    assert_refused(libra("run", config, "--directory", "/proc"), "directory: /proc/calculator cannot be written")
    assert everything_below(here) == before


def test_a_refusal_in_a_process_of_its_own(tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", changed(training={"learning_rat": 1e-4}, directory=str(tmp_path / "runs")))
    assert_refused(process("run", config), f"{config}: training.learning_rat: unknown key 'learning_rat'")
    assert everything_below(tmp_path) == {config}


def test_the_version_is_told() -> None:
    told = libra("--version")
    assert (told.exit_code, told.stdout) == (0, f"libra {version('libra-rl')}\n")
