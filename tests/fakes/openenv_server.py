"""A server that speaks OpenEnv's protocol: sums, as text (`/sums`) and with a tool (`/tools`)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import WSMsgType, web

ADDED = 7  # to the seed


class OpenEnvServer:
    """Sessions at `url`, of which a limited number is open at a time."""

    def __init__(self, sessions: int = 2) -> None:
        self.url, self.most, self.open, self.peak = "", sessions, 0, 0
        self.told: list[Any] = []  # every message, as it came

    @contextmanager
    def running(self) -> Iterator[OpenEnvServer]:
        """Answers from a thread of its own, as the test's client may block."""
        loop, up = asyncio.new_event_loop(), threading.Event()
        over = asyncio.Event()

        async def serve() -> None:
            application = web.Application()
            application.router.add_get("/{kind}/schema", self._schema)
            application.router.add_get("/{kind}/ws", self._session)
            runner = web.AppRunner(application, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            up.set()
            await over.wait()
            await runner.cleanup()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        up.wait()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join()
            loop.close()

    def empties(self) -> bool:
        """Whether all sessions end within ten seconds: a client has left before the server sees it."""
        deadline = time.monotonic() + 10
        while self.open and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.open

    async def _schema(self, request: web.Request) -> web.Response:
        fields = {"sums": ["answer"], "tools": ["tool_name"], "two": ["left", "right"]}.get(request.match_info["kind"])
        if fields is None:
            raise web.HTTPNotFound
        actions = {"properties": {name: {} for name in (*fields, "metadata")}, "required": fields}
        return web.json_response({"action": actions, "observation": {"properties": {"text": {}, "sum": {}}}})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.most:
            full = {"message": f"at capacity: {self.open}/{self.most}", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": full})
            return socket
        self.open += 1
        self.peak = max(self.peak, self.open)
        play = _Sums() if request.match_info["kind"] == "sums" else _Tools()
        try:
            async for message in socket:
                if message.type != WSMsgType.TEXT:
                    break
                told = message.json()
                self.told.append(told)
                if told["type"] == "close":
                    break
                try:
                    said, reward, done = (
                        play.reset(told["data"]) if told["type"] == "reset" else play.step(told["data"])
                    )
                except EOFError:
                    break
                except (RuntimeError, ValueError) as error:
                    code = "VALIDATION_ERROR" if isinstance(error, ValueError) else "EXECUTION_ERROR"
                    await socket.send_json({"type": "error", "data": {"message": str(error), "code": code}})
                    continue
                data = {"observation": said, "reward": reward, "done": done}
                await socket.send_json({"type": "observation", "data": data})
        finally:
            self.open -= 1
        return socket


Result = tuple[dict[str, Any], float | None, bool]


class _Sums:
    """One sum: a step that thinks earns 0.25, one that answers ends it."""

    def reset(self, told: dict[str, Any]) -> Result:
        self.right = told["seed"] + ADDED
        return {"text": f"Q{told['seed']}+{ADDED}", "sum": self.right}, None, False

    def step(self, told: dict[str, Any]) -> Result:
        answer = told["answer"]
        match answer[0]:
            case "A":
                return {"text": ""}, float(answer == f"A{self.right}"), True
            case ">":
                return {"text": "=go_on"}, 0.25, False
            case "*":
                raise RuntimeError("it broke")
            case "-":
                raise EOFError
        raise ValueError("no action")


class _Tools:
    """Its tool says a sum, and its other tool takes the answer."""

    def reset(self, told: dict[str, Any]) -> Result:
        self.right = told["seed"] + ADDED
        return {}, 0.0, False

    def step(self, told: dict[str, Any]) -> Result:
        if told["type"] == "list_tools":
            schema = {"type": "object", "properties": {"argument": {"type": "string"}}}
            return {"tools": [{"name": "calculator", "description": "Adds.", "input_schema": schema}]}, None, False
        assert told["type"] == "call_tool" and told["tool_name"] == "calculator"
        argument = told["arguments"]["argument"]
        if argument == "x":
            return {"tool_name": "calculator", "result": None, "error": {"message": "not_x"}}, None, False
        right = argument == str(self.right)
        result = {"content": [{"type": "text", "text": f"={argument}"}], "is_error": False}
        return {"tool_name": "calculator", "result": result, "error": None}, float(right), right
