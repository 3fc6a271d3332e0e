"""Keys that tokens see, against counting them one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.hardware.attention import Indexer
from libra.hardware.context import ALL, Reach, Retained
from libra.hardware.latent import CompressedAttention, LatentAttention
from libra.hardware.model_file import load_model

reaches = st.builds(Reach, st.integers(1, 300))


def seen(reach: Reach, before: int) -> int:
    """Keys of a token with `before` tokens before it, itself included."""
    if reach.chunked:
        return before % reach.tokens + 1
    return min(before + 1, reach.tokens) if reach.tokens else before + 1


@given(reaches, st.integers(1, 400), st.integers(0, 400))
def test_pairs_of_a_window_are_a_sum_over_tokens(reach: Reach, new: int, prefix: int) -> None:
    counted = sum(seen(reach, prefix + it) for it in range(new))
    found = float(reach.pairs(np.array(float(new)), np.array(float(prefix))))
    assert found == pytest.approx(counted, abs=new / 2 + 1)  # half of each token's own key


@given(st.integers(1, 400), st.integers(0, 400))
def test_without_a_limit_every_key_counts(new: int, prefix: int) -> None:
    assert float(ALL.pairs(np.array(float(new)), np.array(float(prefix)))) == new * (prefix + new / 2)
    assert ALL.share(new / 2) == 1


def test_tokens_past_the_first_chunk_see_half_of_one_on_average() -> None:
    reach, length = Reach(64, chunked=True), 64 * 20
    counted = sum(seen(reach, it) for it in range(length))
    assert float(reach.pairs(np.array(float(length)), np.zeros(()))) == pytest.approx(counted, rel=0.06)
    assert reach.seen(np.array([10.0, 63.0, 64.0, 500.0])).tolist() == [10, 63, 32, 32]


@given(reaches, st.integers(1, 1000))
def test_the_share_of_a_sequence_is_that_of_its_tokens(reach: Reach, length: int) -> None:
    counted = sum(seen(reach, it) for it in range(length))
    mean = (length + 1) / 2
    assert reach.share(mean) * length * mean == pytest.approx(counted, rel=0.02, abs=length / 2 + 2)


@given(st.floats(0, 500), st.floats(0, 9), st.integers(0, 200), st.floats(0, 900))
def test_bytes_grow_more_slowly_with_length(numbers: float, plain: float, window: int, state: float) -> None:
    kept = Retained(numbers, plain, Reach(window), state)
    held = [kept.bytes(length, 2) for length in range(0, 400, 20)]
    more = np.diff(held)
    assert (more >= 0).all()
    assert (np.diff(more) <= 1e-6).all()
    assert kept.grows == (not window and not state)


def test_an_impossible_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens is 0; set it to 1 or more"):
        Reach(0, chunked=True)


def test_chosen_keys_of_eight_bits_keep_positions_and_scales() -> None:
    # FlashMLA's fp8_ds_mla: 512 numbers of a byte, four scales, 64 positions of 16 bits; beside an indexer's key.
    chosen = load_model("deepseek-ai/DeepSeek-V3").kinds[0].mixer
    assert isinstance(chosen, LatentAttention)
    (all_keys,) = chosen.kept()
    assert all_keys.token_bytes(1) == 576
    own, key = replace(chosen, indexer=Indexer(64, 128, 2048)).kept()
    assert (own.token_bytes(2), own.token_bytes(1)) == (1152, 656)
    assert key.token_bytes(1) == key.token_bytes(2) == 132


def test_compressed_vectors_of_eight_bits_have_positions_and_scales() -> None:
    # FlashMLA's layout for DeepSeek-V4: 448 numbers of a byte, 64 of 16 bits, 8 bytes of scales.
    window, vectors = CompressedAttention(64, 512, 1024, 1024, 8, 128, ratio=128).kept()
    assert (window.token_bytes(2), window.token_bytes(1)) == (1024, 584)
    assert vectors.token_bytes(1) == 584 / 128
