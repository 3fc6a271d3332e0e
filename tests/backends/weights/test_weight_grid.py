"""Chunks of weights, and which of them lie in some bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.backends.transport.shared_memory import make_layout
from libra.backends.weights.grid import Grid


@given(st.integers(1, 300), st.integers(1, 40), st.data())
def test_chunks_cover_the_weights_and_ranges_touch_those_they_lie_in(
    numbers: int, chunk: int, data: st.DataObject
) -> None:
    grid = Grid(2 * numbers, "bfloat16", 2 * chunk)
    spans = [grid.span(number) for number in range(len(grid))]
    assert [byte for span in spans for byte in range(span.start, span.stop)] == list(range(grid.size))
    first = data.draw(st.integers(0, grid.size))
    end = data.draw(st.integers(first, grid.size))
    bytes_in = set(range(first, end))
    expected = [bool(bytes_in & set(range(span.start, span.stop))) for span in spans]
    assert grid.touched([(first, end)]).tolist() == expected


@pytest.mark.parametrize(("size", "chunk"), [(0, 4), (8, 0), (7, 4), (8, 3)])
def test_a_grid_has_whole_numbers(size: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="both must be above 0, and whole"):
        Grid(size, "bfloat16", chunk)


def test_ranges_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes 4 to 9 are outside the weights, which have 8 bytes"):
        Grid(8, "bfloat16", 4).touched([(4, 9)])


LAYOUT, SIZE = make_layout(
    [
        ("model.embed_tokens.weight", (100, 8)),
        ("model.layers.0.self_attn.q_proj.weight", (16, 8)),
        ("model.layers.0.self_attn.k_proj.weight", (4, 8)),
        ("model.layers.0.self_attn.o_proj.weight", (8, 16)),
        ("model.layers.0.mlp.up_proj.weight", (24, 8)),
        ("model.layers.0.mlp.odd.gate_proj.weight", (7, 8)),
        ("model.norm.weight", (8,)),
    ],
    "bfloat16",
)


def test_weights_that_lie_elsewhere_are_others() -> None:
    grid = Grid.of(LAYOUT, SIZE)
    assert (grid.size, grid.dtype) == (SIZE, "bfloat16")
    turned, _ = make_layout([(tensor.name, tensor.shape[::-1]) for tensor in LAYOUT], "bfloat16")
    assert Grid.of(turned, SIZE) != grid == Grid.of(tuple(LAYOUT), SIZE)
    mixed = [LAYOUT[0], msgspec.structs.replace(LAYOUT[1], dtype="float32")]
    for layout, kinds in ((mixed, "bfloat16 and float32"), ([], "no type")):
        with pytest.raises(ValueError, match=f"weights of {kinds}: deltas are of one type"):
            Grid.of(layout, SIZE)
