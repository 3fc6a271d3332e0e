"""Ports and sockets that a run opens beside its work, each in a process of its own that does nothing else:
`python -m benchmarks.soak.attack.listening KIND FOLDER`.

Invariant: what listens is the listener of a run, with its limits. The process says in a JSON line where it listens and
what it has to be shown, which no stranger is given, and lasts until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from libra.config.run import MetricsConfig
from libra.loop.metrics import MetricsEndpoint

TOKEN = "5" * 32  # of a replica's store
HOST = "127.0.0.1"


def tell(**said: Any) -> None:
    print(json.dumps(said), flush=True)


async def metrics(folder: Path) -> None:
    token = folder / "token"
    token.touch(0o600)
    token.write_text("metrics-token\n")
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    async with MetricsEndpoint.open(MetricsConfig(port=port, token_file=token)) as endpoint:
        tell(base=(endpoint.address or "").removesuffix("/metrics"), port=port, token="metrics-token")
        await asyncio.Event().wait()


async def weights(folder: Path) -> None:
    from libra.backends.transport.engine_messages import LoadWeights
    from libra.backends.transport.shared_memory import BUFFERS
    from libra.backends.weights.grid import Grid
    from libra.lend.weights.processes import WeightsPublisher

    grid = Grid(1 << 22, "bfloat16")
    memory = os.memfd_create("weights", 0)
    os.ftruncate(memory, BUFFERS * grid.size)
    publisher = await WeightsPublisher.open(grid, memory, HOST, 0, folder / "publisher.log")
    publisher.tell(LoadWeights(0, 0, zlib.crc32(np.zeros(grid.size, np.uint8).data)))
    tell(port=publisher.place.port, token=publisher.place.token)
    await publisher.ended()


async def rendezvous(folder: Path) -> None:
    from libra.backends.grpo.rendezvous import RendezvousServer

    server = RendezvousServer(HOST, 0, TOKEN)
    tell(port=server.port, token=TOKEN)
    await asyncio.Event().wait()


async def agent(folder: Path) -> None:
    """A server's device, and the agent that lends it."""
    from libra.lend.backend.agent import LendingAgent
    from tests.fakes.lent_device import lent_device

    order, serving = lent_device(folder)
    async with LendingAgent.open(order, folder / "logs", lambda line: None):
        tell(device=str(order.device), socket=str(order.listen))
        await asyncio.Event().wait()
    serving.close()


KINDS: dict[str, Callable[[Path], Awaitable[None]]] = {it.__name__: it for it in (metrics, weights, rendezvous, agent)}


async def main(kind: str, folder: Path) -> None:
    await KINDS[kind](folder)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
