"""A real nursery that imports only what a test needs, wired to a launcher as `LocalLauncher.open` wires it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from libra.exec.launch.local import WORKER_ENVIRONMENT, LocalLauncher
from libra.exec.wire.weights import create_buffer

BARE = """
import sys
import libra.exec.launch.nursery as nursery
nursery._import_everything = lambda: None
nursery.main(int(sys.argv[1]), int(sys.argv[2]))
"""
TRAINING = BARE.replace(
    "import sys\n",
    "import sys\nimport libra.exec.train.training_worker\nimport transformers.models.gpt2.modeling_gpt2\n",
)


@asynccontextmanager
async def nursery(logs: Path, source: str = BARE) -> AsyncIterator[tuple[LocalLauncher, subprocess.Popen[bytes]]]:
    """A launcher, and the process that runs `source`."""
    ours, theirs = socket.socketpair()
    weights = create_buffer()
    with open(logs / "nursery.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", source, str(theirs.fileno()), str(weights)],
            pass_fds=(theirs.fileno(), weights),
            env={**os.environ, **WORKER_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
    theirs.close()
    ours.setblocking(False)
    launcher = LocalLauncher(process, ours, logs, weights)
    try:
        yield launcher, process
    finally:
        launcher.close()
