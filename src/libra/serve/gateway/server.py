"""HTTP in front of engines: each turn goes where the policy says, and comes back as the engine answered it.

Invariant: what was not answered is asked again elsewhere, as long as nothing of an answer has reached the client; a
turn is counted once. One event loop asks the policy, so its calls have an order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import count

from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
    TraceConfig,
    web,
)

from libra.route.policy import Placement, Policy, Request, ToolReturn
from libra.serve.gateway.engines import Attempt, EngineBehind, Engines
from libra.serve.gateway.gateway_file import GatewayFile
from libra.serve.gateway.messages import (
    Body,
    prompt_tokens,
    read_body,
    read_finish,
    returned_of,
    usage_of,
    with_field,
)
from libra.serve.gateway.metrics import CONTENT_TYPE, Counts, exposition
from libra.serve.gateway.trajectories import Trajectories
from libra.serve.http_service import CONNECTIONS, refusal, refused
from libra.serve.rare_collection import Connections
from libra.trajectory import Trajectory

_LARGEST_BODY = 64 * 2**20  # bytes
_LOOK_WELL, _LOOK_SICK, _LOOK_IDLE = 10.0, 1.0, 60.0  # seconds between two looks
_LOOK_DEADLINE = 2.0  # seconds for an answer
_CUT_INTERVAL = 1.0  # seconds between two looks at turns that wait too long, or less where little is too long
_CONNECT_DEADLINE = 5.0  # seconds until an engine takes a connection
_DATA, _EVENT = b"data: ", b"\n\n"
_GONE = {502, 503, 504}  # statuses of a server that cannot
_JSON = {"Content-Type": "application/json"}
_UNSAID = ("Accept", "Accept-Encoding", "User-Agent")  # an answer is to come as it is, to be read on its way
_PASSED = ("Content-Type", "Retry-After", "Server-Timing")  # headers of an answer


class _LostError(Exception):
    """The engine went away before it had answered. `answer` is what it said instead, if anything."""

    def __init__(self, message: str, answer: web.Response | None = None) -> None:
        super().__init__(message)
        self.answer = answer


class _OverdueError(Exception):
    """The engine is well, but sends nothing of this turn."""


class _UnavailableError(RuntimeError):
    """No engine can take the turn."""


class Gateway:
    """`finished` is told of every trajectory that ends."""

    def __init__(
        self, file: GatewayFile, policy: Policy, finished: Callable[[Trajectory], None] = lambda _: None
    ) -> None:
        self.engines = Engines(file.engines, file.bucket_limits, file.turn_tokens)
        self.trajectories = Trajectories()
        self.counts = Counts()
        self._file, self._policy, self._finished = file, policy, finished
        self._single = count(1)  # turns that are of no trajectory
        self._session: ClientSession
        self._loop = asyncio.get_running_loop()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
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
            connector=TCPConnector(limit=0),
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=_UNSAID,
            timeout=ClientTimeout(total=None, sock_connect=_CONNECT_DEADLINE),
            auto_decompress=False,
            trace_configs=[_counting(application[CONNECTIONS])],
        ) as own:
            self._session = own
            engines = list(self.engines.all.values())
            await asyncio.gather(*map(self._look_at, engines))
            spread = (_LOOK_WELL * (index + 1) / len(engines) for index in range(len(engines)))  # not all at once
            tasks = [asyncio.create_task(self._keep_looking(*it)) for it in zip(engines, spread, strict=True)]
            tasks += [asyncio.create_task(self._keep_forgetting()), asyncio.create_task(self._keep_cutting())]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Turns

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, "completions")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._turn(request, "chat/completions")

    async def _turn(self, request: web.Request, path: str) -> web.StreamResponse:
        raw = await request.read()
        began = self._loop.time()
        try:
            body = read_body(raw)
            told, context = body.libra, prompt_tokens(body)
            id = f"turn {next(self._single)}" if told is None else told.trajectory
            prompt = id if told is None or told.prompt is None else told.prompt
            task = "" if told is None else told.task
            asked, returned = self.trajectories.begin(id, prompt, task, context, returned_of(told), began)
        except ValueError as error:
            return refused(str(error), 400)
        usage: tuple[int, int] | None = None
        try:
            response, usage = await self._answered(request, path, raw, body, asked, returned)
            return response
        except _UnavailableError as error:
            return refused(str(error), 503)
        except _OverdueError as error:
            return refused(str(error), 504)
        finally:
            if usage is None:
                self.trajectories.failed(id)
            else:
                self.trajectories.ended(id, *usage, self._loop.time())
                self.counts.answered(*usage)
            if told is None:  # there will be no other turn
                self.trajectories.forget(id)
                self._policy.forget(id)

    async def _answered(
        self,
        request: web.Request,
        path: str,
        raw: bytes,
        body: Body,
        asked: Request,
        returned: ToolReturn | None,
    ) -> tuple[web.StreamResponse, tuple[int, int] | None]:
        """The answer of the first engine that gives one, and its tokens of prompt and answer."""
        until = self._loop.time() + self._file.wait_seconds
        lost: _LostError | None = None
        for number in range(self._file.max_attempts):
            try:
                placement = await self._placed(asked, returned, until)
            except _UnavailableError:
                if lost is None or lost.answer is None:
                    raise
                return lost.answer, None
            returned = None  # the policy knows of it
            self.counts.again += number > 0
            engine = self.engines.all[placement.instance]
            sent = self._sent(raw, body, placement)
            try:
                return await self._passed(
                    request, Attempt(self.engines, engine, asked.context_tokens), path, sent, body
                )
            except _LostError as error:
                self._lose(engine)
                lost = error
        assert lost is not None
        if lost.answer is not None:
            return lost.answer, None
        raise _UnavailableError(f"tried on {self._file.max_attempts} engines, each of which failed: {lost}") from None

    def _sent(self, raw: bytes, body: Body, placement: Placement) -> bytes:
        """The body as it came, with what the client has left to us."""
        if self._file.priorities and body.priority is None:
            raw = with_field(raw, b'"priority":%d' % placement.priority)
        if body.stream and body.stream_options is None:
            raw = with_field(raw, b'"stream_options":{"include_usage":true}')
        return raw

    async def _placed(self, asked: Request, returned: ToolReturn | None, until: float) -> Placement:
        while True:
            if returned is None:
                placement = self._policy.place(asked, self.engines)
            else:
                placement = self._policy.tool_returned(asked, returned, self.engines)
                returned = None
            self.trajectories.told(asked.trajectory_id)
            if placement is not None:
                self.counts.placed(placement.migrated)
                return placement
            try:
                async with asyncio.timeout_at(until):
                    await self.engines.changed()
            except TimeoutError:
                raise _UnavailableError(self._none(asked)) from None

    def _none(self, asked: Request) -> str:
        needed = asked.context_tokens + self._file.turn_tokens
        longest = max((engine.capacity_tokens for engine in self.engines.instances), default=0)
        if not self.engines.instances:
            return "no engine is well: GET /engines says which are listed"
        return (
            f"no engine took the turn in {self._file.wait_seconds:g} s: it needs {needed} tokens with turn_tokens, and"
            f" the longest context of an engine that is well is {longest}"
        )

    async def _passed(
        self, request: web.Request, attempt: Attempt, path: str, sent: bytes, body: Body
    ) -> tuple[web.StreamResponse, tuple[int, int] | None]:
        """Raises `_LostError` or `_OverdueError` where nothing of an answer has been passed on."""
        engine = attempt.engine
        headers = _JSON | _authorization(engine, request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async with (
                attempt,
                self._session.post(
                    f"{engine.section.url}/{path}", data=sent, headers=headers, allow_redirects=False
                ) as answer,
            ):
                if body.stream and answer.status == 200:
                    return response, await self._stream(request, response, attempt, answer, body.stream_options is None)
                whole = await answer.read()
                attempt.hear(self._loop.time())
                if 300 <= answer.status < 400:
                    message = f"engine {engine.id} redirects with status {answer.status}: list its final address"
                    return refused(message, 502), None
                said = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
                passed = web.Response(body=whole, status=answer.status, headers=said)
                if answer.status in _GONE:
                    raise _LostError(f"{engine.id} answered with status {answer.status}", passed)
                usage = usage_of(whole) if answer.status == 200 else None
                engine.turns += usage is not None
                return passed, usage
        except (ClientError, OSError) as error:
            failure = attempt.error or _LostError(f"engine {engine.id} went away: {error}")
        if not response.prepared:
            raise failure
        if isinstance(failure, _LostError):
            self._lose(engine)
        await _write(response, _DATA + refusal(f"{failure}; ask again from what has come", 503) + _EVENT)
        return response, None

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        attempt: Attempt,
        answer: ClientResponse,
        hide_usage: bool,
    ) -> tuple[int, int] | None:
        """Event by event. What the engine says of tokens in the end is not passed on where nobody asked for it."""
        usage: tuple[int, int] | None = None
        rest = b""
        while True:
            chunk = await answer.content.readany()
            attempt.hear(self._loop.time())
            if not response.prepared and not await _began(response, request):  # until then it can be asked again
                return None
            if not chunk:
                attempt.engine.turns += usage is not None
                await _write(response, rest)
                return usage
            *events, rest = (rest + chunk).split(_EVENT)
            passed = []
            for event in events:
                found = usage_of(event[len(_DATA) :]) if event.startswith(_DATA) and b'"usage"' in event else None
                usage = found or usage
                if found is None or not hide_usage:
                    passed.append(event + _EVENT)
            if not await _write(response, b"".join(passed)):
                return None

    # Trajectories that end

    async def _finish(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        try:
            told = read_finish(await request.read())
            trajectory = self.trajectories.finish(id, told.reward, told.policy_version)
        except KeyError:
            return _no_trajectory(id)
        except ValueError as error:
            return refused(str(error), 400)
        self._policy.finished(trajectory)
        self._finished(trajectory)
        self.counts.finished += 1
        return web.json_response(asdict(trajectory))

    async def _forget(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        if not self.trajectories.forget(id):
            return _no_trajectory(id)
        self._policy.forget(id)
        return web.Response(status=204)

    # Engines

    def _lose(self, engine: EngineBehind) -> None:
        if self.engines.go(engine.id):
            self._policy.instance_gone(engine.id)

    async def _keep_looking(self, engine: EngineBehind, first: float) -> None:
        """Often at one that is not well; one that is would fail a turn soon if it were not."""
        await asyncio.sleep(first)
        while True:
            await self._look_at(engine)
            await asyncio.sleep(_LOOK_WELL if self.engines.is_well(engine.id) else _LOOK_SICK)

    async def _keep_forgetting(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_IDLE, self._file.idle_seconds))
            for id in self.trajectories.idle_since(self._loop.time() - self._file.idle_seconds):
                self.trajectories.forget(id)
                self._policy.forget(id)
                self.counts.forgotten += 1

    async def _keep_cutting(self) -> None:
        """Nobody waits for ever for an engine that has stopped: neither for one that says nothing at all, nor for one
        that says it is well and sends nothing of a turn."""
        engine_timeout, turn_timeout = self._file.engine_timeout_seconds, self._file.turn_timeout_seconds
        while True:
            await asyncio.sleep(min(_CUT_INTERVAL, engine_timeout / 4, turn_timeout / 4))
            now = self._loop.time()
            for engine in self.engines.all.values():
                dead = not self.engines.is_well(engine.id) and now - engine.heard >= engine_timeout
                for attempt in list(engine.attempts):
                    if dead:
                        attempt.cut(_LostError(f"engine {engine.id} has sent nothing for {now - engine.heard:.0f} s"))
                    elif now - attempt.heard >= turn_timeout:
                        silent = f"{now - attempt.heard:.0f} s, more than turn_timeout_seconds"
                        attempt.cut(_OverdueError(f"engine {engine.id} has sent nothing of the turn for {silent}"))

    async def _look_at(self, engine: EngineBehind) -> None:
        """One that has much to do may say late that it is well; what it generates meanwhile says so, too."""
        began = self._loop.time()
        try:
            async with self._session.get(
                engine.section.health,
                timeout=ClientTimeout(total=_LOOK_DEADLINE),
                headers=_authorization(engine),
                allow_redirects=False,
            ) as answer:
                well = answer.status < 500
        except TimeoutError:
            well = engine.heard >= began
        except (ClientError, OSError):
            well = False
        if well:
            engine.heard = self._loop.time()
            self.engines.come(engine.id)
        else:
            self._lose(engine)

    # What can be seen

    async def _models(self, request: web.Request) -> web.Response:
        for engine in self.engines.instances:
            with suppress(ClientError, OSError):
                async with self._session.get(
                    f"{engine.section.url}/models",
                    timeout=ClientTimeout(total=_LOOK_DEADLINE),
                    headers=_authorization(engine, request),
                    allow_redirects=False,
                ) as answer:
                    return web.Response(body=await answer.read(), status=answer.status, headers=_JSON)
        return refused("no engine is well: GET /engines says which are listed", 503)

    async def _list(self, _: web.Request) -> web.Response:
        listed = [
            {
                "name": engine.id,
                "url": engine.section.url,
                "bucket": engine.bucket,
                "well": self.engines.is_well(engine.id),
                "in_flight": engine.in_flight,
                "load_tokens": engine.load_tokens,
            }
            for engine in self.engines.all.values()
        ]
        return web.json_response({"route": self._file.route, "limits": list(self.engines.limits), "engines": listed})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = exposition(self.engines, self.counts, len(self.trajectories))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.engines.instances else 503)


def _authorization(engine: EngineBehind, request: web.Request | None = None) -> dict[str, str]:
    """The header that the engine wants: its own token, or what the client sent."""
    value = engine.section.authorization()
    if value is None and request is not None:
        value = request.headers.get("Authorization")
        if value is not None and not (value.isascii() and value.isprintable()):
            message = refusal("the header Authorization holds more than printable ASCII characters", 400)
            raise web.HTTPBadRequest(text=message.decode(), content_type="application/json")
    return {} if value is None else {"Authorization": value}


def _counting(connections: Connections) -> TraceConfig:
    """Of those to engines."""

    async def made(*_: object) -> None:
        connections.made += 1

    trace = TraceConfig()
    trace.on_connection_create_end.append(made)
    return trace


async def _began(response: web.StreamResponse, request: web.Request) -> bool:
    """False: the client has gone."""
    try:
        await response.prepare(request)
    except ConnectionError:
        return False
    return True


async def _write(response: web.StreamResponse, data: bytes) -> bool:
    """False: the client has gone."""
    try:
        await response.write(data)
    except ConnectionError:
        return False
    return True


def _no_trajectory(id: str) -> web.Response:
    message = f"trajectory {id} is not under way: its turns name it in the field libra.trajectory"
    return refused(message, 404)
