"""Forecast of lengths: the trend over start versions, and the resulting workload.

Invariant: without evidence the trend is 0. The error of a forecast includes the error of its change to the tracked
lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from libra.lengths.classes import TrajectoryClass
from libra.lengths.cohorts import LOG_CONTEXT, Cohort
from libra.lengths.evidence import WeighedCohorts
from libra.lengths.members import Member

DAMPING = 0.9  # change in a future version, relative to the version before (Gardner & McKenzie 1985)
# A trend is a small change between noisy levels, so its memory has this many half-lives of the other statistics.
TREND_MEMORY = 4
_MIN_POINTS = 6  # a line with a step through fewer points has no residuals for an error estimate
_STEP_F = 12.0  # about the 1 % point of the largest F over all places of one step (Andrews 1993, table I)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trend:
    """Change of the mean logarithm of the final context per version, and its standard error."""

    slope: float
    error: float


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """The workload a given number of versions ahead."""

    classes: tuple[TrajectoryClass, ...]
    scale: float  # factor on the tracked lengths
    error: float  # standard error of the logarithm of the forecast level, about its relative error


def cohort_levels(cohorts: Sequence[Cohort], evidence: WeighedCohorts) -> Array:
    """[cohort] mean logarithm of the final context.

    A running trajectory counts with the mean over all trajectories with more work than its present work (one step of
    Buckley & James 1979). This mean ignores the trend, so weigh a cohort by its finished trajectories.
    """
    shares, logs = evidence.by_work, evidence.log_contexts
    # On average, a running trajectory has passed half of its bin.
    outliving = np.cumsum(shares[::-1])[::-1] - shares / 2
    total = np.cumsum((shares * logs)[::-1])[::-1] - shares * logs / 2
    expected = np.divide(total, outliving, out=logs.copy(), where=outliving > 0)
    levels = []
    for cohort in cohorts:
        to_come = cohort.running.values[:, 0] @ expected[cohort.running.cells[:, 0]]
        levels.append((cohort.sums[:, LOG_CONTEXT].sum() + to_come) / cohort.started)
    return np.array(levels)


def fit(versions: Array, levels: Array, weights: Array) -> Trend:
    """The slope of the weighted least-squares line of `levels` over `versions`, with a step if the levels have jumped.

    A jump is not a trend. A step is kept if it explains more than chance: the largest F statistic over all places with
    two versions on either side must exceed its 1 % point (Andrews 1993). The slope is shrunk by `1 - error**2 /
    slope**2`, and is 0 if it does not exceed its error (the positive-part rule of James & Stein 1961). So noise is not
    extrapolated. Fewer than 6 versions of equal weight show no trend.
    """
    if weights.sum() == 0 or weights.sum() ** 2 / (weights**2).sum() < _MIN_POINTS:
        return Trend(0.0, 0.0)
    weights = weights / weights.sum()
    line = np.column_stack((versions - versions[-1], np.ones_like(versions)))
    found = _least_squares(line, levels, weights)
    stepped = [_least_squares(np.column_stack((line, versions >= at)), levels, weights) for at in versions[2:-1]]
    best = min(stepped, key=lambda candidate: candidate.unexplained)
    if (found.unexplained - best.unexplained) * best.freedom > _STEP_F * best.unexplained:
        found = best
    kept = max(0.0, 1 - (found.error / found.slope) ** 2) if found.slope else 0.0
    return Trend(found.slope * kept, found.error)


@dataclass(frozen=True, slots=True)
class _Line:
    slope: float
    error: float
    unexplained: float  # weighted mean of the squared residuals
    freedom: float  # independent residuals behind the estimated noise of a level


def _least_squares(columns: Array, levels: Array, weights: Array) -> _Line:
    """Least-squares fit of `levels` on `columns`, of which the first is the version. Weights sum to 1 and are unrelated
    to the noise.
    """
    inverse = np.linalg.pinv((columns.T * weights) @ columns, hermitian=True)
    residuals = levels - columns @ (inverse @ (columns.T @ (weights * levels)))
    unexplained = float((weights * residuals**2).sum())
    samples = 1 / float((weights**2).sum())
    freedom = samples - columns.shape[1]
    spread = inverse @ ((columns.T * weights**2) @ columns) @ inverse
    noise = unexplained * samples / freedom
    slope = float(inverse[0] @ (columns.T @ (weights * levels)))
    return _Line(slope, math.sqrt(noise * max(0.0, float(spread[0, 0]))), unexplained, freedom)


def project(
    classes: Sequence[TrajectoryClass],
    trend: Trend,
    age: float,
    steps: float,
    level_error: float,
    longest: int | None,
) -> LengthForecast:
    """Forecast of the classes for `steps` versions from now, from evidence that is `age` versions old.

    The trend applies fully to the age, and damped to the steps, which count as DAMPING + DAMPING**2 + ... versions. A
    trend may or may not continue, so the error includes the part that damping removes."""
    damped = DAMPING * (1 - DAMPING**steps) / (1 - DAMPING)
    scale = math.exp(trend.slope * (age + damped))
    return LengthForecast(
        classes=tuple(scaled(cls, scale, longest) for cls in classes),
        scale=scale,
        error=math.hypot(level_error, (age + steps) * trend.error, (steps - damped) * trend.slope),
    )


def scaled(cls: TrajectoryClass, factor: float, longest: int | None) -> TrajectoryClass:
    """The class with trajectories `factor` times as long: more equal turns, with growing contexts.

    Lengths, turns and tool seconds grow with the factor, and the sum of contexts with its square. The first turn does
    not change. No trajectory becomes longer than `longest` tokens.
    """
    if longest is not None:
        factor = min(factor, max(1.0, longest / cls.peak_context))
    peak = max(1, math.ceil(cls.peak_context * factor))
    return replace(
        cls,
        peak_context=peak if longest is None else min(peak, max(longest, cls.peak_context)),
        mean_context=cls.mean_context * factor,
        generated=cls.generated * factor,
        context_sum=cls.context_sum * factor**2,
        prefill=cls.prefill * factor,
        turns=max(1.0, cls.turns * factor),
        tool_seconds=cls.tool_seconds * factor,
        before_first_return=min(1.0, cls.before_first_return / factor),
        members=tuple(
            Member(it.share, it.generated * factor, it.prefill * factor, it.turns * factor, it.tool_seconds * factor)
            for it in cls.members
        ),
    )
