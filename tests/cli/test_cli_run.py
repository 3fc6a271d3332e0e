"""`libra run`: what is refused before anything starts, and how a run ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from calls import BASE, CONFIG, EXAMPLES, LOG, PROFILE, assert_refused, changed, libra, process, write
from fakes.gpus import FakeGpu, fake_driver

from libra.backends.devices import slot_devices
from libra.config.extras import install_command
from libra.config.run import ClusterConfig, ConfigError, RunConfig, load_config
from libra.loop.checkpoint import FORMAT
from libra.loop.run_directory import locked
from libra.plan.plan import parse_plan
from libra.records.files import DiskError
from libra.records.manifest import seal
from libra.records.schema import Evaluation
from libra.route.catalogue import policy_named


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
        "environment.kind: unknown environment 'chess'; use calculator, command, openenv, verifiers or your own",
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
        "cluster.ray_address: no Ray cluster answers at 127.0.0.1:1 ([Errno 111] Connection refused); run libra on",
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
        "start.buckets: 'short' is to serve contexts up to 65 tokens but has room for 64; lower up_to, or raise",
    ),
    (
        "the longest fit nowhere",
        changed(start={"buckets": [{"shape": "short", "engines": 2, "up_to": 64}]}),
        "start.buckets: the last bucket uses 'short', which holds 64 tokens; end with the shape that holds 192",
    ),
    (
        "unknown policy",
        changed(routing={"policy": "cmlqf"}),
        "routing.policy: policy is 'cmlqf'; did you mean cmlfq?",
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
    assert_refused(result, f"Ray is not installed, but launcher is ray; {install_command('ray')}, or use local")


def test_a_home_that_is_read_only_is_told_with_a_remedy(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    assert_refused(
        libra("run", write(here / "run.yaml", BASE)),
        "/proc/cache/libra cannot be written; set XDG_CACHE_HOME to a directory that you may write to",
    )


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
    token = write(here / "token", "secret\n")
    token.chmod(0o600)
    asked = {"host": "no..host", "port": 29_501, "token_file": str(token)}
    config = write(here / "run.yaml", changed(metrics=asked))
    assert_refused(libra("run", config), "metrics.port: 29501 cannot be used on no..host (encoding with 'idna' codec")


def test_metrics_do_not_meet_replicas(here: Path) -> None:
    config = write(here / "run.yaml", changed(cluster={"port": 29_501}))
    result = libra("run", config, "--metrics-port", 29_501)
    assert_refused(result, "metrics.port: 29501 is also cluster.port, where training replicas meet; give another port")


def make_run(here: Path) -> Path:
    """What an earlier run left: some file, and no checkpoint."""
    run = here / "runs" / "calculator"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    return run


MODELS: list[tuple[str, tuple[str, ...], str]] = [
    ("no tokenizer", ("config.json",), "has no tokenizer.json; give a directory in Hugging Face layout"),
    ("no weights", ("config.json", "tokenizer.json"), "has no *.safetensors weights; save the model there first"),
    (
        "no JSON",
        ("config.json", "tokenizer.json", "one.safetensors"),
        "config.json is not a JSON object; save the model there again",
    ),
]


def test_a_model_whose_configuration_nests_too_deeply_is_refused(here: Path) -> None:
    (here / "model").mkdir()
    for name, content in (("config.json", "[" * 100_000), ("tokenizer.json", "{}"), ("one.safetensors", "")):
        (here / "model" / name).write_text(content)
    config = write(here / "run.yaml", changed(model={"directory": "model"}))
    assert_refused(libra("run", config), "config.json is not a JSON object; save the model there again")


@pytest.mark.parametrize(("files", "message"), [row[1:] for row in MODELS], ids=[row[0] for row in MODELS])
def test_a_model_directory_that_lacks_something_is_refused(here: Path, files: tuple[str, ...], message: str) -> None:
    (here / "model").mkdir()
    for name in files:
        (here / "model" / name).write_text("[")
    config = write(here / "run.yaml", changed(model={"directory": "model"}))
    before = everything_below(here)
    assert_refused(libra("run", config), message)
    assert everything_below(here) == before


def make_model(here: Path, config: dict[str, Any], weights: int = 0) -> dict[str, Any]:
    """The configuration of a run of a model with so many bytes of weights, which take no room."""
    (here / "model").mkdir(exist_ok=True)
    (here / "model" / "config.json").write_text(json.dumps(config))
    (here / "model" / "tokenizer.json").touch()
    with open(here / "model" / "one.safetensors", "wb") as file:
        file.truncate(weights)
    return changed(model={"directory": "model"})


def test_the_kv_of_engines_is_counted(here: Path) -> None:
    """A million million tokens of the example's 768 float32 numbers each."""
    engines = {name: {**shape, "kv_tokens": 10**12} for name, shape in BASE["engines"].items()}
    result = libra("run", write(here / "run.yaml", changed(engines=engines)))
    assert_refused(result, "cluster.slots: 4 workers", "use at most 0, or free some memory")
    result = libra("run", write(here / "run.yaml", make_model(here, {"num_attention_heads": 2})))
    assert_refused(result, "model/config.json has no hidden_size; save the model there again")


