"""Estimates of a trajectory's remaining tokens, blended from general to specific contexts.

Invariant: an estimate is a mixture of the histograms of the trajectory's contexts. A context with n trajectories has
the weight n / (n + `SHRINKAGE`) relative to the more general contexts. So one old sample never decides, and a context
without evidence has no weight. A trajectory's visits to a context are similar, so they share a total weight of 1. The
two most specific contexts contain earlier samples of the same prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from libra.route.evidence import HALF_LIFE, MAX_CONTEXTS, Context, ReturnEvidence, Running
from libra.route.policy import TurnRequest
from libra.route.remaining import BINS, Histogram, Remaining, bin_of, redistributed
from libra.route.tool_state import ToolState, remainders, require_finished
from libra.trajectory import Trajectory

# Number of trajectories at which a context weighs as much as all more general contexts together.
SHRINKAGE = 4.0

RECENT = 3  # latest tool returns that contexts use

_ALONE: tuple[Mapping[int, float], ...] = tuple({bin_: 1.0} for bin_ in range(BINS))  # all weight in one bin

_FIRST_OF_A_RETURN = 2  # index of the first context that changes with each return; earlier ones are constant


def contexts_of(
    prompt_id: str, task: str, recent: tuple[ToolState, ...], returns: int, context_tokens: int
) -> tuple[Context, ...]:
    """Contexts of a trajectory after `returns` tool returns, general contexts first. `recent` are the last three
    returns.

    Numbers of returns and context tokens are rounded to octaves, the finest resolution that few samples support.
    """
    last, last_two = recent[-1:], recent[-2:]
    depth = returns.bit_length()
    return (
        ("all",),
        ("task", task),
        ("return", last),
        ("return of task", task, last),
        ("and depth", task, last, depth),
        ("two returns and depth", task, last_two, depth),
        ("three returns", task, recent),
        ("return and context", task, last, context_tokens.bit_length()),
        ("return of prompt", prompt_id, last),
        ("two returns of prompt", prompt_id, last_two),
    )


class Hierarchy:
    """Evidence from finished trajectories, lower bounds from running ones, and the resulting estimates.

    Running trajectories count in estimates before the first tool return. At that point they matter most, since the
    samples of a prompt start together, and the short samples finish first. Estimates after a return use only finished
    trajectories.
    """

    def __init__(self, half_life: float = HALF_LIFE, max_contexts: int = MAX_CONTEXTS) -> None:
        """Make an empty hierarchy. `half_life` is in trajectories; see `ReturnEvidence`."""
        self._evidence = ReturnEvidence(half_life, max_contexts)
        self._running = Running()
        self._turns = self._generated = 0.0  # sums over all trajectories, with weights that decay in order of arrival

    @property
    def turn_tokens(self) -> float:
        """Mean generated tokens of a turn; 0 before any trajectory has finished."""
        return self._generated / self._turns if self._turns else 0.0

    def learn(self, trajectory: Trajectory) -> None:
        """Learn from a finished trajectory, at its start and after each tool return. O(turns)."""
        require_finished(trajectory)
        self._running.end(trajectory.id)
        kept = 2 ** (-1 / self._evidence.half_life)
        self._turns = kept * self._turns + len(trajectory.turns)
        self._generated = kept * self._generated + trajectory.generated_tokens
        visits: dict[Context, list[int]] = defaultdict(list)
        for contexts, remaining in _moments(trajectory):
            bin_ = bin_of(remaining)
            for context in contexts:
                visits[context].append(bin_)
        self._evidence.count(
            trajectory.policy_version,
            # Reversed, so that general contexts are evicted last. Most contexts have one visit.
            {
                context: _ALONE[bins[0]] if len(bins) == 1 else _shares(bins)
                for context, bins in reversed(visits.items())
            },
        )

    def started(self, request: TurnRequest) -> None:
        """Add a running trajectory, from its first request."""
        contexts = contexts_of(request.prompt_id, request.task, (), 0, request.context_tokens)
        self._running.start(request.trajectory_id, contexts[_FIRST_OF_A_RETURN:])

    def reached(self, request: TurnRequest, generated_tokens: int = 0) -> None:
        """Record that a running trajectory has the context of `request` plus `generated_tokens` tokens."""
        tokens = request.context_tokens + generated_tokens - request.prompt_tokens
        self._running.reached(request.trajectory_id, max(0, tokens))

    def ended(self, trajectory_id: str) -> None:
        """Remove a trajectory without learning from it; no error if it is not running."""
        self._running.end(trajectory_id)

    def predict(self, request: TurnRequest, states: Sequence[ToolState]) -> Remaining | None:
        """Remaining tokens of a trajectory after the tool returns `states`; None before any trajectory has finished."""
        return self.predict_recent(request, tuple(states[-RECENT:]), len(states))

    def predict_recent(self, request: TurnRequest, recent: tuple[ToolState, ...], returns: int) -> Remaining | None:
        """Like `predict`, from the latest `RECENT` states and the number of all states."""
        if not self._evidence.trajectories:
            return None
        contexts = contexts_of(request.prompt_id, request.task, recent, returns, request.context_tokens)
        finished = self._evidence.histograms(contexts)
        fading = self._evidence.fading
        weights = finished[:, BINS].tolist()
        running = None if returns else self._running.histograms(contexts)
        if running is None:  # only shares matter, so the common factor `fading` cancels
            return Remaining(_mixture(weights, fading).dot(finished)[:BINS])
        started = running.sum(axis=1).tolist()
        parts = _mixture([weight * fading + more for weight, more in zip(weights, started, strict=True)])
        return Remaining(redistributed(parts.dot(finished)[:BINS] * np.float32(fading), parts.dot(running)))

    def snapshot(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            "evidence": self._evidence.snapshot(),
            "running": self._running.snapshot(),
            "turns": self._turns,
            "generated": self._generated,
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> Self:
        hierarchy = cls()
        hierarchy._evidence = ReturnEvidence.restore(snapshot["evidence"])
        hierarchy._running = Running.restore(snapshot["running"])
        hierarchy._turns, hierarchy._generated = snapshot["turns"], snapshot["generated"]
        return hierarchy


def _moments(trajectory: Trajectory) -> Iterator[tuple[tuple[Context, ...], int]]:
    """Contexts at the start and after each tool return, each time with the tokens that remained at that point."""
    starts = trajectory.contexts()
    recent: tuple[ToolState, ...] = ()
    for returns, (number, state, remaining) in enumerate(remainders(trajectory)):
        if state is not None:
            recent = (*recent, state)[-RECENT:]
        yield contexts_of(trajectory.prompt_id, trajectory.task, recent, returns, starts[number]), remaining


def _shares(bins: Sequence[int]) -> Mapping[int, float]:
    """Share of a context's visits by bin. `bins` has the bin of each visit."""
    visits = len(bins)
    shares = dict.fromkeys(bins, 1 / visits)
    if len(shares) == visits:
        return shares
    numbers: dict[int, int] = {}
    for bin_ in bins:
        numbers[bin_] = numbers.get(bin_, 0) + 1
    return {bin_: number / visits for bin_, number in numbers.items()}


