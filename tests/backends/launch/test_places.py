"""Which slot is on which node, for every small cluster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.backends.launch.cluster import NodeSlot, NoRoomError, SlotOffer, node_slots, room


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 12))
def test_slots_are_spread_as_evenly_as_there_is_room(rooms: list[int], slots: int) -> None:
    if sum(rooms) < slots:
        with pytest.raises(NoRoomError, match=f"{slots} slots are wanted, .* room for {sum(rooms)}"):
            node_slots(slots, rooms)
        return
    found = node_slots(slots, rooms)
    assert len(set(found)) == slots
    counts = Counter(slot.node for slot in found)
    assert sorted(counts) == list(range(len(counts)))
    for node, count in counts.items():
        assert {slot.number for slot in found if slot.node == node} == set(range(count))
    # Water that fills vessels: no node has two more than another one that is not full.
    level = next(level for level in range(slots + 1) if sum(min(each, level) for each in rooms) >= slots)
    assert all(level - 1 <= count <= level for count in counts.values() if count not in rooms)
    assert sorted(counts.values()) <= sorted(min(each, level) for each in rooms if each)
    width = sum(each > 0 for each in rooms)
    assert len({slot.node for slot in found[:width]}) == min(width, slots)  # core trainers come first


def test_core_trainers_are_on_different_nodes() -> None:
    assert node_slots(4, [0, 2, 2, 2]) == [NodeSlot(0, 0), NodeSlot(1, 0), NodeSlot(2, 0), NodeSlot(0, 1)]


@pytest.mark.parametrize(
    ("offers", "most", "rooms"),
    [
        ([(2.0, 0.0), (1.0, 0.0), (0.0, 0.0)], None, [4, 2, 0]),
        ([(0.9, 0.0), (0.44, 0.0)], None, [2, 0]),
        ([(64.0, 0.0)], 3, [3]),
        ([(2.0, 8.0), (64.0, 0.0)], None, [8, 0]),  # where there are accelerators, those are the devices
        ([(2.0, 8.0), (2.0, 4.0)], 6, [6, 4]),
    ],
)
def test_the_slots_that_nodes_have(offers: list[tuple[float, float]], most: int | None, rooms: list[int]) -> None:
    assert room([SlotOffer("n", *offer) for offer in offers], 0.45, most) == rooms
