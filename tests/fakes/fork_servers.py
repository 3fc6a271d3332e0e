"""A real fork server that imports only what a test needs."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from libra.backends.launch.fork_server import ForkServer
from libra.backends.launch.launcher import LocalLauncher

BARE = """
import sys
import libra.backends.launch.fork_server as fork_server
from libra.backends.machine import Bf16Speed
fork_server._import_everything = lambda kind: None
fork_server._probe = lambda kind: Bf16Speed("", 16.0)  # which would import torch
fork_server.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""
TRAINING = BARE.replace(
    "import sys\n",
    "import sys\nimport libra.backends.grpo.training_worker\nimport transformers.models.gpt2.modeling_gpt2\n",
)


@asynccontextmanager
async def fork_server(logs: Path, source: str = BARE) -> AsyncIterator[tuple[LocalLauncher, subprocess.Popen[bytes]]]:
    """A launcher, and the process that runs `source`."""
    process = ForkServer(logs, command=("-c", source))
    launcher = LocalLauncher(process)
    try:
        yield launcher, process._process
    finally:
        launcher.close()
