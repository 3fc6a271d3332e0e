"""Grids against numpy's own interpolation, and their affine bounds against every point they must stay below."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from libra.config.yaml_file import ConfigError
from libra.cost.grid import EngineGrid, EngineProfile, iteration_lines, prefill_line
from libra.cost.sources.grid_file import load_grid, save_grid

GRID = EngineGrid(
    tp=1,
    batches=(1, 2, 4),
    contexts=(100, 200, 400),
    decode=((1.0, 1.1, 1.3), (1.2, 1.4, 1.8), (1.6, 2.0, 2.8)),
    chunks=(10, 20),
    prefixes=(0, 100, 300),
    prefill=((1.0, 2.0, 4.0), (2.0, 4.0, 8.0)),
)
PROFILE = EngineProfile("A100", "small", "bf16", "made", (GRID, replace(GRID, tp=2)))


@pytest.mark.parametrize(
    ("batch", "context", "wanted"),
    [
        (1, 100, 1.0),
        (2, 400, 1.8),
        (3, 100, 1.4),
        (1.5, 150, 1.175),
        (1, 50, 0.95),  # before the first point: as in the first interval
        (8, 100, 2.4),  # beyond the last: as in the last
        (1, 800, 1.7),
        (8, 800, 8.0),  # along both: 2 and 4 sequences take 2.6 and 4.4 at 800 tokens, 8 of them 2 * 1.8 more
    ],
)
def test_decode_is_linear_between_and_beyond_the_points(batch: float, context: float, wanted: float) -> None:
    assert GRID.decode_seconds(batch, context) == pytest.approx(wanted)


def test_prefill_is_read_from_its_own_table() -> None:
    assert GRID.prefill_seconds(20, 300) == 8.0
    assert GRID.prefill_seconds(15, 50) == pytest.approx(2.25)


def test_many_at_once_are_what_each_is_alone() -> None:
    batches, contexts = [1, 1.5, 3, 9], [0, 100, 250, 1000]
    table = GRID.decode_seconds_at(batches, contexts)
    assert table.tolist() == pytest.approx(
        np.array([[GRID.decode_seconds(b, c) for c in contexts] for b in batches]), rel=1e-12
    )
    assert GRID.prefill_seconds_at([5], [40, 500]).tolist()[0] == pytest.approx(
        [GRID.prefill_seconds(5, 40), GRID.prefill_seconds(5, 500)]
    )


@pytest.mark.parametrize(("batch", "context"), [(0, 100), (1, -1), (float("nan"), 100), (17, 100), (1, 1601)])
def test_there_is_no_time_for_nothing_or_for_too_much(batch: float, context: float) -> None:
    with pytest.raises(ValueError, match="there is no time for"):
        GRID.decode_seconds(batch, context)
    with pytest.raises(ValueError, match="there is no time for"):
        GRID.decode_seconds_at([batch], [context])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 0}, r"tp is 0"),
        ({"batches": (1, 4, 2)}, r"batches is \(1, 4, 2\)"),
        ({"batches": (0, 2, 4)}, "batches"),
        ({"contexts": (100, 100, 400)}, "contexts"),
        ({"chunks": (10,)}, "chunks"),
        ({"prefixes": (-1, 100, 300)}, "prefixes"),
        ({"decode": GRID.decode[:2]}, "decode is not 3 rows of 3"),
        ({"decode": (*GRID.decode[:2], (1.6, 2.0))}, "decode is not 3 rows of 3"),
        ({"prefill": ((1.0, 2.0, 4.0), (2.0, 0.0, 8.0))}, "prefill has a time that is not positive"),
        ({"prefill": ((1.0, 2.0, 4.0), (2.0, float("nan"), 8.0))}, "prefill has a time that is not positive"),
        ({"decode": ((1.0, 2.5, 2.6), *GRID.decode[1:])}, "decode falls below 0 before"),
        ({"decode": (*GRID.decode[:2], (1.6, 2.0, 1.9))}, "decode falls below 0 beyond"),
        ({"decode": (*GRID.decode[:2], (0.9, 1.0, 1.0))}, "decode falls below 0 beyond"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GRID, **change)


def test_a_grid_may_fall_a_little() -> None:
    grid = replace(GRID, decode=(*GRID.decode[:2], (1.1, 1.3, 1.7)))
    assert grid.decode_seconds(16, 100) == pytest.approx(0.5)  # 1.2 - 7 * 0.1


def test_a_profile_finds_its_degrees() -> None:
    assert PROFILE.grid(2).tp == 2
    with pytest.raises(ValueError, match="no tp 4, only 1, 2: make it with tp 4"):
        PROFILE.grid(4)
    with pytest.raises(ValueError, match="rising order"):
        replace(PROFILE, engines=PROFILE.engines[::-1])
    with pytest.raises(ValueError, match="rising order"):
        replace(PROFILE, engines=())


def test_the_digest_is_of_every_value() -> None:
    assert PROFILE.digest == replace(PROFILE).digest
    changed = replace(GRID, prefill=((1.0, 2.0, 4.0), (2.0, 4.0, np.nextafter(8.0, 9.0))))
    others = [
        replace(PROFILE, engines=(changed, PROFILE.engines[1])),
        replace(PROFILE, gpu="A800"),
        replace(PROFILE, source="measured"),
    ]
    assert len({PROFILE.digest, *(other.digest for other in others)}) == 4


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
    with pytest.raises(ValueError, match="longest is 200"):
        prefill_line(grid, 20, longest=200)
    with pytest.raises(ValueError, match="chunk is 0"):
        prefill_line(grid, 0)


def test_a_saved_grid_is_loaded_equal(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "grid.json"
    save_grid(path, PROFILE)
    assert load_grid(path) == PROFILE
    before = path.read_bytes()
    save_grid(path, load_grid(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"gpu": "A100"', '"gpu": "A800"', "the values have"),
        ('"gpu": "A100"', '"gpu": 100', "gpu"),
        ('"gpu": "A100"', '"gpu": "A100", "vendor": "x"', "vendor: not a field"),
        ('"tp": 2', '"tp": 2, "pp": 1', r"engines\.1\.pp: not a field"),
        ('"tp": 2', '"tp": "2"', r"engines\.1\.tp"),
        ('"tp": 2', '"tp": 1', "rising order"),
        ('"profile"', '"extra": 1, "profile"', "nothing else"),
        ("{", "[", "not JSON"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "grid.json"
    save_grid(path, PROFILE)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        load_grid(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        load_grid(tmp_path / "none.json")
