"""The GPUs of this machine, and the device of each slot: a share of a core, a share of a GPU, or whole GPUs.

Invariant: nothing here imports torch or opens a CUDA context, since the driver's own tool lists the GPUs. A slot never
gets a GPU that another process uses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from libra.backends.machine import Bf16Speed, gpu_bf16
from libra.backends.machine import hardware_name as processor_name
from libra.backends.transport.messages import DeviceKind
from libra.config.run import ClusterConfig, ConfigError

_TOOL = "nvidia-smi"
_SECONDS = 30.0  # time limit of the tool, which may load the driver first
_FIELDS = "index,uuid,name,memory.total,compute_cap,driver_version"
_MIB = 1 << 20


class DeviceError(RuntimeError):
    """The GPUs of this machine cannot be listed."""


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int  # in the order of the PCI bus, which nvidia-smi uses, as does CUDA in workers
    uuid: str
    name: str
    memory: int  # bytes
    capability: tuple[int, int]
    driver: str
    users: tuple[int, ...] = ()  # ids of the processes that compute on it


@dataclass(frozen=True, slots=True)
class SlotDevice:
    """The device of one slot."""

    kind: DeviceKind = "cpu"
    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES; none on CPU
    share: float = 1.0  # of the memory of each GPU

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the slot's workers, in addition to those of their kind."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


CPU = SlotDevice()


def inventory(environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs that this process may use; empty without a driver. Raises `DeviceError`."""
    if shutil.which(_TOOL, path=environment.get("PATH")) is None:
        return ()
    users: dict[str, list[int]] = {}
    gpus = []
    try:
        for uuid, *pid in _query("--query-compute-apps=gpu_uuid,pid", environment):
            users.setdefault(uuid, []).append(int(pid[0]) if pid and pid[0].isdigit() else 0)  # 0: pid unknown
        for index, uuid, name, memory, capability, driver in _query(f"--query-gpu={_FIELDS}", environment):
            major, minor = capability.split(".")
            own = tuple(users.get(uuid, ()))
            gpus.append(Gpu(int(index), uuid, name, int(memory) * _MIB, (int(major), int(minor)), driver, own))
    except ValueError as error:  # such as [N/A] for the memory of a GPU that shares the processor's memory
        raise DeviceError(f"{_TOOL} describes a GPU in an unknown form: {error}; update the driver") from None
    return tuple(_visible(gpus, environment.get("CUDA_VISIBLE_DEVICES")))


def run_gpus(cluster: ClusterConfig) -> tuple[Gpu, ...]:
    """The GPUs of this machine for a run's slots; none if the slots are CPU slots. Raises `ConfigError`."""
    if cluster.device == "cpu" or (cluster.device == "auto" and not _installed("vllm")):
        return ()
    try:
        gpus = inventory()
    except DeviceError as error:
        raise ConfigError(f"cluster.device: {error}; set it to cpu, or repair the driver") from None
    if not gpus and cluster.device == "cuda":
        raise ConfigError(f"cluster.device: cuda, but {_TOOL} lists no GPU that is visible here; set it to cpu")
    return gpus


def slot_devices(cluster: ClusterConfig) -> tuple[SlotDevice, ...]:
    """The device of each slot of this machine; empty for CPU slots. Raises `ConfigError`."""
    gpus = run_gpus(cluster)
    if not gpus:
        return ()
    if cluster.placement is not None:
        return _as_placed(gpus, cluster.placement, cluster.share)
    return placed(gpus, cluster.slots, cluster.share, cluster.gpus)


def placed(gpus: Sequence[Gpu], slots: int, share: float, each: int) -> tuple[SlotDevice, ...]:
    """`slots` devices, each of `each` GPUs, or of a `share` of one GPU, spread over the GPUs that no process uses.
    Raises `ConfigError`."""
    if share > 1 or (each > 1 and share != 1):
        raise ConfigError(
            f"cluster.share: a slot of {each} GPU(s) has {share:g} of it; give at most 1, and 1 if cluster.gpus is 2"
            " or more"
        )
    free = [str(gpu.index) for gpu in gpus if not gpu.users]
    if each > 1:
        rooms = [tuple(free[start : start + each]) for start in range(0, len(free) - each + 1, each)]
    else:
        rooms = [(gpu,) for _ in range(int(1 / share + 1e-9)) for gpu in free]
    if slots > len(rooms):
        used = "".join(
            f"; GPU {gpu.index} ({gpu.name}) is used by process {', '.join(map(str, gpu.users))}"
            for gpu in gpus
            if gpu.users
        )
        raise ConfigError(
            f"cluster.slots: {slots} slots of {each if each > 1 else f'{share:g}'} GPU are wanted, but {len(free)} free"
            f" GPU(s) have room for {len(rooms)}{used}; use fewer slots, or a smaller"
            f" {'cluster.gpus' if each > 1 else 'cluster.share'}{', or free the used GPUs' if used else ''}"
        )
    return tuple(SlotDevice("cuda", room, share) for room in rooms[:slots])


def _as_placed(gpus: Sequence[Gpu], placement: Sequence[Sequence[int]], share: float) -> tuple[SlotDevice, ...]:
    """The slots on the GPUs that `placement` names. Raises `ConfigError` if a GPU is missing or in use."""
    there = {gpu.index: gpu for gpu in gpus}
    for index in (index for slot in placement for index in slot):
        if index not in there or there[index].users:
            why = f"is used by process {there[index].users[0]}" if index in there else "is not visible here"
            raise ConfigError(
                f"cluster.placement: GPU {index} {why}; name GPUs that nvidia-smi lists without a process"
            )
    return tuple(SlotDevice("cuda", tuple(map(str, slot)), share) for slot in placement)


def gpus_bf16(gpus: Sequence[Gpu]) -> Bf16Speed:
    """Speed of bf16 on the oldest of these GPUs. Raises `DeviceError` if there is no GPU."""
    if not gpus:
        raise DeviceError(f"{_TOOL} lists no GPU that is visible here")
    return gpu_bf16(min(gpu.capability for gpu in gpus))


def hardware_name(on_gpus: bool) -> str:
    """The machine's processor, and for workers on GPUs also the GPUs and their driver. Measured costs apply to machines
    of the same name."""
    return f"{processor_name()}, {gpu_names(inventory())}" if on_gpus else processor_name()


def gpu_names(gpus: Sequence[Gpu]) -> str:
    counts = Counter((gpu.name, gpu.driver) for gpu in gpus)
    return ", ".join(f"{count} x {name}, driver {driver}" for (name, driver), count in sorted(counts.items()))


def _query(what: str, environment: Mapping[str, str]) -> list[list[str]]:
    try:
        found = subprocess.run(
            [_TOOL, what, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
            env=dict(environment),
        )
    except subprocess.CalledProcessError as error:
        said = (error.stdout or error.stderr or "").strip().splitlines()
        raise DeviceError(f"{_TOOL} failed: {said[-1] if said else f'exit status {error.returncode}'}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"{_TOOL} cannot be run: {error}") from None
    return [[value.strip() for value in line.split(",")] for line in found.stdout.splitlines() if line.strip()]


def _visible(gpus: Sequence[Gpu], named: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists, by index or by the start of their UUID; None: all GPUs."""
    if named is None:
        return list(gpus)
    names = [name.strip() for name in named.split(",") if name.strip()]
    return [gpu for name in names for gpu in gpus if name == str(gpu.index) or _is_uuid(gpu, name)]


def _is_uuid(gpu: Gpu, name: str) -> bool:
    return name.startswith("GPU-") and gpu.uuid.startswith(name)


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
