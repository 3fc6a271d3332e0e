"""Drift-tracked statistics of finished trajectories.

Invariant: a tracker's answers depend only on the trajectories observed and their order, never on time. A trajectory
seen n observations ago weighs `2 ** (-n / half_life)`, and every answer is taken from the same weighted evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.trajectory import Trajectory

FORMAT = 1  # of a snapshot

FALSE_ALARM_RATE = 0.01  # chance that one look at stationary trajectories calls them drifted
TAIL_SHARE = 0.05  # the class of the longest trajectories holds no more than this share of them, where bins allow

_RECENT = 4  # drift compares the tracker with one that forgets this many times faster
_OCTAVES = 32  # bins reach contexts of 2**32 tokens
_FORGOTTEN = 1e-3  # trajectories: a bin with less evidence than this is emptied, and its largest context with it

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrajectoryClass:
    """Trajectories of similar final context, as one weighted class. All but `share` and `peak_context` are means."""

    share: float  # fraction of trajectories; the shares of a workload sum to 1
    peak_context: int  # tokens; no trajectory of the class needs more
    generated: float  # G: tokens generated
    context_sum: float  # C: sum of the context length over those tokens
    prefill: float  # tokens prefilled with a warm prefix cache: prompt and tool returns, each once
    turns: float
    tool_seconds: float
    before_first_return: float  # fraction of `generated` that belongs to the first turn, before any tool has spoken


@dataclass(frozen=True, slots=True)
class Drift:
    """Whether recent final contexts are distributed unlike the older ones."""

    distance: float  # Kolmogorov-Smirnov: largest difference between the two cumulative distributions
    threshold: float  # exceeded by chance in at most `FALSE_ALARM_RATE` of looks
    drifted: bool


class _Sums(NamedTuple):
    """What one trajectory adds to its bin. Tokens and seconds; a bin holds the decayed sums."""

    trajectories: float
    generated: float
    generated_squared: float
    first_generated: float
    context_sum: float
    prefill: float
    turns: float
    tool_returns: float
    unknown_returns: float  # tool returns whose seconds were not recorded
    tool_seconds: float  # of the other returns


class LengthTracker:
    """Exponentially forgotten statistics of finished trajectories, by final context.

    Memory and the time of one observation do not grow with the number of trajectories. A trajectory's final context
    is the most tokens it ever held. Tool seconds that were not recorded count as zero; `unknown_tool_share` says how
    many of the tool returns that concerns.
    """

    def __init__(self, half_life: float = 256.0, bins_per_octave: int = 4, block_tokens: int = 1) -> None:
        """`half_life` is in trajectories; `bins_per_octave` bins cover each doubling of the final context. The prefix
        cache keeps whole blocks of `block_tokens` tokens, so the rest of a context is prefilled again each turn."""
        if not 0 < half_life < math.inf:
            raise ValueError(f"half_life is {half_life}; it is a number of trajectories, above 0 and finite")
        if bins_per_octave < 1:
            raise ValueError(f"bins_per_octave is {bins_per_octave}; it must be at least 1")
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; it must be at least 1")
        self.half_life = half_life
        self.block_tokens = block_tokens
        self.bins_per_octave = bins_per_octave
        bins = _OCTAVES * bins_per_octave
        self._observed = 0
        self._sums = np.zeros((bins, len(_Sums._fields)))
        self._recent = np.zeros(bins)  # counts again, forgotten `_RECENT` times faster
        self._peaks = np.zeros(bins)

    def observe(self, trajectory: Trajectory) -> None:
        """Add one finished trajectory.

        An unfinished one is refused: its length is only a lower bound, and counting it as a length would make the
        tail look shorter than it is.
        """
        if not trajectory.finished:
            raise ValueError(f"trajectory {trajectory.id} is unfinished; observe it when it has finished")
        peak = max(1, trajectory.peak_context)  # bins are logarithmic: an empty context counts as one token
        bin_ = int(math.log2(peak) * self.bins_per_octave)
        if bin_ >= len(self._peaks):
            raise ValueError(f"trajectory {trajectory.id} holds {peak} tokens; at most 2**{_OCTAVES} - 1 are tracked")
        self._observed += 1
        self._sums *= math.exp(self._log_keep)
        self._recent *= math.exp(self._log_keep * _RECENT)
        self._sums[bin_] += _sums_of(trajectory, self.block_tokens)
        self._recent[bin_] += 1
        self._peaks[bin_] = max(self._peaks[bin_], peak)
        faded = self._counts < _FORGOTTEN
        self._sums[faded] = 0
        self._recent[faded] = 0
        self._peaks[faded] = 0

    def classes(self, limit: int = 8) -> tuple[TrajectoryClass, ...]:
        """The workload as at most `limit` classes, shortest first.

        A class is priced as if all of it reached its longest member, so neighbouring bins are merged where that
        overstates the mean final context least. The last class holds at most `TAIL_SHARE` of the trajectories, unless
        the last bin alone holds more or `limit` is 1.
        """
        if limit < 1:
            raise ValueError(f"limit is {limit}; a workload has at least 1 class")
        total = self._total().trajectories
        occupied = np.flatnonzero(self._counts)
        starts = _partition(self._counts[occupied] / total, self._peaks[occupied], limit)
        classes = []
        for members in np.split(occupied, starts[1:]):
            sums = _Sums(*self._sums[members].sum(axis=0))
            # Where nothing was generated, no part of it came after a tool return.
            first = sums.first_generated / sums.generated if sums.generated > 0 else 1.0
            classes.append(
                TrajectoryClass(
                    share=float(sums.trajectories / total),
                    peak_context=int(self._peaks[members[-1]]),
                    generated=float(sums.generated / sums.trajectories),
                    context_sum=float(sums.context_sum / sums.trajectories),
                    prefill=float(sums.prefill / sums.trajectories),
                    turns=float(sums.turns / sums.trajectories),
                    tool_seconds=float(sums.tool_seconds / sums.trajectories),
                    before_first_return=float(first),
                )
            )
        return tuple(classes)

    def quantile(self, q: float) -> float:
        """Final context in tokens that a share `q` of the trajectories does not exceed.

        Within its bin a trajectory may be anywhere between the lower edge and the largest context seen there; it is
        taken to be spread evenly in the logarithm, so the answer is off by less than one bin.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q is {q}; a quantile is asked for a share from 0 to 1")
        target = q * self._total().trajectories
        occupied = np.flatnonzero(self._counts)
        counts = self._counts[occupied]
        upto = np.cumsum(counts)
        at = min(int(np.searchsorted(upto, target)), len(occupied) - 1)
        inside = min(1.0, 1 - float((upto[at] - target) / counts[at]))
        lower = 2.0 ** (float(occupied[at]) / self.bins_per_octave)
        return float(lower * (self._peaks[occupied[at]] / lower) ** inside)

    def drift(self) -> Drift:
        """Compare the tracked final contexts with the same trajectories forgotten four times faster.

        Both histograms weigh the same trajectories, with weights s and f that each sum to 1, so their difference is
        one sum with the weights f - s. For independent draws of one distribution it tends to a Brownian bridge of
        scale `sqrt(sum (f - s)**2)`, whose largest excursion exceeds x times that scale with a probability of at most
        `2 * exp(-2 * x**2)` (Kolmogorov's distribution); binning can only make it smaller. The threshold is that x for
        `FALSE_ALARM_RATE`.

        Assumed: independent trajectories (samples of one prompt resemble each other and raise the rate), weights
        spread over enough trajectories for the limit (half-lives of a few dozen), and a rate per look: looks at
        trajectories that do not overlap each have their own chance. No trajectories, or one, are no drift.
        """
        if self._observed == 0:
            return Drift(distance=0.0, threshold=1.0, drifted=False)  # distances reach 1: without evidence, no alarm
        slow, fast = self._log_keep, self._log_keep * _RECENT
        weight, recent_weight = self._decayed(slow), self._decayed(fast)
        squares = (
            self._decayed(2 * fast) / recent_weight**2
            - 2 * self._decayed(slow + fast) / (weight * recent_weight)
            + self._decayed(2 * slow) / weight**2
        )
        # Below 1e-12 the three terms cancel to rounding noise: the histograms are still the same.
        threshold = math.sqrt(math.log(2 / FALSE_ALARM_RATE) / 2 * max(squares, 1e-12))
        difference = np.cumsum(self._recent / self._recent.sum() - self._counts / self._counts.sum())
        distance = float(np.abs(difference).max())
        return Drift(distance, threshold, distance > threshold)

    @property
    def effective_samples(self) -> float:
        """Equally weighted trajectories that would average as well (Kish): `(sum w)**2 / sum w**2`; 0 when empty."""
        if self._observed == 0:
            return 0.0
        return self._decayed(self._log_keep) ** 2 / self._decayed(2 * self._log_keep)

    @property
    def mean_generated(self) -> float:
        """Mean tokens generated by a trajectory."""
        total = self._total()
        return float(total.generated / total.trajectories)

    @property
    def mean_decode_context(self) -> float:
        """Mean context over all generated tokens; 0 where nothing was generated."""
        total = self._total()
        return float(total.context_sum / total.generated) if total.generated else 0.0

    @property
    def mean_peak(self) -> float:
        """Mean of the final context, each trajectory counted as its bin's longest."""
        total = self._total()
        return float((self._counts * self._peaks).sum() / total.trajectories)

    def work_uncertainty(self) -> float:
        """Relative standard error of `mean_generated`, for independent trajectories.

        Infinite while a single trajectory carries the evidence, or where nothing was generated.
        """
        total = self._total()
        freedom = self.effective_samples - 1
        if freedom <= 0 or total.generated == 0:
            return math.inf
        mean = total.generated / total.trajectories
        variance = max(0.0, total.generated_squared / total.trajectories - mean**2)
        return float(math.sqrt(variance / freedom) / mean)

    @property
    def unknown_tool_share(self) -> float:
        """Share of tool returns whose seconds were not recorded; 0 where no tool was called."""
        total = self._total()
        return float(total.unknown_returns / total.tool_returns) if total.tool_returns > 0 else 0.0

    def snapshot(self) -> dict[str, Any]:
        """The whole state as JSON values; `restore` continues from it exactly."""
        return {
            "format": FORMAT,
            "half_life": self.half_life,
            "bins_per_octave": self.bins_per_octave,
            "block_tokens": self.block_tokens,
            "observed": self._observed,
            "bins": [
                {
                    "bin": int(bin_),
                    "peak": int(self._peaks[bin_]),
                    "recent": float(self._recent[bin_]),
                    "sums": _Sums(*self._sums[bin_].tolist())._asdict(),
                }
                for bin_ in np.flatnonzero(self._counts)
            ],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> LengthTracker:
        """The tracker that `snapshot` was taken of. Raises `ValueError` for any other format."""
        if "format" not in snapshot or snapshot["format"] != FORMAT:
            raise ValueError(f"not a tracker snapshot of format {FORMAT}; observe the trajectories again")
        tracker = cls(snapshot["half_life"], snapshot["bins_per_octave"], snapshot["block_tokens"])
        tracker._observed = snapshot["observed"]
        for saved in snapshot["bins"]:
            tracker._sums[int(saved["bin"])] = _Sums(**saved["sums"])
            tracker._recent[saved["bin"]] = saved["recent"]
            tracker._peaks[saved["bin"]] = saved["peak"]
        return tracker

    @property
    def _counts(self) -> Array:
        return self._sums[:, 0]

    @property
    def _log_keep(self) -> float:
        return -math.log(2) / self.half_life

    def _decayed(self, log_keep: float) -> float:
        """Sum of `exp(log_keep * age)` over all trajectories observed, the newest of age 0."""
        return math.expm1(log_keep * self._observed) / math.expm1(log_keep)

    def _total(self) -> _Sums:
        if self._observed == 0:
            raise ValueError("the tracker has seen no trajectory; observe() at least one finished trajectory first")
        return _Sums(*self._sums.sum(axis=0))


def _sums_of(trajectory: Trajectory, block_tokens: int) -> _Sums:
    context_sum, prefill, end = 0, 0, 0
    for context, turn in zip(trajectory.contexts(), trajectory.turns, strict=True):
        g = turn.generated_tokens
        context_sum += g * context + g * (g + 1) // 2
        # A context shorter than what the engine holds was rewritten (compaction): none of the cache is taken to fit.
        prefill += context - end // block_tokens * block_tokens if context >= end else context
        end = context + g
    returns = [turn for turn in trajectory.turns if turn.tool is not None]
    seconds = [turn.tool_seconds for turn in returns if turn.tool_seconds is not None]
    generated = trajectory.generated_tokens
    return _Sums(
        trajectories=1,
        generated=generated,
        generated_squared=generated**2,
        first_generated=trajectory.turns[0].generated_tokens,
        context_sum=context_sum,
        prefill=prefill,
        turns=len(trajectory.turns),
        tool_returns=len(returns),
        unknown_returns=len(returns) - len(seconds),
        tool_seconds=sum(seconds),
    )


def _partition(shares: Array, peaks: Array, limit: int) -> list[int]:
    """Where each of at most `limit` classes of neighbouring bins starts, by dynamic programming over the last start.

    Minimises `sum share * (peak of its class - peak)`: the tokens by which the mean final context is overstated.
    """
    bins = len(shares)
    below = np.concatenate(([0.0], np.cumsum(shares)))
    tokens_below = np.concatenate(([0.0], np.cumsum(shares * peaks)))
    # cost[start, end] of one class of the bins [start, end)
    class_peak = np.concatenate(([0.0], peaks))
    cost = class_peak * (below - below[:, None]) - (tokens_below - tokens_below[:, None])
    cost[np.tril_indices(bins + 1)] = math.inf
    if limit > 1:
        too_heavy = below[-1] - below[: bins - 1] > TAIL_SHARE
        cost[: bins - 1, bins][too_heavy] = math.inf
    best, choices = cost[0], []
    for _ in range(min(limit, bins) - 1):
        with_one_more = best[:, None] + cost
        choices.append(with_one_more.argmin(axis=0))
        best = with_one_more.min(axis=0)
    starts, end = [], bins
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return [0, *reversed(starts)]
