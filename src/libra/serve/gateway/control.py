"""Control requests of trainers, which go to all engines, and requests that any engine can answer.

Invariant: a control request goes to all engines in service at the same time, and the client gets the worst answer. An
unreachable engine counts as status 502. Engines out of service do not get the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import ClientError, ClientTimeout, web

from libra.config.listeners import GATEWAY
from libra.serve.answers import RefusedRequest, decoded, refused
from libra.serve.bodies import body_of
from libra.serve.gateway.engine_client import EngineClient
from libra.serve.gateway.traced import passed_back, passed_on
from libra.serve.gateway.turns import RETRY_AFTER
from libra.serve.gateway.upstreams import Upstream, Upstreams, untraced, whole_of

TO_ALL = (  # POST; vLLM's paths, then SGLang's
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/abort_requests",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/flush_cache",
    "/pause_generation",
    "/continue_generation",
)
ASKED_OF_ALL = ("/is_paused", "/is_sleeping", "/weight_info")  # GET
FROM_ANY = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")  # POST; one engine answers for all
_ANY_SECONDS = 5.0  # after which the next engine is tried
_LARGEST_ANSWER = 64 * 2**20  # bytes
_JSON = {"Content-Type": "application/json"}


class _WorldSize(msgspec.Struct):
    world_size: int


class _Init(msgspec.Struct):
    init_info: dict[str, msgspec.Raw]


_world_size, _init = msgspec.json.Decoder(_WorldSize), msgspec.json.Decoder(_Init)
_whole_number = msgspec.json.Decoder(int)


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """An engine's answer to a control request."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(slots=True)
class Control:
    """Handlers of control requests."""

    upstreams: Upstreams
    client: EngineClient
    guarded: bool  # whether the clients' Authorization header has the gateway's own token

    def routes(self) -> Iterator[web.RouteDef]:
        for path in TO_ALL:
            yield web.post(path, self.to_all)
        for path in ASKED_OF_ALL:
            yield web.get(path, self.to_all, allow_head=False)
        yield web.get("/get_world_size", self.world_size, allow_head=False)
        yield web.post("/init_weight_transfer_engine", self.init_weight_transfer)

    def shared_routes(self) -> Iterator[web.RouteDef]:
        """Routes of requests that change nothing."""
        yield web.get("/v1/models", self.any)
        for path in FROM_ANY:
            yield web.post(path, self.any)

    async def to_all(self, request: web.Request) -> web.Response:
        """Send the request to all engines; returns the worst answer."""
        body = await self._body(request)
        answers = await asyncio.gather(*(self._ask(it, request, body) for it in self.upstreams.instances))
        return _worst(answers)

    async def world_size(self, request: web.Request) -> web.Response:
        """Sum of the ranks of all engines."""
        return web.json_response({"world_size": sum(await self._sizes(request))})

    async def init_weight_transfer(self, request: web.Request) -> web.Response:
        """Have each engine join the trainer's group, with ranks that follow the ranks of the engines before it."""
        body = await self._body(request)
        try:
            info = decoded(_init, body or b"").init_info
            first = decoded(_whole_number, bytes(info["rank_offset"])) if "rank_offset" in info else None
        except ValueError as error:
            return refused(str(error), 400)
        engines = self.upstreams.instances
        bodies = [body] * len(engines)
        if first is not None:
            for number, size in enumerate(await self._sizes(request)):
                own = {**info, "rank_offset": msgspec.Raw(b"%d" % first)}
                bodies[number] = msgspec.json.encode({"init_info": own})
                first += size
        asked = zip(engines, bodies, strict=True)
        return _worst(await asyncio.gather(*(self._ask(engine, request, own) for engine, own in asked)))

    async def any(self, request: web.Request) -> web.Response:
        """The first answer without an error. Tries the engines one after the other, the least loaded first."""
        body = await self._body(request)
        failed: ControlAnswer | None = None
        for engine in sorted(self.upstreams.instances, key=lambda it: it.load_tokens):
            answer = await self._ask(engine, request, body, ClientTimeout(total=_ANY_SECONDS))
            if answer.status < 500:
                return _answered(answer)
            failed = answer
        return _worst([] if failed is None else [failed])

    async def _sizes(self, request: web.Request) -> list[int]:
        """Number of ranks of each engine in service. Raises `RefusedRequest` if an engine does not report it."""
        engines = self.upstreams.instances
        answers = await asyncio.gather(*(self._ask(it, request, None, path="/get_world_size") for it in engines))
        try:
            return [decoded(_world_size, answer.body).world_size for answer in answers]
        except ValueError:
            statuses = [answer.status for answer in answers]
            raise RefusedRequest(f"engines answer /get_world_size with statuses {statuses}", max(statuses)) from None

    async def _body(self, request: web.Request) -> bytes | None:
        if request.method != "POST":
            return None
        return await body_of(request, GATEWAY.body_most(self.upstreams.longest))

    async def _ask(
        self,
        engine: Upstream,
        request: web.Request,
        body: bytes | None,
        timeout: ClientTimeout | None = None,
        path: str | None = None,
    ) -> ControlAnswer:
        url = engine.section.root + (request.rel_url.raw_path if path is None else path)
        query = request.rel_url.raw_query_string
        headers = passed_on(request) | {"Accept-Encoding": "identity"}
        headers |= engine.authorization(None if self.guarded else request)
        try:
            async with self.client.session.request(
                "GET" if body is None else "POST",
                f"{url}?{query}" if query else url,
                data=body,
                headers=headers | ({} if body is None else _JSON),
                timeout=timeout or self.client.session.timeout,
                allow_redirects=False,
            ) as answer:
                whole = await whole_of(answer, _LARGEST_ANSWER)
                return ControlAnswer(answer.status, whole, passed_back(answer.headers, request))
        except (ClientError, OSError, ValueError, TimeoutError) as error:
            untraced(error)
            said = refused(f"engine {engine.id} does not answer: {error or type(error).__name__}", 502)
            assert isinstance(said.body, bytes)
            return ControlAnswer(502, said.body, {})


def _worst(answers: list[ControlAnswer]) -> web.Response:
    """The answer with the highest status; among equal statuses, that of the first engine."""
    if not answers:
        return refused("no engine is healthy: see GET /engines", 503, RETRY_AFTER)
    return _answered(max(answers, key=lambda answer: answer.status))


def _answered(answer: ControlAnswer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers={**answer.headers, **_JSON})
