"""Grids against numpy's own interpolation, and their affine bounds against every point they must stay below."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from libra.config.yaml_file import ConfigError
from libra.cost.grid import EngineGrid, EngineProfile
from libra.cost.sources.files import load_grid, save_grid

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
        ('"gpu": "A100"', '"gpu": "A100", "vendor": "x"', "vendor: unknown field"),
        ('"tp": 2', '"tp": 2, "pp": 1', r"engines\.1\.pp: unknown field"),
        ('"tp": 2', '"tp": "2"', r"engines\.1\.tp"),
        ('"tp": 2', '"tp": 1', "rising order"),
        ('"profile"', '"extra": 1, "profile"', "no others"),
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
