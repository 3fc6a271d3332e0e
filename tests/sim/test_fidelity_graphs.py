"""Which CUDA graph runs a batch, by vLLM's own dispatcher."""

from __future__ import annotations

import pytest


def test_graphs_are_the_dispatchers() -> None:
    pytest.importorskip("vllm")
    from tests.oracles.fidelity.graphs import differences

    assert differences(range(500)) == []
