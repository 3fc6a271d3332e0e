"""Trajectories in progress, reconstructed from the turns that pass.

Invariant: what the policy learns of a trajectory is what happened to it. A turn counts once it has been answered, and a
tool return is reported once, with the first turn placed after it. Lengths are tokens, times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from libra.route.policy import ToolReturn, TurnRequest
from libra.trajectory import ToolStatus, Trajectory, Turn

UNKNOWN_TOOL = "unknown"


@dataclass(frozen=True, slots=True)
class ReportedReturn:
    """The tool return at the end of a turn's prompt, as the client describes it."""

    tool: str = UNKNOWN_TOOL
    status: ToolStatus = "unknown"
    tokens: int | None = None  # None: the growth of the prompt over the last context


@dataclass(slots=True)
class _Live:
    prompt_id: str
    task: str
    prompt_tokens: int
    began: float
    touched: float
    turns: list[Turn] = field(default_factory=list)
    context: int = 0  # after the last answered turn
    generated: int | None = None  # by that turn, until the next one says what followed it
    in_flight: TurnRequest | None = None
    placed: bool = False  # the policy has seen the tool return before that one


class Trajectories:
    """Call `begin` for each turn, `placed` once the policy has been asked, then `answered` or `failed`; after the last
    turn `finish` or `forget`."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}  # least recently touched first

    def __len__(self) -> int:
        return len(self._live)

    def begin(
        self, id: str, prompt_id: str, task: str, context: int, returned: ReportedReturn | None, now: float
    ) -> tuple[TurnRequest, ToolReturn | None]:
        """The turn and the tool return before it, as the policy is to be asked. Raises ValueError while another turn
        of the trajectory is in flight."""
        live = self._live.pop(id, None)
        if live is None:
            live = _Live(prompt_id, task, context, now, now)
        self._live[id] = live
        if live.in_flight is not None:
            raise ValueError(f"trajectory {id}: a turn is in flight: wait for its answer, or name another trajectory")
        if live.generated is not None:
            what = returned or ReportedReturn()
            tokens = max(0, context - live.context) if what.tokens is None else what.tokens
            live.turns.append(Turn(live.generated, what.tool, what.status, tokens, now - live.touched))
            live.generated, live.placed = None, False
        turn = TurnRequest(id, live.prompt_id, live.prompt_tokens, context, live.task)
        live.in_flight, live.touched = turn, now
        if not live.turns or live.placed:
            return turn, None
        last = live.turns[-1]
        assert last.tool is not None and last.status is not None
        return turn, ToolReturn(last.tool, last.status, last.returned_tokens)

    def placed(self, turn: TurnRequest) -> None:
        """The policy has been asked."""
        if (live := self._of(turn)) is not None:
            live.placed = True

    def answered(self, turn: TurnRequest, context: int, generated: int, now: float) -> None:
        """The engine counted `context` prompt tokens and generated `generated`."""
        if (live := self._of(turn)) is None:
            return
        self._live[turn.trajectory_id] = self._live.pop(turn.trajectory_id)
        if not live.turns:
            live.prompt_tokens = context
        live.context, live.generated, live.in_flight, live.touched = context + generated, generated, None, now

    def failed(self, turn: TurnRequest) -> None:
        """It was not answered: the next turn is this one, asked again."""
        if (live := self._of(turn)) is not None:
            live.in_flight = None

    def _of(self, turn: TurnRequest) -> _Live | None:
        """None: its trajectory has been forgotten, even if another one of the same name has begun."""
        live = self._live.get(turn.trajectory_id)
        return live if live is not None and live.in_flight is turn else None

    def finish(self, id: str, reward: float | None, policy_version: int) -> Trajectory:
        """The whole trajectory. Raises KeyError for an unknown one, ValueError where the last turn has no answer."""
        live = self._live[id]
        if live.generated is None:
            raise ValueError(f"trajectory {id}: its last turn has no answer; forget it, or wait for the answer")
        trajectory = Trajectory(
            id=id,
            prompt_id=live.prompt_id,
            task=live.task,
            prompt_tokens=live.prompt_tokens,
            turns=(*live.turns, Turn(live.generated, None, None, 0)),
            reward=reward,
            policy_version=policy_version,
            finished=True,
            started_at=live.began,
        )
        del self._live[id]
        return trajectory

    def forget(self, id: str) -> bool:
        """False: it is unknown."""
        return self._live.pop(id, None) is not None

    def idle_since(self, moment: float) -> Iterator[str]:
        """Trajectories untouched since `moment` and without a turn in flight, the longest idle first."""
        for id, live in list(self._live.items()):
            if live.touched > moment:
                return
            if live.in_flight is None:
                yield id
