"""The controller and the fork server have no CUDA context, and every fork is of a process with one task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.gpus import FakeGpu, fake_driver

from libra.backends.launch.fork_server import ForkServer
from libra.backends.launch.launcher import LocalLauncher
from libra.backends.transport.messages import DeviceKind

pytestmark = pytest.mark.integration

CONTEXT = "/dev/nvidia-uvm"  # which each CUDA context opens, and the driver's own tool does not
COMPUTING = ("torch", "vllm", "transformers", "accelerate", "ray")
CONTROLLER = f"""
import json, os, sys
import libra.cli.app, libra.loop.preflight, libra.loop.run
from libra.backends.devices import hardware_name, slot_devices
from libra.config.run import ClusterConfig
devices = slot_devices(ClusterConfig(device="cuda"))
opened = [os.path.realpath(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")]
print(json.dumps([len(devices), hardware_name(True), [it for it in {COMPUTING} if it in sys.modules], opened]))
"""


def opened_by(pid: int) -> set[str]:
    return {str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}


def test_the_controller_computes_nothing_itself(tmp_path: Path) -> None:
    """It imports all that a run needs of it, and finds the GPUs of its slots."""
    environment = {**os.environ, **fake_driver(tmp_path, [FakeGpu("NVIDIA H100 80GB HBM3", 81559, "9.0")] * 2)}
    done = subprocess.run([sys.executable, "-c", CONTROLLER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    devices, hardware, computing, opened = json.loads(done.stdout)
    assert devices == 4 and hardware.endswith("2 x NVIDIA H100 80GB HBM3, driver 580.95")
    assert computing == [] and CONTEXT not in opened


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
async def test_the_fork_server_has_one_task_and_no_context_before_and_after_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: DeviceKind
) -> None:
    """With everything imported that engines and trainers need, bf16 tried, and workers forked."""
    for name, value in fake_driver(tmp_path, [FakeGpu("NVIDIA H100 80GB HBM3", 81559, "9.0")]).items():
        monkeypatch.setenv(name, value)
    process = ForkServer(tmp_path, kind=kind)
    launcher = LocalLauncher(process)
    try:
        await launcher.ready()
        for number in range(3):
            assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1
            assert CONTEXT not in opened_by(process.pid)
            link = await launcher.spawn(f"worker-{number}", 0)  # refused where either does not hold
            launcher.kill(link)
            await launcher.gone(link)
    finally:
        launcher.close()
