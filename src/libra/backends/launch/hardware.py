"""What a machine is called, so that costs measured on one are not taken for those of another."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def hardware_name() -> str:
    """The processor, as the operating system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"
