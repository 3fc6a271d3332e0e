"""What trajectories that have finished say about those that are still running, and whether their lengths have changed.

Invariant: a trajectory that is still running counts among those that could have finished wherever it has been, and
nowhere else. Where none is running, a share is the plain weighted histogram's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FALSE_ALARM_RATE = 0.01  # chance that one look at stationary trajectories calls them drifted

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Drift:
    """Whether recent trajectories end after other work (`cohorts.work`) than the older ones."""

    distance: float  # largest difference between the two, in units of the share of trajectories
    threshold: float  # exceeded by chance in at most `FALSE_ALARM_RATE` of looks
    drifted: bool


def at_risk(finished: Array, running: Array, passed: Array) -> Array:
    """[bin, ...] how many could have finished in each bin: all that reach it, those still in it by the part passed.

    `finished` and `running` count trajectories by the bin of their (current) length; `passed` is the sum over the
    running ones of the part of that bin behind them (the actuarial estimate, with each one's own part instead of half).
    """
    reached = np.cumsum((finished + running)[::-1], axis=0)[::-1]
    beyond = np.zeros_like(reached)
    beyond[:-1] = reached[1:]
    return beyond + finished + passed


def hazard(finished: Array, risk: Array) -> Array:
    """[bin] share of those at risk in a bin that finish in it."""
    return np.divide(finished, risk, out=np.zeros_like(risk), where=risk > 0)


def outlived(ending: Array) -> Array:
    """[bin] share that reaches each bin: the product limit (Kaplan & Meier 1958) of the hazards `ending`."""
    return np.concatenate(([1.0], np.cumprod(1 - ending)[:-1]))


def lift(finished: Array, running: Array, passed: Array) -> Array:
    """[bin] how many trajectories each one that finishes in a bin stands for: itself, and its share of those that were
    lost from sight before it, by weight.

    That is the inverse of the probability of still being seen there (Robins & Rotnitzky 1992), estimated by the product
    limit: the sum of `lift * finished` up to a bin is its share of the total (Satten & Datta 2001). Where nothing runs
    all are 1.
    """
    risk = at_risk(finished, running, passed)
    total = float((finished + running).sum())
    seen = np.divide(total, risk, out=np.zeros_like(risk), where=risk > 0)
    return np.asarray(outlived(hazard(finished, risk)) * seen)


def log_survival_variance(finished: Array, risk: Array, risk_squares: Array) -> Array:
    """[bin] variance of the logarithm of the share that outlives the bin (Greenwood 1926), infinite where none does.

    With weights a bin's risk set is worth `risk**2 / risk_squares` trajectories (Kish 1965); `risk_squares` is
    `at_risk` of the squared weights.
    """
    ending = hazard(finished, risk)
    samples = np.divide(risk**2, risk_squares, out=np.ones_like(risk), where=risk_squares > 0)
    with np.errstate(divide="ignore"):
        return np.cumsum(ending / (1 - ending) / samples)


def drift(finished: Array, risk: Array) -> Drift:
    """Compare the shares that outlive each bin of work in a slow and in a fast memory of the same trajectories.

    The columns of both arrays are weighted by `cohorts.POWERS`: s, f, s**2, s f and f**2, for the weights s and f of
    a trajectory in the two memories. Where hazards h do not depend on the weights, the ratio of the two shares, less
    1, is a martingale in the work whatever is still running; its variance C grows by
    `h / (1 - h) * sum (f / F - s / S)**2` a bin, over those at risk, F and S being their total weights. It tends to a
    Brownian motion W(C), and `sqrt(n) W(C) / (1 + n C)` is a Brownian bridge for any n (Hall & Wellner 1980), whose
    largest excursion exceeds x with a probability of at most `2 * exp(-2 * x**2)` (Kolmogorov's distribution). With
    1 / n the sum over all trajectories, and none running, `1 / (1 + n C)` is about the share itself, and the test that
    of Kolmogorov and Smirnov. The threshold is the x for `FALSE_ALARM_RATE`; binning can only lower the rate.

    Assumed: independent trajectories (samples of one prompt resemble each other and raise the rate), weights spread
    over enough of them for the limit (half-lives of a few dozen), and a rate per look: looks at trajectories that do
    not overlap each have their own chance. No trajectories, or one, are no drift.
    """
    ending, recent_ending = hazard(finished[:, 0], risk[:, 0]), hazard(finished[:, 1], risk[:, 1])
    known = (risk[:, 1] > 0) & (ending < 1)  # from the first bin up to one that nothing outlives
    slow, fast, slow_squares, products, fast_squares = risk[known].T
    ending, recent_ending = ending[known], recent_ending[known]
    # Below 1e-12 the three terms cancel to rounding noise: the two memories are still the same.
    spread = np.maximum(fast_squares / fast**2 - 2 * products / (fast * slow) + slow_squares / slow**2, 1e-12)
    if not spread.size:
        return Drift(distance=0.0, threshold=1.0, drifted=False)  # all in the first bin
    variance = np.cumsum(ending / (1 - ending) * spread)
    ratio = np.cumprod((1 - recent_ending) / (1 - ending))
    # Censoring can only widen the variance; where an estimate of it says otherwise, the share itself is the scale.
    scale = np.maximum(1 + variance / spread[0], 1 / np.cumprod(1 - ending))
    distance = float(np.abs((ratio - 1) / scale).max())
    threshold = math.sqrt(math.log(2 / FALSE_ALARM_RATE) / 2 * float(spread[0]))
    return Drift(distance, threshold, distance > threshold)
