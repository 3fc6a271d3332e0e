"""The gateway's HTTP application: its parts, and the requests about trajectories and the gateway itself.

`turns` has the path of a turn, `control` the control requests, and `workers` the engines that join and leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from libra.config.listeners import GATEWAY, ID_LENGTH, SMALL_BODY_BYTES
from libra.live.lengths import SeenLengths
from libra.live.trajectories import Trajectories
from libra.records.files import DiskError
from libra.route.policy import Policy
from libra.serve.answers import RefusedRequest, metrics_response, refused
from libra.serve.bodies import body_of
from libra.serve.connections import CONNECTIONS
from libra.serve.gateway.allowed_hosts import AllowedHosts
from libra.serve.gateway.config import GatewayConfig
from libra.serve.gateway.control import Control
from libra.serve.gateway.counts import Counts
from libra.serve.gateway.ends import TrajectoryEnds, read_finish
from libra.serve.gateway.engine_client import EngineClient
from libra.serve.gateway.formats import FORMATS
from libra.serve.gateway.health import HealthMonitor
from libra.serve.gateway.loops import MARK, refusing_loops
from libra.serve.gateway.others_load import OthersLoad
from libra.serve.gateway.policy_failures import answering_policy_failure, told_policy_failure
from libra.serve.gateway.sessions import SESSION_HEADERS, Sessions
from libra.serve.gateway.turns import RETRY_AFTER, Turns
from libra.serve.gateway.upstreams import Upstream, Upstreams
from libra.serve.gateway.watcher import Watcher, watched_by
from libra.serve.gateway.workers import Workers
from libra.trajectory import Trajectory

_EXPIRE_SECONDS = 60.0  # longest time between two searches for idle trajectories
_GAUGES = {  # for each engine
    "healthy": "1 if the engine is in service.",
    "in_flight": "Turns in flight.",
    "load_tokens": "Context tokens of the turns in flight, including those of other clients.",
    "token_seconds": "Expected seconds per generated token for one more turn, estimated from ended turns.",
}


class Gateway:
    """Calls `keep` with every trajectory that ends, finished or not, before the policy learns from it. `keep` may raise
    `DiskError`; the trajectory has then not ended, and can be ended again. `guarded`: clients send the gateway's own
    token, which engines must not get."""

    def __init__(
        self,
        config: GatewayConfig,
        policy: Policy,
        keep: Callable[[Trajectory], None] = lambda _: None,
        guarded: bool = False,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.upstreams = Upstreams(config.engines, config.limits)
        self.trajectories = Trajectories()
        self.sessions = Sessions()
        self.lengths = SeenLengths()
        self.counts = Counts()
        self._config, self._policy = config, policy
        self.client = client = EngineClient()
        self._health = HealthMonitor(config, self.upstreams, client, self._mark_lost)
        watcher = watched_by(watchers)
        self._ends = TrajectoryEnds(
            keep, policy, self.trajectories, self.sessions.unnamed, self.lengths, self.counts, watcher
        )
        self._turns = Turns(
            config,
            policy,
            self.upstreams,
            self.trajectories,
            self.sessions,
            self._ends,
            self.counts,
            self._health,
            client,
            self._mark_lost,
            watcher,
            guarded,
        )
        self._control = Control(self.upstreams, client, guarded)
        allowed = AllowedHosts.of(config.workers_from)
        self._workers = Workers(self.upstreams, self._health, allowed, self._mark_lost)

    def application(self) -> web.Application:
        app = web.Application(
            client_max_size=GATEWAY.body_bytes, middlewares=[refusing_loops, answering_policy_failure]
        )
        app[MARK] = self.client.mark
        for format in FORMATS:
            app.router.add_post(format.path, partial(self._turns.serve, format))
        app.router.add_routes(self._control.shared_routes())
        if self._config.control:
            app.router.add_routes(self._control.routes())
        app.router.add_routes(self._workers.routes())
        app.router.add_post("/trajectories/{id}/finish", self._finish)
        app.router.add_post("/trajectories/{id}/forget", self._forget)
        app.router.add_post("/finish_session", self._finish_session)
        app.router.add_get("/engines", self._list)
        app.router.add_get("/plan", self._plan)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._is_healthy)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, application: web.Application) -> AsyncIterator[None]:
        async with self.client.running(application[CONNECTIONS]):
            await self._health.start()
            kept = [asyncio.create_task(self._keep_expiring())]
            if self._config.shared:
                others = OthersLoad(self.upstreams, self.client, self.trajectories.contexts, self._config.turn_tokens)
                kept.append(asyncio.create_task(others.follow()))
            yield
            for task in kept:
                task.cancel()
            await asyncio.gather(*kept, self._health.stop(), return_exceptions=True)

    def _mark_lost(self, engine: Upstream, problem: str) -> None:
        if self.upstreams.mark_lost(engine, problem):
            with told_policy_failure():
                self._policy.instance_gone(engine.id)

    # Trajectories

    async def _finish(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        try:
            outcome = read_finish(await body_of(request, SMALL_BODY_BYTES))
            return web.json_response(asdict(self._ends.finish(id, outcome)))
        except KeyError:
            raise _no_trajectory(id) from None
        except ValueError as error:
            return refused(str(error), 400)
        except DiskError as error:
            return _not_finished(id, error)

    async def _forget(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        if not self._ends.forget(id):
            raise _no_trajectory(id)
        return web.Response(status=204)

    async def _finish_session(self, request: web.Request) -> web.Response:
        """End a session for a client of vllm-router, which sends no outcome and may repeat the request."""
        id = request.query.get("session_id", "")
        if not 1 <= len(id) <= ID_LENGTH:
            given = next((name for name in SESSION_HEADERS if name in request.headers), None)
            hint = "" if given is None else f" (the header {given} does not)"
            return refused(f"name the session: /finish_session?session_id=ID{hint}", 400)
        try:
            turns = self._ends.finish_session(id)
        except DiskError as error:
            return _not_finished(id, error)
        return web.json_response({"status": "ok", "session_id": id, "turns": turns})

    async def _keep_expiring(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_EXPIRE_SECONDS, self._config.idle_seconds))
            for id in self.trajectories.idle_since(loop.time() - self._config.idle_seconds):
                self._ends.expire(id)

    # State of the gateway

    async def _list(self, _: web.Request) -> web.Response:
        listed = [
            {"name": engine.id, "url": engine.section.url, "bucket": engine.bucket, "problem": engine.problem}
            | {name: getattr(engine, name) for name in _GAUGES}
            for engine in self.upstreams.all.values()
        ]
        return web.json_response(
            {"route": self._config.route, "limits": list(self.upstreams.limits), "engines": listed}
        )

    async def _plan(self, _: web.Request) -> web.Response:
        """The current values of the keys in the gateway's file, and the lengths of ended trajectories."""
        engines = [
            {"name": it.id, "url": it.section.url, "max_model_len": it.capacity_tokens, "bucket": it.bucket}
            for it in self.upstreams.all.values()
        ]
        routed = {name: getattr(self._config, name) for name in ("route", "sticky", "turn_tokens", "priorities")}
        return web.json_response(
            {"engines": engines, "limits": list(self.upstreams.limits), **routed, "lengths": self.lengths.summary()}
        )

    async def _is_healthy(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.upstreams.instances else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return metrics_response(self._families())

    def _families(self) -> Iterator[Metric]:
        for counter in fields(self.counts):
            name, help = f"libra_gateway_{counter.name}", counter.metadata["help"]
            yield CounterMetricFamily(name, help, value=getattr(self.counts, counter.name))
        yield GaugeMetricFamily("libra_gateway_trajectories", "Trajectories in progress.", value=len(self.trajectories))
        for name, help in _GAUGES.items():
            gauge = GaugeMetricFamily(f"libra_gateway_engine_{name}", help, labels=["engine"])
            for engine in self.upstreams.all.values():
                if (value := getattr(engine, name)) is not None:
                    gauge.add_metric([engine.id], value)
            yield gauge


def _no_trajectory(id: str) -> RefusedRequest:
    return RefusedRequest(f"trajectory {id} is unknown: name one that a turn gave in the field libra.trajectory", 404)


def _not_finished(id: str, error: DiskError) -> web.Response:
    return refused(f"trajectory {id} is not finished: {error}; finish it again later", 503, RETRY_AFTER)
