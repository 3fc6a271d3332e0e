"""How well a policy routes: trajectories of known length replayed through it, and the share that went where they fit.

Invariant: a policy learns a trajectory only after its last turn was placed, and policies that are compared see the same
trajectories, turns and fleet in the same order. Nothing is generated: no load changes, and no time passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.route.bucket import bucket_of
from libra.route.policy import Fleet, InstanceView, Placement, Policy, ToolReturn, TurnRequest, View
from libra.trajectory import Trajectory


class Outcome(NamedTuple):
    """What routing did to one trajectory."""

    bucket: int  # of its true final context, the most tokens it ever held
    single_shot: bool  # after its first tool return it was in this bucket; without tool return: at its first placement
    moves: int  # placements on another instance than the one before
    moved_tokens: int  # in context at those
    tokens: int  # in context at all placements, and generated


_COLUMNS = np.dtype([(name, np.bool_ if name == "single_shot" else np.int64) for name in Outcome._fields])


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """The outcomes of a replay, a row for each trajectory counted, and measures over them.

    A trajectory counts as often as its weight says; `evaluate` gives each the weight 1.
    """

    ids: tuple[str, ...]
    prompts: tuple[str, ...]
    outcomes: NDArray[np.void]  # a column for each field of `Outcome`
    weights: NDArray[np.float64]

    @property
    def single_shot_accuracy(self) -> float:
        """Share of trajectories that were in the bucket of their true final context after their first tool return; a
        trajectory without tool return counts by its first placement."""
        return self._ratio("single_shot")

    @property
    def majority_rate(self) -> float:
        """Share of trajectories in the most frequent true bucket: the accuracy of sending everything there."""
        return float(np.bincount(self.outcomes["bucket"], self.weights).max() / self.weights.sum())

    @property
    def balanced_accuracy(self) -> float:
        """Single-shot accuracy within each true bucket that occurs, averaged over these buckets: one over their number
        for whoever sends everything to the same one."""
        bucket = self.outcomes["bucket"]
        of_bucket = np.bincount(bucket, self.weights)
        right = np.bincount(bucket, self.weights * self.outcomes["single_shot"])
        return float((right[of_bucket > 0] / of_bucket[of_bucket > 0]).mean())

    @property
    def migrated_share(self) -> float:
        """Tokens in context when a trajectory was moved to another instance, as a share of the tokens in context at all
        placements and of all generated: of what engines had before them, the part that was moved or recomputed because
        of a migration. In the midst of a turn, what it has generated is in context."""
        return self._ratio("moved_tokens", "tokens")

    @property
    def moves(self) -> float:
        """Placements on another instance than the one before, per trajectory."""
        return self._ratio("moves")

    def _ratio(self, of: str, to: str | None = None) -> float:
        total = self.weights.sum() if to is None else self.weights @ self.outcomes[to]
        return float(self.weights @ self.outcomes[of] / total) if total else float("nan")


def static_fleet(limits: Sequence[int], *, turn_tokens: int, instances: int = 1) -> View:
    """A fleet with so many idle instances for each bucket, each of which holds its bucket's limit and one more turn."""
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

    `batch` of them run at a time: each makes one turn in each round, and is learned as soon as its last turn was
    placed; the next batch starts when all have ended. The first `warm_up` are replayed and learned, and not counted.
    A turn that generates more than its placement's `ask_again` is asked about with `bucket_overrun`.

    Raises ValueError where a trajectory is unfinished or is given twice, where no instance holds a turn, and where the
    policy asks again for what was generated already.
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
    return Quality(
        tuple(it.trajectory.id for it in counted),
        tuple(it.trajectory.prompt_id for it in counted),
        np.array([it.outcome() for it in counted], dtype=_COLUMNS),
        np.ones(len(counted)),
    )


class _Replay:
    """One trajectory on its way through a policy."""

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
        """Place the next turn, and again where it outlives its placement."""
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


@dataclass(frozen=True, slots=True)
class Interval:
    """A measure, and the bounds that hold it in a share `confidence` of such samples."""

    value: float
    low: float
    high: float
    confidence: float


def bootstrap(
    measure: Callable[[Quality], float],
    quality: Quality,
    other: Quality | None = None,
    *,
    by_prompt: bool = False,
    resamples: int = 1_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a measure, or of its difference to that of `other` (Efron and Tibshirani 1993,
    chapter 13).

    Trajectories are drawn with replacement, the same ones for both policies: the difference is paired, and the two must
    be of the same trajectories in the same order, else ValueError. `by_prompt` draws whole prompts with all their
    samples: samples of one prompt resemble each other, and intervals that take them for independent are too narrow.
    """
    if other is not None and quality.ids != other.ids:
        raise ValueError("the two are not of the same trajectories: evaluate both policies on one list and one warm_up")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; give 1 or more, and about 1000 for bounds of 95 %")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must lie between 0 and 1")

    def value(weights: NDArray[Any]) -> float:
        drawn = measure(replace(quality, weights=quality.weights * weights))
        return drawn if other is None else drawn - measure(replace(other, weights=other.weights * weights))

    keys = quality.prompts if by_prompt else quality.ids
    units, unit_of = np.unique(np.array(keys), return_inverse=True)
    random = np.random.default_rng(seed)
    drawn = [
        value(np.bincount(random.integers(len(units), size=len(units)), minlength=len(units))[unit_of])
        for _ in range(resamples)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(value(np.ones(len(keys))), float(low), float(high), confidence)
