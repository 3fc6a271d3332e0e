"""What an iteration takes by tables of single layers, each timed by itself.

Invariant: an iteration is the sum of its kernels: all that looks at each token by itself, at as many tokens as the CUDA
graph has; the output head and the sampler; and attention. Prefill and decode attention of one iteration are one kernel:
decodes beside a chunk take what the tables have for both together, less the chunk alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.cost.graphs import padded
from libra.cost.grid import EngineGrid
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.iteration_cost import NONE_ADMITTED, Admitted, Chunk, DecodeBatch

Points = Sequence[Sequence[float]]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class LayerTables:
    """Microseconds of all layers of one GPU's share of a model.

    Raises ValueError where attention lacks a decode of one sequence, or a chunk without a prefix.
    """

    tokens: Points  # (tokens, all that looks at each by itself)
    sequences: Points  # (sequences, output head and sampler)
    attention: Points  # (chunk, prefix, decodes, context of each, attention)
    tp: int = 1

    def __post_init__(self) -> None:
        if not self._decodes[0] or not self._chunks[0]:
            raise ValueError("attention has no decodes alone, or no chunks alone: measure both")

    def grid(self, config: EngineConfig) -> EngineGrid:
        """Of batches that only decode, at the sizes of the engine's graphs, and of one chunk."""
        batches = tuple(
            size for size in config.capture_sizes if size <= padded(config.max_num_seqs, config.capture_sizes)
        )
        batches = batches if len(batches) > 1 else (1, config.max_num_seqs)
        contexts, (chunks, prefixes, _) = self._decodes[1], self._chunks
        each = [price_at(self.tokens, size) + price_at(self.sequences, size) for size in batches]
        decode = [
            [one + self.decodes(size, held) for held in contexts] for size, one in zip(batches, each, strict=True)
        ]
        head = price_at(self.sequences, 1)
        prefill = [
            [price_at(self.tokens, chunk) + head + self.chunk(chunk, prefix) for prefix in prefixes] for chunk in chunks
        ]
        return EngineGrid(self.tp, batches, contexts, _seconds(decode), chunks, prefixes, _seconds(prefill))

    def mixed(self, size: int, decodes: int, context: float, chunks: Sequence[Chunk]) -> float:
        """Of an iteration of a graph of `size` tokens; decodes have `context` tokens each."""
        launch = self.chunk(self._chunks[0][0], 0)
        alone = sum(self.chunk(*chunk) for chunk in chunks) - (len(chunks) - 1) * launch
        beside = self.beside(sum(new for new, _ in chunks), decodes, context) if decodes else 0.0
        rows = price_at(self.sequences, decodes + len(chunks))
        return price_at(self.tokens, size) + rows + alone + beside

    def decodes(self, count: float, context: float) -> float:
        """Attention of decodes alone."""
        return _interpolated(*self._decodes, count, context)

    def chunk(self, new: float, prefix: float) -> float:
        """Attention of one chunk alone."""
        return _interpolated(*self._chunks, new, prefix)

    def beside(self, new: float, count: float, context: float) -> float:
        """What decodes add to the attention of so many new tokens; not less than alone."""
        sizes, tables = self._beside
        place = min(max(bisect_right(sizes, new) - 1, 0), max(0, len(sizes) - 2))
        near = [_interpolated(*table, count, context) for table in tables[place : place + 2]]
        part = min(1.0, (new - sizes[place]) / (sizes[place + 1] - sizes[place])) if len(near) > 1 else 0.0
        found = near[0] + max(0.0, part) * (near[-1] - near[0])
        return max(found, self.decodes(count, context))

    @cached_property
    def _decodes(self) -> tuple[tuple[int, ...], tuple[int, ...], Array]:
        return _table([(row[2], row[3], row[4]) for row in self.attention if not row[0]])

    @cached_property
    def _chunks(self) -> tuple[tuple[int, ...], tuple[int, ...], Array]:
        return _table([(row[0], row[1], row[4]) for row in self.attention if row[0] and not row[2]])

    @cached_property
    def _beside(self) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], Array]]]:
        """By the chunk's size, where it has no prefix: with one it is nearly the same."""
        rows: dict[int, list[tuple[float, float, float]]] = {}
        for chunk, prefix, count, context, both in self.attention:
            if chunk and count and not prefix:
                rows.setdefault(int(chunk), []).append((count, context, both - self.chunk(chunk, 0)))
        sizes = tuple(sorted(rows))
        return (sizes, [_table(rows[size]) for size in sizes]) if sizes else ((1,), [self._decodes])


class LayerCost:
    """`IterationCost` of an engine by tables of its layers. The host is taken to be hidden behind the GPU, as with
    asynchronous scheduling."""

    uneven = False

    def __init__(self, tables: LayerTables, config: EngineConfig) -> None:
        self._tables, self._sizes = tables, config.capture_sizes
        grid = tables.grid(config)
        reach = 4 * min(grid.contexts[-1], grid.prefixes[-1])  # as far as a grid goes
        self._decoding = GridCost(grid, replace(config, max_model_len=min(config.max_model_len, reach)))

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        return self._decoding.line(batch, context)

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        count = batch.requests
        size = padded(count + sum(new for new, _ in chunks), self._sizes)
        seconds = self._tables.mixed(size, count, context / count if count else 0.0, chunks) / 1e6
        return max(1, round(seconds * TICKS))


def price_at(points: Points, count: float) -> float:
    """Linear between points, and beyond them in proportion."""
    axis, values = zip(*points, strict=True)
    beyond: float = max(1.0, count / axis[-1])
    return beyond * float(np.interp(count, axis, values))


def read_layers(document: Mapping[str, Any], tp: int) -> LayerTables:
    """Of a file's `layers`. Raises ValueError or KeyError where it is not of the format."""
    return LayerTables(document["tokens"], document["sequences"], document["attention"], tp)


def _table(rows: Sequence[tuple[float, float, float]]) -> tuple[tuple[int, ...], tuple[int, ...], Array]:
    """Axes and values. Where a large batch was not measured the next smaller one's price, in proportion."""
    first, second = (tuple(sorted({int(row[axis]) for row in rows})) for axis in (0, 1))
    values = np.full((len(first), len(second)), np.nan)
    for one, other, value in rows:
        values[first.index(int(one)), second.index(int(other))] = value
    for place in range(1, len(first)):
        missing = np.isnan(values[place])
        values[place, missing] = values[place - 1, missing] * first[place] / first[place - 1]
    if np.isnan(values).any():
        raise ValueError("attention lacks points of its smallest batch or chunk: measure them")
    return first, second, values


def _interpolated(rows: tuple[int, ...], columns: tuple[int, ...], values: Array, row: float, column: float) -> float:
    """Linear between points; beyond the last one as between the last two, before the first as at it."""
    low = []
    for axis, at in ((rows, row), (columns, column)):
        place = min(max(bisect_right(axis, at) - 1, 0), max(0, len(axis) - 2))
        part = max(0.0, (at - axis[place]) / (axis[place + 1] - axis[place])) if len(axis) > 1 else 0.0
        low.append((place, part))
    (i, u), (j, v) = low
    edge = values[i : i + 2, j : j + 2]
    across = edge[:, 0] if edge.shape[1] == 1 else (1 - v) * edge[:, 0] + v * edge[:, 1]
    return float(across[0] if len(across) == 1 else (1 - u) * across[0] + u * across[1])


def _seconds(microseconds: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(value / 1e6 for value in row) for row in microseconds)
