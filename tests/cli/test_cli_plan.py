"""`libra plan`: of one machine, and of a cluster."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from calls import BASE, CONFIG, EXAMPLES, LOG, PROFILE, assert_refused, changed, libra, process, write
from click.testing import Result

from libra.config.extras import install_command
from libra.config.recipe import Recipe
from libra.plan import plan as plans
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.slots import SlotRequest
from libra.plan.plan import Confirmation, DisagreementError, Plan, dump_plan, parse_plan


def plan(*arguments: object, config: Path = CONFIG, log: Path = LOG, profile: Path = PROFILE) -> Result:
    return libra("plan", config, "-t", log, "-p", profile, *arguments)


def test_plan_shows_who_does_what_how_long_it_takes_and_the_proof() -> None:
    result = plan()
    assert result.exit_code == 0, result.stderr
    for words in ("training replicas", "short", "long", "-bound", "optimal", "144 trajectories"):
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
        "note: tool seconds unknown for 100.0 % of the tool calls: 0 s assumed",
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
    assert_refused(
        plan(profile=none), f"--profile {none}: No such file or directory; give a profile.json that a run has written"
    )
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
    assert_refused(plan(config=config), "engines.long.max_model_len: the largest value is 96, but ")


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
    simulated: bool = False

    def arguments(self, directory: Path) -> tuple[object, ...]:
        """Write the files, and say how they are given."""
        log = directory / "log.jsonl"
        log.write_bytes(self.log if isinstance(self.log, bytes) else self.log.encode())
        cluster = write(directory / "cluster.yaml", self.cluster)
        request = write(directory / "request.yaml", self.request)
        asked = ("plan", cluster, "-m", self.model, "-t", log, "-r", request, "-p", self.profile)
        return (*asked, *(() if self.simulated else ("--no-simulation",)), *self.options)

    def call(self, directory: Path) -> Result:
        return libra(*self.arguments(directory))


def test_a_cluster_is_planned_onto_its_nodes(tmp_path: Path) -> None:
    result = Asked().call(tmp_path)
    assert result.exit_code == 0, result.stderr
    for words in ("training", "ranks", "a800/tp", "where", "-bound", "optimal", "64 trajectories"):
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
    first, alternate = result.stderr.splitlines()
    assert first == "note: 1 trajectory of 21 in the log unfinished: their present lengths count as lower bounds"
    assert "is the mean of alternating steps" in alternate
    assert str(tmp_path) not in result.stdout


def test_a_plan_is_simulated_and_says_how_it_was_chosen(tmp_path: Path) -> None:
    asked = Asked(simulated=True, options=("-o", str(tmp_path / "plan.json"), "--simulate-for", "inf"))
    result = asked.call(tmp_path)
    assert result.exit_code == 0, result.stderr
    found = parse_plan((tmp_path / "plan.json").read_text())
    assert found.simulated is not None and found.finalists[0].allocation == found.allocation
    said = " ".join(result.stdout.split())
    for words in (
        "in simulation under cmlfq",
        "predicted",
        "Finalists",
        "chosen",
        "(MFU)",
        "Memory of a GPU: training",
    ):
        assert words in said
    explained = libra("explain", tmp_path / "plan.json", "--html", tmp_path / "plan.html")
    assert explained.exit_code == 0, explained.stderr
    assert "in simulation under cmlfq" in explained.stdout
    assert "Simulated plans" in (tmp_path / "plan.html").read_text()
    again = libra("rehearse", tmp_path / "plan.json", "-t", tmp_path / "log.jsonl", "--steps", 4, "--json")
    assert again.exit_code == 0, again.stderr


def test_a_router_of_loads_gets_one_engine_size_and_is_told_why(tmp_path: Path) -> None:
    result = Asked(options=("--router", "least-loaded", "--json")).call(tmp_path)
    found = parse_plan(result.stdout)
    assert len(found.allocation.buckets) == 1
    assert "least-loaded ignores buckets: all engines have one size" in result.stderr
    assert_refused(Asked(options=("--router", "least-loded")).call(tmp_path), "did you mean least-loaded?")
    assert_refused(Asked(options=("--router", "mine.py:Mine")).call(tmp_path), "there is no file mine.py")


def test_without_a_request_the_defaults_are_said(tmp_path: Path) -> None:
    *arguments, _, _, _, _ = Asked(simulated=True).arguments(tmp_path)
    result = libra(*arguments, "-p", "roofline", "--json", "--no-simulation")
    assert result.exit_code == 0, result.stderr
    request = parse_plan(result.stdout).request
    assert isinstance(request, ClusterRequest)
    assert request.recipe == Recipe(batch=512, samples_per_prompt=16, max_length=40960)
    first, alternate = result.stderr.splitlines()
    assert (
        first
        == "note: no --request: assumed 512 trajectories per step, 16 per prompt, up to 40,960 tokens, asynchronous"
    )
    assert "is the mean of alternating steps" in alternate
    (tmp_path / "plan.json").write_text(result.stdout)
    explained = libra("explain", tmp_path / "plan.json")
    assert "A step is predicted to take" in explained.stdout
    assert "\nLatency-bound: a step is as long as the latency of a batch, " in explained.stdout
    assert f"\n{alternate.removeprefix('note: ')}.\n" in explained.stdout
    assert parse_plan(result.stdout).predicted.step_range is not None


def test_a_cluster_is_planned_with_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    arguments = Asked(options=("--json",)).arguments(tmp_path)
    first, second = (process(*arguments, hash_seed=seed) for seed in ("1", "2"))
    assert first.returncode == 0
    assert first.stderr == second.stderr
    assert first.stdout == second.stdout == libra(*arguments).stdout


def test_the_host_is_priced_unless_told_otherwise(tmp_path: Path) -> None:
    steps = {}
    for host in ("default", "none"):
        result = Asked(options=("--json", "--host", host)).call(tmp_path)
        found = parse_plan(result.stdout)
        assert isinstance(found.request, ClusterRequest)
        assert found.request.profiles[0].host.priced == (host == "default")
        steps[host] = found.predicted.step
    assert steps["default"] > steps["none"]
    unsaid = Asked(options=("--json",)).call(tmp_path)
    assert parse_plan(unsaid.stdout).predicted.step == steps["default"]
    assert "host of a800" in Asked().call(tmp_path).stdout
    absent = Asked(options=("--host", "absent.json")).call(tmp_path)
    assert absent.exit_code == 2
    assert "absent.json" in absent.stderr
    assert "give none, default or fast" in absent.stderr


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
    (
        "a GPU nobody knows",
        Asked(node(gpu="A801")),
        2,
        ("nodes.0.gpu: unknown GPU 'A801'", "known are A100, ", "describe another one"),
    ),
    (
        "a GPU unlike any",
        Asked(node(gpu="TPU")),
        2,
        ("nodes.0.gpu: unknown GPU 'TPU'", "known are A100, A100-40GB, A800"),
    ),
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
    ("half a group", Asked(request={**REQUEST, "batch": 63}), 2, ("batch is 63", "make batch a multiple")),
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
        ("max_batched_tokens is 100000: there is no time for 1 to 100,000 x 0: the grid", "lower it"),
    ),
    (
        "synchronous and stale",
        Asked(request={**REQUEST, "mode": "sync", "staleness": 2}),
        2,
        ("staleness is 2, but mode is sync", "set staleness to 0, or mode to async"),
    ),
    ("an unknown mode", Asked(request={**REQUEST, "mode": "fast"}), 2, ("mode: Input should be 'async', 'sync' or",)),
    ("an empty log", Asked(log=""), 2, ("log.jsonl: there is no trajectory", "at least one finished trajectory")),
    (
        "only unfinished trajectories",
        Asked(log=lines(RUNNING, RUNNING)),
        2,
        ("log.jsonl: all 2 trajectories are unfinished", "give a log with at least one finished trajectory"),
    ),
    ("broken JSON", Asked(log=TWENTY + "{\n"), 2, ("log.jsonl:21: not JSON (",)),
    ("a blank line", Asked(log="\n" + TWENTY), 2, ("log.jsonl:1: not JSON (",)),
    ("no text", Asked(log=b"\xff\n"), 2, ("log.jsonl:1: not JSON (",)),
    (
        "a reward that is no number",
        Asked(log=TWENTY + lines({**TRAJECTORY, "reward": float("nan")})),
        2,
        ("log.jsonl:21: ", "reward must be finite, or null if there is none"),
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
    ("no such profile", Asked(profile="no.json"), 2, ("--profile no.json: No such file", "or give another file")),
    ("no profile at all", Asked(profile=""), 2, ("--profile .: Is a directory", "give auto, tables or roofline")),
    (
        "no such host",
        Asked(options=("--host", "no.json")),
        2,
        ("--host no.json: No such file", "give none, default or fast"),
    ),
    (
        "half a node",
        Asked(options=("--what-if", "gpus=12")),
        2,
        ("--what-if gpus=12", "give a positive multiple of this number"),
    ),
    ("no assumption", Asked(options=("--what-if", "more")), 2, ("--what-if more: give KEY=VALUE",)),
    (
        "a model that trains nowhere",
        Asked(node(count=1, gpus=1), model="Qwen/Qwen3-14B"),
        3,
        (
            "no plan exists: no layout trains Qwen/Qwen3-14B",
            "there is a plan with 5 nodes of a800 (4 GPUs train, by ",
            ", 1 generates)",
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
        ("no plan exists: ", "pool a800 has 1 device;", "share devices (mode: colocated)"),
    ),
]


@pytest.mark.parametrize(
    ("asked", "status", "words"), [row[1:] for row in BAD_PLANS], ids=[row[0] for row in BAD_PLANS]
)
def test_bad_input_ends_in_one_line_that_names_key_and_remedy(
    tmp_path: Path, asked: Asked, status: int, words: tuple[str, ...]
) -> None:
    result = asked.call(tmp_path)
    assert_refused(result, *words, status=status)


def test_a_model_of_another_kind_is_refused_with_the_missing_field(tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    shape = json.loads(
        (EXAMPLES.parent / "src" / "libra" / "hardware" / "models" / "Qwen--Qwen3-0.6B.json").read_text()
    )
    del shape["hidden_size"]
    model.write_text(json.dumps(shape))
    assert_refused(Asked(model=str(model)).call(tmp_path), "hidden_size")


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
    assert_refused(
        libra("plan", CONFIG, "-t", LOG), "--model or --profile is missing: give --model for a cluster of GPUs"
    )
    assert_refused(
        plan("--what-if", "gpus=8"), "--what-if is for a cluster of GPUs: change the configuration of a run in its"
    )


def test_a_refusal_that_quotes_a_log_cannot_control_the_terminal(tmp_path: Path) -> None:
    assert_refused(plan(log=tmp_path / "a\x1b[2Jb"), r"a\x1b[2Jb: No such file")


def test_a_dash_is_standard_output_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = Asked(options=("-o", "-")).call(tmp_path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == Asked(options=("--json",)).call(tmp_path).stdout
    parse_plan(result.stdout)
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize(("first", "second"), [("cp-sat", "ilp"), ("ilp", "cp-sat")])
def test_a_plan_is_confirmed_by_the_other_solver_with_both_values(tmp_path: Path, first: str, second: str) -> None:
    result = Asked(options=("--solver", first, "--confirm", "--json")).call(tmp_path)
    assert result.exit_code == 0, result.stderr
    found = parse_plan(result.stdout)
    assert f"note: confirmed: {first} has a step of {found.predicted.step:,.4f} s" in result.stderr
    assert f"{second} has {found.predicted.step:,.4f} s" in result.stderr
    other = parse_plan(Asked(options=("--solver", second, "--json")).call(tmp_path).stdout)
    assert (found.allocation, found.predicted) == (other.allocation, other.predicted)


def test_solvers_that_disagree_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disagrees(plan: Plan, solver: str) -> Confirmation:
        raise DisagreementError("cp-sat is wrong")

    monkeypatch.setattr(plans, "confirm", disagrees)
    assert_refused(Asked(options=("--confirm",)).call(tmp_path), "libra: cp-sat is wrong\n", status=1)


def test_without_the_extra_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "libra.plan.model.ilp", raising=False)
    monkeypatch.setitem(sys.modules, "pulp", None)
    assert_refused(Asked(options=("--solver", "ilp")).call(tmp_path), install_command("ilp"))


def test_pauses_of_people_are_said_to_bind_the_step_and_can_be_cut(tmp_path: Path) -> None:
    paused = copy.deepcopy(TRAJECTORY)
    paused["turns"][0]["tool_seconds"] = 25_200.0
    log = lines(*[TRAJECTORY] * 19, paused)
    bound = Asked(log=log, options=("--json",)).call(tmp_path)
    assert "the longest tool call of the log took 7 h 00 min" in bound.stderr
    assert "--longest-tool-call SECONDS" in bound.stderr
    cut = Asked(log=log, options=("--json", "--longest-tool-call", "60")).call(tmp_path)
    assert cut.stderr.startswith("note: 1 tool call of more than 1 min 00 s counted as 1 min 00 s\n")
    assert parse_plan(cut.stdout).predicted.step < parse_plan(bound.stdout).predicted.step / 10
