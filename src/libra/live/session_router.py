"""Chooses servers for turns that the caller sends itself, as inside a trainer.

Invariant: a server's load is the total context of its unreleased turns. A repeated request for an unanswered turn is
the same turn. The policy learns from a trajectory only once, when it is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from libra.live.pace import Pace
from libra.live.server import LiveServer, ServerPaces
from libra.live.trajectories import ToldReturn, Trajectories
from libra.live.work import HeldTurn, Took
from libra.route.loads import IndexedFleet
from libra.route.policy import Placement, Policy, ToolReturn, TurnRequest
from libra.trajectory import ToolStatus, Trajectory

IDLE_SECONDS = 3600.0  # seconds after which a trajectory without turns is forgotten
_EXPIRE_SECONDS = 60.0  # seconds between two searches for such trajectories


@dataclass(slots=True)
class _Told:
    """Facts about a trajectory from its caller, and its unreleased turns."""

    prompt: str
    touched: float
    task: str = ""
    turn: TurnRequest | None = None  # the unanswered turn
    returned: ToldReturn | None = None  # since the last answer
    held: list[tuple[LiveServer, HeldTurn]] = field(default_factory=list)  # turns that are not released
    released: tuple[LiveServer, Took] | None = None  # the latest, until its answer is known


class SessionRouter:
    """Call `acquire` for each turn, and `release` when its server has answered or failed, or the turn was abandoned. A
    caller with more information also calls `began`, `answered`, `returned` and `finished`. Without these calls, the
    policy learns nothing and places turns by prefixes and loads. Times are seconds of `clock`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        capacity_tokens: int,
        turn_tokens: int,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a router. Each server has room for contexts of `capacity_tokens`; a turn needs `turn_tokens` beyond
        its context.
        """
        self._policy = policy
        self._capacity, self._turn_tokens = capacity_tokens, turn_tokens
        self._idle_seconds, self._clock = idle_seconds, clock
        self._servers: dict[str, LiveServer] = {}
        self._paces = ServerPaces()
        self._live = Trajectories()
        self._told: dict[str, _Told] = {}
        self._expire_at = clock() + _EXPIRE_SECONDS
        self._refresh()

    def __len__(self) -> int:
        """Number of trajectories in progress."""
        return len(self._told)

    @property
    def servers(self) -> tuple[LiveServer, ...]:
        return self._fleet.instances

    @property
    def in_flight(self) -> dict[str, int]:
        """Number of unreleased turns by server."""
        turns = dict.fromkeys(self._servers, 0)
        for told in self._told.values():
            for server, _ in told.held:
                if self._servers.get(server.id) is server:
                    turns[server.id] += 1
        return turns

    def add(self, ids: Iterable[str]) -> None:
        """Put servers into service. Servers that are already present stay unchanged."""
        for id in ids:
            if id not in self._servers:
                self._servers[id] = LiveServer(id, 0, self._capacity, Pace(like=self._paces.of_kind(0)), self._clock)
        self._refresh()

    def remove(self, ids: Iterable[str]) -> None:
        """Send these servers no more turns; their prefixes are lost. Unknown servers are ignored."""
        for id in ids:
            if self._servers.pop(id, None) is not None:
                self._policy.instance_gone(id)
        self._refresh()

    def prefixes_lost(self) -> None:
        """Record that all prefixes are lost, as after new weights; turns may go to any server."""
        for id in self._servers:
            self._policy.instance_gone(id)

    def acquire(self, id: str, context: int) -> str:
        """The server of a trajectory's next turn, or again of its present turn, with `context` tokens. If no server has
        room, this is the least loaded one. Raises LookupError if no server is in service.
        """
        if not self._servers:
            raise LookupError("no server is available: add one")
        now = self._clock()
        if now >= self._expire_at:
            self._expire(now)
        told = self._told.get(id)
        if told is None:
            told = self._told[id] = _Told(id, now)
        told.touched = now
        if told.turn is not None:
            self._live.failed(told.turn)
        turn, returned = self._live.begin(id, told.prompt, told.task, context, told.returned, now)
        told.turn, told.returned = turn, None
        placed = self._place(turn, returned)
        self._live.placed(turn)
        chosen = self._least_loaded() if placed is None else placed.instance
        server = self._servers[chosen]
        told.held.append((server, server.begun(context)))
        return server.id

    def release(self, server: str, id: str) -> None:
        """Remove a turn from its server. Ignored if the server does not have the turn."""
        if (told := self._told.get(id)) is None:
            return
        told.touched = self._clock()
        for index, (at, held) in enumerate(told.held):
            if at.id == server:
                told.released = at, at.ended(held)
                del told.held[index]
                return

    def began(self, id: str, prompt: str, task: str = "") -> None:
        """Set the prompt that a trajectory shares with others, and the kind of prompt. Call this before the first
        turn.
        """
        self._told[id] = _Told(prompt, self._clock(), task)

    def answered(self, id: str, context: int, generated: int) -> None:
        """Note an answered turn, with `context` prompt tokens and `generated` generated tokens. Ignored if no turn was
        requested.
        """
        told = self._told.get(id)
        if told is not None and told.turn is not None:
            self._live.answered(told.turn, context, generated, self._clock())
            told.turn = None
            if told.released is not None:
                (server, took), told.released = told.released, None
                if self._paces.observe(server, generated, took, self._servers.values()):
                    self._refresh()

    def returned(self, id: str, tool: str, status: ToolStatus) -> None:
        """Note a tool return after the last answer. The next turn's context gives its tokens."""
        if (told := self._told.get(id)) is not None:
            told.returned = ToldReturn(tool, status)

    def finished(self, id: str, reward: float | None, policy_version: int) -> Trajectory | None:
        """End a trajectory; the policy learns from it. Returns the whole trajectory; None, without learning, if its
        last turn has no answer.
        """
        try:
            trajectory = self._live.whole(id, reward, policy_version)
        except (KeyError, ValueError):
            self.forget(id)
            return None
        self._drop(id)
        self._policy.finished(trajectory)
        return trajectory

    def forget(self, id: str) -> None:
        """Drop a trajectory and its unreleased turns without learning."""
        self._drop(id)
        self._policy.forget(id)

    def _place(self, turn: TurnRequest, returned: ToolReturn | None) -> Placement | None:
        if returned is None:
            return self._policy.place(turn, self._fleet)
        return self._policy.tool_returned(turn, returned, self._fleet)

    def _least_loaded(self) -> str:
        least = self._fleet.loads(0).least_in(0)
        assert least is not None  # there are servers
        return least[1].id

    def _drop(self, id: str) -> None:
        self._live.forget(id)
        told = self._told.pop(id, None)
        for server, held in () if told is None else told.held:
            server.ended(held)

    def _expire(self, now: float) -> None:
        """Forget trajectories that have had no turn for long; their callers may not report ends."""
        self._expire_at = now + _EXPIRE_SECONDS
        since = now - self._idle_seconds
        for id in [id for id, told in self._told.items() if told.touched <= since and not told.held]:
            self.forget(id)

    def _refresh(self) -> None:
        self._fleet = IndexedFleet(tuple(self._servers.values()), (self._capacity,), self._turn_tokens)
