"""Groups formed out of layers: by hand for three models, and against vLLM's own functions for random ones."""

from __future__ import annotations

import os
from random import Random
from unittest.mock import patch

import pytest

from libra.hardware.kv_groups import KVGroup
from libra.hardware.kv_layers import GroupedLayers, KVLayer, group_layers

GIB = 2**30
FULL, WINDOW = KVLayer("full", token_bytes=2048), KVLayer("window", token_bytes=2048, tokens=128)


def test_as_many_windows_as_full_layers() -> None:
    """gpt-oss-20b: 24 layers that alternate, 8 heads of 64 in bf16."""
    found = group_layers([WINDOW, FULL] * 12, 16)
    assert found == GroupedLayers((KVGroup("window", 16, 128), KVGroup("full", 16)), (12, 12), 12 * 16 * 2048)
    assert found.blocks(10 * GIB) == 10 * GIB // (12 * 16 * 2048) - 1


def test_more_windows_than_full_layers() -> None:
    """Gemma 3 27B: every sixth of 62 layers reads everything, so 52 windows are in six groups of at most ten."""
    window = KVLayer("window", token_bytes=8192, tokens=1024)
    layers = [KVLayer("full", token_bytes=8192) if number % 6 == 5 else window for number in range(62)]
    found = group_layers(layers, 16)
    assert found.groups == (KVGroup("window", 16, 1024),) * 6 + (KVGroup("full", 16),)
    assert found.layers == (9, 9, 9, 9, 8, 8, 10)
    assert found.block_bytes == 10 * 16 * 8192


def test_a_page_holds_a_state() -> None:
    """Qwen3-Next-80B-A3B: three of four layers have a state, whose bytes are those of 528 tokens' KV, rounded up."""
    state = KVLayer("state", state_bytes=2 * 1024 * 1024 + 49152)
    found = group_layers([state, state, state, KVLayer("full", token_bytes=2048)] * 12, 16)
    size = -(-(2 * 1024 * 1024 + 49152) // (16 * 2048)) * 16
    assert found.groups == (KVGroup("state", size),) * 3 + (KVGroup("full", size),)
    assert found.layers == (12,) * 4
    assert found.block_bytes == 12 * size * 2048


def test_layers_alike_are_one_group() -> None:
    assert group_layers([FULL] * 4, 16) == GroupedLayers((KVGroup("full", 16),), (4,), 4 * 16 * 2048)
    mixed = group_layers([FULL, KVLayer("full", token_bytes=512, heads=2)], 16)
    assert mixed == GroupedLayers((KVGroup("full", 16),), (2,), 16 * 2560)


def test_what_cannot_be_grouped_is_refused() -> None:
    with pytest.raises(ValueError, match="no layers"):
        group_layers([], 16)
    with pytest.raises(ValueError, match="latent"):
        group_layers([KVLayer("full", token_bytes=1152, latent=True), WINDOW], 16)


def random_layers(seed: int) -> list[KVLayer]:
    random = Random(seed)
    heads = random.choice((1, 2, 4, 8))
    kinds = [
        KVLayer("full", token_bytes=heads * 512, heads=heads),
        KVLayer("window", token_bytes=heads * 512, tokens=random.choice((128, 1024)), heads=heads),
    ]
    if random.random() < 0.3:
        more = random.choice((1, 2, 3))
        kinds[1] = KVLayer("window", token_bytes=heads * more * 512, tokens=512, heads=heads * more)
    if random.random() < 0.2:
        kinds.append(KVLayer("chunk", token_bytes=heads * 512, tokens=8192, heads=heads))
    elif random.random() < 0.4:
        kinds[1:] = [KVLayer("state", state_bytes=random.randint(1, 200) * 4096)]
    pattern = [random.choice(kinds) for _ in range(random.randint(1, 8))]
    return pattern * random.randint(1, 12)


@pytest.mark.integration
@patch.dict(os.environ)  # importing vLLM sets variables that the processes of other tests would inherit
def test_vllm_itself() -> None:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    import torch
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    def spec(layer: KVLayer, size: int, state: int) -> KVCacheSpec:
        if layer.kind == "state":
            # As the platform sets it: the page is that of an attention layer.
            padded = state if state > layer.state_bytes else None
            shape = (layer.state_bytes,)
            return MambaSpec(block_size=size, shapes=(shape,), dtypes=(torch.int8,), page_size_padded=padded)
        shape = {"num_kv_heads": layer.heads, "head_size": 128, "dtype": torch.bfloat16}
        if layer.kind == "window":
            return SlidingWindowSpec(block_size=size, sliding_window=layer.tokens, **shape)
        if layer.kind == "chunk":
            return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=layer.tokens, **shape)
        return FullAttentionSpec(block_size=size, **shape)

    kinds = {FullAttentionSpec: "full", SlidingWindowSpec: "window", MambaSpec: "state"}
    config = VllmConfig(cache_config=CacheConfig(block_size=16))
    config.cache_config.kv_cache_layout = "LBNHC"  # as FlashAttention prefers
    for seed in range(200):
        layers = random_layers(seed)
        ours = group_layers(layers, 16)
        states = [it.state_bytes for it in layers if it.kind == "state"]
        token = next((it.token_bytes for it in layers if it.kind != "state"), 0)
        size = ours.groups[0].block_size if states and token else 16
        specs = {f"layer {number}": spec(it, size, size * token) for number, it in enumerate(layers)}
        groups = get_kv_cache_groups(config, specs)
        assert [len(it.layer_names) for it in groups] == list(ours.layers), seed
        found = [it.kv_cache_spec for it in groups]
        first = [next(iter(getattr(it, "kv_cache_specs", {0: it}).values())) for it in found]
        assert [(kinds.get(type(it), "chunk"), it.block_size) for it in first] == [
            (it.kind, it.block_size) for it in ours.groups
        ], seed
        theirs = get_kv_cache_config_from_groups(config, groups, 8 * GIB)
        assert ours.blocks(8 * GIB) == theirs.num_blocks - 1, seed
