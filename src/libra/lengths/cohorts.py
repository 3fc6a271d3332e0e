"""The evidence before it is weighed: trajectories in cohorts by start version, and in bins by final context.

Invariant: within a cohort nothing depends on the order of arrival, so that adding two cohorts is having seen both;
the one exception is the opening cohort, whose trajectories are forgotten one by one as they arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.trajectory import Trajectory

OCTAVES = 32  # bins reach contexts of 2**32 tokens
RECENT = 4  # drift compares the tracker with one that forgets this many times faster
# A trajectory of weight w counts with these powers of w: to be averaged, by the two memories, and for the variances of
# such averages.
POWERS = np.array([1, RECENT, 2, 1 + RECENT, 2 * RECENT])
_NOTHING = 1e-6  # trajectories: a bin of the opening cohort with less weight than this is emptied

Array = NDArray[np.float64]


class Sums(NamedTuple):
    """What one trajectory adds to its bin. Tokens and seconds; a bin holds the sums."""

    trajectories: float
    final_context: float
    log_context: float
    generated: float
    generated_squared: float
    first_generated: float
    context_sum: float
    prefill: float
    turns: float
    tool_returns: float
    unknown_returns: float  # tool returns whose seconds were not recorded
    tool_seconds: float  # of all returns
    tool_seconds_squared: float  # of the trajectory's tool seconds


def sums_of(trajectory: Trajectory, block_tokens: int, unknown_tool_seconds: float = 0.0) -> Sums:
    """Of one trajectory, as far as it has come. The cache keeps whole blocks of `block_tokens` tokens; a tool return
    whose seconds were not recorded counts as `unknown_tool_seconds`.

    A context shorter than what the engine holds was rewritten (compaction). Of the cache it is taken to fit as much as
    the prompt: agents rewrite their history, not their instructions. Where it is shorter than even that, nothing fits.
    """
    context_sum, prefill, end = 0, 0, 0
    for context, turn in zip(trajectory.contexts(), trajectory.turns, strict=True):
        g = turn.generated_tokens
        context_sum += g * context + g * (g + 1) // 2
        prompt_fits = trajectory.prompt_tokens if context >= trajectory.prompt_tokens else 0
        fits = end if context >= end else prompt_fits
        prefill += context - fits // block_tokens * block_tokens
        end = context + g
    returns = [turn for turn in trajectory.turns if turn.tool is not None]
    seconds = [turn.tool_seconds for turn in returns if turn.tool_seconds is not None]
    unknown = len(returns) - len(seconds)
    waited = sum(seconds) + unknown * unknown_tool_seconds
    generated = trajectory.generated_tokens
    context = final_context(trajectory)
    return Sums(
        trajectories=1,
        final_context=context,
        log_context=math.log(context),
        generated=generated,
        generated_squared=generated**2,
        first_generated=trajectory.turns[0].generated_tokens if trajectory.turns else 0,
        context_sum=context_sum,
        prefill=prefill,
        turns=len(trajectory.turns),
        tool_returns=len(returns),
        unknown_returns=unknown,
        tool_seconds=waited,
        tool_seconds_squared=waited**2,
    )


def final_context(trajectory: Trajectory) -> int:
    """The most tokens it ever held. Bins are logarithmic: an empty context counts as one token."""
    return max(1, trajectory.peak_context)


def place(trajectory: Trajectory, bins_per_octave: int) -> tuple[int, float]:
    """The bin of the final context, and the part of that bin, in the logarithm, that lies below it. Raises
    ValueError for a context that no bin holds."""
    context = final_context(trajectory)
    if context >= 2**OCTAVES:
        raise ValueError(f"trajectory {trajectory.id} holds {context} tokens; at most 2**{OCTAVES} - 1 are tracked")
    part, bin_ = math.modf(math.log2(context) * bins_per_octave)
    return int(bin_), part


@dataclass(slots=True)
class Cohort:
    """The trajectories that started with one version, or a few neighbouring ones."""

    finished: int
    counts: Array  # [bin, one of `POWERS`] finished trajectories; differ only in the opening cohort
    sums: Array  # [bin, field of `Sums`] of the finished ones
    peaks: Array  # [bin] tokens: the longest finished one
    running: Array  # [bin] unfinished trajectories
    passed: Array  # [bin] sum over them of the part of the bin they have passed

    @classmethod
    def empty(cls, bins: int) -> Cohort:
        return cls(
            0,
            np.zeros((bins, len(POWERS))),
            np.zeros((bins, len(Sums._fields))),
            np.zeros(bins),
            np.zeros(bins),
            np.zeros(bins),
        )

    def add(self, bin_: int, sums: Sums) -> None:
        """One finished trajectory."""
        self.finished += 1
        self.counts[bin_] += 1
        self.sums[bin_] += sums
        self.peaks[bin_] = max(self.peaks[bin_], sums.final_context)

    def add_running(self, bin_: int, part: float) -> None:
        """One unfinished trajectory, `part` of the way through its bin."""
        self.running[bin_] += 1
        self.passed[bin_] += part

    def forget(self, keep: float) -> None:
        """Let every finished trajectory weigh `keep` times what it did."""
        self.counts *= keep**POWERS
        self.sums *= keep
        faded = self.counts[:, 0] < _NOTHING
        self.counts[faded] = 0
        self.sums[faded] = 0
        self.peaks[faded] = 0

    def absorb(self, other: Cohort) -> None:
        """Add all of `other`."""
        self.finished += other.finished
        self.counts += other.counts
        self.sums += other.sums
        self.peaks = np.maximum(self.peaks, other.peaks)
        self.running = self.running + other.running
        self.passed = self.passed + other.passed

    def clear_running(self) -> None:
        self.running[:] = 0
        self.passed[:] = 0

    @property
    def started(self) -> float:
        return self.finished + float(self.running.sum())

    def snapshot(self) -> dict[str, Any]:
        """As JSON values: the bins that hold anything; `sums` in the order of `Sums`."""
        bins = np.flatnonzero((self.counts[:, 0] > 0) | (self.running > 0))
        return {
            "finished": self.finished,
            "bins": [
                {
                    "bin": int(bin_),
                    "peak": int(self.peaks[bin_]),
                    "counts": self.counts[bin_].tolist(),
                    "running": float(self.running[bin_]),
                    "passed": float(self.passed[bin_]),
                    "sums": self.sums[bin_].tolist(),
                }
                for bin_ in bins
            ],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any], bins: int) -> Cohort:
        cohort = cls.empty(bins)
        cohort.finished = snapshot["finished"]
        for saved in snapshot["bins"]:
            bin_ = saved["bin"]
            cohort.peaks[bin_] = saved["peak"]
            cohort.counts[bin_] = saved["counts"]
            cohort.running[bin_] = saved["running"]
            cohort.passed[bin_] = saved["passed"]
            cohort.sums[bin_] = saved["sums"]
        return cohort
