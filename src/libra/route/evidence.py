"""Evidence by context: histograms of the tokens of finished trajectories, with exponentially decaying weights, and
progress marks of running trajectories.

Invariant: a context's histogram is the sum of all additions since the context was last evicted. An addition counts with
its weight times `2 ** (-n / half_life)`, where n is the number of later trajectories. For a trajectory of an older
policy version, n counts from the first trajectory of a newer version. There are never more than `max_contexts`
histograms.
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
Marks = dict[int, int]  # number of marks by bin, for one context

# A context takes 320 bytes for its histogram, and another 320 bytes for its name and its table entry.
MAX_CONTEXTS = 65_536
# In trajectories; covers the last two policy versions at 512 trajectories per version.
HALF_LIFE = 1024.0

_KEPT_VERSIONS = 64
_COLUMNS = BINS + 1  # columns of the table: weights by bin, and their sum
_REBASE = 64  # half-lives after which stored weights are scaled down, since single precision ends at 2 ** 127


class ReturnEvidence:
    """Weights by context and bin. An addition makes a context the most recently used. The least recently used context
    is evicted first.
    """

    def __init__(self, half_life: float = HALF_LIFE, max_contexts: int = MAX_CONTEXTS) -> None:
        """Make empty evidence; `half_life` is in trajectories."""
        if not 0 < half_life < math.inf:
            raise ValueError(f"half_life is {half_life}; it is a number of trajectories, above 0 and finite")
        if max_contexts < 1:
            raise ValueError(f"max_contexts is {max_contexts}; give 1 or more")
        self.half_life = half_life
        self.max_contexts = max_contexts
        self._clock = 0  # trajectories counted
        # Clock at which additions are stored with their own weight. Later additions are stored with larger weights.
        self._base = 0
        self.fading = 1.0  # present weight of an addition stored with weight 1
        self._versions: list[int] = []  # versions that were the newest when first counted, in order
        self._since: list[int] = []  # clock at which each version was first counted
        # Least recently used first. A plain dict would scan all deleted entries to find its first entry.
        self._rows: OrderedDict[Context, int] = OrderedDict()
        self._taken: list[int] = []  # rows of evicted contexts, still to be zeroed
        # Row 0 stays empty, for contexts without evidence.
        self._table: Histogram = np.zeros((1, _COLUMNS), np.float32)

    def __len__(self) -> int:
        """Number of contexts."""
        return len(self._rows)

    @property
    def trajectories(self) -> int:
        """Number of trajectories counted, including forgotten ones."""
        return self._clock

    def count(self, version: int, histograms: Mapping[Context, Mapping[int, float]]) -> None:
        """Count one trajectory of this policy version: add weights by bin to each context, in the given order."""
        self._clock += 1
        if self._clock - self._base > _REBASE * self.half_life:
            self._table *= np.float32(2 ** ((self._base - self._clock) / self.half_life))
            self._base = self._clock
        self.fading = 2 ** ((self._base - self._clock) / self.half_life)
        stored = 2 ** ((self._standing(version) - self._base) / self.half_life)
        # Keyed by row, since a later context may evict an earlier one and take its row.
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
        flat[np.array(where, np.intp)] += added  # each cell occurs once, except the sums in the last column
        np.add.at(flat, np.array(sums, np.intp), added)

    def histograms(self, contexts: Sequence[Context]) -> Histogram:
        """Stored weights by context and bin, with their sum in a last column. Multiply by `fading` for present weights.
        A context without evidence has zeros.
        """
        return self._table.take([*map(self._rows.get, contexts, repeat(0))], 0)

    def snapshot(self) -> dict[str, Any]:
        """The state as JSON values: weights as they are stored, by context in order of use."""
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
            row = evidence._new_row(as_context(context))  # may enlarge the table
            evidence._table[row, bins] = weights
        return evidence

    def _standing(self, version: int) -> int:
        """Clock value from which trajectories of this version lose weight."""
        if not self._versions or version > self._versions[-1]:
            self._versions.append(version)
            self._since.append(self._clock)
            if len(self._versions) > _KEPT_VERSIONS:
                del self._versions[0], self._since[0]
        newer = bisect_right(self._versions, version)
        return self._clock if newer == len(self._versions) else self._since[newer]

    def _new_row(self, context: Context) -> int:
        """Assign a row to a new context: an empty row, or the row of an evicted context, which is then listed in
        `_taken`. The context becomes the most recently used.
        """
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
    """Contexts and bin of a running trajectory. `marks` are the marks of these contexts, which exist while the
    trajectory runs.
    """

    contexts: tuple[Context, ...]
    marks: list[Marks]
    bin: int


class Running:
    """Counts of running trajectories by context and bin. Memory is proportional to the running trajectories.

    A trajectory marks each of its contexts with one bin, the first bin of the octave of its present tokens. Its end
    removes the marks, and a context without marks is dropped. Octaves keep a mark a lower bound, and it rarely moves.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}  # by trajectory
        self._marks: dict[Context, Marks] = {}

    def start(self, trajectory_id: str, contexts: Iterable[Context], bin_: int = 0) -> None:
        """Add a running trajectory with the contexts at its start."""
        own = tuple(contexts)
        marks = [self._marks.setdefault(context, {}) for context in own]
        for mark in marks:
            mark[bin_] = mark.get(bin_, 0) + 1
        self._places[trajectory_id] = _Place(own, marks, bin_)

    def reached(self, trajectory_id: str, tokens: int) -> None:
        """Record that a trajectory has `tokens` generated and returned tokens. Ignored if the trajectory is not
        running, or already had more tokens.
        """
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
        """Remove a finished or abandoned trajectory; no error if it is not running."""
        place = self._places.pop(trajectory_id, None)
        if place is None:
            return
        for context, mark in zip(place.contexts, place.marks, strict=True):
            _unmark(mark, place.bin)
            if not mark:
                del self._marks[context]

    def histograms(self, contexts: Sequence[Context]) -> Histogram | None:
        """Numbers of running trajectories by context and bin; None if all are in bin 0."""
        marks = [self._marks.get(context) for context in contexts]
        if not any(mark is not None and (len(mark) > 1 or 0 not in mark) for mark in marks):
            return None
        found = np.zeros((len(contexts), BINS), np.float32)
        for row, mark in zip(found, marks, strict=True):
            for bin_, number in (mark or {}).items():
                row[bin_] = number
        return found

    def snapshot(self) -> list[Any]:
        """The state as JSON values."""
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
    """A context from its JSON lists."""
    return tuple(as_context(value) if isinstance(value, (list, tuple)) else value for value in values)
