"""Iteration times of engines of one model on one GPU, as a piecewise-linear grid.

Invariant: planner and simulator read the same grid; its profile names the source (tables, calibration, roofline). Times
are linear between grid points along each axis. Outside the grid, the nearest interval is extrapolated: down to 1
sequence or new token, to 0 tokens of context or prefix, and up to four times the last point. A grid whose extrapolated
times become negative is refused, since measured tables decrease in places. The grid does not check memory: it also has
times for batches that exceed every KV cache.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.cost.host import NO_HOST, HostCost
from libra.cost.kernels import NO_TERMS, KernelTerms

Array = NDArray[np.float64]
Table = tuple[tuple[float, ...], ...]

_BEYOND = 4  # largest multiple of an axis's last point with a time


@dataclass(frozen=True, slots=True)
class EngineGrid:
    """Times of one tensor-parallel degree. Axes rise, and have two or more points."""

    tp: int
    batches: tuple[int, ...]  # sequences that decode together
    contexts: tuple[int, ...]  # tokens of context of each sequence
    decode: Table  # [batch][context] seconds of one decode iteration
    chunks: tuple[int, ...]  # new prompt tokens
    prefixes: tuple[int, ...]  # cached tokens before the chunk
    prefill: Table  # [chunk][prefix] seconds to prefill the chunk of one sequence
    terms: KernelTerms = NO_TERMS  # corrections for effects that the two tables lack
    host: HostCost = NO_HOST  # added to the kernels

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ValueError(f"EngineGrid.tp is {self.tp}; set it to 1 or more")
        for field, axis, least in (
            ("batches", self.batches, 1),
            ("contexts", self.contexts, 1),
            ("chunks", self.chunks, 1),
            ("prefixes", self.prefixes, 0),
        ):
            if len(axis) < 2 or axis[0] < least or any(low >= high for low, high in pairwise(axis)):
                raise ValueError(f"EngineGrid.{field} is {axis}; list two or more rising values, none below {least}")
        _require_table("decode", self.batches, self.contexts, self.decode)
        _require_table("prefill", self.chunks, self.prefixes, self.prefill)

    def slowed(self, factor: float) -> EngineGrid:
        """The grid of an engine for which all work takes `factor` times as long."""
        decode, prefill = (
            tuple(tuple(factor * seconds for seconds in row) for row in table) for table in (self.decode, self.prefill)
        )
        return replace(
            self, decode=decode, prefill=prefill, terms=self.terms.slowed(factor), host=self.host.slowed(factor)
        )

    @property
    def most_sequences(self) -> int:
        """Largest batch with a time, in sequences."""
        return _BEYOND * self.batches[-1]

    @property
    def most_tokens(self) -> int:
        """Largest chunk with a time, in tokens."""
        return _BEYOND * self.chunks[-1]

    def decode_seconds(self, batch: float, context: float) -> float:
        """Seconds of an iteration in which `batch` >= 1 sequences of `context` tokens generate one token each."""
        return _interpolate(self.batches, self.contexts, self.decode, batch, context)

    def prefill_seconds(self, chunk: float, prefix: float) -> float:
        """Seconds to prefill `chunk` >= 1 new tokens of a sequence after `prefix` cached tokens."""
        return _interpolate(self.chunks, self.prefixes, self.prefill, chunk, prefix)

    def decode_seconds_at(self, batches: ArrayLike, contexts: ArrayLike) -> Array:
        """`decode_seconds` of every batch with every context: [batches, contexts]."""
        return _resample(self.batches, self.contexts, self.decode, batches, contexts)

    def prefill_seconds_at(self, chunks: ArrayLike, prefixes: ArrayLike) -> Array:
        """`prefill_seconds` of every chunk after every prefix: [chunks, prefixes]."""
        return _resample(self.chunks, self.prefixes, self.prefill, chunks, prefixes)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Grids of one model on one GPU, one for each tensor-parallel degree."""

    gpu: str
    model: str
    dtype: str
    source: str  # of the kernels: "tables" | "calibration" | "roofline", with the version or file it came from
    engines: tuple[EngineGrid, ...]  # ordered by tp

    def __post_init__(self) -> None:
        degrees = [grid.tp for grid in self.engines]
        if not degrees or any(low >= high for low, high in pairwise(degrees)):
            raise ValueError(f"EngineProfile.engines has tp {degrees}; list each degree once, in rising order")
        if any((grid.terms, grid.host) != (self.terms, self.host) for grid in self.engines):
            raise ValueError("EngineProfile.engines differ in terms or host; give all degrees the same")

    def grid(self, tp: int) -> EngineGrid:
        """The grid of one degree. Raises ValueError if the profile lacks it."""
        for grid in self.engines:
            if grid.tp == tp:
                return grid
        known = ", ".join(str(grid.tp) for grid in self.engines)
        raise ValueError(
            f"the profile of {self.model} on {self.gpu} has no tp {tp}, only {known}: make it with tp {tp}"
        )

    @property
    def host(self) -> HostCost:
        """The host overhead, with its source: the same for all degrees."""
        return self.engines[0].host

    @property
    def terms(self) -> KernelTerms:
        return self.engines[0].terms

    def beside(self, host: HostCost, terms: KernelTerms) -> EngineProfile:
        """The profile with the same kernels, this host and these corrections."""
        return replace(self, engines=tuple(replace(grid, host=host, terms=terms) for grid in self.engines))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, equal only for profiles with equal numbers and names."""
        values = asdict(self)
        for grid in values["engines"]:  # without these parts, the digest is that of older versions
            for part, nothing in (("terms", NO_TERMS), ("host", NO_HOST)):
                if grid[part] == asdict(nothing):
                    del grid[part]
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


def _require_table(field: str, rows: tuple[int, ...], columns: tuple[int, ...], table: Table) -> None:
    if len(table) != len(rows) or any(len(row) != len(columns) for row in table):
        raise ValueError(
            f"EngineGrid.{field} is not {len(rows)} rows of {len(columns)} times; measure the missing ones"
        )
    seconds = np.array(table, dtype=float)
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError(f"EngineGrid.{field} has a time that is not positive and finite; measure it again")
    if (_resample(rows, columns, table, (1, *rows), (0, *columns)) < 0).any():
        raise ValueError(f"EngineGrid.{field} falls below 0 before its first point; add a point closer to 0")
    ends = _BEYOND * rows[-1], _BEYOND * columns[-1]
    if (_resample(rows, columns, table, (1, *rows, ends[0]), (0, *columns, ends[1])) < 0).any():
        raise ValueError(f"EngineGrid.{field} falls below 0 beyond its last point; add a point further out")


def _outside(rows: tuple[int, ...], columns: tuple[int, ...], asked: str) -> ValueError:
    return ValueError(
        f"there is no time for {asked}: the grid goes from 1 x 0 to {_BEYOND * rows[-1]} x {_BEYOND * columns[-1]}"
    )


def _interpolate(rows: tuple[int, ...], columns: tuple[int, ...], table: Table, row: float, column: float) -> float:
    if not (1 <= row <= _BEYOND * rows[-1] and 0 <= column <= _BEYOND * columns[-1]):
        raise _outside(rows, columns, f"{row} x {column}")
    i = bisect_right(rows, row, 1, len(rows) - 1) - 1
    j = bisect_right(columns, column, 1, len(columns) - 1) - 1
    u = (row - rows[i]) / (rows[i + 1] - rows[i])
    v = (column - columns[j]) / (columns[j + 1] - columns[j])
    low, high = table[i], table[i + 1]
    return (1 - u) * ((1 - v) * low[j] + v * low[j + 1]) + u * ((1 - v) * high[j] + v * high[j + 1])


def _resample(
    rows: tuple[int, ...], columns: tuple[int, ...], table: Table, at_rows: ArrayLike, at_columns: ArrayLike
) -> Array:
    """`_interpolate` at the product of two axes."""
    if not (_within(at_rows, 1, rows) and _within(at_columns, 0, columns)):
        raise _outside(rows, columns, f"{_span(at_rows)} x {_span(at_columns)}")
    resampled: Array = _weights(rows, at_rows) @ np.array(table, dtype=float) @ _weights(columns, at_columns).T
    return resampled


def _span(at: ArrayLike) -> str:
    low, high = float(np.min(at)), float(np.max(at))
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _within(at: ArrayLike, least: int, axis: tuple[int, ...]) -> bool:
    values = np.asarray(at, dtype=float)
    return bool(((values >= least) & (values <= _BEYOND * axis[-1])).all())


def _weights(axis: tuple[int, ...], at: ArrayLike) -> Array:
    """[at, axis] weight of each point of the axis in each of the interpolated values."""
    values, points = np.asarray(at, dtype=float), np.array(axis, dtype=float)
    left = np.clip(np.searchsorted(points, values, side="right") - 1, 0, len(points) - 2)
    part = (values - points[left]) / (points[left + 1] - points[left])
    weights = np.zeros((len(values), len(points)))
    each = np.arange(len(values))
    weights[each, left] = 1 - part
    weights[each, left + 1] = part
    return weights


def linear_layers(grid: EngineGrid, most: int) -> Array:
    """[tokens] seconds of linear layers and other work per token, for 0 to `most` tokens."""
    chunk, far, near = grid.chunks[-1], grid.prefixes[-1], grid.prefixes[0]
    pair = (grid.prefill_seconds(chunk, far) - grid.prefill_seconds(chunk, near)) / (chunk * (far - near))
    tokens = np.arange(1, most + 1)
    alone = grid.prefill_seconds_at(tokens, [0])[:, 0] - max(0.0, pair) * tokens * (tokens + 1) / 2
    # More tokens never cost less, though measured tables decrease here and there.
    return np.concatenate([[0.0], np.maximum.accumulate(np.maximum(alone, 0.0))])
