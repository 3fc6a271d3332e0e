"""The gateway's HTTP application: sends each turn to the engine that the policy chooses.

Invariant: a turn is retried on another engine until its answer begins to reach the client, and counted once. The policy
is called from one event loop, so its calls are ordered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import count

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from libra.config.listeners import GATEWAY
from libra.records.files import DiskError
from libra.route.policy import Placement, Policy, ToolReturn, TurnRequest
from libra.serve.answers import RefusedRequest, metrics_response, refused
from libra.serve.bodies import body_of
from libra.serve.connections import CONNECTIONS
from libra.serve.gateway.config import GatewayConfig
from libra.serve.gateway.relay import Relayed, relay
from libra.serve.gateway.trajectories import LibraField, Trajectories, TurnBody, read_finish, read_turn, with_field
from libra.serve.gateway.upstreams import (
    RECHECK_SECONDS,
    Attempt,
    HealthMonitor,
    TurnFailure,
    Upstream,
    Upstreams,
    untraced,
)
from libra.trajectory import Trajectory

_FORGET_SECONDS = 60.0  # between two searches for idle trajectories, at most
_MODELS_TIMEOUT = 2.0  # seconds
# Seconds of an idle connection: vLLM closes it after 5, and a request at that moment would lose its engine.
_KEEPALIVE = 4.0
_CONNECT_TIMEOUT = 5.0  # seconds until an engine accepts a connection
_UNSAID = ("Accept", "User-Agent")  # headers that aiohttp would add
_JSON = {"Content-Type": "application/json"}
_GAUGES = {  # of an engine
    "healthy": "1 if in service.",
    "in_flight": "Turns in flight.",
    "load_tokens": "Context tokens of the turns in flight.",
}
_RETRY_AFTER = {"Retry-After": f"{RECHECK_SECONDS:.0f}"}


class _UnavailableError(RefusedRequest):
    """No engine took the turn in time."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 503, _RETRY_AFTER)


def _counter(help: str) -> int:
    counter: int = field(default=0, metadata={"help": help})
    return counter


@dataclass(slots=True)
class Counts:
    """Counts since the start."""

    placements: int = _counter("Turns sent to an engine.")
    migrations: int = _counter("Turns sent to another engine than the turn before.")
    retries: int = _counter("Turns sent again after their engine failed.")
    turns: int = _counter("Turns answered.")
    prompt_tokens: int = _counter("Prompt tokens of answered turns.")
    generated_tokens: int = _counter("Generated tokens of answered turns.")
    finished: int = _counter("Trajectories finished.")
    forgotten: int = _counter("Trajectories dropped after idle_seconds without a turn.")

    def answered(self, prompt_tokens: int, generated_tokens: int) -> None:
        self.turns += 1
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens


