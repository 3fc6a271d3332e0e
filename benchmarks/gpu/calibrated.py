"""`libra calibrate` on the device, and a matrix product that it has not seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.command import apart
from benchmarks.gpu.parts import product_flops
from benchmarks.gpu.setting import Setting
from benchmarks.rows import Row, at_most

SECONDS = 180.0  # at most
_ERROR = 0.15  # relative, of a product by the rate of others


def calibrated(setting: Setting, directory: Path) -> list[Row]:
    """Run the command as a user does, and hold its rate of products against another one."""
    on_gpu, file = setting.gpu is not None, directory / "calibration.json"
    command = [sys.executable, "-m", "libra.cli.app", "calibrate", "-o", str(file), "--json"]
    environment = {**os.environ, **setting.environment}
    began, device = time.monotonic(), "cuda" if on_gpu else "cpu"
    done = subprocess.run([*command, "--device", device], env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode != 0 or not file.is_file():
        raise RuntimeError(f"libra calibrate failed: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    linear, case = found["linear_flops"]["median"], found["device"]
    error = abs(linear / apart(product_flops, setting) - 1)
    return [
        at_most(case, "libra calibrate takes", seconds, "s", SECONDS if on_gpu else None),
        Row(case, f"linear layers in {found['dtype']}", linear / 1e12, "TFLOP/s"),
        Row(case, "a training step", found["training_flops"]["median"] / 1e12, "TFLOP/s"),
        Row(case, "memory", found["bandwidth"]["median"] / 1e9, "GB/s"),
        at_most(case, "error for a product that it has not seen", error, "", _ERROR if on_gpu else None),
    ]
