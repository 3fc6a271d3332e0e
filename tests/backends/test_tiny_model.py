"""What a model's `config.json` says of its KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libra.backends.tiny_model import kv_bytes_per_token
from libra.backends.transport.messages import Dtype

PLAIN = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "dtype", "wanted"),
    [
        (PLAIN, "bfloat16", 2 * 2 * 3 * 4 * 16),  # bytes, keys and values, layers, heads, 64 / 4 numbers
        (PLAIN, "float32", 4 * 2 * 3 * 4 * 16),
        ({**PLAIN, "num_key_value_heads": 2}, "bfloat16", 2 * 2 * 3 * 2 * 16),
        ({**PLAIN, "head_dim": 32}, "bfloat16", 2 * 2 * 3 * 4 * 32),
        ({**PLAIN, "num_key_value_heads": None, "head_dim": None}, "bfloat16", 2 * 2 * 3 * 4 * 16),
    ],
)
def test_bytes_of_a_token(config: dict[str, Any], dtype: Dtype, wanted: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_per_token(tmp_path, dtype) == wanted


@pytest.mark.parametrize(("gpus", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_gpu_holds_its_heads_and_one_at_least(gpus: int, heads: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert kv_bytes_per_token(tmp_path, "bfloat16", gpus) == 2 * 2 * 3 * heads * 16
