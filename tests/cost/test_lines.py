"""Fitted coefficients against every active set, and bounds of a grid against every point they must stay below."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from libra.cost.grid import EngineGrid
from libra.cost.lines import fit_linear, iteration_lines, prefill_line

GRID = EngineGrid(
    tp=1,
    batches=(1, 2, 4),
    contexts=(100, 200, 400),
    decode=((1.0, 1.1, 1.3), (1.2, 1.4, 1.8), (1.6, 2.0, 2.8)),
    chunks=(10, 20),
    prefixes=(0, 100, 300),
    prefill=((1.0, 2.0, 4.0), (2.0, 4.0, 8.0)),
)
FEATURES = [(1.0, float(b), float(b * context)) for b in (1, 4, 8) for context in (16, 64, 150)]


def seconds(coefficients: tuple[float, ...]) -> list[float]:
    return [sum(c * f for c, f in zip(coefficients, row, strict=True)) for row in FEATURES]


@pytest.mark.parametrize(
    "coefficients",
    [(4e-3, 2e-4, 3e-6), (4e-3, 0.0, 3e-6), (4e-3, 0.0, 0.0), (0.0, 2e-4, 0.0), (0.0, 0.0, 3e-6)],
)
def test_exact_data_gives_its_coefficients_back(coefficients: tuple[float, ...]) -> None:
    fit = fit_linear(FEATURES, seconds(coefficients))
    assert fit.coefficients == pytest.approx(coefficients, rel=1e-6, abs=1e-12)
    assert fit.heldout_error == pytest.approx(0.0, abs=1e-9)


def test_errors_are_relative() -> None:
    """Two measurements of the same work: a mean would be 5.5, the smallest relative error lies near the shorter."""
    fit = fit_linear([[1.0], [1.0]], [1.0, 10.0])
    assert fit.coefficients[0] == pytest.approx((1 / 1 + 1 / 10) / (1 / 1 + 1 / 100))
    # Left out, each is predicted by the other: |10 - 1| / 1 and |1 - 10| / 10.
    assert fit.heldout_error == pytest.approx((9.0 + 0.9) / 2)


def test_work_that_seems_to_save_time_costs_nothing() -> None:
    rows = [(1.0, float(x)) for x in range(6)]
    fit = fit_linear(rows, [6.0 - x for x, _ in enumerate(rows)])
    assert fit.coefficients[1] == 0.0
    assert fit.coefficients[0] > 0


def test_a_feature_that_never_occurs_costs_nothing() -> None:
    assert fit_linear([(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)], [2.0, 4.0, 6.0]).coefficients == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("samples", [0, 1, 2, 3])
def test_too_few_samples_are_refused(samples: int) -> None:
    with pytest.raises(ValueError, match="measure more points"):
        fit_linear(FEATURES[:samples], [1.0] * samples)


def test_samples_and_seconds_must_match() -> None:
    with pytest.raises(ValueError, match="measure more points"):
        fit_linear(FEATURES, [1.0] * (len(FEATURES) - 1))


@pytest.mark.parametrize("bad", [0.0, -1e-3])
def test_a_time_that_is_not_positive_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not positive: measure again"):
        fit_linear([(1.0,), (1.0,)], [1.0, bad])


def misfit(rows: np.ndarray, times: np.ndarray, solution: np.ndarray) -> float:
    return float((((rows @ solution - times) / times) ** 2).sum())


def best_misfit(rows: np.ndarray, times: np.ndarray) -> float:
    """The smallest squared relative error over all sets of features that may cost something."""
    width = rows.shape[1]
    best = misfit(rows, times, np.zeros(width))
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            solution = np.zeros(width)
            scaled = rows[:, chosen] / times[:, None]
            solution[list(chosen)] = np.linalg.lstsq(scaled, np.ones(len(times)), rcond=None)[0]
            if (solution >= 0).all():
                best = min(best, misfit(rows, times, solution))
    return best


@st.composite
def measurements(draw: st.DrawFn) -> tuple[list[list[float]], list[float]]:
    width = draw(st.integers(1, 4))
    count = draw(st.integers(width + 1, width + 4))
    row = st.lists(st.integers(0, 9).map(float), min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=count, max_size=count))
    times = draw(st.lists(st.integers(1, 40).map(lambda tenths: tenths / 10), min_size=count, max_size=count))
    return rows, times


@settings(deadline=None)
@given(measurements())
def test_no_set_of_features_fits_better(measured: tuple[list[list[float]], list[float]]) -> None:
    rows, times = measured
    fit = fit_linear(rows, times)
    assert all(coefficient >= 0 for coefficient in fit.coefficients)
    arrays = np.array(rows), np.array(times)
    assert misfit(*arrays, np.array(fit.coefficients)) == pytest.approx(best_misfit(*arrays), rel=1e-6, abs=1e-6)


def test_large_features_and_short_times_end() -> None:
    fit = fit_linear([[1000.0, 2000.0], [2000.0, 3000.0], [3000.0, 2000.0]], [1e-3] * 3)
    assert all(coefficient >= 0 for coefficient in fit.coefficients)


def bound(grid: EngineGrid, max_num_seqs: int, batch: float, context: float, **limits: object) -> float:
    lines = iteration_lines(grid, max_num_seqs, **limits)  # type: ignore[arg-type]
    return max(line.step + line.per_sequence * batch + line.per_context_token * batch * context for line in lines)


def affine_grid(step: float, per_sequence: float, per_token: float) -> EngineGrid:
    decode = tuple(tuple(step + per_sequence * b + per_token * b * c for c in GRID.contexts) for b in GRID.batches)
    return replace(GRID, decode=decode)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 16])
def test_an_affine_iteration_is_its_own_bound(max_num_seqs: int) -> None:
    grid = affine_grid(0.02, 0.001, 1e-5)
    lines = iteration_lines(grid, max_num_seqs)
    assert len(lines) == 1
    assert lines[0].per_context_token == pytest.approx(1e-5)
    for batch in {1, max_num_seqs}:
        assert bound(grid, max_num_seqs, batch, 250.0) == pytest.approx(0.02 + 0.001 * batch + 1e-5 * 250 * batch)


def test_a_full_batch_decides_the_last_line() -> None:
    """max(0.02, 0.01 * b): flat while memory bounds it, then proportional: two lines, both exact."""
    rows = {1: 0.02, 2: 0.02, 4: 0.04, 8: 0.08}
    grid = replace(
        GRID,
        batches=tuple(rows),
        decode=tuple(tuple(rows[b] + 1e-6 * b * c for c in GRID.contexts) for b in rows),
    )
    assert [(line.step, line.per_sequence) for line in iteration_lines(grid, 8)] == [
        pytest.approx((0.02, 0.0), abs=1e-9),
        pytest.approx((0.0, 0.01), abs=1e-9),
    ]
    assert len(iteration_lines(grid, 2)) == 1
    (only,) = iteration_lines(grid, 8, pieces=1)
    assert (only.step, only.per_sequence) == pytest.approx((0.0, 0.01), abs=1e-9)


def test_limits_make_the_bound_tighter() -> None:
    """Above 200 tokens the slope is five times that below; whoever stays on one side is told its slope, exactly."""
    seconds = {100: 1.0, 200: 1.1, 400: 2.1}
    grid = replace(GRID, decode=tuple(tuple(b * seconds[c] for c in GRID.contexts) for b in GRID.batches))
    assert bound(grid, 4, 4, 150.0, contexts=(100, 200)) == pytest.approx(4 * 1.05)
    assert bound(grid, 4, 4, 300.0, contexts=(200, 400)) == pytest.approx(4 * 1.6)
    assert bound(grid, 4, 4, 300.0) < 4 * 1.5
    # Memory for 150 tokens: no sequence passes 200 tokens, and what longer ones would take does not count.
    assert bound(grid, 4, 1, 150.0, kv_tokens=150) == pytest.approx(1.05)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 1, "pieces": 0}, "pieces is 0"),
        ({"max_num_seqs": 1, "contexts": (200, 100)}, r"contexts is \(200, 100\)"),
        ({"max_num_seqs": 1, "contexts": (0, 100)}, "contexts"),
        ({"max_num_seqs": 1, "kv_tokens": 99}, "kv_tokens is 99"),
    ],
)
def test_bounds_of_nothing_are_refused(limits: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        iteration_lines(GRID, **limits)  # type: ignore[arg-type]


@st.composite
def grids(draw: st.DrawFn) -> EngineGrid:
    """Noise of up to two times on a plausible iteration; what a grid refuses is drawn again."""
    batches, contexts = (1, 3, 8, 20), (64, 256, 1024)
    noise = draw(st.lists(st.floats(0.7, 1.4), min_size=12, max_size=12))
    plausible = np.array([[0.01 + 1e-4 * b + 1e-6 * b * c for c in contexts] for b in batches])
    decode = plausible * np.array(noise).reshape(4, 3)
    try:
        return replace(GRID, batches=batches, contexts=contexts, decode=tuple(map(tuple, decode.tolist())))
    except ValueError:
        reject()


@settings(max_examples=150, deadline=None)
@given(
    grid=grids(),
    max_num_seqs=st.integers(1, 30),
    ends=st.tuples(st.floats(32, 2000), st.floats(32, 2000)),
    memory=st.none() | st.floats(1, 20),
    where=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=8, max_size=8),
)
def test_lines_are_never_above_the_iteration(
    grid: EngineGrid,
    max_num_seqs: int,
    ends: tuple[float, float],
    memory: float | None,
    where: list[tuple[float, float]],
) -> None:
    low, high = min(ends), max(ends)
    kv_tokens = None if memory is None else memory * low
    lines = iteration_lines(grid, max_num_seqs, contexts=(low, high), kv_tokens=kv_tokens)
    assert 1 <= len(lines) <= 3
    assert all(min(line.step, line.per_sequence, line.per_context_token) >= 0 for line in lines)
    assert len({line.per_context_token for line in lines}) == 1
    for u, v in [*where, (0, 0), (0, 1), (1, 0), (1, 1)]:
        context = low + v * (high - low)
        most = max_num_seqs if kv_tokens is None else min(max_num_seqs, kv_tokens / context)
        if most < 1:  # memory does not hold one such sequence
            continue
        batch = 1 + u * (most - 1)
        longest = max(
            line.step + line.per_sequence * batch + line.per_context_token * batch * context for line in lines
        )
        assert longest <= grid.decode_seconds(batch, context) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.floats(1e-3, 1e-1), min_size=5, max_size=5),
    slope=st.floats(0, 1e-6),
    max_num_seqs=st.integers(2, 64),
)
def test_a_convex_grid_is_met_at_a_full_batch(steps: list[float], slope: float, max_num_seqs: int) -> None:
    """Convex in b from a positive start, with the tangent at a full batch above 0: nothing is lost there."""
    batches = (1, 2, 8, 32, 64)
    rates = np.maximum.accumulate(np.array(sorted(steps)) / 64)
    base = [1.0]
    for (low, high), rate in zip(pairwise(batches), rates, strict=False):
        base.append(base[-1] + rate * (high - low))
    decode = tuple(
        tuple(seconds + slope * b * c for c in GRID.contexts) for b, seconds in zip(batches, base, strict=True)
    )
    grid = replace(GRID, batches=batches, decode=decode)
    assert bound(grid, max_num_seqs, max_num_seqs, 300.0, pieces=1) == pytest.approx(
        grid.decode_seconds(max_num_seqs, 300.0), rel=1e-6
    )
    assert bound(grid, max_num_seqs, 1, 300.0, pieces=4) == pytest.approx(grid.decode_seconds(1, 300.0), rel=1e-6)


@pytest.mark.parametrize("chunk", [10, 15, 40])
def test_the_price_of_prefill_counts_tokens_and_what_is_before_them(chunk: int) -> None:
    """The time of a chunk that is exactly a*p + b*p*(c + chunk/2) gives a and b back."""
    per_token, per_pair = 0.002, 1e-6
    prefill = tuple(tuple(per_token * p + per_pair * p * (c + chunk / 2) for c in GRID.prefixes) for p in GRID.chunks)
    line = prefill_line(replace(GRID, prefill=prefill), chunk)
    assert (line.per_token, line.per_token_context) == pytest.approx((per_token, per_pair))
    assert line.error == pytest.approx(0, abs=1e-9)


def test_the_price_of_prefill_states_its_error() -> None:
    grid = replace(GRID, prefill=((1.0, 2.0, 4.0), (1.9, 3.7, 5.4)))
    line = prefill_line(grid, 20)
    errors = [
        abs((line.per_token * 20 + line.per_token_context * 20 * (prefix + 10)) / seconds - 1)
        for prefix, seconds in zip(grid.prefixes, grid.prefill[1], strict=True)
    ]
    assert line.error == pytest.approx(max(errors))
    assert line.error > 0.05
    two = replace(grid, prefixes=grid.prefixes[:2], prefill=tuple(row[:2] for row in grid.prefill))
    with pytest.raises(ValueError, match="a line needs three"):
        prefill_line(two, 20)
    with pytest.raises(ValueError, match="chunk is 0"):
        prefill_line(grid, 0)
