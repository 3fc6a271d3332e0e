"""What describes engines goes to other processes, compiled or not."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest

from libra.sim.engine.afd import AttentionFFN
from libra.sim.engine.config import PREFILL, EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost, DecodeBatch
from libra.sim.engine.kv_tier import KVTier
from libra.sim.engine.speculative import Speculative
from libra.sim.kv_network import KVNetwork

DRAFTS = EngineConfig(2048, 4096, capture_sizes=(1, 2), speculative=Speculative("eagle", 2, (0.5, 0.3)))
TIERS = EngineConfig(2048, 4096, kv_tiers=(KVTier("host", 4096, 2.0**21, 25e9, 25e9),))
VALUES = (
    EngineSpec("engine", DRAFTS, AffineCost(5, per_chunk=1), node="node", role=PREFILL),
    TIERS,
    AttentionFFN(4, 2, 50e9),
    DecodeBatch(3),
    KVNetwork(1e9),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_copy_is_as_the_original(value: object) -> None:
    for copy in (pickle.loads(pickle.dumps(value)), deepcopy(value)):
        assert copy == value and type(copy) is type(value) and repr(copy) == repr(value)
