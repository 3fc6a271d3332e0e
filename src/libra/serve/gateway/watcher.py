"""Observers of a gateway's turns, such as its live page and spans.

Invariant: a watcher changes no answer and no placement. A gateway without watchers has a plain `Watcher`, which does
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
    """A turn in progress at the gateway."""

    request: web.Request
    format: TurnFormat
    body: TurnBody
    raw: bytes  # the body as the client sent it
    session: TurnSession
    needed: TurnRequest
    returned: ToolReturn | None  # the tool return before the turn, if the policy has not seen it yet
    room: int  # tokens beyond the context
    wants_usage: bool  # whether the client wants a stream's usage event

    def reader(self) -> AnswerReader:
        """A reader of one answer."""
        reader = self.format.reader(self.body)
        return reader if self.session.history is None else SaidReader(reader)


UNCOUNTED = "uncounted"  # reason of a turn whose client has left, or whose engine reported no tokens


class End(StrEnum):
    """Ways in which a trajectory ends."""

    FINISHED = "finished"
    FORGOTTEN = "forgotten"
    GIVEN_UP = "given up"


class Watcher:
    """Follows each turn: `begun`, then `placed` and possibly `failed` for each engine, then `ended`. `closed` is called
    for each trajectory that ends."""

    def begun(self, turn: RoutedTurn) -> None:
        """Called when a turn has arrived."""

    def placed(self, turn: RoutedTurn, engine: Upstream, placement: Placement) -> None:
        """Called when the policy has chosen an engine."""

    def headers(self, turn: RoutedTurn) -> Mapping[str, str]:
        """Headers for the engine, in addition to the client's or replacing them."""
        return {}

    def failed(self, turn: RoutedTurn, engine: Upstream, failure: TurnFailure) -> None:
        """Called when the engine has failed the turn; another engine may serve it."""

    def ended(self, turn: RoutedTurn, usage: Usage | None, trouble: str) -> None:
        """Called when the turn is over. `usage` is None without a counted answer; `trouble` is then the reason, in one
        word."""

    def closed(self, id: str, end: End, trajectory: Trajectory | None) -> None:
        """Called when a trajectory has ended, or a turn that belongs to no trajectory. `trajectory` is None if nothing
        is known about it."""


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
    """One watcher that calls all `watchers`."""
    return watchers[0] if len(watchers) == 1 else Watchers(watchers) if watchers else Watcher()
