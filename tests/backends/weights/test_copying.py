"""Differences of whole weights, and which way weights go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.backends.transport.shared_memory import WeightUpdateError
from libra.backends.weights.copying import CopyChoice, add_difference, difference
from libra.backends.weights.grid import CHUNK_BYTES


@given(st.integers(1, 5), st.sampled_from([0, 2, 100, CHUNK_BYTES, CHUNK_BYTES + 6]), st.integers(0, 400))
def test_a_difference_leads_from_one_version_to_the_other(seed: int, size: int, changes: int) -> None:
    generator = np.random.default_rng(seed)
    base = generator.integers(0, 255, size + 4, dtype=np.uint8)
    new = base.copy()
    new[generator.integers(0, len(base), changes)] += 1
    packed, into = difference(base, new), np.zeros_like(base)
    add_difference(packed, base, into)
    assert np.array_equal(into, new)
    assert len(packed) <= len(new) + 8
    for torn in (packed[:-1], packed[:3], np.concatenate([packed, packed[:1]])):
        with pytest.raises(WeightUpdateError, match="a weight delta"):
            add_difference(torn, base, into)


def test_the_faster_way_is_gone_and_the_other_tried_now_and_then() -> None:
    choice, seconds, ways = CopyChoice(), {"everything": 2.0, "delta": 1.0}, []
    for number in range(60):
        if number == 40:
            seconds["everything"] = 0.5  # the network is faster now
        ways.append(choice.next())
        choice.took(ways[-1], seconds[ways[-1]])
    assert ways[:3] == ["everything", "delta", "delta"]
    assert 1 <= ways[3:40].count("everything") <= 3
    found = ways.index("everything", 40)
    assert found < 40 + 18 and set(ways[found:]) == {"everything"}
