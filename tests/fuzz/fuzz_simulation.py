"""Nothing is lost in 5,500 random simulations with faults, of engines of every kind: `make fuzz`, or
`python -m pytest tests/fuzz/fuzz_simulation.py`. `FIRST_SEED=N` before it takes others.

Invariant: pytest collects this file only by its name, since it takes minutes. A failure names its kind and seed, and
`'tests/fuzz/fuzz_simulation.py::test_nothing_is_lost[KIND-SEED]'` runs that one again.
"""

from __future__ import annotations

import os

import pytest
from oracles.conservation import require_conserved
from oracles.faulty_simulation import faulty_case
from oracles.random_engines import KINDS, Kind

FIRST = int(os.environ.get("FIRST_SEED", "0"))
SEEDS = 500  # of each kind


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost(kind: Kind, seed: int) -> None:
    if not require_conserved(faulty_case(kind, seed)):
        pytest.skip("it is refused by name: a tier is too small, or a turn comes beside the next one")
