"""The HTTP application of emulated engines. All run in one process; each has a base URL `/engines/NAME/v1`.

Invariants: a response is sent once the simulator has generated its last token. A request is cancelled when its client
disconnects.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Literal

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from libra.config.listeners import EMULATOR
from libra.serve.answers import RefusedRequest, metrics_response, refused
from libra.serve.bodies import body_of
from libra.serve.emulate.live_engine import LiveEngine, WallClock
from libra.serve.emulate.message_endpoints import MessageAnswer, ResponseAnswer, parse_message, parse_response
from libra.serve.emulate.openai import Answer, GenerationRequest, parse
from libra.serve.emulate.token_endpoints import SGLangAnswer, TokenAnswer, parse_generate, parse_sglang
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.request import Chain, Request

_METRICS: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str], ...] = (
    (GaugeMetricFamily, "num_requests_running", "Requests in the batch.", "running"),
    (GaugeMetricFamily, "num_requests_waiting", "Requests in the queue.", "waiting"),
    (GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
    (CounterMetricFamily, "prompt_tokens", "Prompt tokens of finished requests.", "prompt_tokens"),
    (CounterMetricFamily, "generation_tokens", "Generated tokens of finished requests.", "generated_tokens"),
)
_REMEMBERED = 2  # blocks in the prefix index per block of the engine's KV cache


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A path for requests that generate tokens: its parser and its kind of response."""

    parse: Callable[[bytes, int], GenerationRequest]  # called with the body, and the longest context in tokens
    answer: type[Answer] = Answer


_ENDPOINTS = {
    "/v1/completions": _Endpoint(lambda body, longest: parse(body, False, longest)),
    "/v1/chat/completions": _Endpoint(lambda body, longest: parse(body, True, longest)),
    "/inference/v1/generate": _Endpoint(parse_generate, TokenAnswer),
    "/v1/responses": _Endpoint(parse_response, ResponseAnswer),
    "/v1/messages": _Endpoint(parse_message, MessageAnswer),
    "/generate": _Endpoint(parse_sglang, SGLangAnswer),
}


