"""Watchers of a gateway's turns: its live page, and spans.

Invariant: a watcher changes no answer and no placement. A gateway without one has a plain `Watcher`, which does
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from aiohttp import web

from libra.route.policy import Placement, ToolReturn, TurnRequest
from libra.serve.gateway.formats import TurnFormat
from libra.serve.gateway.sessions import TurnSession
from libra.serve.gateway.turn_bodies import TurnBody
from libra.serve.gateway.upstreams import TurnFailure, Upstream
from libra.serve.gateway.usage import AnswerReader, SaidReader, Usage
from libra.trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class RoutedTurn:
    """A turn on its way."""

    request: web.Request
    format: TurnFormat
    body: TurnBody
    raw: bytes  # the body as it came
    session: TurnSession
    needed: TurnRequest
    returned: ToolReturn | None  # before it, if the policy has not seen that yet
    room: int  # tokens beyond its context
    wants_usage: bool  # whether the client wants a stream's usage event

    def reader(self) -> AnswerReader:
        """A reader of one answer."""
        reader = self.format.reader(self.body)
        return reader if self.session.history is None else SaidReader(reader)


UNCOUNTED = "uncounted"  # trouble of a turn whose client has left, or whose engine reported no tokens


class End(StrEnum):
    """Ends of trajectories."""

    FINISHED = "finished"
    FORGOTTEN = "forgotten"
    GIVEN_UP = "given up"


class Watcher:
    """Follows each turn: `begun`, `placed` and possibly `failed` for each engine, then `ended`; and `closed` for each
    trajectory that ends."""

    def begun(self, turn: RoutedTurn) -> None:
        """A turn has come."""

    def placed(self, turn: RoutedTurn, engine: Upstream, placement: Placement) -> None:
        """The policy has chosen an engine."""

    def headers(self, turn: RoutedTurn) -> Mapping[str, str]:
        """Headers for the engine, added to the client's or replacing them."""
        return {}

    def failed(self, turn: RoutedTurn, engine: Upstream, failure: TurnFailure) -> None:
        """The engine has not served the turn, which may be tried on another."""

    def ended(self, turn: RoutedTurn, usage: Usage | None, trouble: str) -> None:
        """The turn is over. `usage`: None without a counted answer; `trouble` is then the reason, as one word."""

    def closed(self, id: str, end: End, trajectory: Trajectory | None) -> None:
        """A trajectory has ended, or a turn without a trajectory. `trajectory`: None if nothing is known of it."""


class Watchers(Watcher):
    """Several watchers."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = tuple(watchers)

    def begun(self, turn: RoutedTurn) -> None:
        for each in self._watchers:
            each.begun(turn)

    def placed(self, turn: RoutedTurn, engine: Upstream, placement: Placement) -> None:
        for each in self._watchers:
            each.placed(turn, engine, placement)

    def headers(self, turn: RoutedTurn) -> Mapping[str, str]:
        return {name: value for each in self._watchers for name, value in each.headers(turn).items()}

    def failed(self, turn: RoutedTurn, engine: Upstream, failure: TurnFailure) -> None:
        for each in self._watchers:
            each.failed(turn, engine, failure)

    def ended(self, turn: RoutedTurn, usage: Usage | None, trouble: str) -> None:
        for each in self._watchers:
            each.ended(turn, usage, trouble)

    def closed(self, id: str, end: End, trajectory: Trajectory | None) -> None:
        for each in self._watchers:
            each.closed(id, end, trajectory)


def watched_by(watchers: Sequence[Watcher]) -> Watcher:
    """All watchers as one."""
    return watchers[0] if len(watchers) == 1 else Watchers(watchers) if watchers else Watcher()
