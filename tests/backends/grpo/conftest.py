"""A tiny model directory, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 32 wide, 32 tokens; no weights yet."""
    from libra.backends.tiny_model import write_tiny_model
    from libra.config.run import ModelConfig

    directory = tmp_path_factory.mktemp("model")
    shape = ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16)
    write_tiny_model(directory, shape, "0123456789+-*/", longest_context=64)
    return directory


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one core: the tensors are tiny, and somebody else may need the others."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