def test_the_weights_of_a_model_that_is_given_are_counted(here: Path) -> None:
    """Four workers each train them in float32, whatever they are stored in."""
    needed = []
    shape = {"num_attention_heads": 2, "hidden_size": 64, "num_hidden_layers": 2}
    for stored in ("float32", "bfloat16"):
        result = libra("run", write(here / "run.yaml", make_model(here, {"dtype": stored, **shape}, weights=1 << 40)))
        assert_refused(result, "cluster.slots: 4 workers", "GiB are free; use at most 0, or free some memory")
        needed.append(float(result.stderr.partition("need about ")[2].partition(" GiB")[0]))
    assert needed[0] > 4 * 3 * 1024  # the weights, and two moments at least
    assert needed[1] == pytest.approx(2 * needed[0], rel=0.01)


QWEN3_8B = Path(str(files("libra.hardware") / "models" / "Qwen--Qwen3-8B.json"))
H100 = FakeGpu("NVIDIA H100 80GB HBM3", 81559, "9.0")
FULL_GPU = FakeGpu("NVIDIA H100 80GB HBM3", 81559, "9.0", users=(4711,))


def on_gpus(here: Path, **sections: dict[str, Any]) -> str:
    """The configuration of a run of Qwen3-8B, with tied embeddings, on two slots."""
    model = make_model(here, json.loads(QWEN3_8B.read_text()) | {"tie_word_embeddings": True})
    cluster = {"slots": 2, "core": 1, "hybrid": 0, "rollout": 1, "device": "cuda", **sections.pop("cluster")}
    start = {"replicas": 1, "buckets": [{**BASE["start"]["buckets"][1], "engines": 1}]}
    return write(here / "run.yaml", changed(model=model["model"], cluster=cluster, start=start, **sections))


@pytest.mark.parametrize(
    ("gpus", "cluster", "training", "message"),
    [
        ([], {}, {}, "cluster.device: cuda, but nvidia-smi lists no GPU that is visible here; set it to cpu"),
        ([H100, FULL_GPU], {"share": 1}, {}, "GPU 1 (NVIDIA H100 80GB HBM3) is used by process 4711; use fewer slots"),
        ([H100], {}, {}, "cluster.share: a training replica needs about"),  # 20 bytes a parameter: 152 GiB
        (  # 68 GiB are logits
            [H100] * 16,
            {"gpus": 8, "share": 1},
            {"processes": 8, "sharding": "fsdp2", "micro_batch_tokens": 120_000},
            "cluster.share: a training replica needs about 8",
        ),
        ([H100] * 4, {"gpus": 2, "share": 1}, {}, "training.processes: 1, but a slot has 2 GPU(s)"),
    ],
)
def test_what_gpus_do_not_hold_is_refused(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[FakeGpu],
    cluster: dict[str, Any],
    training: dict[str, Any],
    message: str,
) -> None:
    for name, value in fake_driver(here, gpus).items():
        monkeypatch.setenv(name, value)
    assert_refused(libra("run", on_gpus(here, cluster=cluster, training=training)), message)


