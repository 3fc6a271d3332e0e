"""KV in shared memory: a frame is what was put into it, or nothing."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.backends.transport.engine_messages import KVBufferPlace
from libra.backends.transport.kv_buffer import BLOCK_NAME, Filled, OwnFrames, attach

FRAMES, BYTES = 3, 192
FILLED = Filled(transfer=7, version=4, block=bytes(range(BLOCK_NAME)))


@pytest.fixture(scope="module")
def ends() -> tuple[OwnFrames, OwnFrames]:
    own = OwnFrames(FRAMES, BYTES)
    return own, attach(own.place)  # type: ignore[return-value]


def fill(frames: OwnFrames, frame: int, seed: int) -> None:
    frames.payload[frame] = np.random.default_rng(seed).integers(0, 256, BYTES, np.uint8)
    frames.seal(frame, FILLED)


def test_what_one_end_fills_the_other_finds(ends: tuple[OwnFrames, OwnFrames]) -> None:
    ours, theirs = ends
    assert not theirs.holds(1, FILLED)
    fill(ours, 1, 0)
    assert theirs.holds(1, FILLED)
    assert (theirs.payload[1] == ours.payload[1]).all()
    assert not theirs.holds(0, FILLED) and not theirs.holds(2, FILLED)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (FILLED, True),
        (Filled(7, 5, FILLED.block), True),  # KV of older weights is what an engine keeps of its own, too
        (Filled(7, 3, FILLED.block), False),
        (Filled(8, 4, FILLED.block), False),
        (Filled(7, 4, bytes(BLOCK_NAME)), False),
    ],
)
def test_a_frame_is_what_was_wanted(ends: tuple[OwnFrames, OwnFrames], wanted: Filled, found: bool) -> None:
    fill(ends[0], 0, 1)
    assert ends[1].holds(0, wanted) is found


@given(byte=st.integers(0, BYTES - 1), bit=st.integers(0, 7), seed=st.integers(0, 2**32 - 1))
def test_any_flipped_bit_is_found(ends: tuple[OwnFrames, OwnFrames], byte: int, bit: int, seed: int) -> None:
    ours, theirs = ends
    fill(ours, 2, seed)
    theirs.payload[2, byte] ^= 1 << bit
    assert not theirs.holds(2, FILLED)
    theirs.payload[2, byte] ^= 1 << bit
    assert theirs.holds(2, FILLED)


def test_a_block_that_was_half_written_is_none(ends: tuple[OwnFrames, OwnFrames]) -> None:
    """The engine was killed between the payload and its seal, in a frame that an older transfer was in."""
    ours, theirs = ends
    fill(ours, 0, 2)
    ours.payload[0, : BYTES // 2] = 0
    assert not theirs.holds(0, FILLED)
    assert not theirs.holds(0, Filled(8, 4, FILLED.block))


def test_other_memory_is_refused() -> None:
    own = OwnFrames(FRAMES, BYTES)
    with pytest.raises(ValueError, match="KV frames are"):
        attach(KVBufferPlace(own.place.pid, own.place.descriptor, FRAMES + 100, BYTES))
    with pytest.raises(OSError, match=r"."):
        attach(KVBufferPlace(2**22 + 1, own.place.descriptor, FRAMES, BYTES))


def test_the_memory_goes_with_its_owner() -> None:
    own = OwnFrames(FRAMES, BYTES)
    descriptor = own.place.descriptor
    assert "memfd:libra-kv" in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - not a path on disk
    del own
    with pytest.raises(OSError, match=r"."):
        os.fstat(descriptor)
