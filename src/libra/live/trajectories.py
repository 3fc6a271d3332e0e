"""Trajectories in progress, assembled from their turns.

Invariant: the policy learns exactly the trajectory that happened. A turn counts when it is answered, and a tool return
is reported once, with the first turn placed after it. Lengths are tokens. Times are seconds of the event loop's clock,
except the start of a trajectory, which is wall-clock time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from libra.config.listeners import TRAJECTORIES
from libra.route.policy import ToolReturn, TurnRequest
from libra.trajectory import ToolStatus, Trajectory, Turn

UNKNOWN_TOOL = "unknown"


class ReturnReport(Protocol):
    """A tool return as reported by its trajectory's client."""

    @property
    def name(self) -> str:
        """Name of the tool."""

    @property
    def status(self) -> ToolStatus: ...

    @property
    def returned_tokens(self) -> int | None:
        """Tokens of the return; None: the growth of the prompt over the last context."""


@dataclass(frozen=True, slots=True)
class ToldReturn:
    """A `ReturnReport`. By default the tool is unknown."""

    name: str = UNKNOWN_TOOL
    status: ToolStatus = "unknown"
    returned_tokens: int | None = None


@dataclass(slots=True)
class _Live:
    prompt_id: str
    task: str
    prompt_tokens: int
    policy_version: int  # newest version at the start
    began: float  # wall-clock time
    touched: float
    turns: list[Turn] = field(default_factory=list)
    context: int = 0  # after the last answered turn
    generated: int | None = None  # tokens of the last answered turn; None once the next turn has begun
    in_flight: TurnRequest | None = None
    placed: bool = False  # whether the policy has seen the tool return before this turn


@dataclass(frozen=True, slots=True)
class LiveTrajectory:
    """The state of a trajectory in progress."""

    id: str
    task: str
    context: int
    turns: tuple[Turn, ...]  # answered
    in_flight: bool
    touched: float  # when its last turn began, or was answered


class Trajectories:
    """Call `begin` for each turn, `placed` after the policy's answer, then `answered` or `failed`. After the last turn
    call `whole` and `forget`.
    """

    def __init__(self, most: int = TRAJECTORIES, clock: Callable[[], float] = time.time) -> None:
        self.policy_version = 0  # the newest that a finished trajectory had
        self._live: dict[str, _Live] = {}  # least recently touched first
        self.most = most
        self._clock = clock

    def __len__(self) -> int:
        return len(self._live)

    def has_room(self, id: str) -> bool:
        """Whether a turn of this trajectory is within the limit of trajectories."""
        return len(self._live) < self.most or id in self._live

    def is_in_flight(self, id: str) -> bool:
        """Whether a turn of this trajectory is in flight."""
        live = self._live.get(id)
        return live is not None and live.in_flight is not None

    def answered_turns(self, id: str) -> int:
        """Number of answered turns of a trajectory; 0 for an unknown trajectory."""
        live = self._live.get(id)
        return 0 if live is None else len(live.turns) + (live.generated is not None)

    def begin(
        self, id: str, prompt_id: str, task: str, context: int, returned: ReturnReport | None, now: float
    ) -> tuple[TurnRequest, ToolReturn | None]:
        """Begin a turn; returns the turn and the previous tool return, for the policy. Raises ValueError while another
        turn of the trajectory is in flight.
        """
        live = self._live.pop(id, None)
        if live is None:
            live = _Live(prompt_id, task, context, self.policy_version, self._clock(), now)
        self._live[id] = live
        if live.in_flight is not None:
            raise ValueError(f"trajectory {id}: a turn is in flight: wait for its answer, or name another trajectory")
        if live.generated is not None:
            what = returned or ToldReturn()
            tokens = max(0, context - live.context) if what.returned_tokens is None else what.returned_tokens
            live.turns.append(Turn(live.generated, what.name, what.status, tokens, now - live.touched))
            live.generated, live.placed = None, False
        turn = TurnRequest(id, live.prompt_id, live.prompt_tokens, context, live.task)
        live.in_flight, live.touched = turn, now
        if not live.turns or live.placed:
            return turn, None
        last = live.turns[-1]
        assert last.tool is not None and last.status is not None
        return turn, ToolReturn(last.tool, last.status, last.returned_tokens)

    def placed(self, turn: TurnRequest) -> None:
        """Record that the policy has placed the turn."""
        if (live := self._of(turn)) is not None:
            live.placed = True

    def answered(self, turn: TurnRequest, context: int, generated: int, now: float) -> None:
        """Record that the turn was answered, with `context` prompt tokens and `generated` generated tokens."""
        if (live := self._of(turn)) is None:
            return
        self._live[turn.trajectory_id] = self._live.pop(turn.trajectory_id)
        if not live.turns:
            live.prompt_tokens = context
        live.context, live.generated, live.in_flight, live.touched = context + generated, generated, None, now

    def failed(self, turn: TurnRequest) -> None:
        """Record that the turn was not answered; it will begin again."""
        if (live := self._of(turn)) is not None:
            live.in_flight = None

    def latest(self, most: int) -> list[LiveTrajectory]:
        """Latest trajectories, by the time at which their last turn began or ended."""
        return [
            LiveTrajectory(
                id,
                live.task,
                live.context if live.in_flight is None else live.in_flight.context_tokens,
                (*live.turns, *(() if live.generated is None else (Turn(live.generated, None, None, 0),))),
                live.in_flight is not None,
                live.touched,
            )
            for id, live in islice(reversed(self._live.items()), most)
        ]

    def contexts(self) -> list[int]:
        """Present context of each trajectory."""
        return [it.context if it.in_flight is None else it.in_flight.context_tokens for it in self._live.values()]

    def _of(self, turn: TurnRequest) -> _Live | None:
        """The turn's trajectory; None if it has been forgotten, even if a trajectory of the same name has begun
        since.
        """
        live = self._live.get(turn.trajectory_id)
        return live if live is not None and live.in_flight is turn else None

    def whole(self, id: str, reward: float | None, policy_version: int) -> Trajectory:
        """The whole trajectory; call `forget` after storing it. Raises KeyError for an unknown trajectory, and
        ValueError if its last turn has no answer.
        """
        live = self._live[id]
        if live.generated is None:
            raise ValueError(f"trajectory {id}: its last turn has no answer; forget it, or wait for the answer")
        self.policy_version = max(self.policy_version, policy_version)
        return _trajectory(id, live, reward, policy_version, finished=True)

    def so_far(self, id: str) -> Trajectory | None:
        """The answered turns of a trajectory that ends early; None if the trajectory is unknown or has no answered
        turn.
        """
        live = self._live.get(id)
        if live is None or (live.generated is None and not live.turns):
            return None
        return _trajectory(id, live, None, live.policy_version, finished=False)

    def forget(self, id: str) -> bool:
        """Forget a trajectory; returns False for an unknown one."""
        return self._live.pop(id, None) is not None

    def idle_since(self, moment: float) -> Iterator[str]:
        """Trajectories without a turn in flight that have been idle since `moment`, longest idle first."""
        for id, live in list(self._live.items()):
            if live.touched > moment:
                return
            if live.in_flight is None:
                yield id


def _trajectory(id: str, live: _Live, reward: float | None, policy_version: int, finished: bool) -> Trajectory:
    last = () if live.generated is None else (Turn(live.generated, None, None, 0),)
    return Trajectory(
        id=id,
        prompt_id=live.prompt_id,
        task=live.task,
        prompt_tokens=live.prompt_tokens,
        turns=(*live.turns, *last),
        reward=reward,
        policy_version=policy_version,
        finished=finished,
        started_at=live.began,
    )
