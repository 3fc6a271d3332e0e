"""Weights through shared memory: exact, checked, and never half of one version and half of another. A KV frame is what
was put into it, or nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.backends.transport.engine_messages import KVBufferPlace
from libra.backends.transport.messages import DTYPE_BYTES, Dtype, Tensor
from libra.backends.transport.shared_memory import (
    BLOCK_NAME,
    BUFFERS,
    Filled,
    KVBuffer,
    LayoutError,
    OwnFrames,
    WeightBuffer,
    WeightUpdateError,
    create_buffer,
    device_hash,
    make_layout,
)

SHAPES = [("embed.weight", (7, 5)), ("norm.weight", (5,)), ("scale", ()), ("head.weight", (3, 2, 2))]
LAYOUT, SIZE = make_layout(SHAPES, "bfloat16")

# An engine's side: reads buffer 0, then answers by writing buffer 1 as a trainer would.
READER = """
import json, sys
from libra.backends.transport.messages import DTYPE_BYTES, Dtype, Tensor
from libra.backends.transport.shared_memory import WeightBuffer
descriptor, size, checksum = map(int, sys.argv[1:4])
layout = [Tensor(name, tuple(shape), offset, dtype) for name, shape, offset, dtype in json.loads(sys.argv[4])]
buffer = WeightBuffer(descriptor, size)
weights = {name: tensor.clone() for name, tensor in buffer.read(0, layout, checksum)}
assert all(weights[tensor.name].shape == tensor.shape for tensor in layout)
print(buffer.write(1, layout, weights))
"""


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create_buffer()
    yield made
    os.close(made)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES}


def rounded(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(torch.bfloat16) for name, value in values.items()}


def assert_holds(buffer: WeightBuffer, index: int, checksum: int, wanted: dict[str, torch.Tensor]) -> None:
    found = dict(buffer.read(index, LAYOUT, checksum))
    assert found.keys() == wanted.keys()
    for name, value in rounded(wanted).items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], value), name


def test_another_process_reads_exactly_what_was_written(descriptor: int) -> None:
    trainer = WeightBuffer(descriptor, SIZE)
    written = weights(0)
    checksum = trainer.write(0, LAYOUT, written)
    layout = json.dumps([[tensor.name, tensor.shape, tensor.offset, tensor.dtype] for tensor in LAYOUT])
    answer = subprocess.run(
        [sys.executable, "-c", READER, str(descriptor), str(SIZE), str(checksum), layout],
        pass_fds=(descriptor,),
        capture_output=True,
        check=True,
    )
    assert int(answer.stdout) == checksum
    assert_holds(trainer, 1, checksum, written)


def test_numbers_that_are_odd_survive(descriptor: int) -> None:
    layout, size = make_layout([("odd", (6,))], "bfloat16")
    buffer = WeightBuffer(descriptor, size)
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, 3.3895e38])
    [(_, found)] = buffer.read(1, layout, buffer.write(1, layout, {"odd": odd}))
    assert found.view(torch.int16).tolist() == odd.to(torch.bfloat16).view(torch.int16).tolist()


def test_a_layout_of_float32_rounds_nothing(descriptor: int) -> None:
    layout, size = make_layout(SHAPES, "float32")
    buffer, wanted = WeightBuffer(descriptor, size), weights(3)
    assert size > SIZE
    found = dict(buffer.read(1, layout, buffer.write(1, layout, wanted)))
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(wanted, torch.float32)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_wrong_checksum_is_refused_before_the_first_weight(descriptor: int) -> None:
    buffer = WeightBuffer(descriptor, SIZE)
    checksum = buffer.write(0, LAYOUT, weights(0))
    taken = []
    with pytest.raises(WeightUpdateError, match=r"of buffer 0, expected 0x"):
        for name, _ in buffer.read(0, LAYOUT, checksum ^ 1):
            taken.append(name)
    assert taken == []


def test_every_byte_counts(descriptor: int) -> None:
    buffer = WeightBuffer(descriptor, SIZE)
    checksum = buffer.write(0, LAYOUT, weights(0))
    for place in (0, SIZE // 2, SIZE - 1):
        original = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([original[0] ^ 4]), place)
        with pytest.raises(WeightUpdateError):
            next(buffer.read(0, LAYOUT, checksum))
        os.pwrite(descriptor, original, place)
    assert_holds(buffer, 0, checksum, weights(0))


def test_the_buffers_do_not_overlap(descriptor: int) -> None:
    buffer = WeightBuffer(descriptor, SIZE)
    first, second = buffer.write(0, LAYOUT, weights(1)), buffer.write(1, LAYOUT, weights(2))
    assert_holds(buffer, 0, first, weights(1))
    third = buffer.write(0, LAYOUT, weights(3))
    assert_holds(buffer, 1, second, weights(2))
    assert_holds(buffer, 0, third, weights(3))
    assert os.fstat(descriptor).st_size == BUFFERS * (SIZE + 16)  # with the seals


def test_a_hashed_buffer_is_known_by_its_seal_without_reading_it_again(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = WeightBuffer(descriptor, SIZE), WeightBuffer(descriptor, SIZE)
    first = trainer.write(0, LAYOUT, weights(1), hashed=True)
    assert (
        first == trainer.write(1, LAYOUT, weights(1), hashed=True) != trainer.write(1, LAYOUT, weights(2), hashed=True)
    )
    monkeypatch.setattr(WeightBuffer, "checksum", lambda buffer, index: pytest.fail("every byte was read"))
    assert_holds(engine, 0, first, weights(1))
    with pytest.raises(WeightUpdateError, match="of buffer 1"):
        engine.verify(1, first)


def _swapped(words: torch.Tensor) -> None:
    words[[3, 700]] = words[[700, 3]]


def _halves_swapped(words: torch.Tensor) -> None:
    words.copy_(words.roll(len(words) // 2))


def _all_alike(words: torch.Tensor) -> None:
    words += 1


def _two_alike(words: torch.Tensor) -> None:
    words[[5, 9]] ^= 1 << 62


def _there_and_back(words: torch.Tensor) -> None:
    words[[10, 11, 12]] += torch.tensor([1, -2, 1])


def _one_bit(words: torch.Tensor) -> None:
    words[-1] ^= -(1 << 63)


@pytest.mark.parametrize(
    "change", [_swapped, _halves_swapped, _all_alike, _two_alike, _there_and_back, _one_bit], ids=lambda it: it.__name__
)
def test_changes_that_an_exclusive_or_overlooks_change_the_hash(
    change: Callable[[torch.Tensor], None],
) -> None:
    words = torch.arange(1 << 22)  # several chunks, whose order counts too
    before = device_hash(words), device_hash(words.clone())
    change(words)
    assert before[0] == before[1] != device_hash(words)


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 7), (torch.bfloat16, 8), (torch.float32, 3)])
def test_the_hash_is_of_the_bits_whatever_the_type_and_size(dtype: torch.dtype, count: int) -> None:
    one = torch.arange(count).to(dtype)
    other = one.clone()
    assert device_hash(one) == device_hash(other)
    other[count - 1] = -other[count - 1]  # its sign bit alone
    assert device_hash(one) != device_hash(other)


def test_a_buffer_whose_writer_ended_in_the_middle_is_refused(descriptor: int) -> None:
    trainer, engine = WeightBuffer(descriptor, SIZE), WeightBuffer(descriptor, SIZE)
    old = trainer.write(0, LAYOUT, weights(1), hashed=True)
    with pytest.raises(KeyError):
        trainer.write(0, LAYOUT, {LAYOUT[0].name: weights(2)[LAYOUT[0].name]}, hashed=True)
    with pytest.raises(WeightUpdateError, match="of buffer 0"):
        engine.verify(0, old)


def test_another_process_attaches_to_the_buffers(descriptor: int) -> None:
    trainer = WeightBuffer(descriptor, SIZE)
    checksum = trainer.write(0, LAYOUT, weights(1))
    assert_holds(WeightBuffer.attach(os.getpid(), descriptor, SIZE), 0, checksum, weights(1))


def test_weights_that_require_gradients_and_are_not_contiguous(descriptor: int) -> None:
    buffer = WeightBuffer(descriptor, SIZE)
    model = {name: value.requires_grad_() for name, value in weights(0).items()}
    model["embed.weight"] = model["embed.weight"].t().contiguous().t()
    assert not model["embed.weight"].is_contiguous()
    assert_holds(buffer, 0, buffer.write(0, LAYOUT, model), {n: value.detach() for n, value in model.items()})


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=8), st.sampled_from(get_args(Dtype)))
def test_a_layout_has_a_place_for_every_weight(shapes: list[list[int]], dtype: Dtype) -> None:
    named = [(f"w{number}", tuple(shape)) for number, shape in enumerate(shapes)]
    layout, size = make_layout(named, dtype)
    assert [(tensor.name, tensor.shape) for tensor in layout] == named
    ends = 0
    for tensor in layout:
        assert isinstance(tensor, Tensor)
        assert tensor.offset >= ends
        assert tensor.offset % 64 == 0
        ends = tensor.offset + DTYPE_BYTES[dtype] * prod(tensor.shape)
    assert size >= ends
    assert size % 64 == 0


FRAMES, BYTES = 3, 192
FILLED = Filled(transfer=7, version=4, block=bytes(range(BLOCK_NAME)))


@pytest.fixture(scope="module")
def ends() -> tuple[OwnFrames, KVBuffer]:
    own = OwnFrames(FRAMES, BYTES)
    return own, KVBuffer.attach(own.place)


def fill(frames: OwnFrames, frame: int, seed: int) -> None:
    frames.payload[frame] = np.random.default_rng(seed).integers(0, 256, BYTES, np.uint8)
    frames.seal(frame, FILLED)


def test_what_one_end_fills_the_other_finds(ends: tuple[OwnFrames, KVBuffer]) -> None:
    ours, theirs = ends
    assert not theirs.holds(1, FILLED)
    fill(ours, 1, 0)
    assert theirs.holds(1, FILLED)
    assert (theirs.payload[1] == ours.payload[1]).all()
    assert not theirs.holds(0, FILLED) and not theirs.holds(2, FILLED)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (FILLED, True),
        (Filled(7, 5, FILLED.block), True),  # KV of older weights is what an engine keeps of its own, too
        (Filled(7, 3, FILLED.block), False),
        (Filled(8, 4, FILLED.block), False),
        (Filled(7, 4, bytes(BLOCK_NAME)), False),
    ],
)
def test_a_frame_is_what_was_wanted(ends: tuple[OwnFrames, KVBuffer], wanted: Filled, found: bool) -> None:
    fill(ends[0], 0, 1)
    assert ends[1].holds(0, wanted) is found


@given(byte=st.integers(0, BYTES - 1), bit=st.integers(0, 7), seed=st.integers(0, 2**32 - 1))
def test_any_flipped_bit_is_found(ends: tuple[OwnFrames, KVBuffer], byte: int, bit: int, seed: int) -> None:
    ours, theirs = ends
    fill(ours, 2, seed)
    theirs.payload[2, byte] ^= 1 << bit
    assert not theirs.holds(2, FILLED)
    theirs.payload[2, byte] ^= 1 << bit
    assert theirs.holds(2, FILLED)


def test_a_block_that_was_half_written_is_none(ends: tuple[OwnFrames, KVBuffer]) -> None:
    """The engine was killed between the payload and its seal, in a frame that an older transfer was in."""
    ours, theirs = ends
    fill(ours, 0, 2)
    ours.payload[0, : BYTES // 2] = 0
    assert not theirs.holds(0, FILLED)
    assert not theirs.holds(0, Filled(8, 4, FILLED.block))


def test_other_memory_is_refused() -> None:
    own = OwnFrames(FRAMES, BYTES)
    with pytest.raises(LayoutError, match=r"shares \d+ bytes where \d+ are expected"):
        KVBuffer.attach(KVBufferPlace(own.place.pid, own.place.descriptor, FRAMES + 100, BYTES))
    with pytest.raises(OSError, match=r"."):
        KVBuffer.attach(KVBufferPlace(2**22 + 1, own.place.descriptor, FRAMES, BYTES))


def test_the_memory_goes_with_its_owner() -> None:
    own = OwnFrames(FRAMES, BYTES)
    descriptor = own.place.descriptor
    assert "memfd:libra-kv" in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - not a path on disk
    del own
    with pytest.raises(OSError, match=r"."):
        os.fstat(descriptor)
