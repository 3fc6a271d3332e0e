"""Frames and who has them: none twice, none lost."""

from __future__ import annotations

import subprocess

from hypothesis import given
from hypothesis import strategies as st

from libra.backends.transport.engine_messages import KVTransfer
from libra.backends.vllm.kv_handover import KVLeases


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=40))
def test_a_frame_is_in_one_transfer(asked: list[tuple[int, int]]) -> None:
    """Leases of so many blocks, each followed by so many releases of the oldest transfers."""
    leases, held, numbers = KVLeases(10), list[KVTransfer](), set[int]()
    for blocks, releases in asked:
        free = leases.free
        assert free == 10 - sum(len(transfer.frames) for transfer in held)
        transfer = leases.lease(blocks)
        assert (transfer is None) == (blocks > free)
        if transfer is not None:
            assert len(transfer.frames) == blocks and transfer.number not in numbers
            numbers.add(transfer.number)
            held.append(transfer)
        frames = [frame for transfer in held for frame in transfer.frames]
        assert len(set(frames)) == len(frames) and set(frames) <= set(range(10))
        for transfer in held[:releases]:
            leases.release(transfer)
        held = held[releases:]
    for transfer in held:
        leases.release(transfer)
    assert leases.free == 10


def test_frames_of_a_process_are_kept_until_it_is_gone() -> None:
    leases = KVLeases(4)
    writer = subprocess.Popen(["sleep", "60"])
    try:
        transfer = leases.lease(3)
        assert transfer is not None
        leases.release_after(writer.pid, transfer)
        assert leases.free == 1 and leases.lease(2) is None
    finally:
        writer.kill()
        writer.wait()
    assert leases.free == 4
