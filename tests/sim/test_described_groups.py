"""KV cache groups of engines in a file: those of three models are what vLLM's functions make of specs by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from oracles.family_configs import CONFIGS

import libra
from libra.config.yaml_file import ConfigError
from libra.cost.engine_memory import held_bytes
from libra.hardware.cluster_file import gpu_of
from libra.hardware.model_file import load_model
from libra.sim.engine.config import EngineConfig

GPT_OSS = CONFIGS["gpt_oss"] | {
    **{"num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
    **{"vocab_size": 201088, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12},
}
GEMMA = CONFIGS["gemma3_text"] | {
    **{"num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16},
    **{"head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208, "sliding_window": 1024},
}
QWEN_NEXT = CONFIGS["qwen3_next"] | {
    **{"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2},
    **{"head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
    **{"shared_expert_intermediate_size": 512, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 151936},
}


def engine(folder: Path, config: dict[str, Any], tp: int = 1, **keys: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    section = {"name": "e", "model": str(folder / "config.json"), "gpu": "h100", "profile": "roofline"}
    section |= {"tensor_parallel_size": tp, **keys}
    path = folder / "engines.yaml"
    path.write_text(json.dumps({"engines": [section], "route": "least-loaded"}), encoding="utf-8")
    return libra.load_engines(path).engines[0].config


@pytest.mark.integration
@patch.dict(os.environ)  # importing vLLM sets variables that the processes of other tests would inherit
def test_groups_and_blocks_are_vllms(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    import torch
    from vllm.config import CacheConfig, VllmConfig
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

    def full(heads: int, dim: int, size: int = 16) -> KVCacheSpec:
        return FullAttentionSpec(block_size=size, num_kv_heads=heads, head_size=dim, dtype=torch.bfloat16)

    def window(heads: int, dim: int, tokens: int) -> KVCacheSpec:
        shape = {"block_size": 16, "num_kv_heads": heads, "head_size": dim, "dtype": torch.bfloat16}
        return SlidingWindowSpec(sliding_window=tokens, **shape)

    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(4, 16, 32, 128, 128, 4)
    dtypes = (torch.bfloat16, torch.bfloat16)
    state = MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes).page_size_bytes
    size = -(-state // (16 * 2 * 256 * 2)) * 16  # vLLM's `update_block_size_for_backend`: a page holds a state
    delta = MambaSpec(block_size=size, shapes=shapes, dtypes=dtypes, page_size_padded=size * 2 * 256 * 2)
    cases: list[tuple[dict[str, Any], int, list[KVCacheSpec]]] = [
        (GPT_OSS, 1, [window(8, 64, 128), full(8, 64)] * 12),
        (GEMMA, 2, [full(8, 128) if layer % 6 == 5 else window(8, 128, 1024) for layer in range(62)]),
        (QWEN_NEXT, 4, [delta, delta, delta, full(1, 256, size)] * 12),
    ]
    config = VllmConfig(cache_config=CacheConfig(block_size=16))
    config.cache_config.kv_cache_layout = "LBNHC"  # as FlashAttention prefers
    kinds = {FullAttentionSpec: "full", SlidingWindowSpec: "window", MambaSpec: "state"}
    for shape, tp, layers in cases:
        ours = engine(tmp_path, shape, tp)
        groups = get_kv_cache_groups(config, {f"layer {number}": it for number, it in enumerate(layers)})
        specs = [it.kv_cache_spec for it in groups]
        assert [(it.kind, it.block_size, it.tokens) for it in ours.kv_groups] == [
            (kinds[type(it)], it.block_size, getattr(it, "sliding_window", None) or 0) for it in specs
        ]
        model = load_model(tmp_path / "config.json")
        memory = gpu_of("h100", "gpu").usable * 0.9 - held_bytes(model, tp, batched_tokens=8192, seqs=1024)
        assert ours.kv_blocks == get_kv_cache_config_from_groups(config, groups, int(memory)).num_blocks - 1


def test_without_the_hybrid_manager_every_layer_keeps_everything(tmp_path: Path) -> None:
    several = engine(tmp_path, GPT_OSS)
    one = engine(tmp_path, GPT_OSS, disable_hybrid_kv_cache_manager=True)
    assert [it.kind for it in several.kv_groups] == ["window", "full"]
    assert one.kv_groups == ()
    assert one.kv_blocks == pytest.approx(several.kv_blocks / 2, abs=1)


def test_groups_of_a_file_replace_those_of_the_model(tmp_path: Path) -> None:
    groups = [{"kind": "full"}, {"kind": "window", "tokens": 64, "block_size": 32}]
    found = engine(tmp_path, GPT_OSS, kv_groups=groups, kv_blocks=20_000, block_size=32, max_model_len=4096)
    assert [(it.kind, it.block_size, it.tokens) for it in found.kv_groups] == [("full", 16, 0), ("window", 32, 64)]
    assert found.kv_blocks == 20_000


@pytest.mark.parametrize(
    ("config", "keys", "told"),
    [
        (GPT_OSS, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is not simulated .* gpt_oss|set disable"),
        (GPT_OSS, {"speculative": {"method": "ngram", "num_speculative_tokens": 1, "accepted": [0]}}, "speculative"),
        (GPT_OSS, {"kv_groups": [{"kind": "full"}]}, "kv_groups without kv_blocks"),
        (GPT_OSS, {"kv_groups": [{"kind": "window"}], "kv_blocks": 99}, "tokens of window is 0"),
        (QWEN_NEXT, {"tp": 4, "disable_hybrid_kv_cache_manager": True}, "layers have states"),
        (GPT_OSS, {"kv_blocks": 100}, "kv_blocks is 100, less than the"),
    ],
)
def test_what_cannot_be_grouped_is_refused_by_its_key(
    tmp_path: Path, config: dict[str, Any], keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        engine(tmp_path, config, **keys)
    assert "\n" not in str(caught.value)
