"""What a YAML file may say, and how a file that says something else is refused: in one line, with key and remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from libra.config.run import ConfigError, RunConfig, load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
_REMOVE = object()


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Set (or remove) the key at a dotted path; numbers in the path index lists."""
    *outer, last = path.split(".")

    def apply(data: dict[str, Any]) -> None:
        place: Any = data
        for key in outer:
            place = place[int(key)] if key.isdigit() else place.setdefault(key, {})
        if value is _REMOVE:
            del place[last]
        else:
            place[last] = value

    return apply


@pytest.fixture
def data() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / "calculator.yaml").read_text())
    return loaded


def write(directory: Path, data: object) -> Path:
    path = directory / "run.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


RUNS = [
    path
    for path in sorted(EXAMPLES.glob("*.yaml"))
    if (keys := set(yaml.safe_load(path.read_text()))) >= {"environment"} and "lending" not in keys
]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_examples_are_complete(path: Path) -> None:
    assert load_config(path).name == path.stem


def test_what_is_left_out_has_the_documented_default(tmp_path: Path, data: dict[str, Any]) -> None:
    config = load_config(write(tmp_path, data))
    assert config.run_directory == Path("runs/calculator")
    assert (config.seed, config.allocation, config.training.max_staleness) == (0, "adaptive", 1)
    assert config.routing.policy == "cmlfq"
    assert (config.cluster.slots, config.cluster.core, config.cluster.hybrid, config.cluster.rollout) == (4, 1, 1, 2)


def test_a_replica_may_have_several_processes(tmp_path: Path, data: dict[str, Any]) -> None:
    training = load_config(write(tmp_path, data)).training
    assert (training.processes, training.sharding) == (1, "none")
    change("training.processes", 2)(data)
    assert load_config(write(tmp_path, data)).training.sharding == "none"
    change("training.sharding", "fsdp2")(data)
    training = load_config(write(tmp_path, data)).training
    assert (training.processes, training.sharding) == (2, "fsdp2")


def test_trajectories_of_a_step(data: dict[str, Any]) -> None:
    assert RunConfig.model_validate(data).training.trajectories == 24 * 6


SIZE = {"max_model_len": 64, "max_num_seqs": 4, "kv_tokens": 256}

BAD = [
    ("typo", change("training.learning_rat", 1e-4), "training.learning_rat: unknown key 'learning_rat'; did you mean"),
    ("typo at the top", change("trainig", {}), "trainig: unknown key 'trainig'; did you mean training?"),
    ("unlike any key", change("xyz", 1), "xyz: unknown key 'xyz'; known are allocation, checkpoint_every"),
    (
        "option of an environment",
        change("environment.url", "http://127.0.0.1:1"),
        "environment: unknown key 'url'; put the environment's own keys under options",
    ),
    ("typo in the environment", change("environment.optoins", {}), "environment.optoins: unknown key 'optoins'; did"),
    ("typo in an engine", change("engines.short.max_modle_len", 64), "did you mean max_model_len?"),
    ("typo in a bucket", change("start.buckets.0.upto", 40), "start.buckets.0.upto: unknown key 'upto'; did you mean"),
    ("typo in the cluster", change("cluster.slot", 4), "cluster.slot: unknown key 'slot'; did you mean slots?"),
    ("missing", change("training.steps", _REMOVE), "training.steps: this key is required; add it"),
    ("missing section", change("start", _REMOVE), "start: this key is required; add it"),
    ("missing name", change("name", _REMOVE), "name: this key is required; add it"),
    ("empty section", change("training", None), "training: expected a mapping of keys"),
    ("wrong type", change("training.steps", "many"), "training.steps: Input should be a valid integer"),
    ("fraction", change("training.steps", 2.5), "training.steps: Input should be a valid integer"),
    ("none", change("training.steps", 0), "training.steps: Input should be greater than 0 (got 0)"),
    (
        "negative rate",
        change("training.learning_rate", -1.0),
        "training.learning_rate: Input should be greater than or",
    ),
    (
        "temperature that no engine takes",
        change("training.temperature", 2.1),
        "training.temperature: Input should be less than or equal to 2",
    ),
    ("infinite rate", change("training.learning_rate", math.inf), "training.learning_rate: Input should be a finite"),
    ("infinite half life", change("planner.half_life", math.inf), "planner.half_life: Input should be a finite number"),
    ("not a number", change("cluster.share", math.nan), "cluster.share: Input should be"),
    ("a group of one", change("training.samples_per_prompt", 1), "samples_per_prompt: Input should be greater than or"),
    (
        "unknown word",
        change("allocation", "dynamic"),
        "allocation: Input should be 'adaptive' or 'static' (got 'dynamic')",
    ),
    ("no process", change("training.processes", 0), "training.processes: Input should be greater than or equal to 1"),
    (
        "one process is sharded",
        change("training.sharding", "fsdp2"),
        "training: sharding fsdp2 divides a replica among its processes, but processes is 1: set processes to 2",
    ),
    ("unknown sharding", change("training.sharding", "fsdp"), "training.sharding: Input should be 'none' or 'fsdp2'"),
    ("port", change("cluster.port", 70000), "cluster.port: Input should be less than or equal to 65535"),
    ("name leaves the directory", change("name", "../elsewhere"), "name: String should match pattern"),
    ("hidden name", change("name", ".run"), "name: String should match pattern"),
    ("endless name", change("name", "n" * 101), "name: String should have at most 100 characters"),
    ("a cluster without Ray", change("cluster.ray_address", "auto"), "cluster: ray_address is for a Ray cluster: set"),
    (
        "nodes without Ray",
        change("cluster.slots_per_node", 2),
        "cluster: slots_per_node is for a Ray cluster: set",
    ),
    ("slots", change("cluster.slots", 5), "cluster: slots is 5, but core + hybrid + rollout = 4: make them equal"),
    ("no engine size", change("engines", {}), "engines: give 1 or more (got 0)"),
    ("no bucket", change("start.buckets", []), "start.buckets: give 1 or more (got 0)"),
    (
        "unknown size",
        change("start.buckets.0.shape", "shrt"),
        "start.buckets: unknown shape 'shrt'; did you mean short?",
    ),
    (
        "replicas",
        change("start.replicas", 3),
        "start.replicas is 3: give cluster.core to cluster.core + cluster.hybrid",
    ),
    ("a slot left over", change("start.replicas", 1), "start.replicas 1 and 2 engines do not add up"),
    ("a reserved name", change("engines.lent", SIZE), "engines.lent is the name of engines on lent devices: choose"),
    ("limits fall", change("start.buckets.1.up_to", 30), "start.buckets: up_to must rise from bucket to bucket"),
]


