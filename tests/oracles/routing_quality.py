"""Quality of routing: the share of trajectories that a policy sends where they fit, in a replay of known lengths.

Invariant: a policy learns a trajectory only after its last turn was placed. Policies that are compared see the same
trajectories, turns and fleet in the same order. Nothing is generated, so no load changes and no time passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.route.bucket import bucket_of
from libra.route.policy import Fleet, InstanceView, Placement, Policy, ToolReturn, TurnRequest, View
from libra.trajectory import Trajectory


class Outcome(NamedTuple):
    """Routing of one trajectory, in numbers."""

    bucket: int  # of the true final context, the most tokens that the trajectory ever has
    single_shot: bool  # in this bucket after the first tool return, or, without a return, at the first placement
    moves: int  # placements on another instance than before
    moved_tokens: int  # context tokens at these placements
    tokens: int  # context tokens at all placements, plus generated tokens


_COLUMNS = np.dtype([(name, np.bool_ if name == "single_shot" else np.int64) for name in Outcome._fields])


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """The outcomes of a replay, a row for each trajectory counted, and measures over them."""

    ids: tuple[str, ...]
    outcomes: NDArray[np.void]  # a column for each field of `Outcome`

    @property
    def single_shot_accuracy(self) -> float:
        """Share of trajectories that were in the bucket of their true final context after their first tool return. A
        trajectory without a tool return counts by its first placement."""
        return float(self.outcomes["single_shot"].mean())

    @property
    def majority_rate(self) -> float:
        """Share of trajectories in the most frequent true bucket: the accuracy of a policy that sends all there."""
        return float(np.bincount(self.outcomes["bucket"]).max() / len(self.outcomes))

    @property
    def balanced_accuracy(self) -> float:
        """Single-shot accuracy within each true bucket that occurs, averaged over these buckets. It is one over their
        number for a policy that sends all trajectories to one bucket."""
        bucket = self.outcomes["bucket"]
        of_bucket = np.bincount(bucket)
        right = np.bincount(bucket, self.outcomes["single_shot"])
        return float((right[of_bucket > 0] / of_bucket[of_bucket > 0]).mean())

    @property
    def migrated_share(self) -> float:
        """Context tokens of moves to another instance, as a share of the context tokens of all placements plus all
        generated tokens. It is the share of the engines' tokens that migrations move or recompute. In the middle of a
        turn, the turn's generated tokens are in the context."""
        return float(self.outcomes["moved_tokens"].sum() / self.outcomes["tokens"].sum())

    @property
    def moves(self) -> float:
        """Placements on another instance than before, per trajectory."""
        return float(self.outcomes["moves"].mean())


def static_fleet(limits: Sequence[int], *, turn_tokens: int, instances: int = 1) -> View:
    """A fleet of `instances` idle instances per bucket. Each has room for its bucket's limit and one more turn."""
    if instances < 1:
        raise ValueError(f"instances is {instances}; a bucket needs 1 or more")
    return View(
        tuple(
            InstanceView(f"{bucket}-{number}", bucket, limit + turn_tokens, 0)
            for bucket, limit in enumerate(limits)
            for number in range(instances)
        ),
        tuple(limits),
        turn_tokens,
    )


def evaluate(
    policy: Policy, trajectories: Sequence[Trajectory], fleet: Fleet, *, batch: int = 1, warm_up: int = 0
) -> Quality:
    """Replay finished trajectories through a policy, in the order given, and count where it placed them.

    `batch` trajectories run at a time. Each makes one turn per round, and the policy learns it as soon as its last turn
    was placed; the next batch starts when all have ended. The first `warm_up` trajectories are replayed and learned,
    but not counted. If a turn generates more than its placement's `ask_again`, `bucket_overrun` is called.

    Raises ValueError if a trajectory is unfinished or occurs twice, if a turn fits no instance, or if the policy's
    `ask_again` is not beyond the generated tokens.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}; it is a number of trajectories that run at a time, 1 or more")
    if not 0 <= warm_up < len(trajectories):
        raise ValueError(f"warm_up is {warm_up} of {len(trajectories)} trajectories; leave at least one to be counted")
    if len({it.id for it in trajectories}) < len(trajectories):
        raise ValueError("two trajectories have the same id: a policy would take them for one")
    replays = [_Replay(trajectory, fleet) for trajectory in trajectories]
    for start in range(0, len(replays), batch):
        running = replays[start : start + batch]
        while running:
            for replay in running:
                replay.turn(policy, fleet)
                if replay.ended:
                    policy.finished(replay.trajectory)
            running = [replay for replay in running if not replay.ended]
    counted = replays[warm_up:]
    outcomes = np.array([it.outcome() for it in counted], dtype=_COLUMNS)
    return Quality(tuple(it.trajectory.id for it in counted), outcomes)


class _Replay:
    """The replay of one trajectory through a policy."""

    def __init__(self, trajectory: Trajectory, fleet: Fleet) -> None:
        if not trajectory.finished:
            raise ValueError(f"trajectory {trajectory.id!r} is unfinished, so its bucket is not known: leave it out")
        self.trajectory = trajectory
        self.contexts = trajectory.contexts()
        self.bucket = bucket_of(trajectory.peak_context, fleet.limits)
        self.next_turn = 0
        self.instance: str | None = None
        self.single_shot: bool | None = None  # None: no tool has returned
        self.right: list[bool] = []  # by placement
        self.moves = self.moved_tokens = self.tokens = 0

    @property
    def ended(self) -> bool:
        return self.next_turn == len(self.trajectory.turns)

    def turn(self, policy: Policy, fleet: Fleet) -> None:
        """Place the next turn, and place it again whenever it exceeds `ask_again`."""
        trajectory, number = self.trajectory, self.next_turn
        turn, context = trajectory.turns[number], self.contexts[number]
        request = TurnRequest(trajectory.id, trajectory.prompt_id, trajectory.prompt_tokens, context, trajectory.task)
        before = trajectory.turns[number - 1] if number else None
        if before is None or before.tool is None or before.status is None:
            placement = self._placed(policy.place(request, fleet), context)
        else:
            returned = ToolReturn(before.tool, before.status, before.returned_tokens)
            placement = self._placed(policy.tool_returned(request, returned, fleet), context)
            if self.single_shot is None:
                self.single_shot = self.right[-1]
        asked = placement.ask_again
        while asked is not None and asked < turn.generated_tokens:
            answer = policy.bucket_overrun(request, asked, fleet)
            if answer is None:
                break
            if answer.instance != self.instance:
                self._placed(answer, context + asked)
            if answer.ask_again is not None and answer.ask_again <= asked:
                raise ValueError(
                    f"trajectory {trajectory.id!r}: ask_again is {answer.ask_again}, but {asked} tokens of the turn"
                    " are generated: count from the turn's start"
                )
            asked = answer.ask_again
        self.tokens += turn.generated_tokens
        self.next_turn += 1

    def outcome(self) -> Outcome:
        return Outcome(
            bucket=self.bucket,
            single_shot=self.right[0] if self.single_shot is None else self.single_shot,
            moves=self.moves,
            moved_tokens=self.moved_tokens,
            tokens=self.tokens,
        )

    def _placed(self, placement: Placement | None, context: int) -> Placement:
        if placement is None:
            raise ValueError(
                f"trajectory {self.trajectory.id!r}: no instance holds {context} tokens and one turn more: truncate the"
                " trajectory, or give the fleet an instance that does"
            )
        if self.instance not in (None, placement.instance):
            self.moves += 1
            self.moved_tokens += context
        self.instance = placement.instance
        self.tokens += context
        self.right.append(placement.bucket == self.bucket)
        return placement
