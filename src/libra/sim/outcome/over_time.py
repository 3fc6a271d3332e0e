"""Means over time of the number, or the weight, of present items."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ticks = NDArray[np.int64]
Means = NDArray[np.float64]


def mean_present(begins: Ticks, ends: Ticks, edges: Ticks, weights: NDArray[np.float64] | None = None) -> Means:
    """Mean number of items that are present, or their mean weight, between neighbouring `edges`. Item i is present from
    `begins[i]` to `ends[i]`; `edges` rise."""
    passed = _since(begins, edges, weights) - _since(ends, edges, weights)
    # A float sum of many ticks may be slightly below zero.
    return np.maximum(np.diff(passed) / np.diff(edges), 0.0)


def mean_present_by(
    owners: Ticks, count: int, begins: Ticks, ends: Ticks, edges: Ticks, weights: NDArray[np.float64] | None = None
) -> Means:
    """As `mean_present`, for each of `count` owners: [owner, interval between edges]. `owners[i]` is the owner of item
    i; -1: no owner."""
    ordered = np.argsort(owners, kind="stable")
    firsts = np.searchsorted(owners[ordered], np.arange(count + 1))
    made = np.zeros((count, len(edges) - 1))
    for owner in np.flatnonzero(np.diff(firsts)).tolist():
        its = ordered[firsts[owner] : firsts[owner + 1]]
        made[owner] = mean_present(begins[its], ends[its], edges, None if weights is None else weights[its])
    return made


def _since(moments: Ticks, edges: Ticks, weights: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """At each edge, the sum of the times since all earlier moments."""
    order = np.argsort(moments, kind="stable")
    passed = (moments[order] - edges[0]).astype(np.float64)
    heavy = np.ones(len(passed)) if weights is None else weights[order]
    at = (edges - edges[0]).astype(np.float64)
    before = np.searchsorted(passed, at, "right")
    counts = np.concatenate(([0.0], np.cumsum(heavy)))[before]
    times: NDArray[np.float64] = counts * at - np.concatenate(([0.0], np.cumsum(passed * heavy)))[before]
    return times
