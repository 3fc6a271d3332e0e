"""Trajectories that are under way, as told by the turns that pass.

Invariant: what the policy is told of a trajectory is what happened to it: a turn counts once it has been answered, and
a tool return is told once, with the first turn after it. Lengths are tokens, times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from libra.route.policy import Request, ToolReturn
from libra.trajectory import ToolStatus, Trajectory, Turn

UNKNOWN_TOOL = "unknown"


@dataclass(frozen=True, slots=True)
class ReportedReturn:
    """What a client says of the tool whose return is in a turn's prompt."""

    tool: str = UNKNOWN_TOOL
    status: ToolStatus = "unknown"
    tokens: int | None = None  # None: as many as the prompt has more than the context had


@dataclass(slots=True)
class _Live:
    prompt_id: str
    task: str
    prompt_tokens: int
    began: float
    touched: float
    turns: list[Turn] = field(default_factory=list)
    context: int = 0  # at the end of the last turn that was answered
    generated: int | None = None  # of that turn, until what followed it is known
    asked: int | None = None  # context of the turn that is under way
    told: bool = False  # the policy knows of the return before that one


class Trajectories:
    """Told of each turn `begin`, then `told` once the policy was asked of it, then `ended` or `failed`; `finish` or
    `forget` when there are no more."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}  # the one that was touched last comes last

    def __len__(self) -> int:
        return len(self._live)

    def begin(
        self, id: str, prompt_id: str, task: str, context: int, returned: ReportedReturn | None, now: float
    ) -> tuple[Request, ToolReturn | None]:
        """The turn as the policy is asked of it. Raises ValueError while another one of the trajectory is under way."""
        live = self._live.pop(id, None)
        if live is None:
            live = _Live(prompt_id, task, context, now, now)
        self._live[id] = live
        if live.asked is not None:
            raise ValueError(f"trajectory {id}: a turn is under way: wait for its answer, or name another trajectory")
        if live.generated is not None:
            what = returned or ReportedReturn()
            tokens = max(0, context - live.context) if what.tokens is None else what.tokens
            live.turns.append(Turn(live.generated, what.tool, what.status, tokens, now - live.touched))
            live.generated, live.told = None, False
        live.asked, live.touched = context, now
        request = Request(id, live.prompt_id, live.prompt_tokens, context, live.task)
        if not live.turns or live.told:
            return request, None
        last = live.turns[-1]
        assert last.tool is not None and last.status is not None
        return request, ToolReturn(last.tool, last.status, last.returned_tokens)

    def told(self, id: str) -> None:
        """The policy has been asked."""
        if id in self._live:
            self._live[id].told = True

    def ended(self, id: str, context: int, generated: int, now: float) -> None:
        """It was answered: with so many tokens, after a context of so many."""
        live = self._live.pop(id, None)
        if live is None:  # forgotten meanwhile
            return
        self._live[id] = live
        if not live.turns:
            live.prompt_tokens = context
        live.context, live.generated, live.asked, live.touched = context + generated, generated, None, now

    def failed(self, id: str) -> None:
        """It was not answered. The next turn is this one, asked again."""
        if id in self._live:
            self._live[id].asked = None

    def finish(self, id: str, reward: float | None, policy_version: int) -> Trajectory:
        """All of it. Raises KeyError for one that is not under way, ValueError where no turn has been answered."""
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
        """False: it was not under way."""
        return self._live.pop(id, None) is not None

    def idle_since(self, moment: float) -> Iterator[str]:
        """Those that nothing has happened to since then, the longest first."""
        for id, live in list(self._live.items()):
            if live.touched > moment:
                return
            if live.asked is None:
                yield id
