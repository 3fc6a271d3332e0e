"""Deltas of weights are exact for all bits, and garbage is refused."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from libra.backends.weights.delta import DeltaError, Numbers, apply, encode

EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16)
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 3.4e38, 1e-40]


def round_trip(base: Numbers, new: Numbers) -> bytes:
    delta = encode(base, new)
    apart, place = np.zeros_like(base), base.copy()
    apply(delta, base, apart)
    apply(delta, place, place)
    assert np.array_equal(apart, new) and np.array_equal(place, new)
    return delta


@given(st.data(), st.sampled_from([np.uint16, np.uint32]))
def test_any_bits_become_any_others(data: st.DataObject, kind: type) -> None:
    length = data.draw(st.integers(1, 80))
    base, new = (data.draw(arrays.arrays(kind, length)) for _ in range(2))
    round_trip(base, new)
    assert round_trip(base, base.copy()) == b""


def test_every_bf16_pattern_becomes_every_special_one_and_back() -> None:
    patterns = torch.tensor(SPECIAL).to(torch.bfloat16).view(torch.uint16).numpy()
    for pattern in {*patterns.tolist(), 0x7FFF, 0xFFFF, 0x8000, 0x7F81}:
        other = np.full_like(EVERY_BF16, pattern)
        round_trip(EVERY_BF16, other)
        round_trip(other, EVERY_BF16)


@pytest.mark.parametrize("left", SPECIAL)
@pytest.mark.parametrize("right", SPECIAL)
def test_special_fp32_numbers(left: float, right: float) -> None:
    bits = np.array([left, 1.0, right], np.float32).view(np.uint32)
    round_trip(bits, bits[::-1].copy())


@given(st.lists(st.sampled_from([0, 1, 2, 253, 254, 255, 256, 509, 510, 511, 1000]), min_size=1, max_size=20))
def test_gaps_of_any_length(gaps: list[int]) -> None:
    places = np.cumsum(np.array(gaps) + 1) - 1
    base = np.zeros(int(places[-1]) + 1, np.uint16)
    new = base.copy()
    new[places] = 1
    for tail in (0, 3):
        round_trip(np.r_[base, np.zeros(tail, np.uint16)], np.r_[new, np.zeros(tail, np.uint16)])


def test_neighbouring_numbers_cost_little_and_far_ones_are_exact() -> None:
    generator = np.random.default_rng(0)
    base = torch.from_numpy(generator.normal(0, 0.02, 1 << 18).astype(np.float32)).to(torch.bfloat16)
    bits = base.view(torch.uint16).numpy()
    near = bits.copy()
    near[::100] += 1
    assert len(round_trip(bits, near)) < 0.01 * bits.nbytes
    round_trip(bits, np.roll(bits, 1))


@given(st.data())
def test_garbage_is_refused_or_stays_within_its_chunk(data: st.DataObject) -> None:
    base = np.arange(600, dtype=np.uint16)
    new = base.copy()
    new[[0, 7, 300, 599]] ^= 0x8001
    delta = bytearray(encode(base, new))
    match data.draw(st.sampled_from(["cut", "flip", "noise", "longer"])):
        case "cut":
            del delta[data.draw(st.integers(0, len(delta) - 1)) :]
        case "flip":
            delta[data.draw(st.integers(0, len(delta) - 1))] ^= data.draw(st.integers(1, 255))
        case "noise":
            delta = bytearray(data.draw(st.binary(max_size=60)))
        case _:
            delta += b"\0"
    around = np.full(800, 7, np.uint16)
    try:
        apply(bytes(delta), base, around[100:700])
    except DeltaError:
        pass
    assert np.all(around[:100] == 7) and np.all(around[700:] == 7)


@pytest.mark.parametrize(
    ("count", "length"), [(0, 0), (0, 5), (601, 601), (1, 0), (2, 1), (1, 4), (2**32 - 1, 2**32 - 1)]
)
def test_a_head_that_cannot_be_is_refused_before_anything_is_unpacked(count: int, length: int) -> None:
    base = np.zeros(600, np.uint16)
    good = encode(base, base + np.uint16(1))
    with pytest.raises(
        DeltaError, match=f"of 600 numbers: its header says {count} changed numbers, and {length} bytes"
    ):
        apply(struct.pack("<II", count, length) + good[8:], base, base.copy())


def test_a_delta_of_more_numbers_than_there_are_is_refused() -> None:
    base = np.zeros(600, np.uint16)
    new = base.copy()
    new[[10, 599]] = 1
    delta = encode(base, new)
    for shorter in (599, 300, 12):
        with pytest.raises(DeltaError):
            apply(delta, base[:shorter], base[:shorter].copy())


def test_order_of_numbers_is_order_of_steps() -> None:
    """A number's neighbours are one step away, across zero too: what makes most moves small."""
    values = torch.tensor([-1.0, -1e-3, -0.0, 0.0, 1e-3, 1.0]).to(torch.bfloat16)
    bits = values.view(torch.uint16).numpy()
    sizes = [len(encode(bits[i : i + 1].copy(), bits[j : j + 1].copy())) for i, j in pairwise(range(len(bits)))]
    assert sizes[2] == min(sizes)