def test_memory_and_cores_of_the_host_do_not_bound_what_gpus_hold(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of Qwen3-8B, each on eight GPUs, where this machine has a few cores: all that is refused comes later."""
    for name, value in fake_driver(here, [H100] * 16).items():
        monkeypatch.setenv(name, value)
    cluster, training = {"gpus": 8, "share": 1}, {"processes": 8, "sharding": "fsdp2"}
    config = on_gpus(here, cluster=cluster, training=training, routing={"policy": "no/such.py:Policy"})
    assert_refused(libra("run", config), "routing.policy: ")


BAD_CONTINUATIONS = [
    ("earlier run", (), True, "calculator has an earlier run; use --resume, --overwrite, or another --name"),
    ("no run", ("--resume",), False, "name: there is no run to resume in runs/calculator; start it without --resume"),
    ("no checkpoint", ("--resume",), True, "has no checkpoint to resume from; start again with --overwrite"),
    ("overwrite no run", ("--overwrite",), True, "has files but no run, so --overwrite would delete something else;"),
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
    seal(checkpoint)
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
        (
            {"seed": 4},
            "seed: the run was started with 0 and cannot continue with 4; give the old value, or start again",
        ),
        (
            {"training": {"prompts_per_step": 3}},
            "training.prompts_per_step: the run was started with 24 and cannot continue",
        ),
        (
            {"training": {"precision": "bf16"}},
            "training.precision: the run was started with fp32 and cannot continue with bf16; give the old value",
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
            seal(run / "checkpoint-3")
        raise DiskError(run / "journal.jsonl", OSError(28, "No space left on device"))

    monkeypatch.setattr("libra.loop.run.run", full)
    result = libra("run", write(here / "run.yaml", changed(directory=str(here / "runs"))))
    remedy = "continue with --resume" if saved else "the run has no checkpoint yet; start again with --overwrite"
    assert (result.exit_code, result.stderr) == (
        1,
        f"libra run: {run}/journal.jsonl cannot be written (No space left on device): free some space on its disk;"
        f" {remedy}\n",
    )


def test_sigterm_ends_a_run_as_ctrl_c_does(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def wait(*_: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            ended.append(True)  # workers are ended here

    monkeypatch.setattr("libra.loop.run.run", wait)
    result = libra("run", write(here / "run.yaml", BASE))
    assert (result.exit_code, ended) == (130, [True])
    assert result.stderr == (
        "libra run: interrupted (files are in runs/calculator); the run has no checkpoint yet; start again with"
        " --overwrite\n"
    )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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


def slots_plan(here: Path) -> Path:
    """A plan of `libra plan` for the example's slots."""
    plan = here / "plan.json"
    result = libra("plan", CONFIG, "-t", LOG, "-p", PROFILE, "-o", plan)
    assert result.exit_code == 0, result.stderr
    return plan


def test_a_plan_says_how_a_run_begins(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    async def run(config: RunConfig, *rest: object) -> None:
        begun.append((config, rest[-1]))
        raise DiskError(here, OSError(28, "No space left on device"))

    monkeypatch.setattr("libra.loop.run.run", run)
    file = slots_plan(here)
    plan = parse_plan(file.read_text()).allocation
    otherwise = {"replicas": 1, "buckets": [{"shape": "long", "engines": 3, "up_to": 192}]}
    libra("run", write(here / "run.yaml", changed(start=otherwise)), "--plan", file)
    [(config, words)] = begun
    found = tuple((it.shape, it.engines, it.up_to) for it in config.start.buckets)
    assert (config.start.replicas, found) == (plan.replicas, tuple((b.shape, b.engines, b.up_to) for b in plan.buckets))
    assert words == f"{plan.describe()}; layout one device"
    recorded = json.loads((here / "runs" / "calculator" / "config.json").read_text())
    assert recorded["start"]["replicas"] == plan.replicas


def test_a_plan_that_cannot_be_carried_out_is_refused(here: Path) -> None:
    plan, config = slots_plan(here), write(here / "run.yaml", BASE)
    other = write(here / "other.yaml", changed(training={"prompts_per_step": 12}))
    assert_refused(
        libra("run", other, "--plan", plan),
        f"--plan {plan}: training.prompts_per_step: the plan is for 24, and the configuration has 12; plan again",
    )
    assert_refused(libra("run", config, "--plan", plan, "--resume"), "--plan starts a run, and --resume")
    assert_refused(libra("run", config, "--plan", here / "none"), f"--plan {here / 'none'}: No such file or directory;")
    assert_refused(libra("run", config, "--plan", config), f"--plan {config}: not JSON")
    assert_refused(libra("run", plan), f"{plan}: this is a plan, not the configuration of a run: give libra run CONFIG")
    edited = json.loads(plan.read_text())
    edited["predicted"]["step"] *= 2
    (here / "edited.json").write_text(json.dumps(edited))
    assert_refused(libra("run", config, "--plan", here / "edited.json"), "the plan does not answer its own request")


def test_placed_slots_are_on_the_gpus_that_were_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_driver(here, [H100, FULL_GPU, H100, H100]).items():
        monkeypatch.setenv(name, value)
    placed = [[2, 3], [0]]
    cluster = ClusterConfig(slots=2, core=1, hybrid=0, rollout=1, device="cuda", share=1, placement=placed)
    assert [device.gpus for device in slot_devices(cluster)] == [("2", "3"), ("0",)]
    assert (cluster.replica_gpus, cluster.engine_gpus) == (2, 1)
    for gpu, why in (1, "is used by process 4711"), (4, "is not visible here"):
        config = on_gpus(here, cluster={"placement": [[2, 3], [gpu]], "share": 1})
        assert_refused(libra("run", config), f"cluster.placement: GPU {gpu} {why}; name GPUs that")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    config = write(
        here / "run.yaml",
        changed(cluster={"device": "cpu", "placement": [[0], [1], [2], [3, 4]], "hybrid": 0, "core": 2}),
    )
    assert_refused(libra("run", config), "cluster.placement: a replica or an engine on devices 3, 4, but a CPU slot is")


def test_a_plan_for_a_node_of_gpus_is_what_the_run_begins_with(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-8B on eight H100: four share a replica, engines have the others, and all that is checked first passes."""
    begun: list[RunConfig] = []

    async def run(config: RunConfig, *_: object) -> None:
        begun.append(config)
        raise DiskError(here, OSError(28, "No space left on device"))

    monkeypatch.setattr("libra.loop.run.run", run)
    for name, value in fake_driver(here, [H100] * 8).items():
        monkeypatch.setenv(name, value)
    node = {"name": "h100", "count": 1, "gpus": 8, "gpu": "H100", "inter_bandwidth": "400 Gb/s"}
    question = write(here / "node.yaml", {"nodes": [node]}), "-t", EXAMPLES / "search_agent.jsonl"
    asked = write(here / "request.yaml", {"batch": 64, "samples_per_prompt": 8, "max_length": 40960})
    quick = "--no-simulation", "--profile", "roofline", "-m", "Qwen/Qwen3-8B", "-r", asked
    result = libra("plan", *question, *quick, "--for", "libra", "-o", here / "plan.json")
    assert result.exit_code == 0, result.stderr
    model = make_model(here, json.loads(QWEN3_8B.read_text()))["model"]
    training = {"prompts_per_step": 8, "samples_per_prompt": 8}
    config = write(here / "run.yaml", changed(model=model, cluster={"device": "cuda"}, training=training))
    libra("run", config, "--plan", here / "plan.json")
    [made] = begun
    plan = parse_plan((here / "plan.json").read_text())
    assert plan.layout is not None and made.training.processes == plan.layout.dp > 1
    devices = [device.gpus for device in slot_devices(made.cluster)]
    assert devices[0] == tuple(str(group.gpus[0]) for group in plan.placement if group.role == "train")
    assert devices[1:] == [tuple(map(str, group.gpus)) for group in plan.placement if group.role == "generate"]
    result = libra(
        "run",
        write(here / "run.yaml", changed(cluster={"device": "cuda"}, training=training)),
        "--plan",
        here / "plan.json",
        "--name",
        "other",
    )
    assert_refused(result, "model.directory: the plan is for Qwen/Qwen3-8B, and the configuration has none; give the")
