"""An engine that answers in the shapes of vLLM, SGLang and Anthropic, or fails, as a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

PROMPT, GENERATED = 50, 3  # tokens that its answers report

Event = tuple[str | None, Any]  # type and data of an event


def _usage(**more: Any) -> dict[str, Any]:
    return {"prompt_tokens": PROMPT, "completion_tokens": GENERATED, "total_tokens": PROMPT + GENERATED} | more


def _chat(_: Any) -> Any:
    message = {"role": "assistant", "content": "hi", "tool_calls": [{"id": "c1", "function": {"name": "look"}}]}
    return {"choices": [{"index": 0, "message": message}], "usage": _usage()}


def _completion(body: Any) -> Any:
    return {"choices": [{"index": 0, "text": "abc", "token_ids": [7, 8, 9]}], "usage": _usage()}


def _tokens(_: Any) -> Any:
    return {"request_id": "r", "choices": [{"index": 0, "token_ids": [7, 8, 9]}]}


def _sglang(_: Any) -> Any:
    meta = {"prompt_tokens": PROMPT, "completion_tokens": GENERATED}
    return {"text": "abc", "output_ids": [7, 8, 9], "meta_info": meta}


def _response(_: Any) -> Any:
    return {"object": "response", "output": [], "usage": {"input_tokens": PROMPT, "output_tokens": GENERATED}}


def _message(_: Any) -> Any:
    usage = {"input_tokens": PROMPT - 20, "cache_read_input_tokens": 20, "output_tokens": GENERATED}
    return {"type": "message", "content": [{"type": "text", "text": "abc"}], "usage": usage}


WHOLE: dict[str, Callable[[Any], Any]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/inference/v1/generate": _tokens,
    "/generate": _sglang,
    "/v1/responses": _response,
    "/v1/messages": _message,
}
_META = {"prompt_tokens": PROMPT}
STREAMS: dict[str, list[Event]] = {
    "/inference/v1/generate": [
        (None, {"choices": [{"index": 0, "token_ids": [7, 8]}]}),
        (None, {"choices": [{"index": 0, "token_ids": [9]}]}),
        (None, "[DONE]"),
    ],
    "/generate": [
        (None, {"text": "a", "output_ids": [7], "meta_info": _META | {"completion_tokens": 1}}),
        (None, {"text": "abc", "output_ids": [7, 8, 9], "meta_info": _META | {"completion_tokens": GENERATED}}),
        (None, "[DONE]"),
    ],
    "/v1/responses": [
        ("response.created", {"type": "response.created", "response": {"usage": None}}),
        ("response.completed", {"type": "response.completed", "response": _response(None)}),
    ],
    "/v1/messages": [
        ("message_start", {"message": {"usage": {"input_tokens": PROMPT, "output_tokens": 0}}}),
        ("content_block_delta", {"delta": {"type": "text_delta", "text": "abc"}}),
        ("message_delta", {"usage": {"output_tokens": GENERATED}}),
        ("message_stop", {"type": "message_stop"}),
    ],
}


@dataclass
class Asked:
    """A request that came."""

    method: str
    path: str
    headers: CIMultiDict[str]
    body: Any


@dataclass
class FieldEngine:
    """`status` is that of its turns, `control` that of control requests."""

    status: int = 200
    control: int = 200
    health: int = 200
    ranks: int = 2
    max_model_len: int | None = 4096
    asked: list[Asked] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The address of its root."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/get_world_size", self._world_size)
        for path in WHOLE:
            app.router.add_post(path, self._turn)
        app.router.add_route("*", "/{rest:.*}", self._control)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    def turns(self) -> int:
        return sum(asked.path in WHOLE for asked in self.asked)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": self.max_model_len}]})

    async def _world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": self.ranks}, status=self.control)

    async def _control(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.json_response({"path": request.path}, status=self.control)

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        headers = {"X-Request-Id": "of the engine"} if "X-Request-Id" in request.headers else {}
        if self.status != 200:
            error = {"error": {"message": "no", "code": self.status}}
            return web.json_response(error, status=self.status, headers={"Retry-After": "7"})
        if not body.get("stream"):
            return web.json_response(WHOLE[request.path](body), headers=headers)
        response = web.StreamResponse(headers=headers | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for kind, data in STREAMS[request.path]:
            named = "" if kind is None else f"event: {kind}\n"
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"{named}data: {text}\n\n".encode())
            await asyncio.sleep(0)
        return response

    async def _note(self, request: web.Request) -> Any:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        self.asked.append(Asked(request.method, request.path_qs, CIMultiDict(request.headers), body))
        return body