def _mixture(weights: Sequence[float], fading: float = 1.0) -> Histogram:
    """Weight in the estimate of one unit of evidence of each context, in the order of `contexts_of`.

    A context with count n takes the share n / (n + `SHRINKAGE`) of the weight that reaches it. So each unit of its
    evidence gets 1 / (n + `SHRINKAGE`) of this weight. The rest of the weight goes to the more general contexts, in
    equal parts if there are two. A count is an element of `weights` times `fading`.
    """
    everyone, task, anywhere, last, depth, two, three, size, prompt, prompt_two = weights
    of_prompt_two = 1 / (prompt_two * fading + SHRINKAGE)
    of_prompt = of_prompt_two * SHRINKAGE / (prompt * fading + SHRINKAGE)
    half = of_prompt * SHRINKAGE / 2
    of_size = half / (size * fading + SHRINKAGE)
    of_three = half / (three * fading + SHRINKAGE)
    of_two = of_three * SHRINKAGE / (two * fading + SHRINKAGE)
    of_depth = of_two * SHRINKAGE / (depth * fading + SHRINKAGE)
    of_last = (of_depth + of_size) * SHRINKAGE / (last * fading + SHRINKAGE)
    half = of_last * SHRINKAGE / 2
    of_anywhere = half / (anywhere * fading + SHRINKAGE)
    of_task = half / (task * fading + SHRINKAGE)
    of_everyone = (of_task + of_anywhere) * SHRINKAGE / (everyone * fading)
    parts = (of_everyone, of_task, of_anywhere, of_last, of_depth, of_two, of_three, of_size, of_prompt, of_prompt_two)
    return np.array(parts, np.float32)
