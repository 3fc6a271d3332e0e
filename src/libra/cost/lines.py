"""Linear models of engine times: fitted to measured samples, or lower bounds of a grid.

Invariant: no coefficient is negative, since no work takes negative time. The reported error is the error on held-out
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.cost.grid import Array, EngineGrid

_TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True, slots=True)
class LinearFit:
    """`seconds = coefficients . features`. `heldout_error` is the mean relative error of samples that are left out of
    the fit one by one.
    """

    coefficients: tuple[float, ...]
    heldout_error: float


def fit_linear(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> LinearFit:
    """Fit coefficients by non-negative least squares on relative errors. `features` is [samples, k], with more samples
    than k. Raises ValueError for too few samples, or for a time that is not positive.
    """
    rows, times = np.asarray(features, dtype=float), np.asarray(seconds, dtype=float)
    if rows.ndim != 2 or len(rows) != len(times) or len(rows) <= rows.shape[1]:
        raise ValueError(f"{len(rows)} samples cannot determine {rows.shape[-1]} coefficients: measure more points")
    if (times <= 0).any():
        raise ValueError("a measured time is not positive: measure again")
    errors = []
    for left_out in range(len(times)):
        keep = np.arange(len(times)) != left_out
        predicted = rows[left_out] @ non_negative(rows[keep], times[keep])
        errors.append(abs(predicted - times[left_out]) / times[left_out])
    return LinearFit(tuple(float(value) for value in non_negative(rows, times)), float(np.mean(errors)))


def non_negative(rows: Array, times: Array) -> Array:
    """The coefficients (k) for which rows [samples, k] give the times (samples, above 0) with the least relative
    error.
    """
    return least_squares(rows / times[:, None], np.ones(len(times)))


def least_squares(scaled: Array, wanted: Array) -> Array:
    """Non-negative coefficients (k) for which the rows `scaled` [samples, k] are nearest to `wanted`, by Lawson and
    Hanson's active set method (Solving Least Squares Problems, 1974, ch. 23).
    """
    lengths = np.linalg.norm(scaled, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = scaled / lengths  # columns of unit length: the tolerances below mean the same for every feature
    width = scaled.shape[1]
    solution, free = np.zeros(width), np.zeros(width, dtype=bool)
    while True:
        gradient = scaled.T @ (wanted - scaled @ solution)
        gradient[free] = -np.inf
        entering = int(np.argmax(gradient))
        if free.all() or gradient[entering] <= 1e-10 * len(wanted):
            fitted: Array = solution / lengths
            return fitted
        free[entering] = True
        while True:
            trial = np.zeros(width)
            trial[free] = np.linalg.lstsq(scaled[:, free], wanted, rcond=None)[0]
            if (trial[free] > 0).all():
                solution = trial
                break
            blocked = free & (trial <= 0)
            step = np.min(solution[blocked] / (solution[blocked] - trial[blocked]))
            solution = solution + step * (trial - solution)
            free &= solution > 1e-15
            solution[~free] = 0.0


@dataclass(frozen=True, slots=True)
class IterationLine:
    """Lower bound on the seconds of a decode iteration: `step + per_sequence*b + per_context_token*S`.

    `b` sequences decode in the iteration and hold `S` tokens together. No coefficient is negative, so `step` divided by
    the largest number of sequences, or of tokens, in an iteration gives a lower bound, too.
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
    """A few tight affine lower bounds of a decode iteration with up to `max_num_seqs` sequences.

    The bounds hold, up to rounding, for 1 <= b <= `max_num_seqs` sequences whose mean context is in `contexts`
    (default: the grid's range), if `kv_tokens` can hold the batch. A bilinear function minus a multiple of b*context
    has its minimum in a corner of the cell, and all corners are checked.

    All b share one slope over tokens, chosen among the slopes between two contexts of one batch: the slope whose lines
    stay closest to the points. The remainder at each b is the minimum over the contexts, and the lines are edges of the
    lower convex hull of the remainders over b. Bounds are loose if times are not convex in b or not linear in context:
    give `contexts` and `kv_tokens` for tight bounds.
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
    # The rest must not fall with b: fewer sequences must not cost more.
    rest = np.minimum.accumulate(np.maximum(rest, 0.0)[::-1])[::-1]
    return tuple(IterationLine(float(step), float(rate), slope) for step, rate in hull_lines(sizes, rest, pieces))


@dataclass(frozen=True, slots=True)
class PrefillLine:
    """Seconds to prefill in full chunks: `per_token*p + per_token_context*C`.

    `p` is the number of new tokens. `C` is the sum, over the new tokens, of the number of earlier tokens: p new tokens
    after c cached tokens have `C = p * (c + p/2)`. `error` is the largest relative error of a full chunk on the fitted
    prefixes.
    """

    per_token: float
    per_token_context: float
    error: float


def prefill_line(grid: EngineGrid, chunk: int) -> PrefillLine:
    """The price of prefill in chunks of `chunk` tokens (an engine's `max_num_batched_tokens`).

    Fitted by non-negative least squares of relative errors over the grid's prefixes. A last chunk that is not full
    costs more, unless other sequences fill its iteration, as in continuous batching.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; set it to 1 or more")
    if len(grid.prefixes) < 3:
        raise ValueError(f"the grid has prefixes {grid.prefixes}; a line needs three: measure more")
    prefixes = np.array(grid.prefixes, dtype=float)
    seconds = grid.prefill_seconds_at([chunk], prefixes)[0]
    before = chunk * (prefixes + chunk / 2)
    fit = fit_linear(np.column_stack([np.full(len(before), float(chunk)), before]).tolist(), seconds.tolist())
    per_token, per_token_context = fit.coefficients
    error = float(np.max(np.abs((per_token * chunk + per_token_context * before) / seconds - 1)))
    return PrefillLine(per_token, per_token_context, error)


def _axis(points: tuple[int, ...], low: float, high: float) -> Array:
    """`low`, the points between, and `high`."""
    inside = [float(point) for point in points if low < point < high]
    return np.array([low, *inside, high] if low < high else [low])


def _common_slope(tokens: Array, seconds: Array, held: NDArray[np.bool_]) -> float:
    """Slope over tokens of lines below all held points of [batch, context], with an intercept for each batch.

    Among the slopes between two points of a batch, it is the slope whose lines stay closest to the points, by the mean
    relative distance. The slope never exceeds the seconds per token of a point, since an intercept would then be
    negative.
    """
    most = np.min((seconds / tokens)[held])
    first, second = np.triu_indices(tokens.shape[1], 1)
    both = held[:, first] & held[:, second]
    slopes = (seconds[:, second] - seconds[:, first])[both] / (tokens[:, second] - tokens[:, first])[both]
    slopes = np.append(slopes[(slopes > 0) & (slopes < most)], [0.0, most])
    rest = np.where(held, seconds - slopes[:, None, None] * tokens, np.inf)
    slack = np.where(held, (rest - rest.min(axis=2, keepdims=True)) / seconds, 0.0)
    return float(slopes[int(np.argmin(slack.sum(axis=(1, 2))))])


def hull_lines(x: Array, y: Array, pieces: int) -> list[tuple[float, float]]:
    """Non-negative (intercept, slope) of up to `pieces` lines below the points.

    The lines are edges of the lower convex hull. The last edge is always used, since it is the price of a full batch.
    Further edges are added one by one: the edge that most reduces the largest relative distance to a point. `y` must
    not decrease.
    """
    hull = [0]
    for index in range(1, len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            chord = y[a] + (y[index] - y[a]) * (x[b] - x[a]) / (x[index] - x[a])
            if chord > y[b] * (1 + 1e-9):  # a smaller difference is rounding
                break
            hull.pop()
        hull.append(index)
    if len(hull) == 1:
        return [(float(y[0]), 0.0)]
    starts, ends = np.array(hull[:-1]), np.array(hull[1:])
    slopes = (y[ends] - y[starts]) / (x[ends] - x[starts])
    intercepts = y[starts] - slopes * x[starts]
    # A line below 0 at b = 0 is no price: the steepest line through 0 replaces it.
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
