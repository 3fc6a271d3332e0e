"""Time of an engine's steps, learnt from earlier ones.

Invariant: a bound is the fitted cost of a step's shape times a ratio of actual to fitted cost of recent steps
(`StepBound`). Nothing is bounded before enough steps were seen. A new borrower starts small: no step is more than twice
as large as its largest so far.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np

from libra.cost.lines import non_negative
from libra.lend.gate import ServingView
from libra.lend.step_bound import StepBound

_SET_UP = 8  # first steps, which include the one-time set-up of an engine
_FIRST_FIT = 8  # steps
_REFIT = 400  # most steps between two fits; the first fits follow each doubling of the number of steps
_CARE, _CAREFUL_SHARE = 2.0, 0.95  # before the bound: a factor on the ratio that this share of steps kept to
_RIDGE = 1e-9  # seconds: least fitted cost, as no ratio to a cost of 0 exists


@dataclass(frozen=True, slots=True)
class StepShape:
    """Work of one engine step, in counts."""

    sequences: int
    new_tokens: int  # tokens beyond one per sequence
    context: int  # tokens of the contexts of all its sequences


class StepCost:
    """Seconds of steps, by shape: `base + a * sequences + b * new_tokens + c * context`, fitted to the last `memory`
    steps."""

    def __init__(self, missed: float = 0.0025, memory: int = 1600) -> None:
        self._missed, self._memory = missed, memory
        self.bounded = self.over = 0  # steps with a bound, and steps that took longer than their bound
        self.forget()

    def forget(self) -> None:
        """Forget all steps."""
        self._steps: deque[tuple[StepShape, float]] = deque(maxlen=self._memory)
        self._bound = StepBound(self._missed, self._memory)
        self._fit: tuple[float, float, float, float] | None = None
        self._since_fit = 0

    @property
    def seen(self) -> int:
        """Number of remembered steps, at most `memory`."""
        return len(self._steps)

    @property
    def needed(self) -> int:
        """Number of steps before the first bound."""
        return self._bound.needed

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from one step. Raises ValueError unless its time is positive and finite."""
        if not 0 < seconds < math.inf:
            raise ValueError(f"a step of {seconds:g} s; give a positive and finite time")
        bound = self.bound(shape)
        if bound is not None:
            self.bounded, self.over = self.bounded + 1, self.over + (seconds > bound)
        self._steps.append((shape, seconds))
        self._since_fit += 1
        if self._fit is not None:
            self._compare(shape, seconds)
        if self.seen >= _FIRST_FIT and (self._fit is None or self._since_fit >= min(_REFIT, self.seen // 2)):
            self.learn()

    def predicted(self, shape: StepShape) -> float | None:
        """Predicted seconds of a step of this shape; None until a few steps were seen."""
        if self._fit is None:
            return None
        base, sequence, new_token, context = self._fit
        return base + sequence * shape.sequences + new_token * shape.new_tokens + context * shape.context

    def bound(self, shape: StepShape) -> float | None:
        """Most seconds of a step of this shape; None until enough steps were seen."""
        predicted = self.predicted(shape)
        return None if predicted is None else self._bound.bound(predicted)

    def careful(self, shape: StepShape) -> float | None:
        """The bound, or, before the first bound, twice the time that 95 % of steps kept to; None until a few steps were
        seen."""
        predicted = self.predicted(shape)
        if predicted is None:
            return None
        bound, kept = self._bound.bound(predicted), self._bound.kept_by(_CAREFUL_SHARE)
        return bound if bound is not None or kept is None else _CARE * kept * predicted

    def _compare(self, shape: StepShape, seconds: float) -> None:
        predicted = self.predicted(shape)
        assert predicted is not None
        self._bound.observe(predicted, seconds)

    def learn(self) -> None:
        """Fit the cost to all remembered steps; `observe` calls this from time to time."""
        rows = np.array([(1, it.sequences, it.new_tokens, it.context) for it, _ in self._steps], float)
        base, *slopes = non_negative(rows, np.array([seconds for _, seconds in self._steps])).tolist()
        self._fit = max(base, _RIDGE), slopes[0], slopes[1], slopes[2]
        self._bound, self._since_fit = StepBound(self._missed, self._memory), 0
        for shape, seconds in self._steps:
            self._compare(shape, seconds)


class LearntServingCost:
    """A `ServingCost` learnt from the steps of a serving engine; infinite until enough steps were seen.
    `batched_tokens` is `max_num_batched_tokens` of the engine, `context` its `max_model_len`."""

    def __init__(self, cost: StepCost, batched_tokens: int, context: int) -> None:
        self._cost, self._budget, self._longest = cost, batched_tokens, context

    def longest_step(self, view: ServingView) -> float:
        """A step of all live requests and one more, with a full prefill chunk."""
        return self._with_budget(self._budget, view)

    def budget_within(self, seconds: float, view: ServingView) -> int | None:
        """The largest power of 2 for `max_num_batched_tokens` with which the longest step takes at most `seconds`;
        None: no such power."""
        budget = 1 << self._budget.bit_length() - 1
        while budget > view.live + 1:
            if self._with_budget(budget, view) <= seconds:
                return budget
            budget //= 2
        return None

    def _with_budget(self, budget: int, view: ServingView) -> float:
        chunk = max(0, min(budget - view.live - 1, self._longest))
        bound = self._cost.bound(StepShape(view.live + 1, chunk, view.context + view.live + chunk))
        return math.inf if bound is None else bound

    def catch_up(self, view: ServingView) -> float:
        decoding = view.live - view.waiting
        room = max(1, self._budget - decoding)
        steps = max(1, -(-view.queued // room))
        shape = StepShape(view.live, min(view.queued, room), view.context + view.queued)
        bound = self._cost.bound(shape)
        return math.inf if bound is None else steps * bound


@dataclass(frozen=True, slots=True)
class RolloutQueue:
    """Turns that a rollout engine could compute in its next step."""

    running: int  # turns in the batch
    waiting: int  # turns that could be admitted to it now
    prefilling: bool  # whether running turns have prompt tokens left
    context: int  # tokens of the contexts of running and waiting turns

    @property
    def turns(self) -> int:
        return self.running + self.waiting


class TokenBudget:
    """Number of tokens that a rollout step may compute (`max_num_scheduled_tokens`) and still end in time."""

    def __init__(self, cost: StepCost, most: int) -> None:
        self._cost, self._most, self._largest, self._made = cost, most, 0, 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Record a step, and learn from it after the first steps, which include one-time set-up."""
        self._largest = max(self._largest, shape.sequences + shape.new_tokens)
        self._made += 1
        if self._made > _SET_UP:
            self._cost.observe(shape, seconds)

    def start_anew(self) -> None:
        """Forget the times of all steps. Otherwise a bound that permits no step would never be corrected."""
        self._cost.forget()
        self._largest = 0

    def within(self, seconds: float, queue: RolloutQueue) -> int:
        """Tokens of a step that fit into `seconds`; 0: not even one fits. Before the first bound, one token is assumed
        to fit. A step is at most twice as large as the largest earlier step."""
        if not queue.turns:
            return 0
        most = min(self._most, 2 * self._largest or 1)
        if not (queue.waiting or queue.prefilling):
            most = min(most, queue.running)
        fits = bisect_right(range(1, most + 1), seconds, key=lambda tokens: self.bound(tokens, queue))
        return fits or int(self._cost.seen < self._cost.needed)

    def bound(self, tokens: int, queue: RolloutQueue) -> float:
        """Most seconds of a step of `tokens` tokens. The engine may divide the tokens anywhere between two extremes:
        all turns decode, or one prompt takes as many tokens as possible."""
        most = min(tokens, queue.turns)
        least = 1 if queue.prefilling else max(1, min(tokens, queue.running))
        context = queue.context + tokens
        shapes = (StepShape(each, tokens - each, context) for each in {least, most})
        return max(self._cost.careful(shape) or 0.0 for shape in shapes)
