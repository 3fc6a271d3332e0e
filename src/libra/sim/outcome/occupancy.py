"""Occupancy of engines over time: a recorder for a running cluster, and the recorded series.

Invariant: memory is bounded for any length of simulation. Rows are contiguous, and each has the mean over its time. So
a mean over whole rows is exact, no matter how often rows were merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libra.sim.engine.engine import SimEngine

MOST_ROWS = 50_000  # of all engines together, about 20 MB

Means = NDArray[np.float64]
Ticks = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class EngineSeries:
    """Read-only arrays with one entry per row. Before the first row and after the last row the engine is empty.
    `running` and `waiting` are numbers of requests since the engine's latest decision. `held` are KV blocks, which are
    assumed to grow evenly between two decisions."""

    edges: Ticks  # [rows + 1], rising: row i is from edges[i] to edges[i + 1]
    running: Means
    waiting: Means
    held: Means
    held_peak: Ticks  # most blocks at any moment of the row
    pauses: tuple[tuple[int, int], ...] = ()  # (start, end) in ticks, for new weights; adjoining pauses are merged
    more_pauses: int = 0  # number of further pauses, which are not recorded for lack of room

    def __post_init__(self) -> None:
        for values in (self.edges, self.running, self.waiting, self.held, self.held_peak):
            values.flags.writeable = False

    def __len__(self) -> int:
        return len(self.running)

    @property
    def most_held(self) -> int:
        return int(self.held_peak.max(initial=0))

    def merged(self, count: int) -> EngineSeries:
        """The series with every `count` rows merged into one row; the last row may be of fewer."""
        if count == 1 or not len(self):
            return self
        firsts = np.arange(0, len(self), count)
        edges = np.append(self.edges[firsts], self.edges[-1])
        spans, old = np.diff(edges), np.diff(self.edges)
        running, waiting, held = (
            np.add.reduceat(values * old, firsts) / spans for values in (self.running, self.waiting, self.held)
        )
        peaks = np.maximum.reduceat(self.held_peak, firsts)
        return EngineSeries(edges, running, waiting, held, peaks, self.pauses, self.more_pauses)

    def over(self, edges: Ticks) -> tuple[Means, Means]:
        """Means of (running, held) between neighbouring `edges`, which are rising ticks."""
        return self._mean(self.running, edges), self._mean(self.held, edges)

    def _mean(self, values: Means, edges: Ticks) -> Means:
        if not len(self):
            return np.zeros(len(edges) - 1)
        until = np.concatenate(([0.0], np.cumsum(values * np.diff(self.edges))))
        mean: Means = np.diff(np.interp(edges, self.edges, until)) / np.diff(edges)
        return mean


class OccupancyRecorder:
    """The `watch` of one cluster. A row covers the same number of decisions for all engines. This number grows, so that
    there are never more than `most_rows` rows in total, or four rows per engine if that is more."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        if most_rows < 1:
            raise ValueError(f"most_rows is {most_rows}; give 1 or more")
        self._most_rows = most_rows
        self._rows = 0
        self._pauses = 0
        self._decisions = 1  # decisions per row
        self._engines: dict[int, _Seen] = {}

    def __call__(self, engine: SimEngine, now: int) -> None:
        seen = self._engines.get(engine.index)
        if seen is None:
            seen = self._engines[engine.index] = _Seen(now)
        elif now > seen.tick:
            if seen.filled == self._decisions or not seen.rows:
                seen.rows.append([seen.tick, 0, 0, 0, 0])
                seen.filled = 0
                self._rows += 1
            seen.last(engine, now)
            if self._rows > max(self._most_rows, 4 * len(self._engines)):
                self._coarsen()
        if engine.paused:
            self._pause(seen, now, engine.end)
        seen.look(engine, now)

    def series(self, engine: int, end: int) -> EngineSeries:
        """The series of the engine with index `engine` until tick `end`. Raises ValueError if `end` is before the
        engine's last decision."""
        seen = self._engines.get(engine)
        if seen is None:
            nothing = np.zeros(0)
            return EngineSeries(np.zeros(1, np.int64), nothing, nothing, nothing, np.zeros(0, np.int64))
        if end < seen.tick:
            raise ValueError(
                f"engine {engine} was observed at tick {seen.tick}: request its series at that tick or later"
            )
        rows = [*seen.rows, seen.since(end)] if end > seen.tick else seen.rows
        edges = np.array([*(row[0] for row in rows), end], np.int64)
        spans = [later - sooner for sooner, later in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
        running, waiting, held = (
            np.array([row[part] / (scale * span) for row, span in zip(rows, spans, strict=True)], np.float64)
            for part, scale in ((1, 1), (2, 1), (3, 2))
        )
        peaks = np.array([row[4] for row in rows], np.int64)
        return EngineSeries(edges, running, waiting, held, peaks, tuple(seen.pauses), seen.more_pauses)

    def _pause(self, seen: _Seen, start: int, end: int) -> None:
        if seen.pauses and seen.pauses[-1][1] == start and not seen.more_pauses:
            seen.pauses[-1] = (seen.pauses[-1][0], end)
        elif self._pauses < self._most_rows:
            seen.pauses.append((start, end))
            self._pauses += 1
        else:
            seen.more_pauses += 1

    def _coarsen(self) -> None:
        """Merge rows in pairs, and double the decisions per row from now on."""
        for seen in self._engines.values():
            rows = seen.rows
            if len(rows) % 2 == 0:
                seen.filled += self._decisions
            seen.rows = [_sum(*rows[first : first + 2]) for first in range(0, len(rows), 2)]
        self._rows = sum(len(seen.rows) for seen in self._engines.values())
        self._decisions *= 2


@dataclass(slots=True)
class _Seen:
    """Records of one engine: rows of [start, running, waiting, held, largest held], and the engine's state at its last
    decision. In a row, running and waiting are multiplied by ticks, and held by twice the ticks."""

    tick: int
    rows: list[list[int]] = field(default_factory=list)
    filled: int = 0  # decisions in the last row
    pauses: list[tuple[int, int]] = field(default_factory=list)
    more_pauses: int = 0
    running: int = 0
    waiting: int = 0
    held: int = 0
    held_ticks: int = 0
    steps: int = 0

    def look(self, engine: SimEngine, now: int) -> None:
        self.tick = now
        self.running = len(engine.running)
        self.waiting = len(engine.waiting)
        self.held = engine.pool.held
        self.held_ticks = engine.held_ticks
        self.steps = engine.steps

    def last(self, engine: SimEngine, now: int) -> None:
        """Add the last state, which lasted until `now`, to the latest row. If one decision was about several
        iterations, blocks were taken one by one, and the engine has counted the time for which they were held."""
        span = now - self.tick
        held_ticks = engine.held_ticks - self.held_ticks if self.steps else 2 * self.held * span
        row = self.rows[-1]
        row[1] += self.running * span
        row[2] += self.waiting * span
        row[3] += held_ticks
        # If the engine takes blocks faster at first than later, the estimate would exceed the blocks of the engine.
        row[4] = max(row[4], self.held, min(held_ticks // span - self.held, engine.config.kv_blocks))
        self.filled += 1

    def since(self, end: int) -> list[int]:
        span = end - self.tick
        return [self.tick, self.running * span, self.waiting * span, 2 * self.held * span, self.held]


def _sum(first: list[int], second: list[int] | None = None) -> list[int]:
    if second is None:
        return first
    sums = (one + other for one, other in zip(first[1:4], second[1:4], strict=True))
    return [first[0], *sums, max(first[4], second[4])]
