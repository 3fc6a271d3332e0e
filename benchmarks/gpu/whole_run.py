"""A run of the calculator on shares of the device, which is killed in the middle and goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.setting import Setting
from benchmarks.rows import Row, at_least, at_most, none
from libra.backends.devices import inventory
from libra.loop.checkpoint import can_be_resumed

_STEPS, _DRY_STEPS = 40, 6
_PATIENCE = 600.0  # seconds; on a new machine engines compile first
_MEASURED = 180.0  # seconds
_ENDING = 30.0  # seconds
_EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator.yaml"


def run(setting: Setting, directory: Path) -> list[Row]:
    """Start it, kill the controller once it has a checkpoint, resume it, and read what it says."""
    path, dry = directory / "run.yaml", setting.gpu is None
    path.write_text(yaml.safe_dump(_config(setting)))
    base = [sys.executable, "-m", "libra.cli.app", "run", str(path), "--directory", str(directory / "runs")]
    cache = {"XDG_CACHE_HOME": str(directory / "cache")}  # nothing is known of earlier runs
    environment = {**os.environ, **cache, **setting.environment}
    began = time.monotonic()
    with open(directory / "first.log", "wb") as log:
        first = subprocess.Popen(base, stdout=log, stderr=log, env=environment)
    made = directory / "runs" / "gpu"
    try:
        while first.poll() is None and not (made.is_dir() and can_be_resumed(made)):
            if time.monotonic() - began > _PATIENCE:
                raise RuntimeError(f"the run has made no checkpoint in {_PATIENCE:.0f} s")
            time.sleep(0.2)
        killed = first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    _wait_until_free(setting)
    done = subprocess.run(
        [*base, "--resume", "--json"], capture_output=True, text=True, env=environment, timeout=_PATIENCE
    )
    if done.returncode != 0:
        raise RuntimeError(f"the run did not go on: {done.stderr.strip().splitlines()[-1:]}")
    summary = json.loads(done.stdout)
    steps = _DRY_STEPS if dry else _STEPS
    rewards = summary["evaluations"]
    measured = re.search(r"measured in ([\d.]+) s", (directory / "first.log").read_text())
    if measured is None:
        raise RuntimeError("the run has not said how long it measured engines and trainers")
    profile = json.loads((made / "profile.json").read_text())
    case = f"calculator, {steps} steps"
    return [
        none(case, "controllers that ended before they were killed", int(not killed)),
        at_least(case, "steps made", summary["steps"], "", steps),
        at_most(case, "engines and trainers measured in", float(measured[1]), "s", None if dry else _MEASURED),
        Row(case, "error of the measured prices, held out", profile["heldout_error"], ""),
        Row(case, "accuracy gained", rewards[-1]["sampled_accuracy"] - rewards[0]["sampled_accuracy"], ""),
        Row(case, "the whole", time.monotonic() - began, "s"),
    ]


def _wait_until_free(setting: Setting) -> None:
    """The workers of a run that was killed end by themselves, and a run takes no GPU on which a process computes."""
    deadline = time.monotonic() + _ENDING
    while any(gpu.users for gpu in inventory() if str(gpu.index) == setting.gpu):
        if time.monotonic() > deadline:
            raise RuntimeError(f"workers of the run that was killed still compute on GPU {setting.gpu}")
        time.sleep(0.2)


def _config(setting: Setting) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(_EXAMPLE.read_text())
    config |= {"name": "gpu", "checkpoint_every": 3}
    if setting.gpu is None:
        config["training"] |= {"steps": _DRY_STEPS, "prompts_per_step": 4, "samples_per_prompt": 4}
        config["environment"] |= {"train_prompts": 32, "heldout_prompts": 16}
        config["model"] = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1}
        config["warm_up"] = {"steps": 30, "batch": 32}
        config["cluster"] = {"device": "cpu"}
    else:
        config["training"] |= {"steps": _STEPS}
        config["cluster"] = {"device": "cuda", "share": 0.24}
    return config
