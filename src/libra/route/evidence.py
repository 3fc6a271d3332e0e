"""Evidence by context: histograms of the tokens that finished trajectories needed, forgotten exponentially, and
progress marks of running trajectories.

Invariant: a context's histogram sums everything added to it since it was last evicted. Each addition counts with its
weight times `2 ** (-n / half_life)`, where n is the number of later trajectories; for one of an older policy version, n
counts from the first of a newer version. There are never more than `max_contexts` histograms.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Self

import numpy as np

from libra.route.remaining import BINS, BINS_PER_OCTAVE, Histogram, bin_of

Context = tuple[Hashable, ...]  # of strings, numbers and tuples of them
Marks = dict[int, int]  # number by bin, of one context

# 320 bytes for the histogram of a context, and as many again for its name and its place in the table.
MAX_CONTEXTS = 65_536
# Trajectories: the last two policy versions at 512 a version.
HALF_LIFE = 1024.0

_KEPT_VERSIONS = 64
_COLUMNS = BINS + 1  # of the table: weights by bin, and their sum
_REBASE = 64  # half-lives after which the stored weights are scaled down: single precision holds 2 ** 127


class ReturnEvidence:
    """Weights by context and bin. Adding to a context makes it the most recently used; the least recently used are
    evicted first."""

    def __init__(self, half_life: float = HALF_LIFE, max_contexts: int = MAX_CONTEXTS) -> None:
        """`half_life` is in trajectories."""
        if not 0 < half_life < math.inf:
            raise ValueError(f"half_life is {half_life}; it is a number of trajectories, above 0 and finite")
        if max_contexts < 1:
            raise ValueError(f"max_contexts is {max_contexts}; give 1 or more")
        self.half_life = half_life
        self.max_contexts = max_contexts
        self._clock = 0  # trajectories counted
        self._base = 0  # clock at which an addition is stored with its own weight; later ones are stored with more
        self.fading = 1.0  # present weight of an addition stored with weight 1
        self._versions: list[int] = []  # versions that were the newest when first counted, in order
        self._since: list[int] = []  # clock at which each of them was first counted
        # Least recently used first. A plain dict would scan all its deleted entries to find the first one.
        self._rows: OrderedDict[Context, int] = OrderedDict()
        self._taken: list[int] = []  # rows of evicted contexts, still to be zeroed
        # Row 0 stays empty: contexts without evidence read it.
        self._table: Histogram = np.zeros((1, _COLUMNS), np.float32)

    def __len__(self) -> int:
        """Contexts held."""
        return len(self._rows)

    @property
    def trajectories(self) -> int:
        """Trajectories counted so far, including forgotten ones."""
        return self._clock

    def count(self, version: int, histograms: Mapping[Context, Mapping[int, float]]) -> None:
        """Count one trajectory of this policy version: weights by bin to add to each context, in this order."""
        self._clock += 1
        if self._clock - self._base > _REBASE * self.half_life:
            self._table *= np.float32(2 ** ((self._base - self._clock) / self.half_life))
            self._base = self._clock
        self.fading = 2 ** ((self._base - self._clock) / self.half_life)
        stored = 2 ** ((self._standing(version) - self._base) / self.half_life)
        # By row: a context that is evicted for a later one of these leaves its row to that one.
        adding: dict[int, Mapping[int, float]] = {}
        rows, latest_used = self._rows, self._rows.move_to_end
        for context, weights in histograms.items():
            row = rows.get(context)
            if row is None:
                row = self._new_row(context)
            else:
                latest_used(context)
            adding[row] = weights
        if self._taken:
            self._table[self._taken] = 0
            self._taken.clear()
        where: list[int] = []
        sums: list[int] = []
        what: list[float] = []
        for row, weights in adding.items():
            first = row * _COLUMNS
            for bin_, weight in weights.items():
                where.append(first + bin_)
                sums.append(first + BINS)
                what.append(weight)
        added = np.array(what, np.float32)
        added *= np.float32(stored)
        flat = self._table.reshape(-1)
        flat[np.array(where, np.intp)] += added  # each cell occurs once, but the sums, in the last column, repeat
        np.add.at(flat, np.array(sums, np.intp), added)

    def histograms(self, contexts: Sequence[Context]) -> Histogram:
        """Stored weights by context and bin, and their sum in one more column; multiply by `fading` for present
        weights. Zeros for a context without evidence."""
        return self._table.take([*map(self._rows.get, contexts, repeat(0))], 0)

    def snapshot(self) -> dict[str, Any]:
        """JSON values; weights as stored, by context in order of use."""
        contexts = []
        for context, row in self._rows.items():
            bins = np.flatnonzero(self._table[row])
            contexts.append([context, bins.tolist(), self._table[row, bins].tolist()])
        return {
            "half_life": self.half_life,
            "max_contexts": self.max_contexts,
            "clock": self._clock,
            "base": self._base,
            "fading": self.fading,
            "versions": list(self._versions),
            "since": list(self._since),
            "contexts": contexts,
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> Self:
        evidence = cls(snapshot["half_life"], snapshot["max_contexts"])
        evidence._clock, evidence._base, evidence.fading = snapshot["clock"], snapshot["base"], snapshot["fading"]
        evidence._versions, evidence._since = list(snapshot["versions"]), list(snapshot["since"])
        for context, bins, weights in snapshot["contexts"]:
            row = evidence._new_row(as_context(context))  # makes the table larger
            evidence._table[row, bins] = weights
        return evidence

    def _standing(self, version: int) -> int:
        """The clock value from which a trajectory of this version ages."""
        if not self._versions or version > self._versions[-1]:
            self._versions.append(version)
            self._since.append(self._clock)
            if len(self._versions) > _KEPT_VERSIONS:
                del self._versions[0], self._since[0]
        newer = bisect_right(self._versions, version)
        return self._clock if newer == len(self._versions) else self._since[newer]

    def _new_row(self, context: Context) -> int:
        """Assign a row to a context without one: an empty row, or that of an evicted context, which becomes `_taken`.
        The context is then the most recently used."""
        rows = self._rows
        if len(rows) < self.max_contexts:
            row = len(rows) + 1
            if row == len(self._table):
                more = min(len(self._table), self.max_contexts + 1 - row)
                self._table = np.concatenate([self._table, np.zeros((more, _COLUMNS), np.float32)])
        else:
            _, row = rows.popitem(last=False)
            self._taken.append(row)
        rows[context] = row
        return row


@dataclass(slots=True)
class _Place:
    """Contexts and bin of a running trajectory. `marks` are those of its contexts, which exist as long as it runs."""

    contexts: tuple[Context, ...]
    marks: list[Marks]
    bin: int


class Running:
    """Counts of running trajectories by context and bin. Memory is proportional to the running trajectories.

    Each trajectory marks each of its contexts with one bin: the first of the octave of its tokens so far. When it ends
    its marks are removed, and a context without marks is not kept. In octaves a mark rarely moves, and is still a lower
    bound.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}  # by trajectory
        self._marks: dict[Context, Marks] = {}

    def start(self, trajectory_id: str, contexts: Iterable[Context], bin_: int = 0) -> None:
        """Add a running trajectory with the contexts of its start."""
        own = tuple(contexts)
        marks = [self._marks.setdefault(context, {}) for context in own]
        for mark in marks:
            mark[bin_] = mark.get(bin_, 0) + 1
        self._places[trajectory_id] = _Place(own, marks, bin_)

    def reached(self, trajectory_id: str, tokens: int) -> None:
        """Record that a trajectory has `tokens` tokens, generated and returned. Ignored if it is not running, or had
        more before."""
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
        """Remove a trajectory that has finished or was given up; no error if it is not running."""
        place = self._places.pop(trajectory_id, None)
        if place is None:
            return
        for context, mark in zip(place.contexts, place.marks, strict=True):
            _unmark(mark, place.bin)
            if not mark:
                del self._marks[context]

    def histograms(self, contexts: Sequence[Context]) -> Histogram | None:
        """Numbers of running trajectories by context and bin; None if all of them are in bin 0."""
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


def as_context(values: Iterable[Any]) -> Context:
    """A context from its lists in JSON."""
    return tuple(as_context(value) if isinstance(value, (list, tuple)) else value for value in values)
