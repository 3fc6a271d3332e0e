"""What engines of one model on one GPU take, as a piecewise-linear grid.

Invariant: wherever the numbers came from (tables, calibration, roofline), planner and simulator read the same grid,
and the grid says where it is from. Between grid points times are linear along each axis; before the first and beyond
the last point they go on as in the nearest interval, from 1 sequence or new token and 0 others to four times the last
point, and a grid that would reach a negative time on the way is refused: measured tables fall here and there.
Memory is not checked here: a grid has times for batches that no KV cache holds.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra.cost.sources.fit import fit_linear

Array = NDArray[np.float64]
Table = tuple[tuple[float, ...], ...]

_BEYOND = 4  # times the last point of an axis, as far as a grid goes
_TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, slots=True)
class EngineGrid:
    """One tensor-parallel degree. Axes are in rising order, with two points or more."""

    tp: int
    batches: tuple[int, ...]  # sequences that decode together
    contexts: tuple[int, ...]  # tokens that each of them holds
    decode: Table  # [batch][context] seconds of one decode iteration
    chunks: tuple[int, ...]  # new prompt tokens
    prefixes: tuple[int, ...]  # tokens cached before them
    prefill: Table  # [chunk][prefix] seconds to prefill the chunk of one sequence

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

    def decode_seconds(self, batch: float, context: float) -> float:
        """One iteration in which `batch` >= 1 sequences that hold `context` tokens each generate one token each."""
        return _interpolate(self.batches, self.contexts, self.decode, batch, context)

    def prefill_seconds(self, chunk: float, prefix: float) -> float:
        """Prefill of `chunk` >= 1 new tokens of one sequence, of which the `prefix` tokens before are cached."""
        return _interpolate(self.chunks, self.prefixes, self.prefill, chunk, prefix)

    def decode_seconds_at(self, batches: ArrayLike, contexts: ArrayLike) -> Array:
        """`decode_seconds` of every batch with every context: [batches, contexts]."""
        return _resample(self.batches, self.contexts, self.decode, batches, contexts)

    def prefill_seconds_at(self, chunks: ArrayLike, prefixes: ArrayLike) -> Array:
        """`prefill_seconds` of every chunk after every prefix: [chunks, prefixes]."""
        return _resample(self.chunks, self.prefixes, self.prefill, chunks, prefixes)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """All degrees of one model on one GPU."""

    gpu: str
    model: str
    dtype: str
    source: str  # "tables" | "calibration" | "roofline", with the version or file it came from
    engines: tuple[EngineGrid, ...]  # ordered by tp

    def __post_init__(self) -> None:
        degrees = [grid.tp for grid in self.engines]
        if not degrees or any(low >= high for low, high in pairwise(degrees)):
            raise ValueError(f"EngineProfile.engines has tp {degrees}; list each degree once, in rising order")

    def grid(self, tp: int) -> EngineGrid:
        """The grid of one degree. Raises ValueError where there is none."""
        for grid in self.engines:
            if grid.tp == tp:
                return grid
        known = ", ".join(str(grid.tp) for grid in self.engines)
        raise ValueError(
            f"the profile of {self.model} on {self.gpu} has no tp {tp}, only {known}: make it with tp {tp}"
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal exactly where every number and name is."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class IterationLine:
    """Seconds of a decode iteration, from below: `step + per_sequence*b + per_context_token*S`.

    `b` sequences decode in it and hold `S` tokens together. No coefficient is negative: `step` may be spread over as
    many sequences, or as many tokens, as an iteration can have, and what remains is still a lower bound.
    """

    step: float
    per_sequence: float
    per_context_token: float


def iteration_lines(
    grid: EngineGrid,
    max_num_seqs: int,
    *,
    contexts: tuple[float, float] | None = None,
    kv_tokens: float | None = None,
    pieces: int = 3,
) -> tuple[IterationLine, ...]:
    """Affine lower bounds of a decode iteration with up to `max_num_seqs` sequences, together as tight as a few can be.

    They hold, to rounding, for 1 <= b <= `max_num_seqs` sequences whose mean context lies in `contexts` (the grid's
    range unless told), as far as `kv_tokens` can hold the batch: a bilinear function less a multiple of b*context is
    least in a corner of its cell, and all corners are looked at. One slope over tokens serves all b. It is the one,
    of those
    between two contexts of one batch, whose lines stay closest to the points; what is left at each b is the least over
    the contexts, and the lines are edges of the lower convex hull of that over b. What they miss is where times are
    not convex in b, or not linear in context: say which contexts and how much memory there are, for a tight answer.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {max_num_seqs}; set it to 1 or more")
    if pieces < 1:
        raise ValueError(f"pieces is {pieces}; set it to 1 or more")
    shortest, longest = (grid.contexts[0], grid.contexts[-1]) if contexts is None else contexts
    if not 0 < shortest <= longest:
        raise ValueError(f"contexts is {contexts}; give the shortest and the longest mean context, both above 0")
    if kv_tokens is not None and kv_tokens < shortest:
        raise ValueError(f"kv_tokens is {kv_tokens}; one sequence of {shortest} tokens must fit: give it more memory")
    sizes = _axis(grid.batches, 1.0, float(max_num_seqs))
    lengths = _axis(grid.contexts, float(shortest), float(longest))
    tokens = sizes[:, None] * lengths
    if kv_tokens is None:
        held = np.ones(tokens.shape, dtype=bool)
    else:  # a cell counts with all its corners as soon as its least corner fits
        held = np.empty(tokens.shape, dtype=bool)
        held[0, 0] = True
        held[1:, 1:] = tokens[:-1, :-1] <= kv_tokens
        held[0, 1:] = tokens[0, :-1] <= kv_tokens
        held[1:, 0] = tokens[:-1, 0] <= kv_tokens
    seconds = grid.decode_seconds_at(sizes, lengths)
    last = int(np.flatnonzero(held[:, 0])[-1])  # the fullest batch that memory allows
    sizes, tokens, seconds, held = sizes[: last + 1], tokens[: last + 1], seconds[: last + 1], held[: last + 1]
    slope = _common_slope(tokens, seconds, held)
    rest = np.where(held, seconds - slope * tokens, np.inf).min(axis=1)
    # Never falling with b: a price for fewer sequences must not exceed that of more.
    rest = np.minimum.accumulate(np.maximum(rest, 0.0)[::-1])[::-1]
    return tuple(IterationLine(float(step), float(rate), slope) for step, rate in _hull_lines(sizes, rest, pieces))


