"""Real runs of a task so small that each takes seconds: real engines, trainers and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

SMALL_RUN: dict[str, Any] = {
    "name": "small",
    "environment": {
        "kind": "calculator",
        "tools": ["calculator"],
        "options": {"operands": [2, 4]},
        "train_prompts": 32,
        "heldout_prompts": 16,
    },
    "model": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1},
    "warm_up": {"steps": 30, "batch": 32},
    "checkpoint_every": 3,
    "training": {"steps": 8, "prompts_per_step": 4, "samples_per_prompt": 4},
    "planner": {"period": 4},
    "engines": {
        "short": {"max_model_len": 64, "max_num_seqs": 16, "kv_tokens": 1024},
        "long": {"max_model_len": 192, "max_num_seqs": 5, "kv_tokens": 1024},
    },
    "start": {
        "replicas": 2,
        "buckets": [
            {"shape": "short", "engines": 1, "up_to": 40},
            {"shape": "long", "engines": 1, "up_to": 192},
        ],
    },
}


class SmallRuns:
    """Starts `libra run` on the small task, in a directory of its own. `temporary` has a short path: a Ray cluster has
    Unix sockets there, whose paths have 107 bytes at most."""

    def __init__(self, directory: Path, temporary: Path, cache: Path) -> None:
        self.directory, self.temporary = directory, temporary
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(self.temporary)}

    def left(self) -> list[str]:
        """Names in the directory of temporary files, without torch's cache, which a user has one of."""
        return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]

    def start(self, *options: str, **changes: Any) -> subprocess.Popen[str]:
        """A run as a process; `changes` are dotted keys with `__` for the dot."""
        config = json.loads(json.dumps(SMALL_RUN))
        for key, value in changes.items():
            *parents, last = key.split("__")
            section = config
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        path = self.directory / "small.yaml"
        path.write_text(yaml.safe_dump(config))
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "libra.cli.app",
                "run",
                str(path),
                "--directory",
                str(self.directory / "runs"),
                *options,
            ],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def precision(self) -> str:
        """What the run chose."""
        chosen: str = json.loads((self.run_directory / "config.json").read_text())["training"]["precision"]
        return chosen

    def finish(self, process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str, str]:
        """Exit status, standard output and standard error; the run is bounded in time."""
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"the run did not end in {seconds} s:\n{err[-3000:]}") from None
        return process.returncode, out, err

    @property
    def run_directory(self) -> Path:
        return self.directory / "runs" / "small"

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.run_directory / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
