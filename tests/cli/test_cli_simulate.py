"""`libra simulate` as a user meets it: what it prints, its exit status, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from calls import EXAMPLES, assert_refused, libra, write
from typer.testing import Result

from libra.route.catalogue import POLICIES

ENGINES, REQUESTS, AZURE, LOG = (
    EXAMPLES / name for name in ("engines.yaml", "requests.jsonl", "requests.csv", "trajectories.jsonl")
)
BASE: dict[str, Any] = yaml.safe_load(ENGINES.read_text(encoding="utf-8"))
GROUP: dict[str, Any] = BASE["engines"][0]


def simulate(*arguments: object, engines: Path = ENGINES, requests: Path = REQUESTS) -> Result:
    return libra("simulate", engines, "--requests", requests, *arguments)


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def group(**changes: object) -> dict[str, Any]:
    """The example's file with keys of its engines replaced; None takes one away."""
    changed = {key: value for key, value in {**GROUP, **changes}.items() if value is not None}
    return {**BASE, "engines": [changed]}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plan for a cluster, asynchronous and synchronous, and one for slots."""
    directory = tmp_path_factory.mktemp("plans")
    found = {}
    for mode in ("async", "sync"):
        request = write(
            directory / f"{mode}.yaml", {"batch": 64, "samples_per_prompt": 8, "max_length": 8192, "mode": mode}
        )
        found[mode] = directory / f"{mode}.json"
        cluster = EXAMPLES / "cluster_48_a800.yaml"
        made = libra(
            *("plan", cluster, "-m", "Qwen/Qwen3-0.6B", "-t", LOG, "-r", request, "-p", "roofline"),
            *("--no-simulation", "-o", found[mode]),
        )
        assert made.exit_code == 0, made.stderr
    found["slots"] = directory / "slots.json"
    profile = EXAMPLES / "profile_2_cores.json"
    made = libra("plan", EXAMPLES / "calculator.yaml", "-t", LOG, "-p", profile, "-o", found["slots"])
    assert made.exit_code == 0, made.stderr
    return found


# A file of engines


def test_engines_of_a_file_run_requests() -> None:
    result = simulate()
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for words in ("11 of 12 requests finished", "a100-0", "a100-1", "TTFT", "its caller gave it up"):
        assert words in result.stdout


def test_as_json_there_is_nothing_else_on_standard_output(tmp_path: Path) -> None:
    result = simulate("--json", "-o", tmp_path / "result.json")
    found = document(result)
    assert result.stdout == (tmp_path / "result.json").read_text()
    assert found["metrics"]["requests"] == 12
    assert found["workload"]["source"] == {"file": "requests.jsonl"}
    assert found["run"]["route"] == "least-loaded"
    assert sum(engine["requests"] for engine in found["engines"]) == 12
    assert str(EXAMPLES) not in result.stdout


def test_what_is_written_besides_changes_nothing(tmp_path: Path) -> None:
    names = ("requests.jsonl", "timeline.json", "page.html")
    out, timeline, page = (tmp_path / name for name in names)
    written = simulate("--json", "--requests-out", out, "--timeline", timeline, "--report", page)
    assert written.stdout == simulate("--json").stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(12))
    assert {event["ph"] for event in json.loads(timeline.read_text())} >= {"X", "C", "M"}
    html = page.read_text()
    assert html.startswith("<!DOCTYPE html>")
    assert "Simulation of engines.yaml" in html


def test_the_same_inputs_give_the_same_bytes_in_every_process(plans: dict[str, Path], tmp_path: Path) -> None:
    def process(hash_seed: str) -> list[bytes]:
        files = [tmp_path / f"{hash_seed}.{suffix}" for suffix in ("jsonl", "json", "html")]
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "libra.cli.app",
                    "simulate",
                    plans["async"],
                    "-t",
                    LOG,
                    "--route",
                    "two-choices",
                ),
                *("--json", "--requests-out", files[0], "--timeline", files[1], "--report", files[2]),
            ],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=120,
        )
        return [done.stdout, *(file.read_bytes() for file in files)]

    assert process("1") == process("2")


def test_exact_gives_the_same_times(tmp_path: Path) -> None:
    quick, exact = tmp_path / "quick.jsonl", tmp_path / "exact.jsonl"
    assert simulate("--requests-out", quick).exit_code == 0
    assert simulate("--requests-out", exact, "--exact").exit_code == 0
    assert quick.read_bytes() == exact.read_bytes()


def test_requests_of_azure_come_faster_and_later_when_asked() -> None:
    whole = document(simulate("--json", requests=AZURE))["metrics"]
    late = document(simulate("--json", "--start", 2, requests=AZURE))["metrics"]
    fast = document(simulate("--json", "--rate-scale", 1000, requests=AZURE))["metrics"]
    again = document(simulate("--json", "--repeat", 3, requests=AZURE))["metrics"]
    assert again["requests"] == 3 * document(simulate("--json", requests=AZURE))["metrics"]["requests"]
    assert 0 < late["requests"] < whole["requests"] == fast["requests"]
    assert fast["queueing"]["mean"] > whole["queueing"]["mean"]


@pytest.mark.parametrize("route", POLICIES)
def test_engines_of_a_file_run_trajectories(route: str, tmp_path: Path) -> None:
    records = [json.loads(line) for line in LOG.read_text().splitlines()]
    records[0]["finished"] = False
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = libra("simulate", ENGINES, "-t", log, "--concurrency", 4, "--route", route, "--json")
    found = document(result)
    assert found["metrics"]["trajectories"] == 60
    assert found["workload"]["concurrency"] == 4
    assert "note: 1 of 60 trajectories in the log are unfinished: simulated up to their last" in result.stderr


def test_prefill_and_decode_apart() -> None:
    found = document(simulate("--json", engines=ENGINES.with_name("prefill_decode.yaml")))
    asked = {"bandwidth": 25e9, "latency": 1e-4, "lease": 30.0, "local_below": 0, "route": "least-loaded"}
    asked["push"] = False
    assert found["run"]["kv_transfer"] == asked
    metrics = found["metrics"]
    assert metrics["finished"] == metrics["requests"] - 1 == 11
    assert metrics["ttft"]["mean"] > metrics["ttft_prefill"]["mean"] > 0
    assert [(engine["role"], engine["requests"]) for engine in found["engines"]] == [
        *[("prefill", 6)] * 2,  # prompts that were computed there
        *[("decode", 6)] * 2,
    ]
    assert found["transfers"]["begun"] == 12 and found["transfers"]["broken"] == 0
    assert sum(part["mean"] for part in found["transfers"]["ttft"].values()) == pytest.approx(metrics["ttft"]["mean"])


def test_kv_that_is_pushed(tmp_path: Path) -> None:
    """As it is pulled, but for an iteration less; a lease is refused."""
    given = yaml.safe_load(ENGINES.with_name("prefill_decode.yaml").read_text(encoding="utf-8"))
    given["kv_transfer"]["push"] = True
    found = document(simulate("--json", engines=write(tmp_path / "engines.yaml", given)))
    assert found["run"]["kv_transfer"]["push"] is True
    assert [engine["requests"] for engine in found["engines"]] == [6] * 4
    assert next(iter(found["transfers"]["ttft"])) == "waiting for decode"
    generated = found["metrics"]["generated_tokens"]
    assert sum(engine["generated_tokens"] for engine in found["engines"]) == generated
    given["kv_transfer"]["lease"] = 20.0
    refused = simulate(engines=write(tmp_path / "leased.yaml", given))
    assert_refused(refused, "kv_transfer.lease is 20.0; pushed KV has no lease: leave it out")
    del given["kv_transfer"]["lease"]
    given["engines"][0]["num_reserved_decode_tokens"] = 64
    refused = simulate(engines=write(tmp_path / "reserving.yaml", given))
    assert_refused(refused, "engines.0.num_reserved_decode_tokens is 64, but role is prefill")


def test_a_time_limit_stops_it_there_and_says_so() -> None:
    result = simulate("--time-limit", 5)
    assert result.exit_code == 0
    assert "Stopped by the time limit at 5.00 s" in result.stdout
    found = document(simulate("--time-limit", 5, "--json"))
    assert found["partial"]
    assert found["end"] == 5.0 == found["run"]["time_limit"]
    assert found["metrics"]["unfinished"] > 0


def test_the_option_goes_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "engines.yaml", {**BASE, "time_limit": 5.0})
    assert document(simulate("--json", engines=path))["end"] == 5.0
    assert document(simulate("--json", "--time-limit", 7, engines=path))["end"] == 7.0
    assert document(simulate("--json", "--route", "round-robin", engines=path))["run"]["route"] == "round-robin"


def test_weight_updates_of_a_file_pause_its_engines(tmp_path: Path) -> None:
    updates = {"every": 2.0, "times": 3, "pause": 1.5, "refresh": True}
    path = write(tmp_path / "engines.yaml", {**BASE, "weight_updates": updates})
    timeline = tmp_path / "timeline.json"
    paused = document(simulate("--json", "--timeline", timeline, engines=path))["metrics"]
    assert paused["makespan"] > document(simulate("--json"))["metrics"]["makespan"] + 1
    assert sum(event["name"] == "new weights" for event in json.loads(timeline.read_text())) == 6


# A plan


def test_the_rollout_of_a_plan_is_held_against_its_prediction(plans: dict[str, Path]) -> None:
    result = libra("simulate", plans["async"], "-t", LOG)
    assert result.exit_code == 0, result.stderr
    assert "Rollout of 1 step: the plan says " in result.stdout
    assert "note: 1 step: 64 trajectories drawn from 60 finished ones, each once, then more with" in result.stdout
    found = document(libra("simulate", plans["async"], "-t", LOG, "--json"))
    said = found["plan"]
    assert said["simulated_makespan"] == found["metrics"]["makespan"]
    assert said["predicted_rollout"] == found["workload"]["source"]["forecast"]["seconds"]
    assert said["difference"] == pytest.approx(said["simulated_makespan"] / said["predicted_rollout"] - 1)
    assert found["metrics"]["trajectories_completed"] == 64


def test_a_plan_for_slots_is_simulated_with_what_was_measured(plans: dict[str, Path]) -> None:
    found = document(libra("simulate", plans["slots"], "-t", LOG, "--json"))
    assert found["metrics"]["trajectories_completed"] == 144
    assert {config["block_size"] for config in found["configs"]} == {32}


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_whole_run_of_a_plan_compares_steps_with_steps(plans: dict[str, Path], mode: str, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    command = ("rehearse", plans[mode], "-t", LOG, "--steps", 5, "--report", page, "--timeline", trace)
    found = document(libra(*command, "--json", "-o", tmp_path / "run.json"))
    assert json.loads((tmp_path / "run.json").read_text()) == found
    recipe, predicted = (json.loads(plans[mode].read_text())[key] for key in ("request", "predicted"))
    assert [step["trajectories"] for step in found["steps"]] == [64] * 5
    staleness = recipe["recipe"]["staleness"]
    assert max(step["worst_staleness"] for step in found["steps"]) <= staleness
    assert "5 steps in " in page.read_text() and "What was lent" not in page.read_text()
    drawn = [it for it in json.loads(trace.read_text()) if it["name"].startswith("step ")]
    ended = [(it["ts"] + it["dur"]) / 1e6 for it in drawn]
    assert ended == pytest.approx([step["ended"] for step in found["steps"]], abs=1e-5)
    assert found["plan"]["predicted_step"] == predicted["step"]
    assert found["plan"]["whole_mean"] == pytest.approx(found["seconds"] / 5)
    settled = ended[4] - ended[3] if staleness else found["seconds"] / 5
    assert found["plan"]["simulated_step"] == pytest.approx(settled)
    assert found["run"]["route"] == "cmlfq"
    shown = libra(*command)
    assert "a step takes" in shown.stdout and "8 prompts of 8 samples" in shown.stdout


def test_other_draws_have_other_seeds(plans: dict[str, Path]) -> None:
    first, again, other = (
        libra("simulate", plans["sync"], "-t", LOG, "--json", "--seed", seed).stdout for seed in (0, 0, 1)
    )
    assert first == again != other


def test_a_router_without_evidence_is_pointed_out(plans: dict[str, Path]) -> None:
    if len(json.loads(plans["slots"].read_text())["allocation"]["buckets"]) < 2:
        pytest.fail("the example's plan no longer has two buckets")
    published = ("simulate", plans["slots"], "-t", LOG, "--route", "cmlfq-published")
    cold, warm = libra(*published), libra(*published, "--learn-from", LOG)
    assert "without evidence" not in libra("simulate", plans["slots"], "-t", LOG).stdout
    assert "cmlfq-published starts without evidence" in cold.stdout
    assert warm.exit_code == 0
    assert "without evidence" not in warm.stdout


# What is wrong, and words of the one line: key, and remedy.
BAD_FILES: list[tuple[str, object, tuple[str, ...]]] = [
    ("no mapping", [], ("engines.yaml: expected a mapping of keys, as in examples/engines.yaml",)),
    ("no engines", {**BASE, "engines": []}, ("engines: give 1 or more (got 0)",)),
    ("a typo", {**BASE, "rout": "round-robin"}, ("rout: unknown key 'rout'; did you mean route?",)),
    ("a typo within", group(gpus="A100"), ("engines.0.gpus: unknown key 'gpus'; did you mean gpu?",)),
    ("no model", group(model=None), ("engines.0.model: this key is required; add it",)),
    (
        "an unknown model",
        group(model="Qwen/Qwen3-14"),
        ("engines.0.model: ", "did you mean Qwen/Qwen3-14B? Known are "),
    ),
    ("an unknown GPU", group(gpu="A101"), ("engines.0.gpu: unknown GPU 'A101'; known are A100, ",)),
    (
        "updates beyond what is counted",
        {**BASE, "weight_updates": {"every": 1e9, "times": 1, "pause": 1}},
        ("weight_updates.every: 1e+09 seconds is longer than 106 days",),
    ),
    ("an unknown policy", {**BASE, "route": "random"}, ("route: policy is 'random'; choose one of round-robin",)),
    ("a policy of files", {**BASE, "route": "random"}, ("cmlfq, data-parallel",)),
    ("a policy of files, nearly", {**BASE, "route": "data-paralel"}, ("did you mean data-parallel?",)),
    ("an unknown order", group(policy="lifo"), ("engines.0.policy: Input should be 'fcfs' or 'priority'",)),
    (
        "an unknown quantisation",
        group(quantization="fp16"),
        ("engines.0.quantization: Input should be 'fp8', 'awq', 'gptq', 'modelopt_fp4' or 'mxfp4'", "(got 'fp16')"),
    ),
    (
        "quantised experts of a model without",
        group(quantization="mxfp4"),
        ("engines.0.quantization is mxfp4, which is for routed experts", "but Qwen/Qwen3-14B has none: choose another"),
    ),
    ("an unknown KV type", group(kv_cache_dtype="int4"), ("engines.0.kv_cache_dtype: Input should be 'auto', ",)),
    ("no seats", group(max_num_seqs=0), ("engines.0.max_num_seqs: Input should be greater", "(got 0)")),
    (
        "KV for less than a request",
        group(kv_blocks=100),
        ("engines.0.kv_blocks is 100: 1600 tokens, less than one request of max_model_len 16384", "give more memory"),
    ),
    (
        "memory for less than a request",
        group(gpu_memory_utilization=0.37),
        ("engines.0.gpu_memory_utilization is 0.37:", "less than one request of max_model_len 16,384", "raise it"),
    ),
    (
        "a model beyond its GPU",
        group(model="meta-llama/Llama-3.1-70B"),
        ("leaves KV memory for 0 tokens on 1 x A100", "raise it or tensor_parallel_size"),
    ),
    (
        "longer than the model",
        group(max_model_len=50_000),
        ("engines.0.max_model_len is 50000, but Qwen/Qwen3-14B is made for 40960 tokens: lower it",),
    ),
    (
        "heads that do not divide",
        group(tensor_parallel_size=3),
        ("engines.0.tensor_parallel_size: Qwen/Qwen3-14B: ",),
    ),
    (
        "a degree without times",
        group(tensor_parallel_size=40),
        ("engines.0.tensor_parallel_size is 40, but engine times (roofline: ", "are known only for 1, 2, 4, 8: give"),
    ),
    (
        "more stages than layers",
        group(pipeline_parallel_size=41),
        ("engines.0.pipeline_parallel_size is 41, but Qwen/Qwen3-14B has 40 layers: lower it",),
    ),
    (
        "a budget without times",
        group(max_num_batched_tokens=100_000),
        ("engines.0: engine times are not known up to", "max_num_batched_tokens 100000", "lower the keys that"),
    ),
    ("no such profile", group(profile="no.json"), ("engines.0.profile: ", "no.json", "or give another file")),
    (
        "no such host",
        group(host="no.json", overhead=None),
        ("engines.0.host: ", "no.json", "give none, default or fast"),
    ),
    ("two hosts", group(host="default"), ("engines.0.host is default, but overhead is given, too: leave one of them",)),
    (
        "a negative overhead",
        group(overhead={"iteration": -1.0}),
        ("engines.0.overhead.iteration: Input should be greater", "(got -1.0)"),
    ),
    (
        "an hour of overhead and more",
        group(overhead={"request": 3601.0}),
        ("engines.0.overhead.request: Input should be less than or equal to 3600",),
    ),
    (
        "blocks too large for the memory",
        group(block_size=1_000_000),
        ("engines.0.block_size is 1000000: Qwen/Qwen3-14B leaves KV memory for 0 tokens", "16,384: lower it"),
    ),
    (
        "a budget too large for the memory",
        group(max_num_batched_tokens=500_000),
        ("engines.0.max_num_batched_tokens is 500000: Qwen/Qwen3-14B leaves KV memory for 0 tokens", "lower it"),
    ),
    (
        "two of one name",
        {**BASE, "engines": [GROUP, GROUP]},
        ("2 engines have the name a100-0: give each engine its own",),
    ),
    ("limits that fall", {**BASE, "limits": [8192, 4096]}, ("limits is [8192, 4096]; list rising numbers of tokens",)),
    (
        "a bucket without a limit",
        group(bucket=1),
        ("engine a100-0 is in bucket 1, but limits name 1", "add the bucket's limit"),
    ),
    (
        "prefixes that C-MLFQ must follow",
        {**BASE, "route": "cmlfq-published", "sticky": False},
        ("leave sticky true",),
    ),
    (
        "updates all the time",
        {**BASE, "weight_updates": {"every": 0, "times": 1, "pause": 1}},
        ("weight_updates.every: Input should be greater than 0",),
    ),
    (
        "updates without end",
        {**BASE, "weight_updates": {"every": 1, "times": 100_001, "pause": 1}},
        ("weight_updates.times: Input should be less than or equal to 100000",),
    ),
]


@pytest.mark.parametrize(("data", "words"), [row[1:] for row in BAD_FILES], ids=[row[0] for row in BAD_FILES])
def test_engines_that_cannot_run_are_refused_before_they_do(
    tmp_path: Path, data: object, words: tuple[str, ...]
) -> None:
    path = write(tmp_path / "engines.yaml", data)
    out = tmp_path / "out.json"
    assert_refused(simulate("-o", out, engines=path), str(path), *words)
    assert not out.exists()


BAD_CALLS: list[tuple[str, tuple[object, ...], tuple[str, ...]]] = [
    ("no work", (ENGINES,), ("give either --requests FILE or --trajectories FILE",)),
    ("two kinds of work", (ENGINES, "--requests", REQUESTS, "-t", LOG), ("--requests FILE or --trajectories FILE",)),
    ("neither plan nor engines", (LOG, "-t", LOG), ("trajectories.jsonl: give a plan.json", "a YAML file such as")),
    ("no such file", ("no.yaml", "--requests", REQUESTS), ("no.yaml: No such file or directory: give an existing",)),
    ("no such plan", ("no.json", "-t", LOG), ("no.json: No such file or directory",)),
    (
        "no plan",
        (EXAMPLES / "profile_2_cores.json", "-t", LOG),
        ("profile_2_cores.json: format is missing",),
    ),
    ("no such requests", (ENGINES, "--requests", "no.jsonl"), ("no.jsonl: No such file or directory",)),
    ("requests of another kind", (ENGINES, "--requests", ENGINES), ("engines.yaml:1: not JSON",)),
    (
        "trajectories for requests",
        (ENGINES, "--requests", LOG),
        ("trajectories.jsonl: a log of trajectories, not requests; give it to --trajectories",),
    ),
    (
        "an option of trajectories",
        (ENGINES, "--requests", REQUESTS, "--concurrency", 2),
        ("--concurrency is for trajectories (--trajectories); leave it out",),
    ),
    (
        "an option of requests",
        (ENGINES, "-t", LOG, "--rate-scale", 2),
        ("--rate-scale is for requests (--requests); leave it out",),
    ),
    ("an unknown policy", (ENGINES, "-t", LOG, "--route", "best"), ("--route: policy is 'best'; choose one of",)),
    (
        "a rate of nothing",
        (ENGINES, "--requests", REQUESTS, "--rate-scale", 0),
        ("libra: --rate-scale is 0.0; set it to",),
    ),
    (
        "a start after the end",
        (ENGINES, "--requests", REQUESTS, "--start", 1e6),
        ("libra: --start is 1000000.0; no request arrives then or later: start earlier",),
    ),
    (
        "a start after all time",
        (ENGINES, "--requests", REQUESTS, "--start", 1e9),
        ("--start is 1000000000.0; give 0 seconds or more, and less than 9.22e+06",),
    ),
    ("a limit after all time", (ENGINES, "-t", LOG, "--time-limit", 1e9), ("--time-limit is", "less than 9.22e+06")),
    (
        "a policy with a typo",
        (ENGINES, "-t", LOG, "--route", "cmlqf"),
        ("--route: policy is 'cmlqf'; did you mean cmlfq?\n",),
    ),
    ("a start before", (ENGINES, "--requests", REQUESTS, "--start", -1), ("--start is -1.0; give 0 seconds or more",)),
    ("no time", (ENGINES, "-t", LOG, "--time-limit", 0), ("--time-limit is 0.0; give more than 0 seconds",)),
    ("a negative seed", (ENGINES, "-t", LOG, "--seed", -1), ("--seed is -1; give 0 or more",)),
    (
        "none in flight",
        (ENGINES, "-t", LOG, "--concurrency", 0),
        ("libra: --concurrency is 0; give 1", "or leave it out"),
    ),
    ("no samples", (ENGINES, "-t", LOG, "--samples-per-prompt", 0), ("libra: --samples-per-prompt is 0; run each",)),
    (
        "tools that answer before",
        (ENGINES, "-t", LOG, "--unknown-tool-seconds", -1),
        ("--unknown-tool-seconds is -1.0; give 0 seconds or more",),
    ),
    (
        "nowhere to write",
        (ENGINES, "-t", LOG, "--report", "no/page.html"),
        ("no/page.html: there is no directory no; make it",),
    ),
    ("a directory to write to", (ENGINES, "-t", LOG, "-o", EXAMPLES), (f"{EXAMPLES}: is a directory; give a file",)),
    (
        "a log for a policy that learns nothing",
        (ENGINES, "-t", LOG, "--learn-from", LOG),
        ("least-loaded does not: leave it out, or give --route cmlfq-published",),
    ),
    (
        "no log to learn from",
        (ENGINES, "-t", LOG, "--learn-from", "no.jsonl", "--route", "cmlfq-published"),
        ("no.jsonl: No such file",),
    ),
]


@pytest.mark.parametrize(("arguments", "words"), [row[1:] for row in BAD_CALLS], ids=[row[0] for row in BAD_CALLS])
def test_a_call_that_means_nothing_is_refused(arguments: tuple[object, ...], words: tuple[str, ...]) -> None:
    assert_refused(libra("simulate", *arguments), *words)


@pytest.mark.parametrize("option", ["-o", "--requests-out", "--timeline", "--report"])
def test_no_input_is_overwritten(tmp_path: Path, option: str) -> None:
    engines, requests = tmp_path / "engines.yaml", tmp_path / "requests.jsonl"
    engines.write_bytes(ENGINES.read_bytes())
    requests.write_bytes(REQUESTS.read_bytes())
    link = tmp_path / "link"
    link.symlink_to(requests)
    for output, read in ((engines, engines), (requests, requests), (link, requests)):
        refused = simulate(option, output, engines=engines, requests=requests)
        assert_refused(refused, f"{output}: the same file as {read}, which is an input; give another file")
    assert (engines.read_bytes(), requests.read_bytes()) == (ENGINES.read_bytes(), REQUESTS.read_bytes())


def test_two_outputs_are_two_files(tmp_path: Path) -> None:
    out, again = tmp_path / "out.json", tmp_path / "." / ".." / tmp_path.name / "out.json"
    assert_refused(simulate("-o", out, "--report", again), f"{again}: the same file as {out}, which is another output")
    assert not out.exists()
    assert simulate("-o", os.devnull, "--report", os.devnull).exit_code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("option", ["-o", "--requests-out", "--timeline", "--report"])
def test_a_full_disk_is_named(option: str) -> None:
    assert_refused(simulate(option, "/dev/full"), "/dev/full: No space left on device; give another file to write to")


def test_planning_overwrites_no_input(plans: dict[str, Path], tmp_path: Path) -> None:
    log, plan = tmp_path / "log.jsonl", tmp_path / "plan.json"
    log.write_bytes(LOG.read_bytes())
    plan.write_bytes(plans["slots"].read_bytes())
    profile = EXAMPLES / "profile_2_cores.json"
    for refused, path in (
        (libra("plan", EXAMPLES / "calculator.yaml", "-t", log, "-p", profile, "-o", log), log),
        (libra("explain", plan, "--html", plan), plan),
    ):
        assert_refused(refused, f"{path}: the same file as {path}, which is an input")
    assert (log.read_bytes(), plan.read_bytes()) == (LOG.read_bytes(), plans["slots"].read_bytes())


BAD_PLANS: list[tuple[str, str, tuple[object, ...], tuple[str, ...]]] = [
    ("no log", "async", (), ("a plan needs trajectories: give --trajectories",)),
    ("requests", "async", ("--requests", REQUESTS), ("give --trajectories instead of --requests",)),
    ("a rate", "async", ("-t", LOG, "--rate-scale", 2), ("--rate-scale is for requests (--requests); leave it out",)),
    (
        "part of a sample",
        "async",
        ("-t", LOG, "--samples-per-prompt", 7),
        ("libra: --samples-per-prompt is 7, which does not divide 64 trajectories: give a divisor",),
    ),
]


@pytest.mark.parametrize(
    ("plan", "options", "words"), [row[1:] for row in BAD_PLANS], ids=[row[0] for row in BAD_PLANS]
)
def test_a_plan_that_cannot_be_simulated_is_refused(
    plans: dict[str, Path], plan: str, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert_refused(libra("simulate", plans[plan], *options), *words)


def test_a_plan_refuses_a_log_that_its_engines_do_not_hold(plans: dict[str, Path], tmp_path: Path) -> None:
    first = json.loads(LOG.read_text().splitlines()[0])
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({**first, "prompt_tokens": 9000}) + "\n")
    assert_refused(
        libra("simulate", plans["async"], "-t", log), "log.jsonl:1: a context of ", "give --truncate-context"
    )
    assert document(libra("simulate", plans["async"], "-t", log, "--truncate-context", "--json"))["plan"]


def test_the_plan_of_a_machine_is_not_rehearsed(plans: dict[str, Path]) -> None:
    assert_refused(
        libra("rehearse", plans["slots"], "-t", LOG),
        "this plan is for the slots of one machine, but a plan for a cluster",
    )


def test_a_rehearsal_runs_no_code_that_only_the_plan_names(plans: dict[str, Path], tmp_path: Path) -> None:
    plan, found = tmp_path / "plan.json", json.loads(plans["sync"].read_text())
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')\n")
    found["request"]["recipe"]["router"] = f"{tmp_path}/mine.py:Mine"
    plan.write_text(json.dumps(found))
    assert_refused(libra("rehearse", plan, "-t", LOG), "give it as --router", "to run that file")


def test_a_policy_of_the_users_own_routes_a_rehearsal(plans: dict[str, Path], tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("from libra.route.baselines import LeastLoaded\n\n\nclass Mine(LeastLoaded):\n    pass\n")
    command = ("rehearse", plans["sync"], "-t", LOG, "--steps", 1, "--json", "--router")
    mine, known = (document(libra(*command, name)) for name in (f"{own}:Mine", "least-loaded"))
    assert mine["steps"] == known["steps"]
    assert_refused(libra(*command, f"{own}:Other"), "policy is", "Other")


def test_a_policy_of_the_users_own_routes_a_simulation(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("from libra.route.baselines import LeastLoaded\n\n\nclass Mine(LeastLoaded):\n    pass\n")
    command = ("simulate", ENGINES, "-t", LOG, "--json", "--route")
    mine, known = (document(libra(*command, name)) for name in (f"{own}:Mine", "least-loaded"))
    assert mine["metrics"] == known["metrics"] and mine["run"]["route"] == f"{own}:Mine"
    assert_refused(libra(*command, f"{own}:Other"), "--route: policy is", "Other")


def test_a_plan_without_engines_is_refused(plans: dict[str, Path], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    found = json.loads(plans["async"].read_text())
    plan.write_text(json.dumps({**found, "placement": []}))
    assert_refused(libra("simulate", plan, "-t", LOG), f"{plan}: placement has no engine: plan again")


def test_a_plan_refuses_a_log_with_nothing_finished(plans: dict[str, Path], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("")
    assert_refused(libra("simulate", plans["async"], "-t", log), "give a log with at least one finished trajectory")


@pytest.mark.parametrize("command", [("explain",), ("simulate", "-t", LOG), ("rehearse", "-t", LOG)])
def test_a_plan_that_does_not_answer_its_request_is_refused_by_all(
    plans: dict[str, Path], tmp_path: Path, command: tuple[object, ...]
) -> None:
    found = json.loads(plans["async"].read_text())
    found["allocation"]["buckets"][0]["engines"] = 400
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(found))
    verb, *options = command
    assert_refused(libra(verb, plan, *options), "does not answer its own request", "it has 48; plan again")


def test_explaining_what_is_no_plan_says_what_to_give() -> None:
    assert_refused(libra("explain", LOG), f"{LOG}: not JSON (Extra data", "give a plan.json of `libra plan -o`")


@pytest.mark.parametrize(
    ("assumption", "words"),
    [
        ("a800=0", "--what-if a800=0: nodes is empty; a cluster has at least one node: give 1 or more"),
        ("batch=63", "--what-if batch=63: batch is 63, which 8 samples_per_prompt do not divide: make batch"),
    ],
)
def test_an_assumption_that_cannot_be_is_repeated(plans: dict[str, Path], assumption: str, words: str) -> None:
    assert_refused(libra("explain", plans["async"], "--what-if", assumption), words)


@pytest.mark.parametrize(("assumption", "said"), [("batch=128", True), ("gpus=16", False)])
def test_another_batch_keeps_the_weights_of_the_log_and_says_so(
    plans: dict[str, Path], assumption: str, said: bool
) -> None:
    shown = libra("explain", plans["async"], "--what-if", assumption)
    assert shown.exit_code == 0, shown.stderr
    assert (
        "trajectories keep their weights from the plan with batch 64; libra plan --what-if batch=128" in shown.stdout
    ) is said


def test_a_split_of_ones_own_stands_beside_the_plan(plans: dict[str, Path]) -> None:
    split = ("--against", "train=8,generate=40")
    shown = libra("explain", plans["async"], *split)
    assert shown.exit_code == 0, shown.stderr
    assert "train 8, generate 40: a step of " in shown.stdout
    assert "With the split trainers wait " in shown.stdout
    found = document(libra("explain", plans["async"], *split, "--json"))["against"]
    assert (found["split"]["train"], found["split"]["generate"] + found["idle"]) == (8, 40)
    assert "against" not in document(libra("explain", plans["async"], "--json"))
    assert_refused(libra("explain", plans["async"], "--against", "8:40"), "--against 8:40: give GPUs of both sides")


def test_a_name_cannot_drive_the_terminal(tmp_path: Path) -> None:
    engines = [{**GROUP, "name": name, "count": 1} for name in ("\x1b[2Jone", "\x1b[2Jtwo")]
    shown = simulate(engines=write(tmp_path / "engines.yaml", {**BASE, "engines": engines}))
    assert shown.exit_code == 0, shown.stderr
    assert r"Load is uneven: \x1b[2Jtwo works " in shown.stdout
    assert "\x1b[2J" not in shown.stdout