@dataclass(frozen=True, slots=True)
class PrefillLine:
    """Seconds to prefill, full chunk by full chunk: `per_token*p + per_token_context*C`.

    `p` tokens are new and `C` is the sum over them of the tokens before each: p new tokens after c cached ones have
    `C = p * (c + p/2)`. `error` is the largest relative error of a full chunk on the prefixes it was fitted to.
    """

    per_token: float
    per_token_context: float
    error: float


def prefill_line(grid: EngineGrid, chunk: int, longest: float | None = None) -> PrefillLine:
    """The price of prefill in chunks of `chunk` tokens (an engine's `max_num_batched_tokens`).

    Non-negative least squares of relative errors over the grid's prefixes up to `longest` (all unless told). A last
    chunk that is not full costs more than this, unless other sequences fill its iteration, as continuous batching does.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; set it to 1 or more")
    prefixes = np.array([prefix for prefix in grid.prefixes if longest is None or prefix <= longest], dtype=float)
    if len(prefixes) < 3:
        raise ValueError(f"longest is {longest}; three prefixes of the grid must be up to it, of {grid.prefixes}")
    seconds = grid.prefill_seconds_at([chunk], prefixes)[0]
    before = chunk * (prefixes + chunk / 2)
    fit = fit_linear(np.column_stack([np.full(len(before), float(chunk)), before]).tolist(), seconds.tolist())
    per_token, per_token_context = fit.coefficients
    error = float(np.max(np.abs((per_token * chunk + per_token_context * before) / seconds - 1)))
    return PrefillLine(per_token, per_token_context, error)


def _require_table(field: str, rows: tuple[int, ...], columns: tuple[int, ...], table: Table) -> None:
    if len(table) != len(rows) or any(len(row) != len(columns) for row in table):
        raise ValueError(f"EngineGrid.{field} is not {len(rows)} rows of {len(columns)} times; measure what is missing")
    seconds = np.array(table, dtype=float)
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError(f"EngineGrid.{field} has a time that is not positive and finite; measure it again")
    if (_resample(rows, columns, table, (1, *rows), (0, *columns)) < 0).any():
        raise ValueError(f"EngineGrid.{field} falls below 0 before its first point; add a point nearer to 0")
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
    i = min(max(bisect_right(rows, row) - 1, 0), len(rows) - 2)
    j = min(max(bisect_right(columns, column) - 1, 0), len(columns) - 2)
    u = (row - rows[i]) / (rows[i + 1] - rows[i])
    v = (column - columns[j]) / (columns[j + 1] - columns[j])
    low, high = table[i], table[i + 1]
    return (1 - u) * ((1 - v) * low[j] + v * low[j + 1]) + u * ((1 - v) * high[j] + v * high[j + 1])


def _resample(
    rows: tuple[int, ...], columns: tuple[int, ...], table: Table, at_rows: ArrayLike, at_columns: ArrayLike
) -> Array:
    """`_interpolate` at the product of two axes."""
    if not (_within(at_rows, 1, rows) and _within(at_columns, 0, columns)):
        raise _outside(rows, columns, f"{np.asarray(at_rows)} x {np.asarray(at_columns)}")
    resampled: Array = _weights(rows, at_rows) @ np.array(table, dtype=float) @ _weights(columns, at_columns).T
    return resampled


def _within(at: ArrayLike, least: int, axis: tuple[int, ...]) -> bool:
    values = np.asarray(at, dtype=float)
    return bool(((values >= least) & (values <= _BEYOND * axis[-1])).all())


def _weights(axis: tuple[int, ...], at: ArrayLike) -> Array:
    """[at, axis]: how much each point of the axis has in each of the values between."""
    values, points = np.asarray(at, dtype=float), np.array(axis, dtype=float)
    left = np.clip(np.searchsorted(points, values, side="right") - 1, 0, len(points) - 2)
    part = (values - points[left]) / (points[left + 1] - points[left])
    weights = np.zeros((len(values), len(points)))
    each = np.arange(len(values))
    weights[each, left] = 1 - part
    weights[each, left + 1] = part
    return weights


def _axis(points: tuple[int, ...], low: float, high: float) -> Array:
    """`low`, the points between, and `high`."""
    inside = [float(point) for point in points if low < point < high]
    return np.array([low, *inside, high] if low < high else [low])


def _common_slope(tokens: Array, seconds: Array, held: NDArray[np.bool_]) -> float:
    """Slope over tokens of lines below all held points of [batch, context], an intercept for each batch.

    Of the slopes between two points of a batch, the one whose lines stay closest to the points, by the mean relative
    distance. None exceeds the seconds per token of any point, or an intercept would be negative.
    """
    most = np.min((seconds / tokens)[held])
    first, second = np.triu_indices(tokens.shape[1], 1)
    both = held[:, first] & held[:, second]
    slopes = (seconds[:, second] - seconds[:, first])[both] / (tokens[:, second] - tokens[:, first])[both]
    slopes = np.append(slopes[(slopes > 0) & (slopes < most)], [0.0, most])
    rest = np.where(held, seconds - slopes[:, None, None] * tokens, np.inf)
    slack = np.where(held, (rest - rest.min(axis=2, keepdims=True)) / seconds, 0.0)
    return float(slopes[int(np.argmin(slack.sum(axis=(1, 2))))])


def _hull_lines(x: Array, y: Array, pieces: int) -> list[tuple[float, float]]:
    """(intercept, slope) of up to `pieces` lines below the points, none with a negative intercept or slope.

    Of the edges of the lower convex hull, the last always counts: it is what a full batch pays. The others are added
    one by one, each where it lifts the largest relative distance to a point the most. `y` must not fall.
    """
    hull = [0]
    for index in range(1, len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            chord = y[a] + (y[index] - y[a]) * (x[b] - x[a]) / (x[index] - x[a])
            if chord > y[b] * (1 + 1e-9):  # less is rounding, and not worth a line
                break
            hull.pop()
        hull.append(index)
    if len(hull) == 1:
        return [(float(y[0]), 0.0)]
    starts, ends = np.array(hull[:-1]), np.array(hull[1:])
    slopes = (y[ends] - y[starts]) / (x[ends] - x[starts])
    intercepts = y[starts] - slopes * x[starts]
    # A line below 0 at b = 0 is no price: the steepest one through 0 takes its place.
    below = intercepts < 0
    slopes = np.append(slopes[~below], np.min(y / x)) if below.any() else slopes
    intercepts = np.append(intercepts[~below], 0.0) if below.any() else intercepts
    values = intercepts[:, None] + slopes[:, None] * x
    scale = np.maximum(y, _TINY)
    chosen = [len(slopes) - 1]
    reached = values[-1]
    while len(chosen) < min(pieces, len(slopes)):
        gaps = ((y - np.maximum(reached, values)) / scale).max(axis=1)
        gaps[chosen] = np.inf
        chosen.append(int(np.argmin(gaps)))
        reached = np.maximum(reached, values[chosen[-1]])
    return [(float(intercepts[index]), float(slopes[index])) for index in sorted(chosen)]