class Gateway:
    """Calls `keep` with every finished trajectory, before the policy learns from it. `keep` may raise `DiskError`: then
    the trajectory is not finished, and may be finished again. `guarded`: clients show the gateway a token, which is not
    for engines."""

    def __init__(
        self,
        config: GatewayConfig,
        policy: Policy,
        keep: Callable[[Trajectory], None] = lambda _: None,
        guarded: bool = False,
    ) -> None:
        self.upstreams = Upstreams(config.engines, config.bucket_limits)
        self.trajectories = Trajectories()
        self.counts = Counts()
        self._config, self._policy, self._keep, self._guarded = config, policy, keep, guarded
        self._single = count(1)  # turns without a trajectory
        self._session: ClientSession
        self._loop = asyncio.get_running_loop()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=GATEWAY.body_most(self.upstreams.longest))
        app.router.add_post("/v1/{path:completions|chat/completions}", self._turn)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/trajectories/{id}/finish", self._finish)
        app.router.add_post("/trajectories/{id}/forget", self._forget)
        app.router.add_get("/engines", self._list)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, application: web.Application) -> AsyncIterator[None]:
        async with ClientSession(
            connector=TCPConnector(
                limit=0, keepalive_timeout=_KEEPALIVE, socket_factory=application[CONNECTIONS].socket
            ),
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=_UNSAID,
            timeout=ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT),
            auto_decompress=False,
        ) as own:
            self._session = own
            tasks = await HealthMonitor(self._config, self.upstreams, own, self._mark_lost).start()
            tasks.append(asyncio.create_task(self._keep_forgetting()))
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Turns

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        raw = await body_of(request)
        began = self._loop.time()
        try:
            body = read_turn(raw)
            usage = body.wants_usage
            context, room = body.needs(self.upstreams.longest, self._config.turn_tokens)
            libra = body.libra
            told = libra or LibraField(f"turn {next(self._single)}")
            if libra is not None and not self.trajectories.has_room(libra.trajectory):
                return refused("too many trajectories in progress: finish or forget some", 429, _RETRY_AFTER)
            id, prompt = told.trajectory, told.trajectory if told.prompt is None else told.prompt
            turn, returned = self.trajectories.begin(id, prompt, told.task, context, told.tool, began)
        except ValueError as error:
            return refused(str(error), 400)
        relayed: Relayed | None = None
        try:
            relayed = await self._route(request, raw, body, usage, turn, returned, room)
            assert relayed.response is not None
            return relayed.response
        finally:
            if relayed is None or relayed.usage is None:
                self.trajectories.failed(turn)
            else:
                self.trajectories.answered(turn, *relayed.usage, self._loop.time())
                self.counts.answered(*relayed.usage)
            if libra is None:  # it has no other turn
                self.trajectories.forget(id)
                self._policy.forget(id)

    async def _route(
        self,
        request: web.Request,
        raw: bytes,
        body: TurnBody,
        usage: bool,
        turn: TurnRequest,
        returned: ToolReturn | None,
        room: int,
    ) -> Relayed:
        """Try engines until one answers, `max_attempts` at most."""
        if body.stream and not usage:
            raw = with_field(raw, "stream_options", body.with_usage)
        lost: TurnFailure | None = None
        for number in range(self._config.max_attempts):
            try:
                placement = await self._place(turn, returned, room)
            except _UnavailableError:
                if lost is None or lost.answer is None:
                    raise
                return Relayed(lost.answer)
            returned = None  # report it once
            self.counts.retries += number > 0
            engine = self.upstreams.all[placement.instance]
            sent = raw
            if self._config.priorities and not body.has_priority:
                sent = with_field(raw, "priority", b"%d" % placement.priority)
            attempt = Attempt(self.upstreams, engine, turn.context_tokens)
            headers = engine.authorization(None if self._guarded else request)
            relayed = await relay(self._session, request, headers, attempt, sent, stream=body.stream, usage=usage)
            if relayed.failure is not None and relayed.failure.of_engine:
                self._mark_lost(engine)
                lost = relayed.failure
            if relayed.response is not None:
                return relayed
        assert lost is not None
        if lost.answer is not None:
            return Relayed(lost.answer)
        raise _UnavailableError(f"tried on {self._config.max_attempts} engines, each of which failed: {lost.message}")

    async def _place(self, turn: TurnRequest, returned: ToolReturn | None, room: int) -> Placement:
        until = self._loop.time() + self._config.wait_seconds
        while True:
            fleet = self.upstreams.fleet(room)
            if returned is None:
                placement = self._policy.place(turn, fleet)
            else:
                placement = self._policy.tool_returned(turn, returned, fleet)
                returned = None
            self.trajectories.placed(turn)
            if placement is not None:
                self.counts.placements += 1
                self.counts.migrations += placement.migrated
                return placement
            try:
                async with asyncio.timeout_at(until):
                    await self.upstreams.changed()
            except TimeoutError:
                raise _UnavailableError(self._unavailable(turn.context_tokens + room)) from None

    def _unavailable(self, needed: int) -> str:
        if not self.upstreams.instances:
            return "no engine is healthy: see GET /engines"
        longest = max(engine.capacity_tokens for engine in self.upstreams.instances)
        return (
            f"no engine took the turn in {self._config.wait_seconds:g} s: it needs {needed} tokens, and the longest"
            f" context of a healthy engine is {longest}"
        )

    def _mark_lost(self, engine: Upstream) -> None:
        if self.upstreams.mark(engine, healthy=False):
            self._policy.instance_gone(engine.id)

    # Trajectories

    async def _finish(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        try:
            told = read_finish(await body_of(request))
            trajectory = self.trajectories.whole(id, told.reward, told.policy_version)
            self._keep(trajectory)
        except KeyError:
            raise _no_trajectory(id) from None
        except ValueError as error:
            return refused(str(error), 400)
        except DiskError as error:
            return refused(f"trajectory {id} is not finished, finish it again later: {error}", 503, _RETRY_AFTER)
        self.trajectories.forget(id)
        self._policy.finished(trajectory)
        self.counts.finished += 1
        return web.json_response(asdict(trajectory))

    async def _forget(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        if not self.trajectories.forget(id):
            raise _no_trajectory(id)
        self._policy.forget(id)
        return web.Response(status=204)

    async def _keep_forgetting(self) -> None:
        while True:
            await asyncio.sleep(min(_FORGET_SECONDS, self._config.idle_seconds))
            for id in self.trajectories.idle_since(self._loop.time() - self._config.idle_seconds):
                self.trajectories.forget(id)
                self._policy.forget(id)
                self.counts.forgotten += 1

    # Introspection

    async def _models(self, request: web.Request) -> web.Response:
        for engine in self.upstreams.instances:
            try:
                async with self._session.get(
                    f"{engine.section.url}/models",
                    timeout=ClientTimeout(total=_MODELS_TIMEOUT),
                    headers={"Accept-Encoding": "identity"} | engine.authorization(None if self._guarded else request),
                    allow_redirects=False,
                ) as answer:
                    return web.Response(body=await answer.read(), status=answer.status, headers=_JSON)
            except (ClientError, OSError, ValueError) as error:
                untraced(error)
        return refused("no engine is healthy: see GET /engines", 503, _RETRY_AFTER)

    async def _list(self, _: web.Request) -> web.Response:
        listed = [
            {"name": engine.id, "url": engine.section.url, "bucket": engine.bucket}
            | {name: getattr(engine, name) for name in _GAUGES}
            for engine in self.upstreams.all.values()
        ]
        return web.json_response(
            {"route": self._config.route, "limits": list(self.upstreams.limits), "engines": listed}
        )

    async def _health(self, _: web.Request) -> web.Response:
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
                gauge.add_metric([engine.id], getattr(engine, name))
            yield gauge


def _no_trajectory(id: str) -> RefusedRequest:
    return RefusedRequest(f"trajectory {id} is unknown: its turns name it in the field libra.trajectory", 404)