class Emulator:
    """The engines of a deployment and their endpoints."""

    def __init__(self, specs: Sequence[EngineSpec], speed: float, default_tokens: int, seed: int) -> None:
        clock = WallClock(asyncio.get_running_loop(), speed)
        self.engines: Mapping[str, LiveEngine] = {spec.name: LiveEngine(spec, clock) for spec in specs}
        self._contexts = {
            spec.name: PrefixIndex(spec.config.block_size, _REMEMBERED * spec.config.kv_blocks) for spec in specs
        }
        self._default_tokens, self._seed = default_tokens, seed
        self._numbers = count(1)

    def application(self) -> web.Application:
        longest = max(engine.spec.config.max_model_len for engine in self.engines.values())
        app = web.Application(client_max_size=EMULATOR.body_most(longest))
        app.on_shutdown.append(self._close)
        app.router.add_get("/engines", self._list)
        for base in ("", "/engines/{engine}"):
            app.router.add_get(f"{base}/health", self._health)
            app.router.add_get(f"{base}/metrics", self._metrics)
            app.router.add_get(f"{base}/v1/models", self._models)
            for path, endpoint in _ENDPOINTS.items():
                app.router.add_post(base + path, partial(self._serve, endpoint))
        return app

    async def _close(self, _: web.Application) -> None:
        for engine in self.engines.values():
            engine.close()

    async def _health(self, request: web.Request) -> web.Response:
        self._asked(request)
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        return metrics_response(_families(self._asked(request)))

    def _asked(self, request: web.Request) -> Mapping[str, LiveEngine]:
        """The engine that the path names; all engines if it names none."""
        if "engine" not in request.match_info:
            return self.engines
        name = self._named(request)
        return {name: self.engines[name]}

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response({"engines": [{"name": name, "path": f"/engines/{name}/v1"} for name in self.engines]})

    async def _models(self, request: web.Request) -> web.Response:
        name = self._named(request)
        longest = self.engines[name].spec.config.max_model_len
        model = {"id": name, "object": "model", "created": 0, "owned_by": "libra", "max_model_len": longest}
        return web.json_response({"object": "list", "data": [model]})

    async def _serve(self, endpoint: _Endpoint, request: web.Request) -> web.StreamResponse:
        name = self._named(request)
        engine, contexts = self.engines[name], self._contexts[name]
        try:
            asked = endpoint.parse(await body_of(request), engine.spec.config.max_model_len)
            tokens = self._tokens(asked, engine)
            chain = contexts.chain(asked.prompt, asked.body.cache_salt)
            turn = engine.submit(chain, len(asked.prompt), tokens, asked.body.priority)
        except ValueError as error:  # from parsing, or from an engine that can never serve the request
            return refused(str(error), 400)
        reason: Literal["stop", "length"] = "stop" if asked.max_tokens is None else "length"
        answer = endpoint.answer(asked, next(self._numbers), self._seed, reason)
        try:
            if asked.body.stream:
                response = await self._stream(request, engine, turn, answer)
            else:
                await engine.finished(turn)
                answer.extend(turn.generated)
                timing = {"Server-Timing": f"engine;dur={engine.seconds(turn) * 1e3:.3f}"}
                response = web.Response(
                    body=answer.whole(turn.cached_tokens), content_type="application/json", headers=timing
                )
        finally:
            engine.cancel(turn)
        contexts.learn(chain, (*asked.prompt, *answer.tokens), asked.body.cache_salt)
        return response

    async def _stream(
        self, request: web.Request, engine: LiveEngine, turn: Request, answer: Answer
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for generated in engine.progress(turn):
            await response.write(answer.piece(answer.extend(generated), last=generated == turn.output_tokens))
        await response.write(answer.last(turn.cached_tokens))
        return response

    def _tokens(self, asked: GenerationRequest, engine: LiveEngine) -> int:
        """Number of tokens to generate. Raises `ValueError` if they exceed the longest context."""
        longest = engine.spec.config.max_model_len
        room = longest - len(asked.prompt)
        if asked.max_tokens is None:
            return max(1, min(self._default_tokens, room))
        if asked.max_tokens > room:
            raise ValueError(
                f"max_tokens is {asked.max_tokens}; a prompt of {len(asked.prompt)} tokens leaves room for {room} of"
                f" {longest}: ask for fewer"
            )
        return asked.max_tokens

    def _named(self, request: web.Request) -> str:
        name = request.match_info.get("engine")
        if name is None and len(self.engines) == 1:
            return next(iter(self.engines))
        if name in self.engines:
            return str(name)
        said = f"there is no engine {name!r}" if name is not None else f"there are {len(self.engines)} engines"
        raise RefusedRequest(f"{said}: request /engines/NAME/v1; GET /engines lists the names", 404)


def _families(engines: Mapping[str, LiveEngine]) -> Iterator[Metric]:
    """The engines' metrics, under vLLM's names."""
    for kind, name, help, attribute in _METRICS:
        family = kind(f"vllm:{name}", help, labels=["engine"])
        for engine, live in engines.items():
            family.add_metric([engine], getattr(live, attribute))
        yield family


class PrefixIndex:
    """Finds the earlier context with which a prompt shares a prefix. Two requests share exactly the full blocks in
    which all tokens from the start are equal. The index evicts a block only when a KV cache of its size would.

    Each entry maps a full block, identified by all tokens up to its end, to the chain that identifies its context in
    the simulator's caches. The index keeps the `capacity` most recently used blocks.
    """

    def __init__(self, block_size: int, capacity: int) -> None:
        self._size, self._capacity = block_size, capacity
        self._chains: OrderedDict[int, Chain] = OrderedDict()  # keys: hash of all tokens up to the block's end
        self._made = 0

    def __len__(self) -> int:
        return len(self._chains)

    def chain(self, tokens: Sequence[int], salt: str = "") -> Chain:
        """A new chain for a prompt, forked from the chain with the longest common prefix and the same salt."""
        states = self._states(tokens, salt)
        parent, shared = None, 0
        for state in states:
            found = self._chains.get(state)
            if found is None:
                break
            parent, shared = found, shared + self._size
        self._made += 1
        chain = Chain(str(self._made), parent, shared)
        self._learn(chain, states)
        return chain

    def learn(self, chain: Chain, tokens: Sequence[int], salt: str = "") -> None:
        """Add the tokens of a chain's whole context to the index."""
        self._learn(chain, self._states(tokens, salt))

    def _states(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Hash of all tokens up to the end of each full block."""
        size, context, state = self._size, tuple(tokens), hash(salt)
        return [
            state := hash((state, context[start : start + size])) for start in range(0, len(context) - size + 1, size)
        ]

    def _learn(self, chain: Chain, states: Sequence[int]) -> None:
        chains = self._chains
        for state in states:
            chains.setdefault(state, chain)
            chains.move_to_end(state)
        while len(self._chains) > self._capacity:
            self._chains.popitem(last=False)
