"""Weights through shared memory: exact, checked, and never half of one version and half of another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.backends.transport.messages import DTYPE_BYTES, Dtype, Tensor
from libra.backends.transport.weights import BUFFERS, WeightBuffer, WeightUpdateError, create_buffer, make_layout

SHAPES = [("embed.weight", (7, 5)), ("norm.weight", (5,)), ("scale", ()), ("head.weight", (3, 2, 2))]
LAYOUT, SIZE = make_layout(SHAPES, "bfloat16")

# An engine's side: reads buffer 0, then answers by writing buffer 1 as a trainer would.
READER = """
import json, sys
from libra.backends.transport.messages import DTYPE_BYTES, Dtype, Tensor
from libra.backends.transport.weights import WeightBuffer
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


def test_both_ends_see_one_memory(descriptor: int) -> None:
    trainer, engine = WeightBuffer(descriptor, SIZE), WeightBuffer(descriptor, SIZE)
    for version in range(4):
        checksum = trainer.write(version % BUFFERS, LAYOUT, weights(version))
        assert_holds(engine, version % BUFFERS, checksum, weights(version))


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


def test_an_update_that_arrived_half_is_refused(descriptor: int) -> None:
    buffer = WeightBuffer(descriptor, SIZE)
    buffer.write(0, LAYOUT, weights(0))
    complete = buffer.write(1, LAYOUT, weights(1))
    half = os.pread(descriptor, SIZE // 2, SIZE)
    os.pwrite(descriptor, half, 0)
    with pytest.raises(WeightUpdateError):
        next(buffer.read(0, LAYOUT, complete))


def test_the_buffers_do_not_overlap(descriptor: int) -> None:
    buffer = WeightBuffer(descriptor, SIZE)
    first, second = buffer.write(0, LAYOUT, weights(1)), buffer.write(1, LAYOUT, weights(2))
    assert_holds(buffer, 0, first, weights(1))
    third = buffer.write(0, LAYOUT, weights(3))
    assert_holds(buffer, 1, second, weights(2))
    assert_holds(buffer, 0, third, weights(3))
    assert os.fstat(descriptor).st_size == BUFFERS * SIZE


def test_a_second_end_does_not_empty_the_first(descriptor: int) -> None:
    trainer = WeightBuffer(descriptor, SIZE)
    checksum = trainer.write(1, LAYOUT, weights(0))
    assert_holds(WeightBuffer(descriptor, SIZE), 1, checksum, weights(0))


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
