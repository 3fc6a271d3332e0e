"""The path of a turn through the gateway: to its trajectory, to the policy's engine, and back.

Invariant: a turn may be retried on another engine until its answer begins to reach the client, and it is counted once.
The policy is called from one event loop, so its calls are ordered.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from libra.config.listeners import GATEWAY
from libra.live.trajectories import Trajectories
from libra.route.custom import PolicyError
from libra.route.policy import Placement, Policy, ToolReturn
from libra.serve.answers import RefusedRequest, refused
from libra.serve.bodies import body_of
from libra.serve.gateway.config import GatewayConfig
from libra.serve.gateway.counts import Counts
from libra.serve.gateway.ends import TrajectoryEnds
from libra.serve.gateway.engine_client import EngineClient
from libra.serve.gateway.formats import TurnFormat
from libra.serve.gateway.health import RECHECK_SECONDS, HealthMonitor
from libra.serve.gateway.loops import VIA
from libra.serve.gateway.relay import Relayed, relay
from libra.serve.gateway.sessions import Sessions, TurnSession
from libra.serve.gateway.traced import passed_on
from libra.serve.gateway.turn_bodies import with_field
from libra.serve.gateway.upstreams import STRIKES, Attempt, Fault, TurnFailure, Upstream, Upstreams
from libra.serve.gateway.watcher import UNCOUNTED, RoutedTurn, Watcher

RETRY_AFTER = {"Retry-After": f"{RECHECK_SECONDS:.0f}"}


class UnavailableError(RefusedRequest):
    """No engine took the turn in time."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 503, RETRY_AFTER)


