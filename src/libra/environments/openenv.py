"""An OpenEnv environment behind a URL as a task: the model reads its observations and writes its actions.

Invariant: an episode is one session of the server, on one WebSocket; its reward is the sum of the rewards of its steps.
If the server refuses an action, the model reads the refusal. Any other refusal is a failure of the environment.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import aiohttp

from libra.environments.protocol import Prompt
from libra.environments.served import EpisodeFailedError, Seat, split_of

Message = dict[str, Any]  # in OpenAI's format

_CONNECT_SECONDS = 10.0
_REFUSED = "VALIDATION_ERROR"  # the server's code for an invalid action


class OpenEnvEnvironment:
    """`kind: openenv`. Options:

    - `url` of the server; `sessions`, its limit of concurrent sessions; `seconds`, the time limit of an answer
    - `tasks`, the number of seeds; `reset`, more arguments of a reset; `steps`, the limit of an episode
    - `instructions`, the system message; `turn_tokens`; `name`, in the records
    - `action`, the field that gets a turn's text; `observation`, the field that the model reads"""

    def __init__(
        self,
        url: str,
        tasks: int,
        reset: Mapping[str, Any] | None = None,
        instructions: str = "",
        action: str = "",
        observation: str = "",
        steps: int = 32,
        sessions: int = 1,
        seconds: float = 60.0,
        turn_tokens: int = 1024,
        name: str = "openenv",
    ) -> None:
        if type(tasks) is not int or tasks < 1:
            raise ValueError(f"tasks is {tasks!r}; give the number of seeds, 1 or more")
        self.name, self.turn_tokens = name, turn_tokens
        self._url, self._tasks, self._reset, self._steps = url.rstrip("/"), tasks, dict(reset or {}), steps
        self._sessions, self._seconds, self._instructions = sessions, seconds, instructions
        actions, observations = (_schema(self._url).get(kind) or {} for kind in ("action", "observation"))
        self._calls_tools = not action and "tool_name" in actions.get("properties", ())
        self._action = "" if self._calls_tools else _field("action", action, actions)
        self._observation = observation and _field("observation", observation, observations)

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        return split_of([Prompt(f"{self.name}-{it}", "", "") for it in range(self._tasks)], split, count, seed)

    @asynccontextmanager
    async def opened(self, logs: Path) -> AsyncIterator[None]:
        self._free = asyncio.Semaphore(self._sessions)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)  # no time limit on a turn
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._client:
            yield

    async def play(self, prompt: Prompt, seat: Seat) -> float:
        async with self._free, self._client.ws_connect(f"{self._url}/ws", max_msg_size=0) as socket:
            session = _Session(socket, self._seconds)
            seen = self._seen(await session.ask("reset", {**self._reset, "seed": int(prompt.id.rpartition("-")[2])}))
            tools = await session.tools() if self._calls_tools else None
            messages = [{"role": "system", "content": self._instructions}] if self._instructions else []
            messages.append({"role": "user", "content": seen})
            for _ in range(self._steps):
                reply = await self._turn(seat, messages, tools)
                if reply is None:
                    break
                answers = await (self._act(session, reply) if tools is None else session.call(reply))
                if session.done or not answers:
                    break
                messages += [reply, *answers]
            await session.leave()
        return session.reward

    async def _turn(self, seat: Seat, messages: Sequence[Message], tools: Sequence[Message] | None) -> Message | None:
        """The model's next message, or None if the chat is too long for every engine. The episode then ends with the
        reward of its earlier steps."""
        body = {"model": "policy", "messages": messages} | ({} if tools is None else {"tools": tools})
        headers = {"Authorization": f"Bearer {seat.key}"}
        async with self._client.post(f"{seat.url}/chat/completions", json=body, headers=headers) as answer:
            told: dict[str, Any] = await answer.json()
        if answer.ok:
            reply: Message = told["choices"][0]["message"]
            return reply
        if "context_length_exceeded" in told["error"]["message"]:
            return None
        raise EpisodeFailedError(told["error"]["message"])

    async def _act(self, session: _Session, reply: Message) -> list[Message]:
        try:
            seen = self._seen(await session.ask("step", {self._action: reply.get("content") or ""}))
        except _RefusedActionError as error:
            seen = str(error)
        return [{"role": "user", "content": seen}]

    def _seen(self, observation: Mapping[str, Any]) -> str:
        return _text(observation.get(self._observation) if self._observation else observation)


