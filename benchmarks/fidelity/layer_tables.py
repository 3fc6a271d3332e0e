"""Time of an iteration from tables of single layers, each timed by itself.

Invariant: an iteration is the sum of its kernels: all that looks at each token by itself, at the token count of the
CUDA graph; the output head and the sampler; and attention. Prefill and decode attention of one iteration are one
kernel: decodes beside a chunk take what the tables have for both together, less the chunk alone. Where batches of
contexts that differ were timed too, these count as longer ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.cost.graphs import padded
from libra.cost.grid import EngineGrid
from libra.cost.host import NO_HOST
from libra.sim.clock import TICKS
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.group_cost import Graph, Together
from libra.sim.engine.iteration_cost import NONE_ADMITTED, Admitted, Chunk, DecodeBatch

Points = Sequence[Sequence[float]]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class LayerTables:
    """Microseconds of all layers of one GPU's share of a model.

    A chunk without a prefix sees half of itself in the mean. Raises ValueError where attention lacks decodes alone, or
    chunks alone.
    """

    tokens: Points  # (tokens, all that looks at each by itself)
    sequences: Points  # (sequences, output head and sampler)
    attention: Points  # (new tokens of prompts, what each sees in the mean, decodes, context of each, attention)
    tp: int = 1
    experts: Mapping[str, Points] = field(default_factory=dict)  # (tokens of all GPUs, experts with their exchange)
    # (decodes, tokens of context that one of standard deviation counts as), of decodes alone and beside a chunk
    spread: Mapping[str, Points] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self._decodes[0] or not self._prefills:
            raise ValueError("attention has no decodes alone, or no chunks alone: measure both")

    def grid(self, config: EngineConfig) -> EngineGrid:
        """Grid of batches that only decode, at the sizes of the engine's graphs, and of one chunk; without experts."""
        batches = tuple(
            size for size in config.capture_sizes if size <= padded(config.max_num_seqs, config.capture_sizes)
        )
        batches = batches if len(batches) > 1 else (1, config.max_num_seqs)
        contexts, chunks = self._decodes[1], tuple(self._prefills)
        prefixes = (0, *sorted({round(seen) for seen in self._prefills[chunks[0]][0] if seen >= 1}))
        each = [price_at(self.tokens, size) + price_at(self.sequences, size) for size in batches]
        decode = [
            [one + self.decodes(size, held) for held in contexts] for size, one in zip(batches, each, strict=True)
        ]
        head = price_at(self.sequences, 1)
        prefill = [
            [price_at(self.tokens, chunk) + head + self.prefill(chunk, prefix + chunk / 2) for prefix in prefixes]
            for chunk in chunks
        ]
        return EngineGrid(self.tp, batches, contexts, _seconds(decode), chunks, prefixes, _seconds(prefill))

    def counted(self, kind: str, count: int, spread: int) -> int:
        """Tokens of context that are added to those of a batch, for contexts that differ."""
        return round(_between(self.spread.get(kind), count) * spread)

    def mixed(self, size: int, decodes: int, context: float, chunks: Sequence[Chunk]) -> float:
        """Time of an iteration of a graph of `size` tokens; decodes have `context` tokens each."""
        new = sum(tokens for tokens, _ in chunks)
        alone = self.prefill(new, sum(tokens * (before + tokens / 2) for tokens, before in chunks) / new)
        beside = self.beside(new, decodes, context) if decodes else 0.0
        rows = price_at(self.sequences, decodes + len(chunks))
        return price_at(self.tokens, size) + rows + alone + beside

    def decodes(self, count: float, context: float) -> float:
        """Attention of decodes alone."""
        return _interpolated(*self._decodes, count, context)

    def prefill(self, new: float, seen: float) -> float:
        """Attention of `new` tokens alone, of one chunk or several; each sees `seen` tokens in the mean."""
        chunks = [*self._prefills]
        place = min(max(bisect_right(chunks, new) - 1, 0), max(0, len(chunks) - 2))
        near = chunks[place : place + 2]
        values = [max(0.0, _extended(*self._prefills[chunk], seen)) for chunk in near]
        part = max(0.0, (new - near[0]) / (near[-1] - near[0])) if len(near) > 1 else 0.0
        return values[0] + part * (values[-1] - values[0])

    def beside(self, new: float, count: float, context: float) -> float:
        """Attention that `count` decodes add to that of `new` tokens; not less than alone."""
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
    def _prefills(self) -> dict[int, tuple[tuple[float, ...], tuple[float, ...]]]:
        """For each number of new tokens: tokens seen, and the time of their attention."""
        alone = [row for row in self.attention if row[0] and not row[2]]
        found = {}
        for chunk in sorted({int(row[0]) for row in alone}):
            points = sorted({row[1]: row[4] for row in alone if row[0] == chunk}.items())
            seen, us = zip(*points, strict=True)
            found[chunk] = (seen, us)
        return found

    @cached_property
    def _beside(self) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], Array]]]:
        """By new tokens, nearest to where they are one prompt from its beginning: elsewhere it is nearly the same."""
        mixed = [row for row in self.attention if row[0] and row[2]]
        nearest: dict[float, float] = {}
        for chunk, seen, *_ in mixed:
            if abs(seen - chunk / 2) < abs(nearest.get(chunk, float("inf")) - chunk / 2):
                nearest[chunk] = seen
        rows: dict[int, list[tuple[float, float, float]]] = {}
        for chunk, seen, count, context, both in mixed:
            if seen == nearest[chunk]:
                rows.setdefault(int(chunk), []).append((count, context, both - self.prefill(chunk, seen)))
        sizes = tuple(sorted(rows))
        return (sizes, [_table(rows[size]) for size in sizes]) if sizes else ((1,), [self._decodes])