@pytest.mark.parametrize(("spoil", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_key_is_refused_with_its_place_and_the_remedy(
    tmp_path: Path, data: dict[str, Any], spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    spoil(data)
    path = write(tmp_path, data)
    with pytest.raises(ConfigError) as refusal:
        load_config(path)
    text = str(refusal.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text


NOT_A_CONFIGURATION = [
    ("not YAML", "name: [", "not YAML: "),
    ("a list", "- name", "expected a mapping of keys, as in examples/calculator.yaml"),
    ("empty", "", "expected a mapping of keys"),
]


@pytest.mark.parametrize(
    ("text", "message"), [row[1:] for row in NOT_A_CONFIGURATION], ids=[row[0] for row in NOT_A_CONFIGURATION]
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(write(tmp_path, text))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory: give an existing YAML file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory: give an existing YAML file"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 9\): give a YAML file"):
        load_config(tmp_path / "latin.yaml")


def test_overrides_replace_what_the_file_says(tmp_path: Path, data: dict[str, Any]) -> None:
    overrides = {"name": "other", "training.steps": 3, "planner.period": 2}
    config = load_config(write(tmp_path, data), overrides)
    assert (config.name, config.training.steps, config.planner.period) == ("other", 3, 2)
    assert config.training.prompts_per_step == 24


BAD_OVERRIDES = [
    (
        "refused value",
        change("seed", 0),
        {"training.steps": -1},
        "training.steps: Input should be greater than 0 (got -1)",
    ),
    ("no section", change("training", 5), {"training.steps": 1}, "training: expected a mapping of keys (got 5)"),
    (
        "empty section",
        change("training", None),
        {"training.steps": 1},
        "training: expected a mapping of keys (got None)",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "overrides", "message"), [row[1:] for row in BAD_OVERRIDES], ids=[row[0] for row in BAD_OVERRIDES]
)
def test_overrides_are_checked_as_the_file_is(
    tmp_path: Path,
    data: dict[str, Any],
    spoil: Callable[[dict[str, Any]], None],
    overrides: dict[str, Any],
    message: str,
) -> None:
    spoil(data)
    with pytest.raises(ConfigError) as refusal:
        load_config(write(tmp_path, data), overrides)
    assert message in str(refusal.value)
