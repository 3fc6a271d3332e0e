"""Generates turns on the fleet of a run, and makes episodes of them.

Invariant: tokens in, tokens out. Generated tokens enter an episode as the ids that an engine sampled, with their
log-probs and weight versions; no code decodes and encodes them again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from libra.backends.vllm.kv_handover import ContextMove
from libra.loop.episode import Episode
from libra.loop.fleet import ServingFleet
from libra.loop.running_turn import Draft, RunningTurn
from libra.route.policy import Placement, ToolReturn
from libra.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One engine's part of a turn, for the timeline and the routing log."""

    trajectory: str
    worker: str
    tokens: int
    seconds: float  # at the engine, including its queue
    placement: Placement
    change: ContextMove | None  # the move of the context to this engine, before its part


class RolloutObserver(Protocol):
    """Observer of the turns and tool calls of episodes."""

    def turn(self, report: TurnReport) -> None:
        """Called when an engine's part in a turn ends."""
        ...

    def turns(self, worker: str, change: int) -> None:
        """Called when the number of turns at an engine changes by `change`."""
        ...

    def tools(self, worker: str, change: int) -> None:
        """Called when the number of episodes that wait for a tool, and whose last turn this engine served, changes by
        `change`."""
        ...


class TurnMaker:
    """Makes the turns of one task, each on one engine or on several in sequence."""

    def __init__(self, task: str, stop_token: int, fleet: ServingFleet, observer: RolloutObserver) -> None:
        self.fleet, self.observer = fleet, observer
        self._task, self._stop_token = task, stop_token
        self._requests = 0
        self.generated_tokens = 0

    async def make(self, draft: Draft, most_tokens: int, returned: ToolReturn | None) -> list[int]:
        """Generate the next turn into `draft`; returns its tokens. It ends with the stop token or after
        `most_tokens`."""
        start = len(draft.tokens)
        turn = RunningTurn(draft, self._task, self.fleet, most_tokens, self._stop_token, returned)
        while True:
            placement = turn.place()
            if placement is None:
                await self.fleet.changed()
                continue
            self._requests += 1
            began, before = time.monotonic(), len(draft.tokens)
            draft.engine = placement.instance
            self.observer.turns(draft.engine, 1)
            try:
                await turn.serve(placement, f"{draft.asked.id}/{len(draft.turns)}#{self._requests}")
            finally:
                self.observer.turns(draft.engine, -1)
            tokens = len(draft.tokens) - before
            self.generated_tokens += tokens
            seconds = time.monotonic() - began
            self.observer.turn(TurnReport(draft.asked.id, placement.instance, tokens, seconds, placement, turn.change))
            if turn.over:
                draft.buckets.append(placement.bucket)
                return draft.tokens[start:]

    def finish(self, draft: Draft, reward: float, branches: tuple[Episode, ...] = ()) -> Episode:
        """Complete the episode of `draft`, and have the policy learn from it."""
        trajectory = Trajectory(
            id=draft.asked.id,
            prompt_id=draft.asked.prompt.id,
            task=self._task,
            prompt_tokens=draft.prompt_tokens,
            turns=tuple(draft.turns),
            reward=reward,
            policy_version=min(version for version in draft.versions if version >= 0),
            finished=True,
            started_at=draft.started_at,
        )
        self.fleet.policy.finished(trajectory)
        buckets = tuple(draft.buckets)
        return Episode(
            trajectory, draft.tokens, draft.generated, draft.logprobs, draft.versions, reward, buckets, branches
        )