@dataclass(slots=True)
class Turns:
    """Serves turns of every format."""

    config: GatewayConfig
    policy: Policy
    upstreams: Upstreams
    trajectories: Trajectories
    sessions: Sessions
    ends: TrajectoryEnds
    counts: Counts
    health: HealthMonitor
    client: EngineClient
    mark_lost: Callable[[Upstream, str], None]  # called to take an engine out of service, with the problem
    watcher: Watcher
    guarded: bool  # whether the clients' Authorization header has the gateway's own token

    async def serve(self, format: TurnFormat, request: web.Request) -> web.StreamResponse:
        raw = await body_of(request, GATEWAY.body_most(self.upstreams.longest))
        if not self.upstreams.longest:
            raise UnavailableError("no engine is in service: see GET /engines")
        try:
            turn = self._begun(format, request, raw)
        except ValueError as error:
            return refused(str(error), 400)
        relayed: Relayed | None = None
        try:
            self.watcher.begun(turn)
            relayed = await self._route(turn)
            assert relayed.response is not None
            return relayed.response
        finally:
            self._ended(turn, relayed)

    def _begun(self, format: TurnFormat, request: web.Request, raw: bytes) -> RoutedTurn:
        """Parse and admit a turn. Raises `ValueError` for a request that must not reach an engine."""
        body = format.read(raw)
        context, room = body.needs(self.upstreams.longest, self.config.turn_tokens)
        wants_usage = format.asks_usage and body.wants_usage
        session = self._admitted(self.sessions.of(format, request.headers, body))
        field, now = session.field, asyncio.get_running_loop().time()
        id, prompt = field.trajectory, field.trajectory if field.prompt is None else field.prompt
        needed, returned = self.trajectories.begin(id, prompt, field.task, context, field.tool, now)
        return RoutedTurn(request, format, body, raw, session, needed, returned, room, wants_usage)

    def _admitted(self, session: TurnSession) -> TurnSession:
        """The session, or a new session if the turn cannot belong to it. Raises `RefusedRequest` if there are too many
        trajectories to begin another."""
        id = session.field.trajectory
        if not session.strict and self.trajectories.is_in_flight(id):
            return self.sessions.lone()
        if session.lone or self.trajectories.has_room(id):
            return session
        if session.history is not None:  # without a name, a next turn of this session does not need to find it
            return self.sessions.lone()
        raise RefusedRequest("too many trajectories in progress: finish or forget some", 429, RETRY_AFTER)

    def _ended(self, turn: RoutedTurn, relayed: Relayed | None) -> None:
        id, usage, said = turn.needed.trajectory_id, None, None
        if relayed is not None:
            usage, said = relayed.usage, relayed.said
        self.watcher.ended(turn, usage, "" if usage is not None else _trouble(relayed))
        if usage is None:
            self.trajectories.failed(turn.needed)
        else:
            self.trajectories.answered(turn.needed, *usage, asyncio.get_running_loop().time())
            self.counts.answered(usage)
        if turn.session.lone:
            self.ends.forget(id)
        else:
            self.ends.turn_over(id)
        for each in self.sessions.ended(turn.session, None if usage is None else said):
            self.ends.expire(each)

    async def _route(self, turn: RoutedTurn) -> Relayed:
        """Try engines, `max_attempts` at most, until one answers."""
        raw, body, returned = turn.raw, turn.body, turn.returned
        if turn.format.asks_usage and body.stream and not turn.wants_usage:
            raw = with_field(raw, "stream_options", body.with_usage)
        lost: TurnFailure | None = None
        answer: web.Response | None = None  # the latest error response of an engine to this turn
        refusing: list[Upstream] = []  # engines that are full, or answered with an error
        failing: list[Upstream] = []  # engines among them that answered with an error
        for number in range(self.config.max_attempts):
            try:
                placement = await self._place(turn, returned, refusing)
            except UnavailableError as error:
                if answer is not None:
                    return Relayed(answer)
                if lost is None:
                    raise
                raise UnavailableError(f"{error}; the last attempt: {lost.message}") from None
            returned = None  # the policy gets it only once
            self.counts.retries += number > 0
            engine = self._chosen(placement)
            self.watcher.placed(turn, engine, placement)
            sent = raw
            if self.config.priorities and not body.has_priority:
                sent = with_field(raw, "priority", b"%d" % placement.priority)
            relayed = await self._relay(turn, engine, sent)
            if relayed.failure is None:
                assert relayed.response is not None
                if relayed.response.status < 400:
                    self._blame(engine, failing)
                return relayed
            self.watcher.failed(turn, engine, relayed.failure)
            self._judge(engine, relayed.failure)
            if relayed.response is not None:
                return relayed
            lost = relayed.failure
            answer = lost.answer or answer
            if lost.fault is not Fault.GONE:
                refusing.append(engine)
            if lost.fault is Fault.ERROR:
                failing.append(engine)
        if answer is not None:
            return Relayed(answer)
        assert lost is not None
        raise UnavailableError(f"tried on {self.config.max_attempts} engines, each of which failed: {lost.message}")

    def _chosen(self, placement: Placement) -> Upstream:
        engine = self.upstreams.all.get(placement.instance)
        if engine is None:
            raise PolicyError(
                f"policy {self.config.route}: its choice {placement.instance!r:.80} is not an engine; see GET /engines"
            )
        return engine

    async def _relay(self, turn: RoutedTurn, engine: Upstream, body: bytes) -> Relayed:
        attempt = Attempt(self.upstreams, engine, turn.needed.context_tokens)
        own = engine.authorization(None if self.guarded else turn.request)
        headers = {VIA: self.client.mark, **passed_on(turn.request), **self.watcher.headers(turn), **own}
        relayed = await relay(
            self.client.connections,
            turn.request,
            turn.format.path,
            headers,
            attempt,
            body,
            turn.reader(),
            stream=bool(turn.body.stream),
        )
        if relayed.usage is not None:
            _, generated = relayed.usage
            self.upstreams.answered(attempt, generated)
        return relayed

    def _judge(self, engine: Upstream, failure: TurnFailure) -> None:
        """Take an engine out of service if it is lost. Have its health checked if it answered with an error or is
        full."""
        if failure.fault is Fault.GONE:
            self.mark_lost(engine, failure.message)
        elif failure.fault is not Fault.SILENT:
            self.health.doubt(engine)

    def _blame(self, engine: Upstream, failing: list[Upstream]) -> None:
        """Count a failure of each of the `failing` engines, since `engine` served the turn that they failed. A turn
        that no engine serves is not counted, since the turn itself may be the cause."""
        engine.served()
        for other in failing:
            if other.strike():
                self.mark_lost(other, f"it failed {STRIKES} turns in sequence that other engines served")

    async def _place(self, turn: RoutedTurn, returned: ToolReturn | None, refusing: list[Upstream]) -> Placement:
        until = asyncio.get_running_loop().time() + self.config.wait_seconds
        while True:
            fleet = self.upstreams.fleet(turn.room, refusing)
            if returned is None:
                placement = self.policy.place(turn.needed, fleet)
            else:
                placement = self.policy.tool_returned(turn.needed, returned, fleet)
                returned = None
            self.trajectories.placed(turn.needed)
            if placement is not None:
                self.counts.placements += 1
                self.counts.migrations += placement.migrated
                return placement
            if refusing:
                raise UnavailableError("no other engine in service has room for the turn")
            try:
                async with asyncio.timeout_at(until):
                    await self.upstreams.changed()
            except TimeoutError:
                raise UnavailableError(self._unavailable(turn.needed.context_tokens + turn.room)) from None

    def _unavailable(self, needed: int) -> str:
        if not self.upstreams.instances:
            return "no engine is healthy: see GET /engines"
        longest = max(engine.capacity_tokens for engine in self.upstreams.instances)
        return (
            f"no engine took the turn in {self.config.wait_seconds:g} s: it needs {needed} tokens, and the longest"
            f" context of a healthy engine is {longest}"
        )


def _trouble(relayed: Relayed | None) -> str:
    """Reason why a turn was not counted, in one word."""
    if relayed is None:
        error = sys.exception()
        return "no error" if error is None else type(error).__name__
    if relayed.failure is not None:
        return relayed.failure.fault.name.lower()
    status = relayed.response.status if relayed.response is not None else 0
    return str(status) if status >= 400 else UNCOUNTED
