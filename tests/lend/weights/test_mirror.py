"""A mirror has one version that engines load, checked, whatever comes and in whatever order."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.backends.transport.shared_memory import Vector, WeightUpdateError
from libra.backends.weights.delta import encode
from libra.backends.weights.grid import Grid
from libra.lend.weights.mirror import Mirror
from libra.lend.weights.wire import NOTHING, Chunk, Complete

GRID = Grid(100, "bfloat16", 32)  # four chunks, the last one short
ALL = Complete(0, 0, len(GRID), None)


def content_of(version: int) -> Vector:
    base = np.random.default_rng(0).integers(0, 255, GRID.size, dtype=np.uint8)
    for each in range(version):
        places = np.random.default_rng(each + 1).integers(0, GRID.size, 9)
        base[places] += 1
    return base


def chunk_of(number: int, version: int, base: int) -> Chunk:
    new = GRID.numbers(content_of(version), number)
    checksum = zlib.crc32(new.view(np.uint8).data)
    if base == NOTHING:
        return Chunk(number, version, NOTHING, 0, checksum, new.tobytes())
    old = GRID.numbers(content_of(base), number)
    return Chunk(number, version, base, zlib.crc32(old.view(np.uint8).data), checksum, encode(old, new))


@dataclass
class Kept:
    wanted: list[bool] = field(default_factory=lambda: [True] * len(GRID))

    def __post_init__(self) -> None:
        self.halves = np.zeros(GRID.size, np.uint8), np.zeros(GRID.size, np.uint8)
        self.mirror = Mirror(GRID, self.halves, np.array(self.wanted))

    def give(self, version: int, base: int) -> None:
        for number in range(len(GRID)):
            self.mirror.take(chunk_of(number, version, base))

    def settle(self, version: int) -> bool:
        self.mirror.confirm(msgspec.structs.replace(ALL, version=version))
        return self.mirror.settle()

    def begin(self, version: int) -> None:
        self.give(version, NOTHING)
        assert self.settle(version)

    @property
    def loaded(self) -> Vector:
        return self.halves[self.mirror.half]


def test_deltas_lead_from_version_to_version_and_engines_never_load_what_is_not_complete() -> None:
    kept = Kept()
    kept.begin(3)
    assert np.array_equal(kept.loaded, content_of(3))
    kept.give(4, 3)
    assert not kept.mirror.settle() and kept.mirror.held == 3  # nobody has said that it was published
    assert np.array_equal(kept.loaded, content_of(3))
    kept.give(5, 4)
    assert not kept.settle(4)  # it went by
    assert kept.settle(5) and np.array_equal(kept.loaded, content_of(5))
    assert not kept.settle(5)
    for number in range(len(GRID)):
        assert kept.mirror.chunk(number) == chunk_of(number, 5, NOTHING)


TWICE = [(number, version) for number in range(4) for version in (4, 5)] * 2


@given(st.permutations(TWICE), st.lists(st.booleans(), min_size=4, max_size=4))
def test_any_order_and_repetition_ends_where_it_should_or_asks(
    order: list[tuple[int, int]], wanted: list[bool]
) -> None:
    kept = Kept([True, *wanted[1:]])
    kept.begin(3)
    for number, version in order:
        kept.mirror.take(chunk_of(number, version, version - 1))
    kept.settle(5)
    have = kept.mirror.have
    missing = [number for number in range(4) if kept.wanted[number] and have[number] < 5]
    assert (kept.mirror.held == 5) is not bool(missing)
    for number in missing:  # what is said to be here is here, so what leads on from it will do
        for version in range(int(have[number]) + 1, 6):
            assert kept.mirror.take(chunk_of(number, version, version - 1))
    assert kept.mirror.held == 5 or kept.mirror.settle()
    for number in np.flatnonzero(kept.wanted):
        assert np.array_equal(kept.loaded[GRID.span(number)], content_of(5)[GRID.span(number)])


WRONG = {
    "its base": (lambda chunk: msgspec.structs.replace(chunk, base_sum=chunk.base_sum ^ 1), "made from another"),
    "its result": (lambda chunk: msgspec.structs.replace(chunk, sum=chunk.sum ^ 1), "its checksum differs"),
    "its bytes": (lambda chunk: msgspec.structs.replace(chunk, payload=chunk.payload[:-1]), "does not unpack|unpacks"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("staged", [False, True])
def test_a_delta_that_is_wrong_is_not_believed_and_the_chunk_is_asked_for_whole(what: str, staged: bool) -> None:
    kept = Kept()
    kept.begin(3)
    version = 4
    if staged:
        kept.give(4, 3)
        version = 5
    damage, why = WRONG[what]
    with pytest.raises(WeightUpdateError, match=rf"chunk 1 of weights v{version}: .*({why})"):
        kept.mirror.take(damage(chunk_of(1, version, version - 1)))
    assert kept.mirror.have.tolist() == [version - 1, NOTHING, version - 1, version - 1]
    assert not kept.mirror.take(chunk_of(1, version, version - 1))  # nothing is made from what may be wrong
    for number in (0, 2, 3):
        assert kept.mirror.take(chunk_of(number, version, version - 1))
    assert not kept.settle(version)
    assert np.array_equal(kept.loaded, content_of(3))  # as engines know it
    late = chunk_of(1, version, NOTHING)
    assert kept.mirror.take(late) and kept.mirror.is_late(late)
    assert kept.mirror.settle() and np.array_equal(kept.loaded, content_of(version))


def test_a_whole_chunk_of_other_length_or_place_is_refused() -> None:
    kept = Kept()
    with pytest.raises(WeightUpdateError, match="it has 3 bytes of 32"):
        kept.mirror.take(Chunk(0, 1, NOTHING, 0, 0, b"abc"))
    for number in (-1, 4):
        with pytest.raises(WeightUpdateError, match=f"chunk {number} is none of 4 chunks"):
            kept.mirror.take(Chunk(number, 1, NOTHING, 0, 0, b""))


def test_weights_of_another_run_are_all_asked_for() -> None:
    kept = Kept()
    kept.begin(3)
    kept.mirror.forget()
    assert np.all(kept.mirror.have == NOTHING)
    assert not kept.mirror.take(chunk_of(0, 4, 3))
    kept.begin(2)
    assert np.array_equal(kept.loaded, content_of(2))


def test_several_senders_have_to_say_that_a_version_is_complete() -> None:
    kept = Kept()
    kept.give(1, NOTHING)
    kept.mirror.confirm(Complete(1, 0, 2, None))
    assert not kept.mirror.settle()
    kept.mirror.confirm(Complete(1, 2, 4, None))
    assert kept.mirror.settle()
    assert kept.mirror.checksum is None


def test_a_mirror_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="name the chunks that the node needs"):
        Kept([False] * 4)
