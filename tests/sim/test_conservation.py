"""Requests, tokens, blocks and bytes are conserved by engines of every kind, whatever breaks; and visiting every
iteration makes no difference. `tests/fuzz/fuzz_simulation.py` has more of the same.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.conservation import require_conserved
from oracles.faulty_simulation import faulty_case
from oracles.random_engines import KINDS, Kind


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_lost(kind: Kind, seed: int) -> None:
    require_conserved(faulty_case(kind, seed))
