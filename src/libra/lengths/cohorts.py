"""The unweighted evidence: trajectories in cohorts by start version, and in cells by work and context.

Invariant: a cohort does not depend on the order of arrival, so the sum of two cohorts has the evidence of both. The
only exception is the opening cohort, where each arrival reduces the weight of earlier trajectories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libra.trajectory import Trajectory

OCTAVES = 32  # bins reach contexts of 2**32 tokens
WORK_OCTAVES = 48  # bins reach work of 2**48 prefilled tokens, some 900 years
# The work of a generated token and of a tool second, in prefilled tokens. Assumed: in a second, an engine prefills
# 10,000 tokens, or decodes 50 tokens of a sequence. Estimates hardly change with engines four times slower or twice as
# fast, since they depend only on which of two trajectories takes longer.
GENERATED, SECOND = 200, 10_000
RECENT = 4  # drift detection compares the evidence with evidence that is forgotten this many times faster
# Powers of a trajectory's weights in the two memories: first powers for averages, second powers for their variances.
POWERS = np.array([1, RECENT, 2, 1 + RECENT, 2 * RECENT])
_NOTHING = 1e-6  # weight in trajectories below which a bin of the opening cohort is emptied

Array = NDArray[np.float64]


class Sums(NamedTuple):
    """Contribution of one trajectory to the sums of its bin, in tokens and seconds."""

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
    unknown_returns: float  # tool returns without recorded seconds
    tool_seconds: float  # seconds of all tool returns
    tool_seconds_squared: float  # of the trajectory's tool seconds
    generated_tool_seconds: float  # product of `generated` and `tool_seconds`


LOG_CONTEXT = Sums._fields.index("log_context")


def sums_of(trajectory: Trajectory, block_tokens: int, unknown_tool_seconds: float = 0.0) -> Sums:
    """Sums of one trajectory so far.

    The prefix cache keeps whole blocks of `block_tokens` tokens. A tool return without recorded seconds counts as
    `unknown_tool_seconds`. A turn that starts with a shorter context than the engine's follows a compaction. Then only
    the prompt is assumed to be cached, since agents rewrite their history, not their instructions. If the context is
    shorter than the prompt, no token is assumed to be cached.
    """
    context_sum, prefill, end, generated = 0, 0, 0, 0
    prompt = trajectory.prompt_tokens
    for context, turn in zip(trajectory.contexts(), trajectory.turns, strict=True):
        g = turn.generated_tokens
        generated += g
        context_sum += g * context + g * (g + 1) // 2
        fits = end if context >= end else prompt if context >= prompt else 0
        prefill += context - fits // block_tokens * block_tokens
        end = context + g
    returns = [turn for turn in trajectory.turns if turn.tool is not None]
    seconds = [turn.tool_seconds for turn in returns if turn.tool_seconds is not None]
    unknown = len(returns) - len(seconds)
    waited = sum(seconds) + unknown * unknown_tool_seconds
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
        generated_tool_seconds=generated * waited,
    )


def final_context(trajectory: Trajectory) -> int:
    """Largest context of a trajectory in tokens; at least 1, since bins are logarithmic."""
    return max(1, trajectory.peak_context)


def work(sums: Sums) -> float:
    """Time that a trajectory has taken so far on engines of constant speed, in prefilled tokens; at least 1.

    Trajectories that started together have had the same time, so time decides which of them have finished. Wall time
    would suffice for engines of constant speed. Real engines slow down under load, for all trajectories at once, and so
    does this clock.
    """
    return max(1.0, sums.prefill + GENERATED * sums.generated + SECOND * sums.tool_seconds)


class Cell(NamedTuple):
    """A cell of trajectories with similar work and context: the bins of both logarithms."""

    work: int
    context: int


def place(trajectory: Trajectory, sums: Sums, bins_per_octave: int) -> tuple[Cell, float]:
    """The cell of a trajectory, and the part of the work bin that it has passed, in the logarithm. Raises ValueError
    for a context beyond all bins.
    """
    context = sums.final_context
    if context >= 2**OCTAVES:
        raise ValueError(f"trajectory {trajectory.id} holds {context} tokens; at most 2**{OCTAVES} - 1 are tracked")
    part, bin_ = math.modf(math.log2(work(sums)) * bins_per_octave)
    last = WORK_OCTAVES * bins_per_octave - 1
    return Cell(min(int(bin_), last), int(math.log2(context) * bins_per_octave)), part


class Table:
    """Rows of numbers by cell, as one array."""

    def __init__(self, width: int) -> None:
        self._rows: dict[Cell, int] = {}
        self._cells = np.zeros((8, 2), dtype=np.int64)
        self._values = np.zeros((8, width))

    def add(self, cell: Cell, values: Array) -> None:
        row = self._rows.get(cell)
        if row is None:
            row = self._rows[cell] = len(self._rows)
            if row == len(self._values):
                self._cells = np.concatenate((self._cells, np.zeros_like(self._cells)))
                self._values = np.concatenate((self._values, np.zeros_like(self._values)))
            self._cells[row] = cell
        self._values[row] += values

    @property
    def cells(self) -> NDArray[np.int64]:
        """[row, work and context bin]"""
        return self._cells[: len(self._rows)]

    @property
    def values(self) -> Array:
        """[row, column]"""
        return self._values[: len(self._rows)]

    def items(self) -> list[tuple[Cell, Array]]:
        """(cell, row) in the order of the cells."""
        return [(cell, self._values[row]) for cell, row in sorted(self._rows.items())]

    def absorb(self, other: Table) -> None:
        for cell, values in other.items():
            self.add(cell, values)

    def without(self, rows: NDArray[np.bool_]) -> Table:
        kept = Table(self._values.shape[1])
        for cell, row in self._rows.items():
            if not rows[row]:
                kept.add(cell, self._values[row])
        return kept


COUNTS = slice(0, len(POWERS))  # columns of a table of finished trajectories
SUMS = slice(len(POWERS), len(POWERS) + len(Sums._fields))


@dataclass(slots=True)
class Cohort:
    """The trajectories that started with one version, or with a few adjacent versions."""

    bins: int  # of the context
    finished: int = 0
    # Columns: finished trajectories by `POWERS` (powers differ only in the opening cohort), and the fields of `Sums`.
    table: Table = field(default_factory=lambda: Table(SUMS.stop))
    # Columns: unfinished trajectories, and the sum of the parts of the work bin that they have passed.
    running: Table = field(default_factory=lambda: Table(2))
    peaks: Array = field(init=False)  # [context bin] tokens of the longest finished trajectory

    def __post_init__(self) -> None:
        self.peaks = np.zeros(self.bins)

    @property
    def counts(self) -> Array:
        """[row of `table`, one of `POWERS`]"""
        return self.table.values[:, COUNTS]

    @property
    def sums(self) -> Array:
        """[row of `table`, field of `Sums`]"""
        return self.table.values[:, SUMS]

    def add(self, cell: Cell, sums: Sums) -> None:
        """Add one finished trajectory."""
        self.finished += 1
        self.table.add(cell, np.array((*[1.0] * len(POWERS), *sums)))
        self.peaks[cell.context] = max(self.peaks[cell.context], sums.final_context)

    def add_running(self, cell: Cell, part: float) -> None:
        """Add one unfinished trajectory, `part` of the way through its work bin."""
        self.running.add(cell, np.array((1.0, part)))

    def forget(self, keep: float) -> None:
        """Multiply the weight of every finished trajectory by `keep`."""
        self.counts[:] *= keep**POWERS
        self.sums[:] *= keep
        faded = self.counts[:, 0] < _NOTHING
        if faded.any():
            self.table = self.table.without(faded)
            self.peaks[np.setdiff1d(np.arange(self.bins), self.table.cells[:, 1])] = 0

    def absorb(self, other: Cohort) -> None:
        """Add all of `other`."""
        self.finished += other.finished
        self.table.absorb(other.table)
        self.running.absorb(other.running)
        self.peaks = np.maximum(self.peaks, other.peaks)

    def clear_running(self) -> None:
        self.running = Table(2)

    @property
    def started(self) -> float:
        return self.finished + float(self.running.values[:, 0].sum())

    def snapshot(self) -> dict[str, Any]:
        """The cohort as JSON values: cells as (work bin, context bin, columns...), peaks as (context bin, tokens)."""
        return {
            "finished": self.finished,
            "cells": [[*cell, *values.tolist()] for cell, values in self.table.items()],
            "running": [[*cell, *values.tolist()] for cell, values in self.running.items()],
            "peaks": [[int(bin_), int(self.peaks[bin_])] for bin_ in np.flatnonzero(self.peaks)],
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any], bins: int) -> Cohort:
        cohort = cls(bins, snapshot["finished"])
        for table, saved in ((cohort.table, snapshot["cells"]), (cohort.running, snapshot["running"])):
            for work_bin, bin_, *values in saved:
                table.add(Cell(work_bin, bin_), np.array(values))
        for bin_, peak in snapshot["peaks"]:
            cohort.peaks[bin_] = peak
        return cohort