class _RefusedActionError(Exception):
    """The environment refused an action as invalid."""


class _Session:
    """A session of the server, with the rewards of its steps."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, seconds: float) -> None:
        self._socket, self._seconds = socket, seconds
        self.reward, self.done = 0.0, False

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The observation after a reset or a step."""
        await self._socket.send_json({"type": kind, "data": data})
        try:
            message = await self._socket.receive(self._seconds)
        except TimeoutError:
            raise EpisodeFailedError(f"{kind}: the environment took more than {self._seconds:g} s") from None
        if message.type != aiohttp.WSMsgType.TEXT:
            raise EpisodeFailedError(f"{kind}: the environment closed the session")
        answer = message.json()
        told: dict[str, Any] = answer["data"]
        if answer["type"] == "error":
            code, said = told.get("code"), told.get("message")
            if kind == "step" and code == _REFUSED:
                errors = told.get("errors")
                raise _RefusedActionError(f"{said}: {_text(errors)}" if errors else said)
            remedy = "; set sessions to the server's limit of concurrent sessions" if code == "CAPACITY_REACHED" else ""
            raise EpisodeFailedError(f"{kind}: the environment said {said} ({code}){remedy}")
        if kind == "step":
            self.reward += float(told.get("reward") or 0.0)
        self.done = bool(told.get("done"))
        observation: dict[str, Any] = told["observation"]
        return observation

    async def tools(self) -> list[Message]:
        """The environment's tools, in OpenAI's format."""
        told = (await self.ask("step", {"type": "list_tools"}))["tools"]
        named = [
            {"name": it["name"], "description": it["description"], "parameters": it["input_schema"]} for it in told
        ]
        return [{"type": "function", "function": each} for each in named]

    async def call(self, reply: Message) -> list[Message]:
        """The returns of the tools that a turn calls; empty without a call."""
        returned = []
        for call in reply.get("tool_calls") or ():
            name, written = call["function"]["name"], call["function"]["arguments"]
            try:
                action = {"type": "call_tool", "tool_name": name, "arguments": json.loads(written)}
                content = _returned(await self.ask("step", action))
            except (_RefusedActionError, json.JSONDecodeError) as error:
                content = str(error)
            returned.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return returned

    async def leave(self) -> None:
        """End the session, and wait until the server has closed it and can open another."""
        await self._socket.send_json({"type": "close"})
        with suppress(TimeoutError):
            await self._socket.receive(self._seconds)


def _returned(observation: Mapping[str, Any]) -> str:
    if error := observation.get("error"):
        return str(error["message"])
    result = observation.get("result")
    parts = result.get("content") if isinstance(result, dict) else None
    if not isinstance(parts, list):
        return _text(result)
    return "".join(part["text"] for part in parts if "text" in part)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _schema(url: str) -> dict[str, Any]:
    """JSON schemas of the server's actions and observations. Raises ValueError if the server has none."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/schema", timeout=_CONNECT_SECONDS) as answer:
            found = json.load(answer)
        if isinstance(found, dict):
            return found
        raise ValueError("it is not an object")
    except HTTPError as error:
        raise ValueError(f"url: {url}/schema answers {error.code}: give the URL of an OpenEnv server") from None
    except OSError as error:
        why = getattr(error, "reason", error)
        raise ValueError(f"url: {url} does not answer ({why}): start its server, or give another URL") from None
    except ValueError as error:
        raise ValueError(f"url: {url}/schema is not a schema ({error}): give the URL of an OpenEnv server") from None


def _field(option: str, name: str, schema: Mapping[str, Any]) -> str:
    """The field `name`, or the only required one."""
    fields, required = list(schema.get("properties", ())), list(schema.get("required", ()))
    if name in fields:
        return name
    if not name and len(required) == 1:
        return str(required[0])
    raise ValueError(
        f"{option}: {name or 'nothing'} is given, but the fields are {', '.join(fields) or 'none'}: name one of them"
    )
