"""A gateway over sockets, in front of emulated engines and of servers that misbehave as a test tells them to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import ClientSession
from serve.field_engine import FieldEngine

from libra.config.listeners import EMULATOR, GATEWAY, HttpLimits
from libra.route.baselines import LeastLoaded
from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest
from libra.serve.emulate.server import Emulator
from libra.serve.gateway.config import GatewayConfig, UpstreamSection
from libra.serve.gateway.server import Gateway
from libra.serve.gateway.upstreams import Upstream
from libra.serve.gateway.watcher import Watcher
from libra.serve.http import serving
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.trajectory import Trajectory

CONFIG = EngineConfig(max_model_len=512, kv_blocks=200, block_size=8, max_num_seqs=8, max_num_batched_tokens=64)
COST = AffineCost(2 * 10**9)  # 2 ms an iteration


class RecordingPolicy(LeastLoaded):
    """Least loaded, and what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        self.calls.append(request)
        placement = super().place(request, fleet)
        return None if placement is None else replace(placement, priority=-7)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        self.calls.append((request, returned))
        return super().tool_returned(request, returned, fleet)

    def finished(self, trajectory: Trajectory) -> None:
        self.calls.append(trajectory)
        super().finished(trajectory)

    def forget(self, trajectory_id: str) -> None:
        self.calls.append(f"forget {trajectory_id}")
        super().forget(trajectory_id)

    def instance_gone(self, instance: str) -> None:
        self.calls.append(f"gone {instance}")
        super().instance_gone(instance)


@dataclass
class Scripted:
    """A server that answers /health while it is well, and turns as its script says, byte for byte."""

    script: Callable[[asyncio.StreamWriter], Awaitable[None]]
    own: dict[str, Any] = field(default_factory=dict)  # more of its section
    well: bool = True
    heads: list[bytes] = field(default_factory=list)  # of the requests that came, as they came

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        tasks: set[asyncio.Task[Any]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await self._answer(reader, writer)
            except (OSError, asyncio.IncompleteReadError):  # the gateway has gone
                pass
            finally:
                tasks.discard(task)
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            if head.startswith(b"GET /health"):
                if not self.well:
                    await asyncio.Event().wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                continue
            lengths = [line for line in head.splitlines() if line.lower().startswith(b"content-length")]
            await reader.readexactly(sum(int(line.split(b":")[1]) for line in lengths))
            await self.script(writer)
            await writer.drain()


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


async def say_nothing(_: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def stop_in_mid_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b'data: {"choices": [{"text": "a"}]}\n\n')
    await asyncio.Event().wait()


@dataclass
class Stage:
    base: str
    session: ClientSession
    gateway: Gateway
    policy: RecordingPolicy
    emulators: dict[str, Emulator]
    stops: dict[str, Callable[[], Awaitable[None]]]  # each ends an engine's server, by name
    scripted: list[Scripted]
    finished: list[Trajectory]

    def engine(self, name: str) -> Upstream:
        return self.gateway.upstreams.all[name]

    def mark(self, name: str, healthy: bool) -> None:
        if healthy:
            self.gateway.upstreams.mark_healthy(self.engine(name))
        else:
            self.gateway.upstreams.mark_lost(self.engine(name), "a test says so")

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.session.post(path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None


@asynccontextmanager
async def emulated(
    *names: str, default_tokens: int = 10, limits: HttpLimits = EMULATOR, **config: int
) -> AsyncIterator[tuple[str, Emulator]]:
    """The address of a server with emulated engines of 512 tokens."""
    specs = [EngineSpec(name, replace(CONFIG, **config), COST) for name in names]
    emulator = Emulator(specs, 1.0, default_tokens, 0)
    async with serving(emulator.application(), "127.0.0.1", 0, limits) as base:
        yield base, emulator


@asynccontextmanager
async def staged(
    engines: int = 2,
    scripted: Sequence[Scripted] = (),
    fields: Sequence[FieldEngine] = (),
    limits: HttpLimits = GATEWAY,
    buckets: tuple[int, ...] | None = None,
    watchers: Sequence[Watcher] = (),
    **settings: Any,
) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        sections, emulators, stops = [], {}, {}
        for name in (f"e{number}" for number in range(engines)):
            own = await stack.enter_async_context(AsyncExitStack())
            base, emulators[name] = await own.enter_async_context(emulated(name))
            sections.append(UpstreamSection(name=name, url=f"{base}/v1/", max_model_len=512))
            stops[name] = own.aclose
        for number, server in enumerate(scripted):
            url = await stack.enter_async_context(server.serving())
            sections.append(UpstreamSection(name=f"s{number}", url=url, max_model_len=512, **server.own))
        for number, engine in enumerate(fields):
            root = await stack.enter_async_context(engine.serving())
            sections.append(UpstreamSection(name=f"f{number}", url=root, max_model_len=engine.max_model_len))
        policy, finished = RecordingPolicy(), []
        file = GatewayConfig(engines=tuple(sections), limits=buckets, **{"turn_tokens": 16, **settings})
        gateway = Gateway(file, policy, finished.append, watchers=watchers)
        base = await stack.enter_async_context(serving(gateway.application(), "127.0.0.1", 0, limits))
        session = await stack.enter_async_context(ClientSession(base))
        yield Stage(base, session, gateway, policy, emulators, stops, list(scripted), finished)
