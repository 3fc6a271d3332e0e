"""Load of other gateways and users on the engines of a gateway, as the engines report it.

Invariant: an engine's load is the load of this gateway's turns in flight, plus one mean context for each other request
on the engine. The mean is over the gateway's own trajectories. An engine without reports counts as having no other
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from libra.serve.gateway.engine_client import EngineClient
from libra.serve.gateway.engine_gauges import EngineGauges, gauges_of
from libra.serve.gateway.upstreams import Upstream, Upstreams

_LOOK_SECONDS = 0.5  # between two queries; turns take seconds


class OthersLoad:
    """Queries the engines' queues while `follow` runs. `contexts` returns the contexts of the gateway's trajectories,
    in tokens; without such contexts, `usual` tokens are assumed for each request."""

    def __init__(
        self, upstreams: Upstreams, client: EngineClient, contexts: Callable[[], Sequence[int]], usual: int
    ) -> None:
        self._upstreams, self._client = upstreams, client
        self._contexts, self._usual = contexts, usual
        self._added: dict[Upstream, int] = {}  # tokens added to the load of each engine

    async def follow(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        engines = list(self._upstreams.all.values())
        told = await asyncio.gather(*(gauges_of(engine, self._client) for engine in engines))
        contexts = self._contexts()
        mean = sum(contexts) / len(contexts) if contexts else self._usual
        before, self._added = self._added, {}
        for engine, gauges in zip(engines, told, strict=True):
            tokens = round(mean * _others(engine, gauges))
            if tokens != (last := before.get(engine, 0)):
                engine.load_tokens += tokens - last
            self._added[engine] = tokens


def _others(engine: Upstream, gauges: EngineGauges) -> int:
    """Number of an engine's requests that are not this gateway's."""
    return max(0, (gauges.running or 0) + (gauges.waiting or 0) - engine.in_flight)
