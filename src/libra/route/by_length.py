"""Buckets by prompt length alone: a prompt longer than most is taken to become a trajectory longer than most.

Invariant: the expected final context rises with the prompt's length, and depends on the `KEPT` trajectories that
finished last and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from libra.route.bucket import Bucketed
from libra.route.policy import TurnRequest
from libra.trajectory import Trajectory

HALF_LIFE = 256.0  # trajectories, as the length tracker forgets
KEPT = 1_024  # four half-lives: what is let go of weighed a sixteenth or less

Array = NDArray[np.float64]


class QuantileMatch:
    """Maps a prompt length to the final context of the same rank among the latest trajectories.

    A trajectory behind which n others have finished weighs `2 ** (-n / half_life)`; the latest `kept` are kept.
    """

    def __init__(self, kept: int = KEPT, half_life: float = HALF_LIFE, pairs: Iterable[tuple[int, int]] = ()) -> None:
        if kept < 1:
            raise ValueError(f"kept is {kept}; it is a number of trajectories, 1 or more")
        if not half_life > 0:
            raise ValueError(f"half_life is {half_life}; it is a number of trajectories, above 0")
        self._half_life = half_life
        self._ring = np.zeros((kept, 2))
        self._added = 0
        self._sorted: tuple[Array, Array, Array, Array] | None = None  # made when asked, until the next trajectory
        for pair in pairs:
            self.add(*pair)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Prompt and final context of each kept trajectory, oldest first."""
        return [(int(prompt), int(final)) for prompt, final in self._kept()]

    def add(self, prompt_tokens: int, final_context: int) -> None:
        self._ring[self._added % len(self._ring)] = prompt_tokens, final_context
        self._added += 1
        self._sorted = None

    def match(self, prompt_tokens: int) -> int | None:
        """Final context in tokens; None before any trajectory.

        The rank of a prompt is the share of shorter ones and half the share of equal ones, so where all prompts are
        equal every one is given the median. Of the final contexts it is the smallest that at least this share does not
        exceed. O(log kept), and O(kept log kept) the first time after an `add`.
        """
        if not self._added:
            return None
        if self._sorted is None:
            self._sorted = self._sort()
        prompts, below, finals, up_to = self._sorted
        shorter, no_longer = prompts.searchsorted(prompt_tokens), prompts.searchsorted(prompt_tokens, "right")
        rank = (below[shorter] + below[no_longer]) / 2
        return int(finals[min(int(up_to.searchsorted(rank)), len(finals) - 1)])

    def _kept(self) -> Array:
        oldest = self._added % len(self._ring) if self._added > len(self._ring) else 0
        return np.concatenate([self._ring[oldest : self._added], self._ring[:oldest]])

    def _sort(self) -> tuple[Array, Array, Array, Array]:
        """Prompts in order and the weight before each, and of all; finals in order and the weight up to each."""
        prompts, finals = self._kept().T
        weights = 2.0 ** (-np.arange(len(prompts))[::-1] / self._half_life)
        by_prompt, by_final = np.argsort(prompts, kind="stable"), np.argsort(finals, kind="stable")
        below = np.concatenate([[0.0], weights[by_prompt].cumsum()])
        return prompts[by_prompt], below, finals[by_final], weights[by_final].cumsum()


class LengthByPrompt(Bucketed):
    """The `length-by-prompt` policy: the final context is expected by `QuantileMatch` at the first turn.

    The final context of a trajectory is the most tokens it ever held. Before any has finished, the prompt itself is
    all that is expected.
    """

    NAME = "length-by-prompt"
    REASON = "bucket by prompt length"

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._match = QuantileMatch()

    def finished(self, trajectory: Trajectory) -> None:
        if not trajectory.finished:
            raise ValueError(f"trajectory {trajectory.id!r} is unfinished, so its length is unknown: forget it instead")
        self._match.add(trajectory.prompt_tokens, trajectory.peak_context)
        super().finished(trajectory)

    def _expected(self, request: TurnRequest) -> int:
        matched = self._match.match(request.prompt_tokens)
        return request.context_tokens if matched is None else matched

    def _rule(self) -> list[list[int]]:
        return [list(pair) for pair in self._match.pairs]

    def _resume(self, rule: list[list[int]]) -> None:
        self._match = QuantileMatch(pairs=[(prompt, final) for prompt, final in rule])