class LayerCost:
    """`IterationCost` of an engine by tables of its layers. The host is taken to be hidden behind the GPU, as with
    asynchronous scheduling."""

    def __init__(self, tables: LayerTables, config: EngineConfig, ran: Graph | None = None) -> None:
        """`ran` is the graph of all ranks of a group; None: that of the batch."""
        self.uneven = bool(tables.spread)
        self._tables, self._sizes = tables, config.capture_sizes
        if ran is not None:
            self._sizes = (ran.size,) if ran.size else ()
        grid = tables.grid(config)
        reach = 4 * min(grid.contexts[-1], grid.prefixes[-1])  # as far as a grid goes
        reached = replace(config, max_model_len=min(config.max_model_len, reach), capture_sizes=self._sizes)
        self._decoding = GridCost(grid, reached)

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        counted = self._tables.counted("alone", batch.requests, batch.spread)
        base, slope, limit = self._decoding.line(DecodeBatch(batch.requests), context + counted)
        return base + slope * counted, slope, limit - counted

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        count = batch.requests
        size = padded(count + sum(new for new, _ in chunks), self._sizes)
        context += self._tables.counted("beside", count, batch.spread)
        us = self._tables.mixed(size, count, context / count if count else 0.0, chunks)
        return max(1, round(us / 1e6 * TICKS))


class RanksCost:
    """`GroupCost` of data-parallel ranks that divide the experts of a model, by tables of its layers."""

    host = NO_HOST

    def __init__(self, tables: LayerTables, config: EngineConfig) -> None:
        if not tables.experts:
            raise ValueError("layers.experts is missing: data-parallel ranks have nothing in common")
        self._tables, self._config = tables, config
        self._ranks: dict[Graph, LayerCost] = {}

    def rank(self, graph: Graph) -> LayerCost:
        cost = self._ranks.get(graph)
        if cost is None:
            cost = self._ranks[graph] = LayerCost(self._tables, self._config, graph)
        return cost

    def together(self, graph: Graph, tokens: int, requests: int, cpu: float, iteration: int) -> Together:
        us = price_at(self._tables.experts["eager" if graph.kind == "NONE" else "graph"], tokens)
        return Together(((1, round(us / 1e6 * TICKS)),))


def price_at(points: Points, count: float) -> float:
    """Linear between points, and beyond them in proportion."""
    axis, values = zip(*points, strict=True)
    beyond: float = max(1.0, count / axis[-1])
    return beyond * float(np.interp(count, axis, values))


def read_layers(document: Mapping[str, Any], tp: int) -> LayerTables:
    """Tables of a file's `layers`. Raises ValueError or KeyError where these are not of the format."""
    more = {key: document.get(key, {}) for key in ("experts", "spread")}
    return LayerTables(document["tokens"], document["sequences"], document["attention"], tp, **more)


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


def _between(points: Points | None, at: float) -> float:
    """Linear between points, and beyond them as at the nearest; 0 where there are none."""
    if not points:
        return 0.0
    axis, values = zip(*points, strict=True)
    return float(np.interp(at, axis, values))


def _extended(axis: Sequence[float], values: Sequence[float], at: float) -> float:
    """Linear between points, and beyond the last as between the two before it. Before the first as between it and
    where twice as much is seen: points next to it are so near that they differ by noise."""
    if len(axis) == 1:
        return values[0]
    low = min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)
    high = low + 1
    if at < axis[0]:
        high = min(max(bisect_right(axis, 2 * axis[0]), high), len(axis) - 1)
    part = (at - axis[low]) / (axis[high] - axis[low])
    return values[low] + part * (values[high] - values[low])


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
