"""The tracker of finished and running trajectories. Trajectories of newer start versions reduce the weight of older
trajectories.

Invariant: a tracker's answers depend only on the given trajectories and, before the first `observe_running`, on their
order; never on time. Evidence is weighed at each query: a trajectory weighs `2 ** (-n / half_life)` if n others have
started later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from libra.lengths.classes import Distribution, TrajectoryClass
from libra.lengths.cohorts import OCTAVES, Cohort, place, sums_of
from libra.lengths.evidence import FORGOTTEN, Drift, WeighedCohorts, weigh
from libra.lengths.forecast import TREND_MEMORY, LengthForecast, cohort_levels, fit, project
from libra.trajectory import Trajectory

FORMAT = 4  # of a snapshot

_COHORTS = 64  # with more cohorts, old cohorts are dropped, or adjacent cohorts joined


class LengthTracker:
    """Statistics of trajectories by final context, with exponentially decaying weights.

    Long trajectories finish late, so finished trajectories alone are too short a sample. `observe_running` therefore
    reports the running trajectories. After its first call, evidence is weighed by start version, and a finished
    trajectory also represents running trajectories with less work (`evidence.weigh`). Before that call, weights decay
    in the order of arrival.

    After a detected drift, weights decay four times as fast, until old and recent trajectories agree again. Memory and
    the time of one observation do not grow with the number of trajectories. A tracker is not thread-safe: guard it with
    a lock.
    """

    def __init__(
        self,
        half_life: float = 256.0,
        bins_per_octave: int = 4,
        block_tokens: int = 1,
        unknown_tool_seconds: float = 0.0,
    ) -> None:
        """Create an empty tracker.

        `half_life` is in trajectories; `bins_per_octave` bins cover each doubling of the final context. The prefix
        cache keeps whole blocks of `block_tokens` tokens, so an incomplete last block is prefilled again each turn. A
        tool return without recorded seconds counts as `unknown_tool_seconds`.
        """
        if not 0 < half_life < math.inf:
            raise ValueError(f"half_life is {half_life}; it is a number of trajectories, above 0 and finite")
        if bins_per_octave < 1:
            raise ValueError(f"bins_per_octave is {bins_per_octave}; it must be at least 1")
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; it must be at least 1")
        self.half_life = half_life
        self.bins_per_octave = bins_per_octave
        if not 0 <= unknown_tool_seconds < math.inf:
            raise ValueError(f"unknown_tool_seconds is {unknown_tool_seconds}; it must be 0 or more, and finite")
        self.block_tokens = block_tokens
        self.unknown_tool_seconds = unknown_tool_seconds
        self._by_version = False  # whether `observe_running` has been called
        self._opened: int | None = None  # last version of the opening cohort, whose weights decay in order of arrival
        self._opening = Cohort(self._bins)
        self._width = 1  # versions per cohort, except the opening one
        self._cohorts: dict[int, Cohort] = {}  # by start version // width
        self._weighed: WeighedCohorts | None = None  # until more is observed
        self._ahead = Cohort(self._bins)  # running trajectories, as if they had finished in their present state

    def observe(self, trajectory: Trajectory) -> None:
        """Add one finished trajectory; its `policy_version` is the version at its start. Raises ValueError for an
        unfinished trajectory, since its length is only a lower bound.
        """
        if not trajectory.finished:
            raise ValueError(f"trajectory {trajectory.id} is unfinished; give it to observe_running()")
        sums = sums_of(trajectory, self.block_tokens, self.unknown_tool_seconds)
        cell, _ = place(trajectory, sums, self.bins_per_octave)
        version = trajectory.policy_version
        self._weighed = None
        if not self._by_version:
            self._opened = version if self._opened is None else max(version, self._opened)
        cohort = self._cohort(version)
        if cohort is self._opening:
            cohort.forget(2 ** (-1 / self.half_life))
        cohort.add(cell, sums)
        self._trim()

    def observe_running(self, trajectories: Iterable[Trajectory]) -> None:
        """Replace the known running trajectories by these unfinished trajectories, in their present state.

        Before a query, call `observe` for the trajectories that have finished, then this method with all running
        trajectories, even if there are none. A trajectory that finishes counts twice until the next call. A trajectory
        that waits for a tool ends with this tool call: status "unknown", no returned tokens, and as `tool_seconds` the
        time that it has waited. Without this time, long waits count as less work.
        """
        placed = []
        for trajectory in trajectories:
            if trajectory.finished:
                raise ValueError(f"trajectory {trajectory.id} has finished; give it to observe()")
            sums = sums_of(trajectory, self.block_tokens, self.unknown_tool_seconds)
            placed.append((trajectory.policy_version, sums, *place(trajectory, sums, self.bins_per_octave)))
        self._by_version = True
        self._weighed = None
        self._ahead = Cohort(self._bins)
        for cohort in (self._opening, *self._cohorts.values()):
            cohort.clear_running()
        for version, sums, cell, part in placed:
            self._cohort(version).add_running(cell, part)
            self._ahead.add(cell, sums)
        self._cohorts = {key: cohort for key, cohort in self._cohorts.items() if cohort.started}
        self._trim()

    def classes(self, limit: int = 8) -> tuple[TrajectoryClass, ...]:
        """The workload as at most `limit` classes, shortest first.

        A class is priced as if all its trajectories were as long as the longest. So adjacent bins are merged where this
        overstates the mean final context least. The last class holds at most `TAIL_SHARE` of the trajectories, unless
        the last bin alone holds more or `limit` is 1.
        """
        if limit < 1:
            raise ValueError(f"limit is {limit}; a workload has at least 1 class")
        return self._distribution().classes(limit)

    def quantile(self, q: float) -> float:
        """Quantile `q` of the final context, in tokens.

        Trajectories of a bin are assumed to be spread evenly in the logarithm, between the lower edge and the largest
        observed context. So the answer is off by less than one bin.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q is {q}; give a share from 0 to 1")
        return self._distribution().quantile(q)

    def drift(self) -> Drift:
        """Test whether the work of trajectories, in tokens and tools, has changed: compare it with a memory that decays
        four times faster (`evidence.find_drift`).

        Before the first `observe_running`, the finished trajectories are assumed to be all trajectories. Without
        evidence there is no alarm.
        """
        if not self._finished:
            return Drift(distance=0.0, threshold=1.0, drifted=False)  # a distance is at most 1
        return self._evidence().drift

    def forecast(self, steps: float, limit: int = 8, longest: int | None = None) -> LengthForecast:
        """The workload `steps` versions after the newest started version, with no trajectory above `longest` tokens.

        The trend is a line through the mean log final context of the versions, over four times the memory of the other
        statistics. The trend covers the age of the evidence in full, and continues damped for the steps. Before the
        first `observe_running` there is no trend. A jump is not a trend, but may look like one while only one later
        version has started.
        """
        if not 0 <= steps < math.inf:
            raise ValueError(f"steps is {steps}; it is a number of versions, 0 or more")
        if longest is not None and longest < 1:
            raise ValueError(f"longest is {longest}; it is a number of tokens, 1 or more")
        classes = self.classes(limit)
        evidence = self._evidence()
        keys = sorted(self._cohorts)
        versions = (np.array(keys, dtype=float) + 0.5) * self._width - 0.5
        cohorts = [self._cohorts[key] for key in keys]
        finished = np.array([cohort.finished for cohort in cohorts], dtype=float)
        weights = evidence.weights[1:]
        trend = fit(versions, cohort_levels(cohorts, evidence), weights ** (1 / TREND_MEMORY) * finished)
        memory = evidence.memory_weights[1:] * finished
        age = float(versions[-1] - (versions * memory).sum() / memory.sum()) if memory.sum() else 0.0
        return project(classes, trend, age, steps, self._distribution().level_error(), longest)

    @property
    def mean_decode_context(self) -> float:
        """Mean context over all generated tokens; 0 if nothing was generated."""
        total = self._distribution().total()
        return float(total.context_sum / total.generated) if total.generated else 0.0

    @property
    def mean_peak(self) -> float:
        """Mean final context, with each trajectory counted as the longest of its bin."""
        distribution = self._distribution()
        return float((distribution.shares * distribution.peaks).sum())

    def work_uncertainty(self) -> float:
        """Relative standard error of the mean tokens that a trajectory generates, for independent trajectories.

        Infinite if the evidence is a single trajectory, or if no token was generated.
        """
        distribution = self._distribution()
        total, freedom = distribution.total(), distribution.samples - 1
        if freedom <= 0 or total.generated == 0:
            return math.inf
        variance = max(0.0, total.generated_squared - total.generated**2)
        return float(math.sqrt(variance / freedom) / total.generated)

    @property
    def unknown_tool_share(self) -> float:
        """Share of tool returns without recorded seconds; 0 if no tool was called."""
        total = self._distribution().total()
        return float(total.unknown_returns / total.tool_returns) if total.tool_returns > 0 else 0.0

    def snapshot(self) -> dict[str, Any]:
        """The whole state as JSON values; `restore` continues from it exactly."""
        return {
            "format": FORMAT,
            "half_life": self.half_life,
            "bins_per_octave": self.bins_per_octave,
            "block_tokens": self.block_tokens,
            "unknown_tool_seconds": self.unknown_tool_seconds,
            "by_version": self._by_version,
            "opened": self._opened,
            "width": self._width,
            "opening": self._opening.snapshot(),
            "ahead": self._ahead.snapshot(),
            "cohorts": [[key, self._cohorts[key].snapshot()] for key in sorted(self._cohorts)],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> LengthTracker:
        """The tracker from a `snapshot`. Raises `ValueError` for any other format."""
        if "format" not in snapshot or snapshot["format"] != FORMAT:
            raise ValueError(f"not a tracker snapshot of format {FORMAT}; observe the trajectories again")
        settings = ("half_life", "bins_per_octave", "block_tokens", "unknown_tool_seconds")
        tracker = cls(*(snapshot[name] for name in settings))
        tracker._by_version = snapshot["by_version"]
        tracker._opened = snapshot["opened"]
        tracker._width = snapshot["width"]
        tracker._opening = Cohort.restore(snapshot["opening"], tracker._bins)
        tracker._ahead = Cohort.restore(snapshot["ahead"], tracker._bins)
        tracker._cohorts = {key: Cohort.restore(saved, tracker._bins) for key, saved in snapshot["cohorts"]}
        return tracker

    @property
    def _bins(self) -> int:
        return OCTAVES * self.bins_per_octave

    @property
    def _finished(self) -> int:
        return self._opening.finished + sum(cohort.finished for cohort in self._cohorts.values())

    def _cohort(self, version: int) -> Cohort:
        """The cohort of a version, created if missing."""
        if self._opened is not None and version <= self._opened:
            return self._opening
        key = version // self._width
        cohort = self._cohorts.get(key)
        if cohort is None:
            cohort = self._cohorts[key] = Cohort(self._bins)
        return cohort

    def _trim(self) -> None:
        """Keep at most `_COHORTS` cohorts: drop the oldest if its weight has decayed, else join adjacent cohorts."""
        while len(self._cohorts) > _COHORTS:
            oldest = min(self._cohorts)
            behind = sum(cohort.started for key, cohort in self._cohorts.items() if key > oldest)
            if 2 ** (-behind / self.half_life) < FORGOTTEN and not len(self._cohorts[oldest].running.values):
                del self._cohorts[oldest]
            else:
                self._widen()

    def _widen(self) -> None:
        narrow, self._cohorts = self._cohorts, {}
        self._width *= 2
        for key, cohort in narrow.items():
            self._cohorts.setdefault(key // 2, Cohort(self._bins)).absorb(cohort)

    def _evidence(self) -> WeighedCohorts:
        if not self._finished:
            raise ValueError("the tracker has seen no trajectory; observe() at least one finished trajectory first")
        if self._weighed is None:
            cohorts = [self._opening, *(self._cohorts[key] for key in sorted(self._cohorts))]
            self._weighed = weigh(cohorts, self.half_life)
        return self._weighed

    def _distribution(self) -> Distribution:
        return self._evidence().distribution(self._ahead, self.bins_per_octave)
