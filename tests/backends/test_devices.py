"""Slots by the list of the driver's tool, or a refusal that names the GPU. The tool is a script in PATH."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.gpus import FakeGpu, fake_driver

from libra.backends.devices import (
    Gpu,
    SlotDevice,
    gpu_names,
    gpus_bf16,
    inventory,
    placed,
    slot_devices,
)
from libra.backends.machine import choose
from libra.config.run import ClusterConfig, ConfigError

H100 = FakeGpu("NVIDIA H100 80GB HBM3", 81559, "9.0")
T4 = FakeGpu("Tesla T4", 15360, "7.5")


def gpu(index: int, *users: int) -> Gpu:
    return Gpu(index, f"GPU-{index}", "NVIDIA H100", 80 << 30, (9, 0), "580.95", users)


def test_the_tool_is_read(tmp_path: Path) -> None:
    environment = fake_driver(tmp_path, [H100, FakeGpu("Tesla T4", 15360, "7.5", users=(41, 42))])
    first, second = inventory(environment)
    assert (first.index, first.name, first.memory, first.capability) == (0, H100.name, 81559 << 20, (9, 0))
    assert (first.users, second.users) == ((), (41, 42))
    assert gpu_names([first, second]) == f"1 x {H100.name}, driver 580.95, 1 x Tesla T4, driver 580.95"


@pytest.mark.parametrize(("visible", "found"), [("1", [1]), ("1,0", [1, 0]), ("GPU-fake-1", [1]), ("", []), ("7", [])])
def test_only_visible_gpus_count(tmp_path: Path, visible: str, found: list[int]) -> None:
    environment = fake_driver(tmp_path, [H100, H100]) | {"CUDA_VISIBLE_DEVICES": visible}
    assert [each.index for each in inventory(environment)] == found


def test_no_driver_is_no_gpu(tmp_path: Path) -> None:
    assert inventory({"PATH": str(tmp_path)}) == ()


def test_a_broken_driver_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_driver(tmp_path, [], error="Driver/library version mismatch").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"cluster\.device: nvidia-smi failed: Driver/library version mismatch"):
        slot_devices(ClusterConfig(device="cuda"))


def test_what_the_tool_does_not_know_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no memory of its own to tell of a GPU that shares the processor's, and no process of another container."""
    shared = FakeGpu("NVIDIA GB10", "[N/A]", "12.1")
    for name, value in fake_driver(tmp_path, [shared]).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"cluster\.device: nvidia-smi describes a GPU in an unknown form: .*N/A"):
        slot_devices(ClusterConfig(device="cuda"))
    hidden = FakeGpu(H100.name, H100.memory, H100.capability, users=("[N/A]",))
    assert [each.users for each in inventory(fake_driver(tmp_path, [hidden, H100]))] == [(0,), ()]


def test_shares_are_spread_over_gpus() -> None:
    found = placed([gpu(0), gpu(1)], 4, 0.45, 1)
    assert [device.environment["CUDA_VISIBLE_DEVICES"] for device in found] == ["0", "1", "0", "1"]
    assert placed([gpu(0)], 4, 0.25, 1) == (SlotDevice("cuda", ("0",), 0.25),) * 4
    assert [device.gpus for device in placed([gpu(i) for i in range(4)], 2, 1, 2)] == [("0", "1"), ("2", "3")]


@pytest.mark.parametrize(
    ("gpus", "slots", "share", "each", "why"),
    [
        ([gpu(0), gpu(1, 4711)], 2, 1.0, 1, r"room for 1; GPU 1 \(NVIDIA H100\) is used by process 4711; use fewer"),
        ([gpu(0)], 3, 0.45, 1, r"3 slots of 0\.45 GPU are wanted, but 1 free GPU\(s\) have room for 2"),
        ([gpu(0), gpu(1)], 1, 0.5, 2, r"cluster\.share: a slot of 2 GPU\(s\) has 0\.5 of it"),
        ([gpu(0)], 1, 1.5, 1, r"cluster\.share: a slot of 1 GPU\(s\) has 1\.5 of it"),
    ],
)
def test_what_has_no_room_is_refused(gpus: list[Gpu], slots: int, share: float, each: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        placed(gpus, slots, share, each)


def test_auto_takes_gpus_only_for_a_vllm_that_is_built_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake_driver(tmp_path, [H100]).items():
        monkeypatch.setenv(name, value)
    cluster = ClusterConfig(slots=2, core=1, hybrid=0, rollout=1)
    monkeypatch.setattr("libra.backends.devices._installed", lambda name: False)
    assert slot_devices(cluster) == ()
    monkeypatch.setattr("libra.backends.devices._installed", lambda name: True)
    assert slot_devices(cluster) == (SlotDevice("cuda", ("0",), 0.45),) * 2


def test_bf16_is_known_without_running_anything(tmp_path: Path) -> None:
    assert choose("auto", [gpus_bf16(inventory(fake_driver(tmp_path, [H100])))]).precision == "bf16"
    old = gpus_bf16(inventory(fake_driver(tmp_path, [H100, T4])))
    assert choose("auto", [old]).words == "computes in fp32: no tensor cores for bf16 here"
