"""Where Prometheus asks a run for its numbers.

Invariant: it answers in the event loop of the controller, so what it tells is of one moment; a run that has no port for
it opens none and needs no web server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from libra.config.run import ConfigError, MetricsConfig
from libra.loop.recorder import Recorder


class MetricsEndpoint:
    """It tells what `recorder` knows, as soon as there is one."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.address: str | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, config: MetricsConfig) -> AsyncIterator[Self]:
        """Answers while this is entered, if anybody asked for it. Raises `ConfigError` where the port is taken."""
        endpoint = cls()
        if config.port is None:
            yield endpoint
            return
        # Imported here: a run that is not asked for metrics does not need them.
        from aiohttp import web

        from libra.loop.metrics import CONTENT_TYPE, exposition
        from libra.serve.http_service import serving

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=exposition(endpoint.recorder), headers={"Content-Type": CONTENT_TYPE})

        application = web.Application()
        application.router.add_get("/metrics", metrics)
        try:
            async with serving(application, config.host, config.port) as base:
                endpoint.address = f"{base}/metrics"
                yield endpoint
        except OSError as error:
            if endpoint.address is not None:
                raise
            why = f"{config.port} cannot be used on {config.host} ({error.strerror})"
            raise ConfigError(f"metrics.port: {why}; give a free port, or leave it out") from None
