"""Trajectories under way: how far they have come, at the contexts that they started in.

Invariant: each one marks each of its contexts with one bin, the first of the octave of the tokens it has had so far;
one that ends leaves no mark, and a context without marks is not kept. By octaves a mark seldom moves, and is a lower
bound still.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libra.route.evidence import Context, as_context
from libra.route.remaining import BINS, BINS_PER_OCTAVE, Histogram, bin_of

Marks = dict[int, int]  # number by bin, of one context


@dataclass(slots=True)
class _Place:
    """Where a running trajectory is. Its contexts have marks as long as it runs, so those can be kept at hand."""

    contexts: tuple[Context, ...]
    marks: list[Marks]
    bin: int


class Running:
    """Counts of running trajectories by context and bin. Memory is that of the trajectories that run."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}  # by trajectory
        self._marks: dict[Context, Marks] = {}

    def start(self, trajectory_id: str, contexts: Iterable[Context], bin_: int = 0) -> None:
        """From now on it runs; its contexts are where it started."""
        own = tuple(contexts)
        marks = [self._marks.setdefault(context, {}) for context in own]
        for mark in marks:
            mark[bin_] = mark.get(bin_, 0) + 1
        self._places[trajectory_id] = _Place(own, marks, bin_)

    def reached(self, trajectory_id: str, tokens: int) -> None:
        """It has had so many tokens, generated and returned. One that does not run is ignored; none comes back down."""
        place = self._places.get(trajectory_id)
        if place is None:
            return
        now = bin_of(tokens) // BINS_PER_OCTAVE * BINS_PER_OCTAVE
        if now > place.bin:
            for mark in place.marks:
                _unmark(mark, place.bin)
                mark[now] = mark.get(now, 0) + 1
            place.bin = now

    def end(self, trajectory_id: str) -> None:
        """It has finished or was given up; no error if it does not run."""
        place = self._places.pop(trajectory_id, None)
        if place is None:
            return
        for context, mark in zip(place.contexts, place.marks, strict=True):
            _unmark(mark, place.bin)
            if not mark:
                del self._marks[context]

    def histograms(self, contexts: Sequence[Context]) -> Histogram | None:
        """How many run, by context and bin; None where none of them has more than started."""
        marks = [self._marks.get(context) for context in contexts]
        if not any(mark is not None and (len(mark) > 1 or 0 not in mark) for mark in marks):
            return None
        found = np.zeros((len(contexts), BINS), np.float32)
        for row, mark in zip(found, marks, strict=True):
            for bin_, number in (mark or {}).items():
                row[bin_] = number
        return found

    def snapshot(self) -> list[Any]:
        """JSON values."""
        return [[id, place.contexts, place.bin] for id, place in self._places.items()]

    @classmethod
    def restore(cls, snapshot: Iterable[Any]) -> Running:
        running = cls()
        for id, contexts, bin_ in snapshot:
            running.start(id, (as_context(context) for context in contexts), bin_)
        return running


def _unmark(marks: Marks, bin_: int) -> None:
    if marks[bin_] == 1:
        del marks[bin_]
    else:
        marks[bin_] -= 1


def redistributed(finished: Histogram, running: Histogram) -> Histogram:
    """Shares by bin of the lengths of all, when some have `finished` in their bins and others are `running` in theirs.

    The product-limit estimator (Kaplan and Meier 1958). One that runs counts as at risk below its bin: in it, it may
    end any time. What is longer than all that have finished is put an octave beyond the longest that runs: as long
    again. The weights must not all be 0.
    """
    at_risk = finished.copy()
    at_risk[:-1] += running[1:]
    at_risk = at_risk[::-1].cumsum()[::-1]
    hazard = np.divide(finished, at_risk, out=np.zeros_like(finished), where=at_risk > 0)
    np.minimum(hazard, 1, out=hazard)  # sums in single precision may be too small
    survive = (1 - hazard).cumprod()
    shares: Histogram = hazard.copy()
    shares[1:] *= survive[:-1]
    if survive[-1] > 0:
        longest = int((finished + running).nonzero()[0][-1])
        shares[min(BINS - 1, longest + BINS_PER_OCTAVE)] += survive[-1]
    return shares
