"""A driver that lists GPUs which are not there: `nvidia-smi` as a script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FakeGpu:
    name: str
    memory: int | str  # MiB
    capability: str
    users: tuple[int | str, ...] = ()


def fake_driver(directory: Path, gpus: Sequence[FakeGpu], error: str = "") -> dict[str, str]:
    """The environment in which these GPUs are found."""
    rows = [
        f"{index}, GPU-fake-{index}, {gpu.name}, {gpu.memory}, {gpu.capability}, 580.95"
        for index, gpu in enumerate(gpus)
    ]
    users = [f"GPU-fake-{index}, {pid}" for index, gpu in enumerate(gpus) for pid in gpu.users]
    lines = {"gpu": "\n".join(rows), "apps": "\n".join(users)}
    tool = directory / "nvidia-smi"
    if error:
        tool.write_text(f"#!/bin/sh\necho '{error}'\nexit 18\n")
    else:
        tool.write_text(
            f"#!/bin/sh\ncase $1 in\n--query-gpu=*) echo '{lines['gpu']}';;\n"
            f"--query-compute-apps=*) echo '{lines['apps']}';;\nesac\n"
        )
    tool.chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}
