"""OpenAI's chat API on this machine, for the environments that play the episodes of a run.

Invariant: the server answers a request only if it has the token of the run, and only while its episode is in progress.
The run determines sampling: the server ignores a request's temperature and similar fields, and refuses fields that need
other sampling.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import msgspec
from aiohttp import web

from libra.config.listeners import EPISODES
from libra.environments.served import Seat
from libra.loop.conversation import ChatRequest, Conversation, Reply, TooLongError
from libra.serve.answers import RefusedRequest, decoded
from libra.serve.bodies import body_of
from libra.serve.http import serving

MODEL = "policy"
_PATH = "/v1/chat/completions"


class _Body(msgspec.Struct, frozen=True):
    """The fields of a request that change its answer; all others are ignored."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None


_body = msgspec.json.Decoder(_Body)


class EpisodeServer:
    """Server of the chat API for the episodes in progress."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self._url = ""  # base URL of all episodes; set by `open`
        self._seated: dict[str, Conversation] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Self]:
        server = cls()
        application = web.Application(client_max_size=EPISODES.body_bytes)
        application.router.add_post(_PATH, server._complete)
        application.router.add_post("/{session}" + _PATH, server._complete)
        application.router.add_get("/v1/models", _models)
        application.router.add_get("/{session}/v1/models", _models)
        async with serving(application, "127.0.0.1", 0, EPISODES, server.key) as base:
            server._url = f"{base}/v1"
            yield server

    @contextmanager
    def seated(self, id: str, conversation: Conversation) -> Iterator[Seat]:
        """Context in which the server answers the requests of an episode."""
        session = f"{id}-{secrets.token_hex(4)}"  # unique, so that a client of an earlier attempt cannot interfere
        self._seated[session] = conversation
        try:
            yield Seat(self._url, session, self.key)
        finally:
            del self._seated[session]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = str(request.match_info.get("session") or request.headers.get("X-Session-ID", ""))
        conversation = self._seated.get(session)
        if conversation is None:
            raise RefusedRequest(
                f"no running episode has session {session!r}: name one in the URL or X-Session-ID", 404
            )
        try:
            body = decoded(_body, await body_of(request))
            reply = await conversation.reply(_asked(body))
        except TooLongError as error:
            raise RefusedRequest(f"context_length_exceeded: {error}", 400) from None
        except ValueError as error:
            raise RefusedRequest(str(error), 400) from None
        return await _streamed(request, reply) if body.stream else web.json_response(_answer(reply))


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "libra"}]})


def _asked(body: _Body) -> ChatRequest:
    """The request for a completion. Raises `ValueError` if it needs a feature that episodes do not support."""
    wanted = {
        "n": body.n not in (None, 1),
        "stop": bool(body.stop),
        "tool_choice": body.tool_choice not in (None, "auto", "none"),
        "response_format": body.response_format is not None and body.response_format.get("type") != "text",
    }
    if refused := [name for name, asked in wanted.items() if asked]:
        raise ValueError(f"{', '.join(refused)}: not supported in an episode for training; leave it out")
    if not body.messages:
        raise ValueError("messages is empty: send at least one")
    tools = None if body.tool_choice == "none" else body.tools
    return ChatRequest(body.messages, tools, body.max_completion_tokens or body.max_tokens)


def _answer(reply: Reply) -> dict[str, Any]:
    choice = {"index": 0, "message": reply.message, "finish_reason": reply.ending, "logprobs": None}
    return {**_head("chat.completion"), "choices": [choice], "usage": _usage(reply)}


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.generated_tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.generated_tokens, "total_tokens": total}


async def _streamed(request: web.Request, reply: Reply) -> web.StreamResponse:
    """Send the whole turn as one event, since a turn is parsed at its end."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    head = _head("chat.completion.chunk")
    calls = [{"index": index, **call} for index, call in enumerate(reply.message.get("tool_calls") or ())]
    delta = {**reply.message, "tool_calls": calls} if calls else reply.message
    events: list[Mapping[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.ending}], "usage": _usage(reply)},
    ]
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
