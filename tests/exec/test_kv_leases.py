"""Frames and who has them: none twice, none lost."""

from __future__ import annotations

import subprocess

from hypothesis import given
from hypothesis import strategies as st

from libra.backends.transport.messages import Parcel
from libra.backends.vllm.kv_leases import KVLeases


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=40))
def test_a_frame_is_in_one_parcel(asked: list[tuple[int, int]]) -> None:
    """Leases of so many blocks, each followed by so many releases of the oldest parcels."""
    leases, held, numbers = KVLeases(10), list[Parcel](), set[int]()
    for blocks, releases in asked:
        free = leases.free
        assert free == 10 - sum(len(parcel.frames) for parcel in held)
        parcel = leases.lease(blocks)
        assert (parcel is None) == (blocks > free)
        if parcel is not None:
            assert len(parcel.frames) == blocks and parcel.number not in numbers
            numbers.add(parcel.number)
            held.append(parcel)
        frames = [frame for parcel in held for frame in parcel.frames]
        assert len(set(frames)) == len(frames) and set(frames) <= set(range(10))
        for parcel in held[:releases]:
            leases.release(parcel)
        held = held[releases:]
    for parcel in held:
        leases.release(parcel)
    assert leases.free == 10


def test_frames_of_a_process_are_kept_until_it_is_gone() -> None:
    leases = KVLeases(4)
    writer = subprocess.Popen(["sleep", "60"])
    try:
        parcel = leases.lease(3)
        assert parcel is not None
        leases.release_after(writer.pid, parcel)
        assert leases.free == 1 and leases.lease(2) is None
    finally:
        writer.kill()
        writer.wait()
    assert leases.free == 4
