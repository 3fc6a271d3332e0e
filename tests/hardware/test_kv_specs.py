"""Memory of a sequence: bytes are those of vLLM's KV cache specifications."""

from __future__ import annotations

from typing import Any

import pytest

from libra.hardware.attention import Attention, Indexer
from libra.hardware.context import Reach, Retained
from libra.hardware.decoder import decoder
from libra.hardware.latent import CompressedAttention, LatentAttention
from libra.hardware.layers import LayerKind, Mixer
from libra.hardware.mlp import MLP
from libra.hardware.model import ModelSpec
from libra.hardware.state_space import Mamba2
from libra.hardware.states import GatedDeltaNet, KimiDelta, ShortConvolution

interface = pytest.importorskip("vllm.v1.kv_cache_interface")
mamba = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
torch = pytest.importorskip("torch")
BLOCK = 16
TP = [1, 2, 4, 8]


def block(part: Retained, number: float) -> float:
    """Bytes of a block of one layer."""
    return BLOCK * (part.numbers * number + part.plain)


def spec(heads: int, key: int, value: int, dtype: Any, window: int = 0) -> Any:
    shape = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": key, "head_size_v": value, "dtype": dtype}
    if window:
        return interface.SlidingWindowSpec(**shape, sliding_window=window)
    return interface.FullAttentionSpec(**shape)


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize(("number", "dtype"), [(2, "bfloat16"), (1, "uint8")])
@pytest.mark.parametrize(
    "mixer",
    [
        Attention(64, 8, 64, reach=Reach(128), sinks=True),  # gpt-oss-120b
        Attention(64, 8, 64),
        Attention(64, 4, 192, 128),  # MiMo-V2-Flash
        Attention(64, 8, 192, 128, Reach(128)),
        Attention(16, 2, 256, gate="channel"),  # Qwen3.5-35B-A3B
    ],
)
def test_attention(mixer: Attention, number: int, dtype: str, tp: int) -> None:
    heads = max(1, mixer.kv_heads // tp)
    theirs = spec(heads, mixer.head_dim, mixer.value, getattr(torch, dtype), mixer.reach.tokens)
    (part,) = mixer.kept(tp)
    assert block(part, number) == theirs.page_size_bytes
    assert part.reach == mixer.reach


def test_latent_vectors_and_the_keys_of_an_indexer() -> None:
    own, keys = LatentAttention(128, 1536, 512, 128, 64, 128, Indexer(64, 128, 2048)).kept(8)
    latent = {"block_size": BLOCK, "num_kv_heads": 1}
    theirs = interface.MLAAttentionSpec(**latent, head_size=576, dtype=torch.bfloat16)
    assert block(own, 2) == theirs.page_size_bytes
    # vLLM's `Indexer` gives its cache head_dim + head_dim // 128 * 4 bytes a token.
    theirs = interface.MLAAttentionSpec(**latent, head_size=132, dtype=torch.uint8)
    assert block(keys, 2) == theirs.page_size_bytes


def test_compressed_vectors() -> None:
    window, compressed, keys = CompressedAttention(64, 512, 1024, 1024, 8, 128, 4, Indexer(64, 128, 512)).kept(8)
    shape = {"block_size": 256, "num_kv_heads": 1, "dtype": torch.bfloat16}
    theirs = interface.SlidingWindowMLASpec(**shape, head_size=512, sliding_window=128)
    assert 256 * window.numbers * 2 == theirs.page_size_bytes
    theirs = interface.MLAAttentionSpec(**shape, head_size=512, tokens_per_state=4)
    assert 256 * compressed.numbers * 2 == theirs.page_size_bytes
    assert keys.plain == 132 / 4
    assert window.reach == Reach(128)


CALCULATOR = "MambaStateShapeCalculator"
STATES: list[tuple[Mixer, str, dict[str, int], str]] = [
    (
        GatedDeltaNet(16, 32, 128, 128, 4, 4),  # Qwen3.5-35B-A3B
        "gated_delta_net_state_shape",
        {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128, "conv_kernel_size": 4},
        "float32",
    ),
    (
        Mamba2(64, 64, 128, 8, 4, 4),  # Nemotron-3-Nano
        "mamba2_state_shape",
        {
            "intermediate_size": 4096,
            "n_groups": 8,
            "num_heads": 64,
            "head_dim": 64,
            "state_size": 128,
            "conv_kernel": 4,
        },
        "float32",
    ),
    (
        Mamba2(24, 64, 256, 1, 4, 2),  # one group, which every device has
        "mamba2_state_shape",
        {
            "intermediate_size": 1536,
            "n_groups": 1,
            "num_heads": 24,
            "head_dim": 64,
            "state_size": 256,
            "conv_kernel": 4,
        },
        "bfloat16",
    ),
    (
        KimiDelta(96, 128, 4, full_gate=True),  # Kimi K3
        "kda_state_shape",
        {"num_heads": 96, "head_dim": 128, "conv_kernel_size": 4},
        "float32",
    ),
    (ShortConvolution(2048, 3), "short_conv_state_shape", {"intermediate_size": 2048, "conv_kernel": 3}, "bfloat16"),
]


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize(("mixer", "shape", "sizes", "dtype"), STATES)
def test_states(mixer: Mixer, shape: str, sizes: dict[str, int], dtype: str, tp: int) -> None:
    shapes = getattr(mamba.MambaStateShapeCalculator, shape)(tp_world_size=tp, **sizes) if "kda" not in shape else None
    if shapes is None:
        shapes = mamba.MambaStateShapeCalculator.kda_state_shape(tp, **sizes)
    dtypes = (torch.bfloat16, getattr(torch, dtype))[: len(shapes)]
    theirs = interface.MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=dtypes)
    (part,) = mixer.kept(tp)
    assert part.state == theirs.page_size_bytes


def model_of(*mixers: Mixer) -> ModelSpec:
    kinds = tuple(LayerKind(mixer, MLP(96)) for mixer in mixers)
    return ModelSpec("mixed", 64, 200, False, 4096, kinds, tuple(range(len(kinds))))


def test_a_sequence_of_a_hybrid_model() -> None:
    model = model_of(Attention(8, 2, 64), Attention(8, 2, 64, reach=Reach(128)), Mamba2(8, 16, 32, 2, 4))
    state = 3 * (128 + 2 * 2 * 32) * 2 + 128 * 32 * 2
    assert model.kv_bytes(100, 2) == 2 * 100 * 2 * 2 * 64 * 2 + state
    assert model.kv_bytes(1000, 2) == (1000 + 128) * 2 * 2 * 64 * 2 + state
    assert model.kv_bytes(1000, 1, tp=2) == (1000 + 128) * 2 * 64 + state / 2


def test_an_even_model_takes_the_same_for_each_token() -> None:
    model = decoder("even", 4, 64, 8, 2, 16, 96, 200, False, 4096)
    assert {model.kv_bytes_per_token(2, context=length) for length in (None, 1, 7, 4096)} == {4 * 2 * 2 * 16 * 2}


def test_stages_of_a_pipeline_are_those_of_the_order() -> None:
    full, window = Attention(8, 2, 64), Attention(8, 2, 64, reach=Reach(128))
    kinds = (LayerKind(window, MLP(96)), LayerKind(full, MLP(96)))
    model = ModelSpec("stages", 64, 200, False, 4096, kinds, (0, 0, 0, 1) * 2)
    each = 2 * 2 * 64 * 2
    assert model.kv_bytes(1000, 2, pp=2) == (1000 + 3 * 128) * each
    assert model.kv_bytes(1000, 2, pp=8) == 1000 * each
