"""What a machine is called, so that costs measured on one are not taken for those of another."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from libra.backends.arithmetic import cpu_limits


def hardware_name() -> str:
    """The processor, as the operating system names it, and what keeps libraries from its newest instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    limits = cpu_limits(os.environ)
    return f"{name}, {len(os.sched_getaffinity(0))} cores" + (f", {limits}" if limits else "")
